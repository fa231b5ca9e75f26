"""/v1/messages and /v1/responses through prefill and decode, and everything that may fail there."""

import asyncio
import json
import re
from typing import Any

import pytest
from tests.live.agents import (
    ID,
    LIMIT,
    MESSAGES,
    PATHS,
    RESPONSES,
    alone,
    body,
    failed_within,
    plain,
    same,
)
from tests.support.site import Site, play, served

from balanceroute.proxy.lab.emulate.faults import AfterPull
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.topologies import CONNECTORS

paths = pytest.mark.parametrize("path", PATHS)
ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
FAST = {"prefill_base_ns": 5_000_000}


def engines(site: Site) -> list[str]:
    return [seen.engine for seen in site.seen]


@paths
@ways
@pytest.mark.parametrize("connector", CONNECTORS)
@served("connector")
async def test_a_request_is_split_and_answered_as_by_one_engine(
    site: Site, connector: str, path: str, stream: bool
) -> None:
    values = body(path, stream=stream)
    # What a rank that hands a response back says is what one says that has ended.
    whole = path == RESPONSES and CONNECTORS[connector].recomputes
    await asyncio.sleep(1.0)
    right = await alone(site, path, values)
    answer = await site.post(path, values | {"kv_transfer_params": {"mine": 1}}, ID)
    same(answer, right)
    (record,) = await site.ended()
    assert (record.outcome, record.retries, record.endpoint) == (Outcome.OK, 0, path)
    assert (record.prompt_tokens > 0, record.output_tokens) == (not (whole and stream), 12)
    assert bool(record.rank) is not whole
    assert record.prefiller
    assert site.fleet.stats()["leases"]["held"] == 0
    by_role = {seen.engine.partition("/")[0]: seen.values for seen in site.seen}
    if whole:
        assert (len(site.seen), by_role["prefill"]) == (1, values)
        return
    assert by_role.keys() == {"prefill", "decode"}
    prefill, decode = by_role["prefill"], by_role["decode"]
    assert (prefill["stream"], prefill[LIMIT[path]]) == (False, 1)
    assert "mine" not in prefill.pop("kv_transfer_params")
    assert "mine" not in decode.pop("kv_transfer_params")
    assert decode == values
    changed = {"stream", LIMIT[path], "store", "ignore_eos"}
    assert {name for name in prefill if prefill[name] != values.get(name)} <= changed


@paths
@ways
@pytest.mark.parametrize(
    "fault", ["status_500", "status_503", "status_429", "reset_before_headers"]
)
@pytest.mark.parametrize("role", ["prefill", "decode"])
@served()
async def test_what_one_engine_fails_to_do_another_one_does(
    site: Site, role: str, fault: str, path: str, stream: bool
) -> None:
    values = body(path, stream=stream)
    right = await alone(site, path, values)
    site.fleet.faults.set(f"{role}/0", **{fault: 1.0})
    same(await site.post(path, values, ID), right)
    (record,) = await site.ended()
    assert (record.outcome, record.retries > 0) == (Outcome.OK, True)
    asked = [one for one in engines(site) if one.startswith(role)]
    assert (asked[0], asked[-1]) == (f"{role}/0", f"{role}/1")


@paths
@ways
@pytest.mark.parametrize("role", ["prefill", "decode"])
@served()
async def test_a_refusal_is_the_engines_own(site: Site, role: str, path: str, stream: bool) -> None:
    site.fleet.faults.set(role, status_400=1.0)
    answer = await site.post(path, body(path, stream=stream), ID)
    assert answer.status == 400
    assert ("type" in answer.json) is (path == MESSAGES)
    assert answer.json["error"]["message"]
    (record,) = await site.ended()
    assert record.outcome is Outcome.CLIENT_ERROR
    assert len(site.received("decode")) == (role == "decode")


@paths
@ways
@pytest.mark.parametrize("after_pull", [AfterPull.ERROR, AfterPull.RESET, AfterPull.SILENCE])
@served(flags={"first_token_timeout_s": 2.0, "answer_timeout_s": 4.0})
async def test_a_rank_that_fails_behind_the_pull_costs_another_prefill(
    site: Site, after_pull: AfterPull, path: str, stream: bool
) -> None:
    """By then the stream of a response has begun, and nothing of it has reached the client."""
    values = body(path, stream=stream)
    right = await alone(site, path, values)
    site.fleet.faults.set("decode/0", after_pull=after_pull)
    same(await site.post(path, values, ID), right)
    (record,) = await site.ended()
    assert (record.outcome, record.retries > 0) == (Outcome.OK, True)
    assert len(site.received("prefill")) == 1 + record.retries


