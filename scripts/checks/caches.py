"""What must hold of KV caches: events, ranks that have a prompt, data-parallel ranks, audits."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from types import MappingProxyType
from typing import Any

import numpy as np

from balanceroute.proxy.core.events import PrefillerId, Ticket
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, token_hashes
from balanceroute.proxy.live.engines.kv_feed import KvEventSource, KvFeed
from balanceroute.proxy.live.engines.kv_subscriber import subscribe
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.prompt_keys import prompt_blocks, prompt_name
from balanceroute.proxy.live.openai.shape import Api
from checks.fleet import (
    BLOCK_TOKENS,
    SUCCESSES,
    Checks,
    Engine,
    Fleet,
    Proxy,
    ask,
    completion,
    json_of,
    metric,
    until,
)
from checks.legs import TraceChecks

_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
# Three times what the engine's 512 blocks hold, in families that share a beginning.
_FAMILIES, _PROMPTS = 12, 80
# How far the hit rates may be apart.
_MOST_APART = 0.02
_P = PrefillerId(0)
# Conversations of each route, and the lines of each turn: the first one has a block of text.
_TALKS, _TURNS = 2, (60, 30, 30)
# Of what the engine finds; the rest is in the last 2 KiB of a text, and in the template's last tokens.
_LEAST_KNOWN = 0.5
_LINE = "def function_{0}(value): return value * {0}"
_ROUTES: dict[Api, Callable[[list[str]], dict[str, Any]]] = {
    Api.CHAT: lambda said: {"messages": _messages(said), "max_tokens": 1},
    Api.COMPLETIONS: lambda said: {"prompt": " ".join(said), "max_tokens": 1},
    Api.MESSAGES: lambda said: {"messages": _messages(said), "max_tokens": 1},
    Api.RESPONSES: lambda said: {"input": _messages(said), "max_output_tokens": 1},
}


class KvChecks(Checks):
    """Events of KV caches."""

    def check_events_tell_what_the_engine_finds(self) -> str:
        blocks, rng = EngineBlocks(BLOCK_TOKENS), random.Random(7)
        ask(self._prefiller.url, *completion(_prompt(rng, 0), max_tokens=1))  # No listener yet.
        with self._following(blocks):
            until(lambda: blocks.blocks(_P) > 0, "what was published before is known")
            expected = asked = found = 0.0
            for _ in range(_PROMPTS):
                prompt = _prompt(rng, rng.randrange(_FAMILIES))
                expected += BLOCK_TOKENS * _known(blocks, prompt)
                more, hits = self._counted(*completion(prompt, max_tokens=1))
                asked, found = asked + more, found + hits
                until(partial(_is_whole, blocks, prompt), "a prompt's blocks are told")
            share, truth = expected / asked, found / asked
            assert truth > 0.1, f"found {truth}"
            assert abs(share - truth) <= _MOST_APART, f"expected {share}, found {truth}"
            own = self._of_a_proxy(blocks.blocks(_P))
        return (
            f"{100 * share:.1f} % expected, {100 * truth:.1f} % found of {asked:.0f} tokens; {own}"
        )

    def check_events_tell_the_tokens_of_texts_on_every_route(self) -> str:
        blocks, rng = EngineBlocks(BLOCK_TOKENS), random.Random(8)
        with self._following(blocks):
            return "; ".join(self._of_texts(blocks, rng, api) for api in _ROUTES)

    def _of_texts(self, blocks: EngineBlocks, rng: random.Random, api: Api) -> str:
        reported = found = total = 0.0
        for _ in range(_TALKS):
            said = [f"{api.value} {rng.random()}"]
            for lines in _TURNS:
                said.append("\n".join(_LINE.format(rng.randrange(100)) for _ in range(lines)))
                body = {"model": "tiny", **_ROUTES[api](said)}
                name, texts = _named(api, body)
                known = BLOCK_TOKENS * blocks.leading(_P, blocks.texts.tokens(texts))
                asked, had = self._counted(api.value, body, {"x-session-id": name})
                until(partial(_is_known, blocks, texts), "the tokens of a text are told")
                # The reported blocks are there; the engine reports none of the last piece of the text.
                assert known <= had, f"{known} tokens told, {had} had"
                reported, found, total = reported + known, found + had, total + asked
        assert reported > _LEAST_KNOWN * found > 0, f"{api.value}: {reported} of {found} tokens"
        return f"{api.value} {reported:.0f} of {found:.0f} cached (of {total:.0f})"

    def _counted(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[float, float]:
        """Ask the prefiller; return how many prompt tokens it looked up, and how many it had."""
        before = [self._prefiller.metric(name) for name in (_QUERIES, _HITS)]
        ask(self._prefiller.url, path, body, headers=headers)
        queries, hits = (self._prefiller.metric(name) for name in (_QUERIES, _HITS))
        return queries - before[0], hits - before[1]

    def _of_a_proxy(self, blocks: int) -> str:
        """Have a proxy come late and know the same; return how many blocks."""
        events, replay = self._prefiller.kv_addresses
        flags = ["--prefill-choice=prefix-aware", f"--kv-block-tokens={BLOCK_TOKENS}"]
        flags += [f"--kv-events={events}", f"--kv-replay={replay}"]
        with self._fleet.proxy("kv events", *flags) as proxy:
            until(lambda: _cached_blocks(proxy) == blocks, f"the proxy knows {blocks} blocks")
        return f"a proxy that comes later knows all {blocks} blocks"

    @contextmanager
    def _following(self, blocks: EngineBlocks) -> Iterator[None]:
        """Follow the prefiller's events in a thread of its own."""
        events, replay = self._prefiller.kv_addresses
        feed, ended = KvFeed(blocks, _P, replays=True), threading.Event()
        source = KvEventSource(feed, events, replay, lambda: True, lambda _: None)
        thread = threading.Thread(target=lambda: asyncio.run(_follow(source, ended)))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


