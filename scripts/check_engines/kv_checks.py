"""What must hold of vLLM's KV cache events: what they tell is what the engine then finds."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from answers import ask
from engines import BLOCK_TOKENS
from fleet import Fleet, Proxy, until
from pd_checks import completion

from balanceroute.proxy.core.events import PrefillerId, Ticket
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, token_hashes
from balanceroute.proxy.live.engines.kv_feed import KvEventSource, KvFeed, subscribe
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.prompt_keys import prompt_blocks, prompt_name
from balanceroute.proxy.live.openai.shape import Api

_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
# Three times what the engine's 512 blocks hold, in families that share a beginning.
_FAMILIES, _PROMPTS = 12, 80
# How far the hit rates may be apart.
_MOST_APART = 0.02
_P = PrefillerId(0)
# Conversations of each route, and the lines of each turn: the first one has a block of text.
_TALKS, _TURNS = 2, (60, 30, 30)
# Of what the engine finds; the rest is in the last 2 KiB of a text, and in the template's last tokens.
_LEAST_TOLD = 0.5
_LINE = "def function_{0}(value): return value * {0}"
_ROUTES: dict[Api, Callable[[list[str]], dict[str, Any]]] = {
    Api.CHAT: lambda said: {"messages": _messages(said), "max_tokens": 1},
    Api.COMPLETIONS: lambda said: {"prompt": " ".join(said), "max_tokens": 1},
    Api.MESSAGES: lambda said: {"messages": _messages(said), "max_tokens": 1},
    Api.RESPONSES: lambda said: {"input": _messages(said), "max_output_tokens": 1},
}


class KvChecks:
    """The checks, in the order in which they run. The name of a method is what it claims."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._prefiller = fleet.prefillers[0]

    def check_events_tell_what_the_engine_finds(self) -> str:
        blocks, rng = EngineBlocks(BLOCK_TOKENS), random.Random(7)
        self._compute(_prompt(rng, 0))  # Before anybody listens.
        with self._heard(blocks):
            until(lambda: blocks.blocks(_P) > 0, "what was published before is known")
            queries, hits = self._counters()
            expected = 0
            for _ in range(_PROMPTS):
                prompt = _prompt(rng, rng.randrange(_FAMILIES))
                expected += BLOCK_TOKENS * _known(blocks, prompt)
                self._compute(prompt)
                until(partial(_is_whole, blocks, prompt), "a prompt's blocks are told")
            asked, found = (
                now - before for now, before in zip(self._counters(), (queries, hits), strict=True)
            )
            told, truth = expected / asked, found / asked
            assert truth > 0.1, f"found {truth}"
            assert abs(told - truth) <= _MOST_APART, f"expected {told}, found {truth}"
            own = self._of_a_proxy(blocks.blocks(_P))
        return (
            f"{100 * told:.1f} % expected, {100 * truth:.1f} % found of {asked:.0f} tokens; {own}"
        )

    def check_events_tell_the_tokens_of_texts_on_every_route(self) -> str:
        blocks, rng = EngineBlocks(BLOCK_TOKENS), random.Random(8)
        seen = []
        with self._heard(blocks):
            for api, asked in _ROUTES.items():
                told = found = total = 0
                for _ in range(_TALKS):
                    said = [f"{api.value} {rng.random()}"]
                    for lines in _TURNS:
                        said.append(
                            "\n".join(_LINE.format(rng.randrange(100)) for _ in range(lines))
                        )
                        body = {"model": "tiny", **asked(said)}
                        name, texts = _named(api, body)
                        known = blocks.leading(_P, blocks.texts.tokens(texts))
                        queries, hits = self._counters()
                        ask(self._prefiller.url, api.value, body, headers={"x-session-id": name})
                        until(partial(_is_told, blocks, texts), "the tokens of a text are told")
                        asked_for, had = (
                            now - before
                            for now, before in zip(self._counters(), (queries, hits), strict=True)
                        )
                        # What is told is there; of the last piece of the text nothing is.
                        assert BLOCK_TOKENS * known <= had, f"{known} blocks told, {had} tokens had"
                        told, found = told + BLOCK_TOKENS * known, found + int(had)
                        total += int(asked_for)
                assert told > _LEAST_TOLD * found > 0, f"{api.value}: {told} of {found} tokens"
                seen.append(f"{api.value} {told} of {found} cached (of {total})")
        return "; ".join(seen)

    def _of_a_proxy(self, blocks: int) -> str:
        """Have a proxy come late and know the same; return how many blocks."""
        events, replay = self._prefiller.kv_addresses
        flags = ["--prefill-choice=prefix-aware", f"--kv-block-tokens={BLOCK_TOKENS}"]
        flags += [f"--kv-events={events}", f"--kv-replay={replay}"]
        with self._fleet.proxy("kv events", *flags) as proxy:
            until(lambda: _cached_blocks(proxy) == blocks, f"the proxy knows {blocks} blocks")
        return f"a proxy that comes later knows all {blocks} blocks"

    def _compute(self, prompt: list[int]) -> None:
        ask(self._prefiller.url, *completion(prompt, max_tokens=1))

    def _counters(self) -> tuple[float, float]:
        return self._prefiller.metric(_QUERIES), self._prefiller.metric(_HITS)

    @contextmanager
    def _heard(self, blocks: EngineBlocks) -> Iterator[None]:
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


def _is_told(blocks: EngineBlocks, texts: tuple[int, ...]) -> bool:
    return len(blocks.texts.tokens(texts[-1:])) > 0


def _prompt(rng: random.Random, family: int) -> list[int]:
    """Return a prompt that shares up to ten blocks with the others of its family."""
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
    state = proxy.state()["state"]
    assert isinstance(state, dict)
    return state["prefillers"][0]["cached_blocks"]