@paths
@ways
@pytest.mark.parametrize(
    "fault",
    [
        "reset_after_tokens",
        "end_after_tokens",
        "stall_after_tokens",
        "error_event_after_tokens",
    ],
)
@served(flags={"idle_stream_timeout_s": 3.0, "answer_timeout_s": 8.0})
async def test_a_rank_that_fails_within_the_answer(
    site: Site, fault: str, path: str, stream: bool
) -> None:
    values = body(path, tokens=60, stream=stream)
    right = await alone(site, path, values)
    site.fleet.faults.set("decode/0", **{fault: 5})
    answer = await site.post(path, values, ID)
    (record,) = await site.ended()
    if not stream:
        same(answer, right)
        assert record.outcome is Outcome.OK
        return
    failed_within(answer, path)
    assert record.outcome is Outcome.UPSTREAM_ERROR
    told = plain(b"".join(answer.events[:-1]))
    assert plain(right.body).startswith(told)
    assert told


@paths
@ways
@pytest.mark.parametrize("direct", ["decode", "prefill", "refuse"])
@served(flags=lambda direct: {"direct": direct})
async def test_a_prefill_without_a_kv_cache(
    site: Site, direct: str, path: str, stream: bool
) -> None:
    values = body(path, stream=stream)
    right = await alone(site, path, values)
    site.fleet.faults.set("prefill/0", drop_kv_params=1.0)
    same(await site.post(path, values, ID), right)
    roles = [one.partition("/")[0] for one in engines(site)]
    expected = {"decode": ["prefill", "decode"], "prefill": ["prefill", "prefill"]}
    assert roles == expected.get(direct, ["prefill", "prefill", "decode"])
    last = site.seen[-1].values
    assert ("kv_transfer_params" in last) is (direct == "refuse")
    assert last[LIMIT[path]] == 12


@paths
@ways
def test_a_lease_that_lapses_in_the_pool_is_prefilled_again(path: str, stream: bool) -> None:
    values = body(path, "t7 t8", stream=stream)

    async def scenario(site: Site) -> None:
        right = await alone(site, path, values)
        first = site.send(path, body(path, tokens=200, stream=True))
        await first.until_events(4)
        same(await site.post(path, values, ID), right)
        await first.end()
        record = next(one for one in await site.ended(2) if one.lease_lapses)
        assert record.outcome is Outcome.OK
        assert len(site.received("prefill")) == 2 + record.lease_lapses

    flags = {"batch": 1, "lease_s": 2.0, "lease_margin_s": 0.5, "connect_timeout_s": 0.25}
    play(scenario, ranks=1, lease_s=2.0, mean_output_tokens=1e5, flags=flags)


@paths
@ways
@served(ranks=4)
async def test_two_engines_die_of_a_prompt_and_no_third_one(
    site: Site, path: str, stream: bool
) -> None:
    taken = site.take

    def die(engine: str, request: Any, reply: Any) -> bool:
        if engine.startswith("decode") and request.header(b"x-request-id") == b"mine":
            site.fleet.kill(engine)
            return True
        return taken(engine, request, reply)

    site.take = die  # type: ignore[method-assign]
    answer = await site.post(path, body(path, stream=stream), ID)
    assert answer.status == 502
    assert answer.header(b"x-should-retry") == b"false"
    assert ("type" in answer.json) is (path == MESSAGES)
    other = await site.post(path, body(path, stream=not stream), ID)
    assert (other.status, other.header(b"x-should-retry")) == (502, b"false")
    assert sum(not one.alive for one in site.fleet.engines) == 2
    assert (await site.post(path, body(path, "t9"))).status == 200


@paths
@ways
@pytest.mark.parametrize("when", ["prefill", "pool", "decode"])
@served(ranks=1, mean_output_tokens=1e5, flags={"batch": 1})
async def test_a_client_that_leaves_frees_everything(
    site: Site, when: str, path: str, stream: bool
) -> None:
    first = None
    if when == "pool":
        first = site.send(path, body(path, tokens=300, stream=True))
        await first.until_events(4)
    exchange = site.send(path, body(path, "t5", tokens=300, stream=stream), headers=ID)
    count = {"prefill": 1, "pool": 2, "decode": 2}[when]
    await site.until(lambda: len(site.seen) >= count + (when == "pool"))
    await asyncio.sleep(0.01 if when == "prefill" else 0.4)
    exchange.call.abort()
    record = (await site.ended())[0]
    assert record.outcome is Outcome.CANCELLED
    if first is not None:
        assert len(site.received("decode")) == 1
        await first.end()
    await site.until(lambda: site.fleet.idle)


