"""KV cache events of prefillers and ranks in the whole proxy, and the names by which they tell of texts."""

import asyncio
import json
from typing import Any

import pytest
from tests.support.chaos.world import RANK_PORT
from tests.support.site import Seen, Site, play, served

from balanceroute.proxy.core.events import RankId, Ticket
from balanceroute.proxy.core.prefill.engine_blocks import Knowledge
from balanceroute.proxy.lab.emulate import DpMode
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.prompt_keys import prompt_blocks
from balanceroute.proxy.live.openai.shape import Api

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENGINES: dict[str, Any] = {
    "prefix_cache_tokens": 100_000,
    "block_tokens": 16,
    "prompt_tokens_details": True,
    "max_model_len": 100_000,
    "kv_events": True,
    "adapters": ("adapter",),
}
FLAGS = {"prefill_choice": "prefix-aware"}
WORDS = " ".join(f"w{number}" for number in range(1_000))
IDS = list(range(2_000))


def name_of(seen: Seen) -> bytes | None:
    return seen.request.header(b"x-session-id")


@pytest.mark.parametrize(
    ("path", "values", "named"),
    [
        (CHAT, {"messages": [{"role": "user", "content": WORDS}]}, True),
        ("/v1/messages", {"messages": [{"role": "user", "content": WORDS}]}, True),
        ("/v1/responses", {"input": WORDS}, True),
        (COMPLETIONS, {"prompt": WORDS}, True),
        (COMPLETIONS, {"prompt": [WORDS]}, True),
        # These are looked up by their ids: of the model itself.
        (COMPLETIONS, {"prompt": IDS}, False),
        (COMPLETIONS, {"prompt": IDS, "model": "adapter"}, True),
        (COMPLETIONS, {"prompt": IDS, "cache_salt": "salt"}, True),
        # Too short to be found again.
        (COMPLETIONS, {"prompt": "short"}, False),
    ],
)
@served(flags=FLAGS, **ENGINES)
async def test_the_prefill_leg_alone_names_a_text(
    site: Site, path: str, values: dict[str, object], named: bool
) -> None:
    await asyncio.sleep(2.0)  # Until the models are known.
    body = {"model": "tiny", "max_tokens": 3, "session_id": "mine", **values}
    client = [(b"x-session-id", b"of the client")]
    assert (await site.post(path, body, client)).status == 200
    (prefill,), (decode,) = site.received("prefill", path), site.received("decode", path)
    name = name_of(prefill)
    assert (name is not None and name.startswith(b"br-")) is named
    assert ("session_id" in prefill.values) is not named
    assert name_of(decode) is None
    assert decode.values["session_id"] == "mine"


