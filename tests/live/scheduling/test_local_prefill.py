"""Short prompts that ranks compute in the whole proxy."""

import pytest
from tests.support.site import Site, served

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
FLAGS = {"local_prefill_tokens": 200}
BODY = {"model": "tiny", "prompt": list(range(150)), "max_tokens": 3, "ignore_eos": True}
LONG = BODY | {"prompt": list(range(900))}


async def warm_up(site: Site) -> None:
    """Let a prefill be measured."""
    assert (await site.post(COMPLETIONS, LONG)).status == 200


@pytest.mark.parametrize("stream", [False, True])
@served(flags=FLAGS)
async def test_a_rank_computes_a_short_prompt(site: Site, stream: bool) -> None:
    await warm_up(site)
    answer = await site.post(COMPLETIONS, BODY | {"stream": stream})
    assert answer.status == 200
    await site.until(lambda: len(site.world.ended) == 2)
    assert len(site.received("prefill", COMPLETIONS)) == 1
    pulled, computed = site.received("decode", COMPLETIONS)
    assert "kv_transfer_params" in pulled.values
    assert "kv_transfer_params" not in computed.values
    assert [record.local_prefill for record in site.world.ended] == [False, True]
    assert [record.prompt_tokens for record in site.world.ended] == [900, 150]
    page = (await site.get("/metrics")).body.decode()
    assert "balanceroute_local_prefills_total 1.0" in page


@served()
async def test_without_the_setting_prefillers_compute_all(site: Site) -> None:
    await warm_up(site)
    await site.post(COMPLETIONS, BODY)
    assert len(site.received("prefill", COMPLETIONS)) == 2


@served(flags=FLAGS | {"retry_attempts": 1})
async def test_short_prompts_are_served_while_no_prefiller_is_up(site: Site) -> None:
    for number in range(2):
        site.fleet.kill(f"prefill/{number}")
    for _ in range(12):  # Until health checks know.
        await site.post(COMPLETIONS, LONG)
    served = await site.post(COMPLETIONS, BODY)
    assert served.status == 200
    refused = await site.post(COMPLETIONS, LONG)
    assert refused.status == 503
    assert b"no engine of each role is up" in refused.body


@served(flags=FLAGS)
async def test_another_rank_computes_what_a_rank_lost(site: Site) -> None:
    await warm_up(site)
    site.fleet.kill("decode/0")
    for _ in range(3):
        assert (await site.post(COMPLETIONS, BODY)).status == 200
    assert {seen.engine for seen in site.received("decode")[1:]} == {"decode/1"}
    assert len(site.received("prefill", COMPLETIONS)) == 1


COMPUTING = {
    "flags": {"local_prefill_tokens": 2_000},
    "ranks": 3,
    "prefix_cache_tokens": 100_000,
    "max_model_len": 100_000,
}


def messages(turns: int) -> list[dict[str, object]]:
    return [
        {"role": "user", "content": " ".join(f"{turn}{word % 100:02}" for word in range(1_000))}
        for turn in range(turns)
    ]


@served(**COMPUTING)
async def test_a_conversation_returns_to_its_rank(site: Site) -> None:
    await warm_up(site)
    times_s = []
    for turns in range(1, 5):
        body = {"model": "tiny", "messages": messages(turns), "max_tokens": 2, "stream": True}
        begin_s = site.loop.time()
        assert (await site.post(CHAT, body)).status == 200
        times_s.append(site.loop.time() - begin_s)
    assert not site.received("prefill", CHAT)
    assert len({seen.engine for seen in site.received("decode", CHAT)}) == 1
    # 1,000 new tokens each time.
    assert max(times_s[1:]) < 1.2 * times_s[0]


@pytest.mark.parametrize(
    ("header", "members"),
    [
        ((b"x-session-id", b"one"), {}),
        ((b"x-claude-code-session-id", b"one"), {"metadata": {"user_id": "somebody"}}),
        ((b"x-app", b"cli"), {"metadata": {"user_id": '{"session_id": "one"}'}}),
        ((b"thread-id", b"one"), {"prompt_cache_key": "of all"}),
        ((b"originator", b"codex"), {"prompt_cache_key": "one"}),
    ],
)
@served(**COMPUTING)
async def test_a_session_returns_to_its_rank_however_its_client_writes_it(
    site: Site, header: tuple[bytes, bytes], members: dict[str, object]
) -> None:
    await warm_up(site)
    for turns in range(1, 5):
        said = messages(turns)
        if turns % 2:  # The same, to an engine.
            said = [dict(reversed(message.items())) for message in said]
        body = {"model": "tiny", "messages": said, "max_tokens": 2, "stream": True}
        assert (await site.post(CHAT, body | members, [header])).status == 200
    assert not site.received("prefill", CHAT)
    assert len({seen.engine for seen in site.received("decode", CHAT)}) == 1
