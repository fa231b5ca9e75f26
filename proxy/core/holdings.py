"""What requests hold, and how it is taken and released.

A queued request holds its place in a queue, a prefilling one the budget of a prefiller, a pooled one
its place in the pool, and a decoding one slots and KV tokens of a rank. The prefiller's budget stays
charged until the KV cache has left it.
"""

from collections.abc import Collection, Iterable, Mapping
from math import inf

from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    AbortDecode,
    AbortPrefill,
    Action,
    PrefillLost,
    RankId,
    ReleasePrefill,
    RequestId,
)
from balanceroute.proxy.core.leases import Leases
from balanceroute.proxy.core.ledger import Ledger
from balanceroute.proxy.core.lifecycle import LifecycleState, Request, Trigger
from balanceroute.proxy.core.pool import Pool
from balanceroute.proxy.core.prefill import Prefillers
from balanceroute.proxy.core.prefill.budgets import Pairs
from balanceroute.proxy.core.prefill_queue import PrefillQueue
from balanceroute.proxy.core.queueing import KvMeter
from balanceroute.proxy.core.warm_up import with_loss

# The scheduler's self-check: what is charged against what the requests' states say.


def check_holdings(
    requests: "Collection[Request]",
    *,
    prefill_queue: "PrefillQueue",
    prefillers: "Prefillers",
    pool: "Pool",
    ledger: "Ledger",
    waiting: int,
) -> None:
    """Recount every holding from the requests' states and assert that nothing leaked."""
    ledger.check()
    held = [0] * len(prefillers.held_tokens)
    prefills, direct = held.copy(), held.copy()
    slots = [0] * len(ledger.bound)
    for request in requests:
        state, decodes = request.state, request.decode
        # Rule 2 of `lifecycle`: what a request holds follows from its state.
        if request.prefiller is not None:
            assert request.ticket.prefill
            held[request.prefiller] += request.held_tokens()
            prefills[request.prefiller] += request.prefilling
            direct[request.prefiller] += 0 if decodes else request.ticket.slots
        if request.rank is not None:
            slots[request.rank] += request.ticket.slots
        # A direct request holds sequences instead of a prefill.
        assert request.prefilling == (state is LifecycleState.PREFILLING and decodes)
        assert (request.rank is not None) == (state is LifecycleState.DECODING)
        assert (request.request in pool) == (state is LifecycleState.POOLED)
        assert (request in prefill_queue) == (state is LifecycleState.QUEUED)
        assert request.ticket.prefill or state is not LifecycleState.PREFILLING
        assert decodes or state in {LifecycleState.QUEUED, LifecycleState.PREFILLING}
    assert direct == prefillers.direct, f"{direct} != {prefillers.direct}"
    assert held == prefillers.held_tokens, f"{held} != {prefillers.held_tokens}"
    assert prefills == prefillers.prefills, f"{prefills} != {prefillers.prefills}"
    assert sum(prefills) == prefillers.prefilling
    assert slots == ledger.bound.tolist(), f"{slots} != {ledger.bound}"
    assert pool.slots == sum(entry.slots for entry in pool)
    # The count that bounds admission, derived from its complement.
    answered = sum(
        request.rank is not None
        or (request.state is LifecycleState.PREFILLING and not request.decode)
        for request in requests
    )
    assert waiting == len(requests) - answered


