"""What must hold of vLLM's KV cache events: what they tell is what the engine then finds."""

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from answers import ask
from engines import BLOCK_TOKENS
from fleet import Fleet, Proxy, until
from pd_checks import completion

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks
from balanceroute.proxy.core.prefill.token_blocks import token_hashes
from balanceroute.proxy.live.engines.kv_feed import KvFeed, Source
from balanceroute.proxy.live.engines.kv_subscriber import subscribe

_QUERIES, _HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
# Three times what the engine's 512 blocks hold, in families that share a beginning.
_FAMILIES, _PROMPTS = 12, 80
# How far the hit rates may be apart.
_MOST_APART = 0.02
_P = PrefillerId(0)


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
        source = Source(feed, events, replay, lambda: True, lambda _: None)
        thread = threading.Thread(target=lambda: asyncio.run(_follow(source, ended)))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


async def _follow(source: Source, ended: threading.Event) -> None:
    sources = asyncio.Queue[Source]()
    sources.put_nowait(source)
    following = asyncio.create_task(subscribe(sources))
    await asyncio.to_thread(ended.wait)
    following.cancel()
    await asyncio.wait([following])


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