@paths
@ways
def test_a_deadline_that_passes_in_the_pool_ends_the_wait(path: str, stream: bool) -> None:
    async def scenario(site: Site) -> None:
        first = site.send(path, body(path, tokens=300, stream=True))
        await first.until_events(4)
        due = [(b"x-request-deadline-ms", b"1500")]
        answer = await site.post(path, body(path, "t5", stream=stream), due)
        assert answer.status == 503
        error = answer.json["error"]
        assert error["type"] == (
            "overloaded_error" if path == MESSAGES else "ServiceUnavailableError"
        )
        assert len(site.received("decode")) == 1
        await first.end()

    flags = {"batch": 1, "client_deadline": True}
    play(scenario, ranks=1, mean_output_tokens=1e5, flags=flags)


@paths
@ways
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("connector", ["nixl", "mooncake", "mooncake-ascend"])
@served("connector")
async def test_an_answer_that_ends_at_its_first_token(
    site: Site, connector: str, temperature: int, path: str, stream: bool
) -> None:
    """A greedy message is then the prefiller's if that knows of the whole prompt."""
    values = body(path, stream=stream, temperature=temperature)
    await asyncio.sleep(1.0)
    site.fleet.faults.set("all", eos_first=1.0)
    right = await alone(site, path, values)
    same(await site.post(path, values, ID), right)
    (record,) = await site.ended()
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 1)
    told = path == MESSAGES and connector == "nixl" and not temperature
    ascend = connector == "mooncake-ascend"  # Where no rank computes a prompt.
    assert len(site.received("decode")) == (not (told or ascend))
    page = (await site.get("/metrics")).body
    assert not re.search(rb"prefills_without_kv_total\{.*\} [1-9]", page)


@ways
@served(connector="mooncake-ascend")
async def test_a_message_that_a_rank_hands_back_is_begun_again(site: Site, stream: bool) -> None:
    values = body(MESSAGES, tokens=60, stream=stream)
    right = await alone(site, MESSAGES, values)
    for tokens in (0, 4):
        site.fleet.faults.set("decode/0", recomputed_after_tokens=tokens)
        answer = await site.post(MESSAGES, values, ID)
        record = (await site.ended())[-1]
        assert record.recomputes + record.retries == 1
        if stream and tokens:
            assert "dropped the request" in failed_within(answer, MESSAGES)
            assert record.outcome is Outcome.UPSTREAM_ERROR
        else:
            same(answer, right)
        site.world.ended.clear()


@served(connector="mooncake-ascend")
async def test_a_client_may_stop_at_the_word_of_a_rank_that_hands_back(site: Site) -> None:
    values = body(MESSAGES, tokens=60, stop_sequences=["recomputed"])
    site.fleet.faults.set("decode", recomputed_after_tokens=4)
    answer = await site.post(MESSAGES, values, ID)
    assert answer.json["stop_sequence"] == "recomputed"
    assert len(site.received("decode")) == 1


@paths
@ways
def test_usage_is_that_of_one_engine(path: str, stream: bool) -> None:
    """A rank takes all of a transferred prompt for cached; the prefiller knows what was."""
    text = " ".join(f"t{i}" for i in range(200))
    values = body(path, text, stream=stream)

    async def scenario(site: Site) -> None:
        await alone(site, path, values, "decode/1")
        right = await alone(site, path, values, "decode/1")
        await site.post(path, values, ID)
        same(await site.post(path, values, ID), right)
        record = (await site.ended(2))[-1]
        assert record.cached_tokens
        assert record.prompt_tokens > record.cached_tokens
        page = (await site.get("/metrics")).body
        assert b"balanceroute_prompt_tokens_cached" in page

    changes: dict[str, Any] = {"prefillers": 1, "ranks": 2, "prefix_cache_tokens": 100_000}
    play(scenario, prompt_tokens_details=True, **changes)


@paths
@ways
@served(flags={"first_token": "prefill", "resume": "valid"})
async def test_the_first_token_is_always_the_ranks(site: Site, path: str, stream: bool) -> None:
    values = body(path, stream=stream, temperature=0)
    right = await alone(site, path, values)
    same(await site.post(path, values, ID), right)
    (record,) = await site.ended()
    assert not record.early_first_token
    assert "return_token_ids" not in site.seen[0].values