async def _follow(source: KvEventSource, ended: threading.Event) -> None:
    sources = asyncio.Queue[KvEventSource]()
    sources.put_nowait(source)
    following = asyncio.create_task(subscribe(sources))
    await asyncio.to_thread(ended.wait)
    following.cancel()
    await asyncio.wait([following])


def _messages(said: list[str]) -> list[dict[str, str]]:
    return [
        {"role": "assistant" if number % 2 else "user", "content": text}
        for number, text in enumerate(said)
    ]


def _named(api: Api, values: dict[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Return what a prefill leg calls a text, and the text's blocks."""
    body = RequestBody(json.dumps(values).encode())
    ticket = prompt_blocks(api, body, BLOCK_TOKENS).of(Ticket(1))
    line = prompt_name(api, body, ticket).decode()
    return line.removeprefix("x-session-id: ").strip(), ticket.blocks


def _is_known(blocks: EngineBlocks, texts: tuple[int, ...]) -> bool:
    return len(blocks.texts.tokens(texts[-1:])) > 0


def _prompt(rng: random.Random, family: int) -> list[int]:
    """Return a prompt that shares up to ten blocks with the rest of its family."""
    shared = random.Random(family)
    ids = [shared.randrange(100, 900) for _ in range(10 * BLOCK_TOKENS)]
    own = [rng.randrange(100, 900) for _ in range(rng.randrange(1, 15 * BLOCK_TOKENS))]
    prompt = ids[: BLOCK_TOKENS * rng.randrange(11)] + own
    # The last token is computed in any case: of a prompt of full blocks one counts as not found.
    return prompt if len(prompt) % BLOCK_TOKENS else prompt[:-1] or [100]


def _known(blocks: EngineBlocks, prompt: list[int]) -> int:
    return blocks.leading(_P, token_hashes(np.array(prompt, np.int64), BLOCK_TOKENS))


def _is_whole(blocks: EngineBlocks, prompt: list[int]) -> bool:
    return _known(blocks, prompt) == len(prompt) // BLOCK_TOKENS


def _cached_blocks(proxy: Proxy) -> object:
    return proxy.state()["prefillers"][0]["cached_blocks"]


# What must hold where decode ranks compute prompts: short ones, and a conversation's next turns.

_LIMIT_TOKENS = 256
_FLAGS = ("--local-prefill-tokens", str(_LIMIT_TOKENS))
_SHORT, _LONG = 8, 4
_CONVERSATIONS, _LOCAL_TURNS = 6, 4
# Of a conversation's first prompt, and of what a client adds in a turn.
_FIRST_TOKENS, _FURTHER_TOKENS, _ANSWER_TOKENS = 300, 90, 24
_STRAIGHT = "balanceroute_local_prefills_total"


@dataclass
class _Conversation:
    """What a client keeps of it: its name, all token ids so far, and the rank of the last turn."""

    name: str
    ids: list[int] = field(default_factory=list)
    rank: str = ""


class LocalityChecks(Checks):
    """Decode ranks that compute prompts."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._rng = random.Random(16)

    def check_short_prompts_go_straight_to_a_rank(self) -> str:
        with self._fleet.proxy("straight", *_FLAGS) as proxy:
            for _ in range(_LONG):
                line = self._ask(proxy, self._ids(_LIMIT_TOKENS + 50))[1]
                assert not line["local_prefill"], "a long prompt went straight to a rank"
                assert line["prefiller"], line
            prompts = [self._ids(10 + 30 * number) for number in range(_SHORT)]
            prefilled = self._prefiller.metric(SUCCESSES)
            pulled, computed = map(self._prompt_tokens, ("external_kv_transfer", "local_compute"))
            ours = []
            for number, prompt in enumerate(prompts):
                answer, line = self._ask(proxy, prompt, stream=bool(number % 2))
                assert line["local_prefill"], f"a prompt of {len(prompt)} tokens was prefilled"
                ours.append(answer)
            # What the proxy counts is what the engines did.
            wanted = computed + sum(map(len, prompts))
            until(lambda: self._prompt_tokens("local_compute") == wanted, "the ranks computed all")
            assert self._prompt_tokens("external_kv_transfer") == pulled, "a rank pulled"
            assert self._prefiller.metric(SUCCESSES) == prefilled, "the prefiller worked"
            counted = metric(proxy.url, _STRAIGHT)
            assert counted == _SHORT, f"the proxy counts {counted:.0f}"
        for number, (prompt, answer) in enumerate(zip(prompts, ours, strict=True)):
            self._same(*completion(prompt, ignore_eos=True, stream=bool(number % 2)), answer)
        return f"{_SHORT} of {sum(map(len, prompts))} tokens, exact; {_LONG} longer ones did not"

    def check_a_conversation_returns_to_its_rank(self) -> str:
        talks = [_Conversation(f"talk {number}") for number in range(_CONVERSATIONS)]
        for talk in talks:
            talk.ids = self._ids(_FIRST_TOKENS)
        found = asked = 0
        with self._fleet.proxy("turns", *_FLAGS) as proxy:
            # At once, so that the ranks share them.
            with ThreadPoolExecutor(_CONVERSATIONS) as threads:
                list(threads.map(partial(self._turn, proxy), talks))
            ranks = {talk.rank for talk in talks}
            assert len(ranks) == len(self._fleet.decoders), f"all talks are on {ranks}"
            for _ in range(1, _LOCAL_TURNS):
                for talk in talks:
                    known, rank, hits = len(talk.ids), talk.rank, self._hits()
                    talk.ids += self._ids(_FURTHER_TOKENS)
                    cached, line = self._turn(proxy, talk)
                    assert line["local_prefill"], "a later turn was prefilled"
                    assert talk.rank == rank, f"a later turn went to {talk.rank}, not to {rank}"
                    counted = hits | {rank: hits[rank] + cached}
                    until(partial(self._is_counted, counted), f"{cached} hits at {rank} alone")
                    # The last token of an answer is in no cache, nor is a block that is not full.
                    full = (known - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                    assert cached == full, f"{cached} tokens cached, not {full}"
                    found, asked = found + cached, asked + len(talk.ids) - _ANSWER_TOKENS
            # Another conversation of the same length has to be prefilled.
            line = self._ask(proxy, self._ids(_FIRST_TOKENS + _FURTHER_TOKENS))[1]
            assert not line["local_prefill"], "a long first turn went straight to a rank"
        turns = _CONVERSATIONS * (_LOCAL_TURNS - 1)
        return f"{turns} turns, {found} of {asked} tokens cached as the engines count, on {len(ranks)} ranks"

    # How it is done.

    def _ids(self, tokens: int) -> list[int]:
        """Return token ids that no engine has cached."""
        return [self._rng.randrange(100, 900) for _ in range(tokens)]

    def _ask(
        self, proxy: Proxy, prompt: Sequence[int], *, session: str = "", **values: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return the answer to a prompt, and the log's line."""
        path, body = completion(list(prompt), ignore_eos=True, **values)
        headers = {"x-session-id": session} if session else {}
        answer = ask(proxy.url, path, body, headers=headers)
        name = answer["id"] if isinstance(answer, dict) else answer[0]["id"]
        return answer, proxy.line_of(name.removeprefix("cmpl-"))

    def _turn(self, proxy: Proxy, talk: _Conversation) -> tuple[int, dict[str, Any]]:
        """Carry on a conversation by one turn, compared with one engine's.

        Returns:
            The cached tokens of the answer's usage, and the log's line.
        """
        values = {"max_tokens": _ANSWER_TOKENS, "return_token_ids": True}
        answer, line = self._ask(proxy, talk.ids, session=talk.name, **values)
        self._same(*completion(list(talk.ids), ignore_eos=True, **values), answer)
        talk.ids += answer["choices"][0]["token_ids"]
        talk.rank = line["rank"]
        details = answer["usage"]["prompt_tokens_details"] or {}
        return int(details.get("cached_tokens") or 0), line

    def _is_counted(self, hits: dict[str, float]) -> bool:
        return self._hits() == hits

    def _hits(self) -> dict[str, float]:
        """Return the prompt tokens that each rank found in its cache, by its name."""
        return {one.url: one.metric(_HITS) for one in self._fleet.decoders}


# A mixture of experts whose ranks share a barrier, as prefiller and as decode engine.

_RANKS = 2
# Requests at once, and how often at most.
_BURST = 8
_ROUNDS = 5


class DpChecks(TraceChecks):
    """Ranks that share a barrier."""

    output_part = 4  # A step of these ranks takes ten times as long.

    def check_br_h_serves_a_trace_slice_on_ranks_with_a_port_each(self) -> str:
        return self.check_a_trace_slice_is_served_without_an_error()

    def check_the_mirrored_load_is_the_ranks(self) -> str:
        seen = self.check_the_mirrored_load_is_the_engines()
        (unit,) = self._validated()["units"]
        assert unit["whole"], unit
        assert len(unit["ranks"]) == _RANKS, unit
        idle = unit["idle"]
        return (
            f"{seen}; barrier: {idle['tokens']:.0%} idle by loads, {idle['dummy']:.1%} in dummy "
            f"batches, steps end within {idle['spread_ms_p50']:.1f} ms"
        )

    def check_answers_of_ranks_with_a_port_each_are_those_of_one_engine(self) -> str:
        decoders = self._fleet.decoders
        decoded = [engine.metric(SUCCESSES) for engine in decoders]
        prefills, rounds = [0], 0
        with self._fleet.proxy("ports", "--policy", "round-robin") as proxy:
            # The engine chooses; each rank hands out what it prefilled, at a port of its own.
            while min(prefills) < 2:
                assert rounds < _ROUNDS, f"one rank prefilled nearly all: {prefills}"
                prefills = self._compare(proxy, self._prefiller)
                rounds += 1
        served = _grown(decoded, [engine.metric(SUCCESSES) for engine in decoders])
        assert served == [rounds * _BURST // 2] * 2, served
        return f"{sum(served)} requests, by decode rank {served}, by prefill rank {prefills}"

    def check_ranks_behind_one_port_are_found_and_answer_as_one_engine(self) -> str:
        server, prefiller = self._prefiller, self._fleet.decoders[0]
        with self._fleet.proxy(
            "found",
            "--policy",
            "round-robin",
            prefill=[prefiller.url],
            decode=[f"{server.url}@discover"],
        ) as proxy:
            names = [rank["name"] for rank in proxy.state()["ranks"]]
            assert names == [f"{server.url}@{rank}" for rank in range(_RANKS)], names
            served = self._compare(proxy, prefiller)
        assert served == [_BURST // 2] * 2, served
        return f"{_BURST} requests, by rank {served}"

    # How it is done.

    def _by_rank(self) -> list[float]:
        return [self._prefiller.metric(SUCCESSES, engine=str(rank)) for rank in range(_RANKS)]

    def _compare(self, proxy: Proxy, single: Engine) -> list[int]:
        """Compare what some requests at once are answered with what an engine says to each alone.

        Returns:
            How many of the former each rank behind one port finished.
        """
        requests = [completion(f"def rank_{i}(", stream=bool(i % 2)) for i in range(_BURST)]
        before = self._by_rank()
        with ThreadPoolExecutor(_BURST) as threads:
            ours = list(threads.map(lambda request: ask(proxy.url, *request), requests))
        finished = _grown(before, self._by_rank())
        for request, one in zip(requests, ours, strict=True):
            self._same(*request, one, of=single)
        return finished


def _grown(before: list[float], after: list[float]) -> list[int]:
    return [int(new - old) for old, new in zip(before, after, strict=True)]


# Engines seen from outside.

_WATCHED_MINUTES, _CLIENTS, _TOKENS = 0.5, 12, 150


class AuditChecks(Checks):
    """`balanceroute audit` of the engines."""

    def check_an_audit_tells_what_it_sees_and_what_it_cannot_know(self) -> str:
        command = ["audit", "--prefill", *(engine.url for engine in self._fleet.prefillers)]
        command += ["--decode", *(engine.url for engine in self._fleet.decoders)]
        command += ["--minutes", str(_WATCHED_MINUTES), "--interval-s", "0.2"]
        with self._fleet.proxy("audited", "--policy", "jsq") as proxy, _busy(proxy):
            report = json_of(*command, into=self._fleet.folder / "audit.json")
        assert len(report["ranks"]) == len(self._fleet.decoders), report["ranks"]
        assert 0.0 < report["idle_fraction"] < 1.0, report
        assert report["output_tokens_per_s"] > 0.0, report
        # Steps of two ranks on a busy CPU need not show what a token costs.
        unknown = [] if report["fit"] is not None else ["step time"]
        if report["recovery"] is None:
            assert report["unknown"], report
            unknown.append(f"what policies recover ({report['unknown'].partition(' (')[0]})")
        return (
            f"{report['looks']} looks, {report['idle_fraction']:.0%} idle, bound by {report['bound']}, "
            f"unknown: {', '.join(unknown) or 'nothing'}"
        )


@contextmanager
def _busy(proxy: Proxy) -> Iterator[None]:
    """Keep as many requests running as there are clients."""
    ended = Event()

    def run(number: int) -> None:
        while not ended.is_set():
            number += _CLIENTS
            prompt = [1 + (7 * number) % 97] * (20 + 37 * number % 300)
            limit = _TOKENS - 13 * (number % 7)
            ask(proxy.url, *completion(prompt, max_tokens=limit, ignore_eos=True), timeout_s=600.0)

    with ThreadPoolExecutor(_CLIENTS) as clients:
        running = [clients.submit(run, number) for number in range(_CLIENTS)]
        try:
            yield
        finally:
            ended.set()
        for one in running:
            one.result()