class Holdings:
    """Takes and releases what the requests of one scheduler hold.

    Attributes:
        ledger: Of the ranks; replaced when their number or the policy changes.
    """

    def __init__(
        self,
        prefill_queue: PrefillQueue,
        prefillers: Prefillers,
        pool: Pool,
        ledger: Ledger,
        leases: Leases,
        *,
        meter: KvMeter | None = None,
    ) -> None:
        self.ledger = ledger
        self._leases = leases
        self._meter = meter
        self._prefill_queue = prefill_queue
        self._prefillers = prefillers
        self._pool = pool

    def release(self, request: Request, state: LifecycleState, *, gone: bool) -> list[Action]:
        """Release everything that `request` held in `state`; return what the driver has to do.

        `gone` means that the engine has ended its part already, so there is nothing to abort.
        """
        actions: list[Action] = []
        if self._meter is not None and state is not LifecycleState.QUEUED:
            self._settle(self._meter, request, state)
        match state:  # The usual end first.
            case LifecycleState.DECODING:
                if not gone:
                    assert request.rank is not None
                    actions.append(AbortDecode(request.request, request.rank))
                    if request.prefiller is not None:
                        # No rank will pull these blocks, unless a pull is already in progress.
                        actions.append(ReleasePrefill(request.request, request.prefiller))
                self.release_prefill(request)
                self.unbind(request)
                return actions
            case LifecycleState.QUEUED:
                self._prefill_queue.remove(request)
            case LifecycleState.PREFILLING:
                assert request.prefiller is not None
                if request.decode:
                    self.end_prefill(request)
                else:
                    self._prefillers.end_direct(request.prefiller, request.ticket.slots)
                if not gone:
                    actions.append(AbortPrefill(request.request, request.prefiller))
            case LifecycleState.POOLED:
                entry = self._pool.remove(request.request)
                # For when it comes back.
                request.overtaken = entry.overtaken
                request.lapses += 1
                # No rank will pull these blocks; without the action the prefiller keeps them until
                # their lease ends.
                if request.prefiller is not None:
                    cheaper = gone and entry.overflow_limit < inf
                    actions.append(ReleasePrefill(request.request, request.prefiller, cheaper))
            case LifecycleState.DONE | LifecycleState.FAILED | LifecycleState.CANCELLED:
                raise AssertionError(f"request {request.request} ended twice")
        # After the actions, which name the prefiller.
        self.release_prefill(request)
        return actions

    def emitted(self, request: Request) -> int:
        """Return the KV tokens that a bound request holds beyond its prompt."""
        return self.ledger.kv_tokens(request.request) - request.kv_tokens()

    def end_prefill(self, request: Request) -> None:
        """Free the place of its prefill; its tokens stay charged."""
        assert request.prefiller is not None
        assert request.prefilling
        self._prefillers.end_prefill(request.prefiller)
        request.prefilling = False

    def release_prefill(self, request: Request) -> None:
        """Release its prefiller's budget, if it holds one."""
        if request.prefiller is not None:
            self._prefillers.release(request.prefiller, request.held_tokens())
            request.prefiller = None

    def bind(self, request: Request, rank: RankId) -> None:
        """Take its slots and its load on a rank."""
        request.rank = rank
        _bind(self.ledger, request, rank)
        if self._meter is not None:
            self._meter.held_shares.bind(request.request, request.ticket, request.kv_tokens())

    def unbind(self, request: Request) -> None:
        """Release its slots and its load on its rank."""
        tokens = self.ledger.unbind(request.request)
        if self._meter is not None:
            self._meter.held_shares.unbind(request.request)
        # If it is decoded again, the emitted tokens are prefilled with the prompt. Of several
        # sequences it is their mean, rounded up: too high an estimate never overfills a rank.
        emitted = -(-(tokens - request.kv_tokens()) // request.ticket.slots)
        if self._leases.pace is not None:
            self._leases.pace.left(tokens)
        request.emitted_before += emitted
        request.prompt_tokens += emitted
        request.rank = None
        request.started = False

    def _settle(self, meter: KvMeter, request: Request, state: LifecycleState) -> None:
        """Have the tenant pay for what the request held, before it is released."""
        if request.decode:
            bound = state is LifecycleState.DECODING
            held = self.ledger.kv_tokens(request.request) if bound else 0
            meter.end(request.request, request.ticket, held)
        else:
            meter.end_direct(request.request)

    def move(self, requests: Iterable[Request], ledger: Ledger) -> None:
        """Bind all bound requests in a new ledger, with the tokens that they hold in this one."""
        for request in requests:
            if request.rank is None:
                continue
            _bind(ledger, request, request.rank, emitted=self.emitted(request))
        ledger.turnover = self.ledger.turnover
        self.ledger = ledger

    def check(self, requests: Collection[Request], waiting: int) -> None:
        """Recount every holding from the requests' states and assert that nothing leaked."""
        check_holdings(
            requests,
            prefill_queue=self._prefill_queue,
            prefillers=self._prefillers,
            pool=self._pool,
            ledger=self.ledger,
            waiting=waiting,
        )


def _bind(ledger: Ledger, request: Request, rank: RankId, *, emitted: int = 0) -> None:
    """Bind a request with its prompt first, then with what it emitted, as a projection needs the age."""
    ledger.bind(
        request.request,
        rank,
        request.kv_tokens(),
        age=request.emitted_before,
        slots=request.ticket.slots,
    )
    if request.started:
        ledger.emit(request.request, emitted)
        ledger.start(request.request)


# A request whose engine lost it: what it releases, and which instances it avoids from then on.


def lose_prefill(
    request: Request, event: PrefillLost, holdings: Holdings, now_ns: int
) -> list[Action]:
    """Release what a request holds that has to be prefilled again; the caller queues it.

    Raises:
        LifecycleError: Its rank has the KV cache already, or it has no prefill.
    """
    if request.started:
        # From the first token on the rank holds the KV cache, and its loss is a
        # `RequestRecomputed`.
        raise LifecycleError(f"request {request.request} has pulled its KV cache already")
    if not request.ticket.prefill:
        raise LifecycleError(f"request {request.request} has no prefill to lose")
    # Read first: the holdings follow from the state before the move, and `release` clears them.
    state, prefiller, rank = request.state, request.prefiller, request.rank
    request.move(Trigger.PREFILL_LOST)
    actions = holdings.release(request, state, gone=True)
    if rank is not None and not event.same_rank:
        request.lost_on_ranks = with_loss(request.lost_on_ranks, rank)
    if event.elsewhere:
        assert prefiller is not None
        request.lost_on_prefillers = with_loss(request.lost_on_prefillers, prefiller)
    request.decode = request.decode and event.decode
    if request.answered:
        # The limit of the wait before prefill is for the first token.
        request.waiting_since_ns = now_ns
    return actions


def lose_decode(request: Request, holdings: Holdings) -> None:
    """Release the rank of a request that never joined its batch; the caller puts it in the pool.

    Raises:
        LifecycleError: It is on no rank, or in the batch.
    """
    if request.started:
        # Likewise: a request in the batch can be recomputed, but not go back to the pool as it
        # was.
        raise LifecycleError(f"request {request.request} is in its rank's batch already")
    request.move(Trigger.DECODE_LOST)
    assert request.rank is not None
    request.lost_on_ranks = with_loss(request.lost_on_ranks, request.rank)
    # Only the rank's slots: the prefiller still holds the KV cache, under the same lease.
    holdings.unbind(request)


def recompute(
    request: Request, holdings: Holdings, now_ns: int, *, elsewhere: bool
) -> list[Action]:
    """Release what a request holds whose rank dropped it; the caller queues it.

    Raises:
        LifecycleError: It is on no rank.
    """
    state, rank = request.state, request.rank
    request.move(Trigger.RECOMPUTE)
    actions = holdings.release(request, state, gone=True)
    if elsewhere:
        assert rank is not None
        request.lost_on_ranks = with_loss(request.lost_on_ranks, rank)
        # Either end of the KV transfer may be at fault.
        if request.pulled_from is not None:
            lost_on = with_loss(request.lost_on_prefillers, request.pulled_from)
            request.lost_on_prefillers = lost_on
    # It was served in between, so a new wait begins, with new time limits.
    request.wait_anew(now_ns)
    return actions


def unpaired(requests: Mapping[RequestId, Request], pairs: Pairs) -> list[RequestId]:
    """Return the pooled requests whose KV caches no open rank can use."""
    if not pairs.limited:
        return []
    return [
        request.request
        for request in requests.values()
        if request.state is LifecycleState.POOLED
        and request.prefiller is not None
        and not pairs.feeds(request.prefiller, request.ticket.eligible)
    ]
