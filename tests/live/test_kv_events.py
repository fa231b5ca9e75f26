"""KV cache events over ZeroMQ: from emulated prefillers into the index, and into the choice."""

import asyncio
import random
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.extended import usually
from tests.live.served import COMPLETIONS, ENGINES, Client, Served, serving
from tests.support.played import in_real_time

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, Knowledge, token_hashes
from balanceroute.proxy.lab.emulate import EmulatedFleet, EmulationSettings
from balanceroute.proxy.lab.emulate.prefix_caches import _blocks
from balanceroute.proxy.live.engines.kv_feed import (
    KvEventSource,
    KvFeed,
)

pytest.importorskip("zmq", reason="an extra")

from balanceroute.proxy.lab.emulate.kv_publisher import KvPublisher
from balanceroute.proxy.live.engines.kv_subscriber import (
    subscribe,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


P = PrefillerId(0)
BLOCK = 16
SETTINGS = replace(
    ENGINES,
    prefillers=2,
    block_tokens=BLOCK,
    prefix_cache_tokens=40 * BLOCK,
    kv_events=True,
    prompt_tokens_details=True,
)


def prompt(seed: int, blocks: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000) for _ in range(blocks * BLOCK + 1)]


@asynccontextmanager
async def engines(settings: EmulationSettings = SETTINGS) -> "AsyncIterator[EmulatedFleet]":
    fleet = EmulatedFleet(settings, rng=random.Random(5), publish=KvPublisher)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()


async def until(ready: Callable[[], bool]) -> None:
    while not ready():  # noqa: ASYNC110 - of what sockets bring.
        await asyncio.sleep(0)


def request(tokens: list[int]) -> dict[str, object]:
    return {"model": "tiny", "prompt": tokens, "max_tokens": 2, "ignore_eos": True}


@in_real_time()
async def test_the_index_follows_a_prefiller_through_its_life() -> None:
    blocks = EngineBlocks(BLOCK)
    async with engines() as fleet:
        engine = Client(fleet.engines[0].port)

        async def compute(*seeds: int) -> None:
            for seed in seeds:
                answer = await engine.post(COMPLETIONS, request(prompt(seed, 6)))
                assert answer.status == 200

        def follows() -> bool:
            cache = fleet._prefillers[fleet.engines[0]]._caches._caches[0]
            held = [seed for seed in range(20) if known(seed) == 6]
            whole = [seed for seed in range(20) if cached(seed) == 6]
            return held == whole and blocks.blocks(P) == len(cache._held)

        def cached(seed: int) -> int:
            caches = fleet._prefillers[fleet.engines[0]]._caches
            return caches._caches[0].leading(hashed(prompt(seed, 6)))

        def known(seed: int) -> int:
            tokens = np.array(prompt(seed, 6), np.int64)
            return blocks.leading(P, token_hashes(tokens, BLOCK))

        await compute(0, 1)
        feed = KvFeed(blocks, P, replays=True)
        lost: list[str] = []
        ((events, replay), _) = fleet.kv_addresses
        source = KvEventSource(feed, events, replay, lambda: True, lost.append)
        sources = asyncio.Queue[KvEventSource]()
        sources.put_nowait(source)
        task = asyncio.create_task(subscribe(sources))
        try:
            # What was published before it listened.
            await until(lambda: blocks.blocks(P) == 12 and follows())
            assert blocks.knowledge(P) is Knowledge.ALL
            # More than fit.
            await compute(*range(2, 9))
            await until(lambda: blocks.blocks(P) == 40 and follows())
            fleet.kill(0)
            await fleet.restore(0)
            engine.close()
            engine = Client(fleet.engines[0].port)
            await compute(3)
            await until(lambda: blocks.blocks(P) == 6 and follows())
            await until(lambda: bool(lost))
            assert not task.done()
        finally:
            engine.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def hashed(tokens: list[int]) -> list[int]:
    return _blocks(tokens, BLOCK)


def flags(fleet: EmulatedFleet) -> list[str]:
    events, replays = zip(*fleet.kv_addresses, strict=True)
    return [
        *("--prefill-choice", "prefix-aware", "--kv-block-tokens", str(BLOCK)),
        *("--kv-events", *events, "--kv-replay", *replays),
    ]


async def until_known(served: Served, blocks: list[int]) -> None:
    while True:
        prefillers = (await served.admin.get("/admin/state")).json["state"]["prefillers"]
        # One that was found takes no prefill before its first probe.
        ready = all(one["open"] or one["status"] == "removed" for one in prefillers)
        if ready and [one["cached_blocks"] for one in prefillers] == blocks:
            return
        await asyncio.sleep(0.01)


@in_real_time()
async def test_a_proxy_finds_what_others_had_computed() -> None:
    async with engines() as fleet:
        for place, seed in ((0, 1), (1, 2)):
            engine = Client(fleet.engines[place].port)
            assert (await engine.post(COMPLETIONS, request(prompt(seed, 8)))).status == 200
            engine.close()
        async with serving(fleet.prefill_urls, fleet.decode_urls, *flags(fleet)) as served:
            await until_known(served, [8, 8])
            for seed, place in ((2, 1), (1, 0), (2, 1), (1, 0)):
                answer = await served.client.post(COMPLETIONS, request(prompt(seed, 8)))
                assert answer.status == 200
                # Elsewhere it would have been stored once more.
                held = fleet._prefillers[fleet.engines[1 - place]]._caches._caches[0]
                assert held.leading(hashed(prompt(seed, 8))) == 0


ROOMY = replace(SETTINGS, prefix_cache_tokens=200 * BLOCK)