@served(flags=FLAGS | {"resume": "exact"}, **ENGINES)
async def test_what_goes_on_behind_its_ids_has_no_name(site: Site) -> None:
    await asyncio.sleep(2.0)
    body = {"model": "tiny", "prompt": WORDS, "max_tokens": 20, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    site.fleet.faults.set("decode/0", reset_after_tokens=7)
    exchange = await site.send(COMPLETIONS, body).end()
    assert exchange.done, exchange.body
    (record,) = await site.ended()
    assert (record.output_tokens, record.resumes) == (20, 1)
    first, again = site.received("prefill", COMPLETIONS)
    assert name_of(first)
    assert name_of(again) is None


@served(flags=FLAGS, **{**ENGINES, "kv_events": False})
async def test_nobody_is_told_names_where_nobody_listens(site: Site) -> None:
    body = {"model": "tiny", "prompt": WORDS, "max_tokens": 3, "session_id": "mine"}
    assert (await site.post(COMPLETIONS, body)).status == 200
    assert all(name_of(seen) is None for seen in site.seen)
    assert all(seen.values["session_id"] == "mine" for seen in site.received("", COMPLETIONS))


@served(flags=FLAGS, **ENGINES)
async def test_what_other_prefillers_computed_is_found_by_its_text(site: Site) -> None:
    """A conversation that one prefiller has by name, and another by its own doing."""
    await asyncio.sleep(2.0)
    body = {"model": "tiny", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 2}
    assert (await site.post(CHAT, body)).status == 200
    (seen,) = site.received("prefill", CHAT)
    other = next(one for one in ("prefill/0", "prefill/1") if one != seen.engine)
    assert (await site.ask(other, CHAT, body)).status == 200
    blocks = site.world.scheduler.prefillers._choice.memory._reported  # type: ignore[attr-defined]
    await site.until(lambda: min(map(blocks.engines.blocks, (0, 1))) > 50)
    (text,) = blocks.engines.texts._prompts.values()
    assert [blocks.engines.leading(one, text.tokens) for one in (0, 1)] == [len(text.tokens)] * 2


def ticket_of(body: dict[str, object], tokens: int) -> Ticket:
    blocks = prompt_blocks(Api.CHAT, RequestBody(json.dumps(body).encode()), 16)
    return blocks.of(Ticket(tokens))


@pytest.mark.parametrize("texts", [False, True])
def test_what_ranks_keep_is_what_they_tell(texts: bool) -> None:
    """Also of a chat, whose tokens only the prefillers' events tell."""

    async def scenario(site: Site) -> None:
        await asyncio.sleep(2.0)
        memory = site.world.scheduler.intake.memory
        assert memory is not None
        engine_blocks = memory._engine_blocks
        assert engine_blocks is not None
        body = {"model": "tiny", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 2}
        if not texts:
            body = {"model": "tiny", "prompt": IDS, "max_tokens": 2}
        path = CHAT if texts else COMPLETIONS
        assert (await site.post(path, body)).status == 200
        tokens = 1_004 if texts else len(IDS)
        ticket = ticket_of(body, tokens)
        if not texts:
            ids = RequestBody(json.dumps(body).encode())
            ticket = prompt_blocks(Api.COMPLETIONS, ids, 16).of(Ticket(tokens))
        (decode,) = site.received("decode", path)
        rank = int(decode.request.header(b"x-data-parallel-rank") or b"")
        await site.until(lambda: engine_blocks.blocks(rank) > 50)
        state = (await site.state())["ranks"]
        assert [one["cached_blocks"] > 50 for one in state] == [one == rank for one in range(2)]
        kept = memory.kept(ticket)
        assert kept.get(RankId(1 - rank), 0) == 0
        assert kept[RankId(rank)] > 0.6 * tokens
        # Another client has it computed at the other one.
        header = [(b"x-data-parallel-rank", b"%d" % (1 - rank))]
        port = site.fleet.engine("decode/0").port
        assert (await site.send(path, body, headers=header, port=port).end()).status == 200
        await site.until(lambda: engine_blocks.blocks(1 - rank) > 50)
        assert memory.kept(ticket)[RankId(1 - rank)] > 0.6 * tokens
        # And the engine begins anew: what was sent there is gone.
        site.fleet.engine("decode/0").kill()
        await site.fleet.restore(site.fleet.engines.index(site.fleet.engine("decode/0")))
        await site.until(lambda: engine_blocks.blocks(rank) == engine_blocks.blocks(1 - rank) == 0)
        header = [(b"x-data-parallel-rank", b"%d" % rank)]
        other = {"model": "tiny", "prompt": IDS[100:200], "max_tokens": 2}
        sent = site.send(COMPLETIONS, other, headers=header, port=port)
        assert (await sent.end()).status == 200
        await site.until(lambda: engine_blocks.knowledge(rank) is Knowledge.ALL)
        assert memory.kept(ticket).get(RankId(rank), 0) == 0

    flags = FLAGS | {
        "prefix_affinity": 1.0,
        "policy": "br-0",
        "rank_kv_events_port": RANK_PORT,
        "rank_kv_replay_port": RANK_PORT,
    }
    play(scenario, flags=flags, dp_mode=DpMode.HEADER, **ENGINES)


def test_a_rank_that_comes_back_is_followed_again() -> None:
    async def scenario(site: Site) -> None:
        await asyncio.sleep(2.0)
        memory = site.world.scheduler.intake.memory
        assert memory is not None
        engine_blocks = memory._engine_blocks
        assert engine_blocks is not None
        url = site.fleet.engine("decode/0").url
        body = {"model": "tiny", "prompt": IDS, "max_tokens": 2}
        for _ in range(2):
            assert (await site.post(COMPLETIONS, body)).status == 200
            await site.until(
                lambda: max(map(engine_blocks.blocks, engine_blocks.engines), default=0) > 50
            )
            order = {"role": "decode", "url": url}
            assert (await site.admin("/admin/instances/remove", order, method="POST")).status == 200
            await site.until(lambda: engine_blocks.engines == [])
            added = await site.admin("/admin/instances", order | {"ranks": 2}, method="POST")
            assert added.status == 200, added.body
            await site.until(
                lambda: max(map(engine_blocks.blocks, engine_blocks.engines), default=0) > 50
            )
            await asyncio.sleep(5.0)

    flags = FLAGS | {"prefix_affinity": 1.0, "policy": "br-0", "rank_kv_events_port": RANK_PORT}
    flags |= {"rank_kv_replay_port": RANK_PORT}
    play(scenario, flags=flags, dp_mode=DpMode.HEADER, at_rest=False, **ENGINES)