@paths
@ways
@served()
async def test_a_limit_beyond_the_context_is_refused_before_a_prefill(
    site: Site, path: str, stream: bool
) -> None:
    await asyncio.sleep(1.0)
    long = await site.post(path, body(path, tokens=5000, stream=stream), ID)
    assert long.status == 400
    assert "cannot be greater than max_model_len=4096" in long.json["error"]["message"]
    assert ("type" in long.json) is (path == MESSAGES)
    assert site.seen == []


@paths
@ways
@served(flags={"local_prefill_tokens": 512})
async def test_short_prompts_may_be_left_to_ranks(site: Site, path: str, stream: bool) -> None:
    values = body(path, stream=stream)
    right = await alone(site, path, values)
    for engine in ("prefill/0", "prefill/1"):
        site.fleet.kill(engine)
    await asyncio.sleep(20.0)
    same(await site.post(path, values, ID), right)
    (record,) = await site.ended()
    assert record.local_prefill


@paths
@served(mean_output_tokens=1e5)
async def test_each_delta_of_a_stream_is_progress(site: Site, path: str) -> None:
    """What stands around the text is none: a response begins with four events before its first token."""
    exchange = site.send(path, body(path, tokens=40, stream=True))
    while sum(b"delta" in event for event in exchange.events) < 20:
        await exchange.until_events(len(exchange.events) + 1)
    (session,) = site.world.proxy.deployment.driver.sessions.values()
    assert session.emitted_tokens == sum(
        b"_delta\n" in one or b".delta\n" in one for one in exchange.events
    )
    await exchange.end()


@paths
@served(flags={"direct": "decode", "direct_decode_tokens": 200})
async def test_a_long_prompt_for_one_engine_is_not_for_a_rank(site: Site, path: str) -> None:
    one = {
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "f"},
    }
    more: dict[str, Any] = one if path == MESSAGES else {"truncation": "auto"}
    for text in ("t1", "t1 " * 900):
        assert (await site.post(path, body(path, text, **more), ID)).status == 200
    roles = [name.partition("/")[0] for name in engines(site)]
    assert roles == ["decode", "prefill"]
    site.seen.clear()
    # Neither is one that a prefill was to serve.
    site.fleet.faults.set("prefill", drop_kv_params=1.0)
    for text in ("t1", "t1 " * 900):
        assert (await site.post(path, body(path, text), ID)).status == 200
    roles = [name.partition("/")[0] for name in engines(site)]
    assert roles == ["prefill", "decode", "prefill", "prefill"]


@served()
async def test_unknown_events_pass_as_they_are(site: Site) -> None:
    said = [
        b'event: message_start\ndata: {"type":"message_start","message":{}}\n\n',
        b'event: surprise\nid: 7\ndata: {"type":"surprise","usage":{"input_tokens":1}}\n\n',
        b"data: no json\n\n",
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ]

    def answer(engine: str, request: Any, reply: Any) -> None:
        del engine, request
        reply.start(200, [(b"content-type", b"text/event-stream")])
        for event in said:
            reply.write(event)
        reply.end()

    site.rank_handlers[MESSAGES.encode()] = answer
    exchange = await site.post(MESSAGES, body(MESSAGES, stream=True))
    assert exchange.events == said
    assert exchange.error is None


@served(max_model_len=131_072)
async def test_a_long_beginning_of_a_response_waits_whole(site: Site) -> None:
    """VLLM repeats instructions and tools in each event of the beginning."""
    values = body(RESPONSES, stream=True, instructions="be brief " * 20_000)
    right = await alone(site, RESPONSES, values)
    site.fleet.faults.set("decode/0", after_pull=AfterPull.ERROR)
    same(await site.post(RESPONSES, values, ID), right)
    assert len(json.dumps(values)) > 150_000


@ways
@served()
async def test_a_sampled_message_ends_where_its_rank_ends_it(site: Site, stream: bool) -> None:
    """The prefiller's first token ended the answer, and another draw does not."""
    values = body(MESSAGES, stream=stream, temperature=1)
    right = await alone(site, MESSAGES, values)
    site.fleet.faults.set("prefill", eos_first=1.0)
    same(await site.post(MESSAGES, values, ID), right)
    (record,) = await site.ended()
    assert (record.output_tokens, record.retries) == (12, 0)
    greedy = await site.post(MESSAGES, values | {"temperature": 0}, ID)
    assert len(site.received("decode")) == 1
    assert greedy.status == 200