def said(seed: int, turns: int) -> list[dict[str, str]]:
    """Return a conversation of 700 words a turn; a word is a token."""
    rng = random.Random(seed)
    messages = []
    for _ in range(turns):
        words = " ".join(f"t{rng.randrange(1_000)}" for _ in range(700))
        messages.append({"role": "user", "content": words})
    return messages


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS])
@in_real_time()
async def test_a_text_goes_where_its_tokens_are_by_now(path: str) -> None:
    def body(turns: int, **more: object) -> dict[str, object]:
        messages = said(1, turns)
        text = "".join(f"{one['content']} " for one in messages)
        asked = {"messages": messages} if path != COMPLETIONS else {"prompt": text}
        return {"model": "tiny", "max_tokens": 2, **asked, **more}

    async with engines(ROOMY) as fleet:

        async def compute(place: int, path: str, *bodies: dict[str, object]) -> None:
            """Have an engine compute prompts that the proxy does not see."""
            engine = Client(fleet.engines[place].port)
            for one in bodies:
                assert (await engine.post(path, one)).status == 200
            engine.close()

        for place in (
            0,
            1,
        ):  # An engine that begins now would count as one that lost its cache.
            await compute(place, COMPLETIONS, request(prompt(9, 1)))
        async with serving(fleet.prefill_urls, fleet.decode_urls, *flags(fleet)) as served:
            await until_known(served, [1, 1])
            client = {"session_id": "of the client's"}
            assert (await served.client.post(path, body(1, **client))).status == 200
            caches = [fleet._prefillers[one]._caches for one in fleet.engines[:2]]
            first = next(place for place in (0, 1) if len(caches[place]._caches[0]._held) > 1)
            # Somebody else has it computed at the other one, and has it dropped at this one.
            await compute(1 - first, path, body(1))
            fillers = [request(prompt(seed, 40)) for seed in range(20, 26)]
            await compute(first, COMPLETIONS, *fillers)
            await until_known(served, [len(one._caches[0]._held) for one in caches])
            before = [one._counters[0].prefix_hits for one in caches]
            assert (await served.client.post(path, body(2))).status == 200
            after = [one._counters[0].prefix_hits for one in caches]
            assert after[first] == before[first]
            assert after[1 - first] - before[1 - first] > 600


@pytest.mark.parametrize("by", usually(["file"], ["file", "order", "ports"]))
@in_real_time()
async def test_prefillers_that_come_and_go_are_followed(tmp_path: Path, by: str) -> None:
    found = by == "file"
    async with engines() as fleet:
        first, second = fleet.prefill_urls
        listed, addresses = tmp_path / "engines.toml", fleet.kv_addresses
        engine = Client(fleet.engines[1].port)
        assert (await engine.post(COMPLETIONS, request(prompt(2, 8)))).status == 200
        engine.close()
        listed.write_text("")
        words = ["--prefill-choice", "prefix-aware", "--kv-block-tokens", str(BLOCK)]
        words += ["--kv-events", addresses[0][0], "--kv-replay", addresses[0][1]]
        if found:
            words += ["--discover", f"file:{listed}", "--discover-interval-s", "0.1"]
            words += ["--discover-hold-s", "0"]
        elif by == "ports":
            ports = [one.rpartition(":")[2] for one in addresses[1]]
            words += ["--kv-events-port", ports[0], "--kv-replay-port", ports[1]]
        async with serving([first], fleet.decode_urls, *words) as served:

            async def come() -> None:
                events, replay = addresses[1]
                told = f'url = "{second}"\nkv_events = "{events}"\nkv_replay = "{replay}"\n'
                if found:
                    listed.write_text(f"[[prefill]]\n{told}")
                    return
                named = {"kv_events": events, "kv_replay": replay} if by == "order" else {}
                await order("", role="prefill", url=second, **named)

            async def go() -> None:
                listed.write_text("")
                if not found:
                    await order("/remove", role="prefill", url=second)

            async def order(path: str, **values: object) -> None:
                answer = await served.admin.post(f"/admin/instances{path}", values)
                assert answer.status == 200, answer.body

            async def served_by_the_second() -> bool:
                held = fleet._prefillers[fleet.engines[0]]._caches._caches[0]
                answer = await served.client.post(COMPLETIONS, request(prompt(2, 8)))
                assert answer.status == 200
                return held.leading(hashed(prompt(2, 8))) == 0

            await until_known(served, [0])
            await come()
            # What it had computed before it was there.
            await until_known(served, [0, 8])
            assert await served_by_the_second()
            await go()
            await until_known(served, [0, 0])
            await come()
            await until_known(served, [0, 0, 8])
            assert await served_by_the_second()


@pytest.mark.parametrize("replays", [False, True])
@in_real_time()
async def test_treacherous_events_cost_no_answer(replays: bool) -> None:
    async with engines(replace(SETTINGS, kv_event_faults=0.5)) as fleet:
        words = flags(fleet) if replays else flags(fleet)[: -1 - len(fleet.prefill_urls)]
        async with serving(fleet.prefill_urls, fleet.decode_urls, *words) as served:
            seed = 0
            while seed < 60 or not (replays or await has_lost_events(served)):
                tokens = prompt(seed % 7, 4) + prompt(seed, 2)
                answer = await served.client.post(COMPLETIONS, request(tokens))
                assert answer.status == 200
                assert answer.json["usage"]["prompt_tokens"] == len(tokens)
                seed += 1
                if seed == 40:
                    fleet.kill(0)
                    await fleet.restore(0)
            page = await metrics(served)
            assert "balanceroute_decision_failures_total{" not in page


async def metrics(served: Served) -> str:
    return (await served.admin.get("/metrics")).body.decode()


async def has_lost_events(served: Served) -> bool:
    return "balanceroute_kv_events_lost_total{" in await metrics(served)
