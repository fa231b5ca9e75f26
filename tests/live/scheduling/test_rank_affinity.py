"""Conversations whose turns return to the rank that has their beginning, in the whole proxy."""

import asyncio

import pytest
from tests.support.site import Site, served

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
WORLD = {"ranks": 3, "prefix_cache_tokens": 100_000, "max_model_len": 100_000}
FLAGS: dict[str, object] = {"prefix_affinity": 1.0}
TURNS = 4
PULLED = "vllm:external_prefix_cache_hits_total{"
METRIC = "balanceroute_rank_prefix_tokens_total"


def messages(turns: int, conversation: int = 0) -> list[dict[str, object]]:
    return [
        {
            "role": "user",
            "content": " ".join(f"{conversation}{turn}{word % 100:02}" for word in range(1_000)),
        }
        for turn in range(turns)
    ]


async def talk(site: Site, *, stream: bool) -> None:
    """Have turns of three conversations at the same time, in another order each time."""
    for turns in range(1, TURNS + 1):
        exchanges = []
        for place in range(3):
            said = messages(turns, (place + turns) % 3)
            # So long that the next one comes to ranks that have something.
            body = {"model": "tiny", "messages": said, "max_tokens": 200, "ignore_eos": True}
            exchanges.append(site.send(CHAT, body | {"stream": stream}))
            await asyncio.sleep(0.5)
        for exchange in exchanges:
            assert (await exchange.end()).status == 200, exchange.body


def homes(site: Site) -> list[set[str]]:
    """Return which ranks each conversation was on."""
    seen = site.received("decode", CHAT)
    return [
        {one.engine for one in seen if one.values["messages"][0] == messages(1, number)[0]}
        for number in range(3)
    ]


@pytest.mark.parametrize(
    ("connector", "policy", "stream"),
    [
        ("nixl", "br-0", False),
        ("nixl", "br-h", True),
        ("nixl", "br-0-bypass", False),
        ("mooncake", "br-h", False),
        ("mooncake-ascend", "br-h", True),
        ("mooncake-hybrid", "br-h", False),
    ],
)
@served("connector", flags=lambda policy: FLAGS | {"policy": policy}, **WORLD)
async def test_turns_return_to_their_rank(
    site: Site, connector: str, policy: str, stream: bool
) -> None:
    await talk(site, stream=stream)
    assert [len(ranks) for ranks in homes(site)] == [1, 1, 1]
    page = (await site.get("/metrics")).body.decode()
    (line,) = (one for one in page.splitlines() if one.startswith(METRIC + " "))
    # Of three conversations the first two KiB blocks and so on, at every later turn.
    assert float(line.split()[1]) > 3 * 1_000 * (1 + 2 + 3) / 2


@pytest.mark.parametrize("flags", [{}, {"prefix_affinity": 0.0}, FLAGS | {"policy": "fifo"}])
@served("flags", **WORLD)
async def test_without_the_price_they_go_where_there_is_most_room(
    site: Site, flags: dict[str, object]
) -> None:
    await talk(site, stream=False)
    assert max(len(ranks) for ranks in homes(site)) > 1


@pytest.mark.parametrize(("connector", "paper"), [("mooncake-layerwise", False), ("nixl", True)])
@served("connector", flags=lambda paper: FLAGS | {"paper": paper}, **WORLD)
async def test_nothing_is_remembered_where_it_would_save_nothing(
    site: Site, connector: str, *, paper: bool
) -> None:
    await talk(site, stream=False)
    assert site.world.scheduler.intake.memory is None
    assert not site.world.proxy.deployment.driver._settings.uses_blocks


@pytest.mark.parametrize("session", [b"", b"one"])
@served(flags=FLAGS, **WORLD)
async def test_what_a_rank_pulls_is_what_it_lacks(site: Site, session: bytes) -> None:
    """Of a session also where its client writes earlier turns otherwise."""
    for turns in range(1, 5):
        said = messages(turns)
        if session and turns % 2:
            said = [dict(reversed(message.items())) for message in said]
        body = {"model": "tiny", "messages": said, "max_tokens": 2}
        headers = [(b"x-session-id", session)] if session else []
        assert (await site.post(CHAT, body, headers)).status == 200
        other = {"model": "tiny", "prompt": [turns] * 9, "max_tokens": 2}
        assert (await site.post(COMPLETIONS, other)).status == 200
    assert len({one.engine for one in site.received("decode", CHAT)}) == 1
    pages = [(await site.ask(f"decode/{n}", "/metrics", None, "GET")).body for n in range(3)]
    lines = b"".join(pages).decode().splitlines()
    pulled = sum(float(one.split()[-1]) for one in lines if one.startswith(PULLED))
    # 10,000 words in all, of which each of four turns adds 1,000.
    assert 0.0 < pulled < 0.5 * sum(one.prompt_tokens for one in site.world.ended)
