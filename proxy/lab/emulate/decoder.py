"""The work of decode ranks: get a request's KV cache, then emit a token in each step."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from balanceroute.proxy.lab.emulate.engine_metrics import RankCounters
from balanceroute.proxy.lab.emulate.exchange import TokenSequence
from balanceroute.proxy.lab.emulate.faults import AfterPull
from balanceroute.proxy.lab.emulate.hub import EngineCall, Hub
from balanceroute.proxy.lab.emulate.leases import (
    AskMetaserver,
    Await,
    EndedLease,
    Hang,
    KvPeer,
    Lease,
    LeaseEnd,
    Misread,
    PullFailure,
    Stale,
    claim,
    metaserver_params,
)
from balanceroute.proxy.lab.emulate.prefix_caches import NOTHING, KvLog, PrefixCaches, pulled
from balanceroute.proxy.lab.emulate.request import ENGINE_DEAD, Prompt, compact, internal_error
from balanceroute.proxy.lab.emulate.settings import Preemption
from balanceroute.topologies import CONNECTORS, KvFlow


@dataclass(slots=True, eq=False)
class _Arrival:
    """A prompt whose KV cache has not arrived."""

    call: EngineCall
    number: int
    lease: Lease | None = None
    timer: asyncio.TimerHandle | None = None
    forget: Callable[[], None] | None = None  # Stops waiting for a prefill.
    read: list[int] | None = None  # The tokens whose KV came, if they are not the prompt's.
    cached_tokens: int = 0  # Those that need not come.


class Decoder:
    """The ranks behind one server."""

    def __init__(
        self,
        hub: Hub,
        ranks: list[int],
        *,
        peer: KvPeer,
        counters: Sequence[RankCounters],
        die: Callable[[], None],
        logs: Sequence[KvLog] = (),
    ) -> None:
        self._hub, self._settings = hub, hub.settings
        self._barrier, self._book = hub.barrier, hub.book
        self._counters = counters
        self._caches = PrefixCaches(hub.settings, counters, logs)
        self._ranks = ranks
        self._peer = peer
        self._die = die
        self._loop = asyncio.get_running_loop()
        self._arrivals: dict[_Arrival, None] = {}

    def running(self, rank: int) -> int:
        return self._barrier.running(self._ranks[rank])

    def arriving(self, rank: int) -> int:
        """Return the number of sequences whose KV cache has not arrived."""
        return sum(
            arrival.call.exchange.request.n
            for arrival in self._arrivals
            if arrival.call.rank == rank
        )

    def waiting(self, rank: int) -> int:
        return self._barrier.waiting(self._ranks[rank])

    def usage(self, rank: int) -> float:
        """Return the share of the KV cache in use; 0 without a limit."""
        tokens = self._settings.rank_kv_tokens
        return 0.0 if tokens is None else self._barrier.loads[self._ranks[rank]] / tokens

    def serve(self, call: EngineCall) -> None:
        exchange = call.exchange
        if call.remote_prefill and exchange.request.prompt_logprobs is not None:
            # They need the prompt computed here.
            exchange.fail()
            return
        for number, prompt in enumerate(exchange.request.prompts):
            if call.remote_prefill:
                self._claim(call, number)
                continue
            found = self._caches.cached(call.rank, prompt.tokens)
            arrival = self._arrive(call, number)
            if found != prompt.tokens[: len(found)]:
                arrival.read = [*found, *prompt.tokens[len(found) :]]
                self._misread(arrival, Prompt(arrival.read, None), None, again=True)
            cached = self._caches.compute(call.rank, prompt.tokens)
            for sequence in exchange.sequences_of(number):
                sequence.choice.cached_tokens = cached
            compute_ns = self._settings.compute_ns(len(prompt.tokens) - cached)
            self._join(arrival, compute_ns)

    def _claim(self, call: EngineCall, number: int) -> None:
        if call.exchange.over:
            return
        arrival = self._arrive(call, number)
        match claim(self._settings.connector, call.kv, self._hub.sources, self._book, self._peer):
            case Lease() as lease:
                self._pull(arrival, lease)
            case Stale(engine_id, ended):
                self._pull_stale(arrival, engine_id, ended)
            case PullFailure(after_s):
                self._wait(arrival, 1e9 * after_s, call.exchange.fail)
            case Await(engine_id, name):
                self._await_prefill(arrival, engine_id, name)
            case AskMetaserver(url):
                name = call.external_id(number)
                num_blocks = self._settings.blocks(
                    len(call.exchange.request.prompts[number].tokens)
                )
                params = metaserver_params(
                    self._peer,
                    name,
                    num_blocks=num_blocks,
                    block_tokens=self._settings.block_tokens,
                )
                self._book.begin_anew(self._peer.engine_id, name)  # A client may reuse a name.
                self._await_prefill(arrival, self._peer.engine_id, name)
                self._hub.poster.post(url, compact(params))
            case Hang():
                pass

    def _arrive(self, call: EngineCall, number: int) -> _Arrival:
        arrival = _Arrival(call, number)
        self._arrivals[arrival] = None
        call.exchange.stages[number] = partial(self._cancel, arrival)
        return arrival

    def _wait(self, arrival: _Arrival, emulated_ns: float, then: Callable[[], None]) -> None:
        arrival.timer = self._loop.call_later(self._settings.seconds(emulated_ns), then)

    def _await_prefill(self, arrival: _Arrival, engine_id: str, name: str) -> None:
        lease = self._book.find(engine_id, name)
        if lease is not None:
            self._pull(arrival, lease)
            return
        arrival.forget = self._book.await_grant(engine_id, name, partial(self._pull, arrival))

    def _pull(self, arrival: _Arrival, lease: Lease) -> None:
        arrival.forget = None
        exchange = arrival.call.exchange
        prompt = exchange.request.prompts[arrival.number]
        read = self._read(arrival, lease.prompt)
        if read is None:
            self._book.overruns.append(arrival.call.request_id)
            exchange.fail(internal_error(ENGINE_DEAD))
            self._loop.call_soon(self._die)
            return
        cached = self._caches.cached(arrival.call.rank, prompt.tokens)
        if CONNECTORS[self._settings.connector].pulls_missing:
            arrival.cached_tokens = len(cached)
        if read != prompt.tokens:
            arrival.read = read
            again = cached != prompt.tokens[: len(cached)]
            self._misread(arrival, Prompt(read, None), None, again=again)
        lease.pulling = True
        arrival.lease = lease
        transfer_ns = self._settings.transfer_ns(len(prompt.tokens) - arrival.cached_tokens)
        self._wait(arrival, transfer_ns, partial(self._pulled, arrival, lease))

    def _read(self, arrival: _Arrival, prefilled: Prompt) -> list[int] | None:
        """Return the tokens whose KV is there after a pull; None if the engine dies of it."""
        tokens, settings = (
            arrival.call.exchange.request.prompts[arrival.number].tokens,
            self._settings,
        )
        if CONNECTORS[settings.connector].flow is not KvFlow.PULL:
            return prefilled.tokens if len(prefilled.tokens) == len(tokens) else None
        cached = self._caches.cached(arrival.call.rank, tokens)
        return pulled(tokens, cached, prefilled.tokens, settings.block_tokens)

    def _pull_stale(self, arrival: _Arrival, engine_id: str, ended: EndedLease | None) -> None:
        """Read blocks that hold another prompt's KV cache; no error is reported."""
        prompt = arrival.call.exchange.request.prompts[arrival.number]
        stale = self._book.stale(engine_id, prompt)
        arrival.read = [NOTHING] * len(prompt.tokens)
        names = (one.name for one in self._hub.sources if one.engine_id == engine_id)
        self._misread(arrival, stale, ended, prefiller=next(names, ""))
        transfer_ns = self._settings.transfer_ns(len(prompt.tokens))
        self._wait(arrival, transfer_ns, partial(self._arrived, arrival))

    def _misread(
        self,
        arrival: _Arrival,
        prompt: Prompt,
        ended: EndedLease | None,
        *,
        again: bool = False,
        prefiller: str = "",
    ) -> None:
        call = arrival.call
        decoder, arrived_s = self._peer.name, call.arrived_s
        misread = Misread(call.request_id, ended, decoder, arrived_s, again, prefiller)
        self._book.misreads.append(misread)
        for sequence in arrival.call.exchange.sequences_of(arrival.number):
            sequence.misread(prompt)

    def _pulled(self, arrival: _Arrival, lease: Lease) -> None:
        arrival.lease = None
        if lease.end is not None:  # The prefiller died in the meantime.
            arrival.call.exchange.fail()
            return
        self._book.finish(lease, LeaseEnd.PULLED)
        self._arrived(arrival)

    def _arrived(self, arrival: _Arrival) -> None:
        """Continue after the pull: the prefiller's blocks are free, and no token was emitted yet."""
        exchange = arrival.call.exchange
        prompt = exchange.request.prompts[arrival.number]
        counters = self._counters[arrival.call.rank]
        tokens = len(prompt.tokens) - arrival.cached_tokens
        counters.pulled_tokens += tokens
        counters.pulls.add(-(-tokens // self._settings.block_tokens))
        read = arrival.read
        if read is not None:
            read = [*read[:-1], NOTHING]  # The last token was computed from what is wrong.
        self._caches.keep(arrival.call.rank, prompt.tokens, read)
        if exchange.faults.after_pull is None:
            self._join(arrival)
        else:
            self._wait(
                arrival, 1e9 * exchange.faults.after_pull_s, partial(self._fail_after_pull, arrival)
            )

    def _fail_after_pull(self, arrival: _Arrival) -> None:
        exchange = arrival.call.exchange
        match exchange.faults.after_pull:
            case AfterPull.RESET:
                exchange.abandon()
                exchange.reply.abort()
            case AfterPull.ERROR:
                exchange.fail()
            case AfterPull.DEATH:
                self._loop.call_soon(self._die)
            case AfterPull.SILENCE | None:
                pass

    def _cancel(self, arrival: _Arrival, crashed: bool) -> None:
        del self._arrivals[arrival]
        if arrival.timer is not None:
            arrival.timer.cancel()
        if arrival.forget is not None:
            arrival.forget()
        if arrival.lease is not None:
            if crashed:
                self._book.give_back(arrival.lease)
            else:
                self._book.finish(arrival.lease, LeaseEnd.RELEASED)

    def _join(self, arrival: _Arrival, compute_ns: int = 0) -> None:
        del self._arrivals[arrival]
        call = arrival.call
        del call.exchange.stages[arrival.number]
        for sequence in call.exchange.sequences_of(arrival.number):
            sequence.on_end = partial(self._ended, call)
            sequence.on_drop = partial(self._dropped, call)
            self._submit(call, sequence, compute_ns)
            compute_ns = 0  # Further sequences share the prompt.

    def _submit(self, call: EngineCall, sequence: TokenSequence, compute_ns: int = 0) -> None:
        call.exchange.stages[sequence] = lambda _: self._barrier.withdraw(sequence)
        self._barrier.submit(sequence, self._ranks[call.rank], compute_ns=compute_ns)

    def _ended(self, call: EngineCall, sequence: TokenSequence) -> None:
        del call.exchange.stages[sequence]

    def _dropped(self, call: EngineCall, sequence: TokenSequence) -> None:
        exchange = call.exchange
        self._counters[call.rank].preemptions += 1
        if self._settings.preemption is Preemption.STOP:
            exchange.recompute(sequence)
            return
        service_ns = self._settings.prefill.service_ns(sequence.kv_tokens)
        timer = self._loop.call_later(
            self._settings.seconds(service_ns), self._submit, call, sequence
        )
        exchange.stages[sequence] = lambda _: timer.cancel()
