"""Requests that one engine has to do whole go where the operator says, and nowhere else."""

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.chaos.expectation import comparable
from tests.support.site import Exchanged, Site, play, served

from balanceroute.proxy.live.engines.instances import Status
from balanceroute.proxy.live.request.leg_settings import Direct
from balanceroute.proxy.live.telemetry.record import Outcome
from balanceroute.topologies import CONNECTORS

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
ID: "Headers" = [(b"x-request-id", b"mine")]
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 12, "ignore_eos": True}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
TALK = [{"role": "user", "content": "t1 t2 t3"}]
# What is asked for, and the member that a rejection names.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "n": (COMPLETIONS, BODY | {"n": 2}, "n"),
    "two prompts": (COMPLETIONS, BODY | {"prompt": ["t1 t2", "t3"]}, "prompt"),
    "echo": (COMPLETIONS, BODY | {"echo": True}, "echo"),
    "prompt_logprobs": (COMPLETIONS, BODY | {"prompt_logprobs": 1}, "prompt_logprobs"),
    "messages": (
        MESSAGES,
        {
            "model": "tiny",
            "messages": TALK,
            "max_tokens": 12,
            "tools": [{"name": "f", "input_schema": {}}],
        }
        | {"tool_choice": {"type": "tool", "name": "f"}},
        "tool_choice",
    ),
    "responses": (
        RESPONSES,
        {"model": "tiny", "input": "t1 t2 t3", "max_output_tokens": 12, "truncation": "auto"},
        "truncation",
    ),
    "chat": (CHAT, {"model": "tiny", "messages": TALK, "max_tokens": 12, "n": 3}, "n"),
}
ASCEND = ("mooncake-ascend", "mooncake-hybrid", "mooncake-layerwise")


async def alone(site: Site, path: str, values: dict[str, Any]) -> Exchanged:
    """Return what one engine answers by itself; the fleet must be without faults."""
    port = site.fleet.engine("decode/0").port
    answer = await site.send(path, values, headers=ID, port=port).end()
    assert answer.status == 200, answer.body
    site.seen.pop()
    return answer


def same(one: Exchanged, other: Exchanged) -> None:
    """Check that two answers are the same but for what tells engines apart and who spoke first."""
    assert one.error is None
    assert (one.status, other.status) == (200, 200), one.body
    parts = [
        sorted(comparable(answer.body, "mine").split(b"\n\n")) if answer.events else
        [comparable(answer.body, "mine")]
        for answer in (one, other)
    ]  # fmt: skip
    assert parts[0] == parts[1]


async def served_whole(site: Site, path: str, values: dict[str, Any]) -> None:
    """Check that a request gets one engine's own answer, and what that engine got."""
    right = await alone(site, path, values)
    answer = await site.post(path, values | {"kv_transfer_params": {"do_remote_decode": True}}, ID)
    same(answer, right)
    (seen,) = site.seen
    assert "kv_transfer_params" not in seen.values
    record = site.world.ended[-1]
    assert (record.outcome, record.retries) == (Outcome.OK, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direct", [Direct.PREFILL, Direct.DECODE])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_it_is_done_whole_by_an_engine_of_the_role(
    connector: str, direct: Direct, kind: str, stream: bool
) -> None:
    """The role that answers is the operator's choice, with every connector."""
    path, values, _ = KINDS[kind]
    more = STREAM if path not in (MESSAGES, RESPONSES) else {"stream": True}
    if stream and kind != "prompt_logprobs":  # Which no engine serves.
        values = values | more

    async def scenario(site: Site) -> None:
        await asyncio.sleep(1.0)
        await served_whole(site, path, values)
        (record,) = site.world.ended
        assert site.seen[0].engine.startswith(direct.value)
        engine = site.fleet.engine(site.seen[0].engine).url
        named = {Direct.PREFILL: (engine, ""), Direct.DECODE: ("", engine)}
        assert (record.prefiller, record.rank) == named[direct]
        if path == COMPLETIONS:
            assert record.output_tokens == 12 * record.choices
        assert site.fleet.stats()["leases"]["held"] == 0

    play(scenario, connector=connector, flags={"direct": direct.value})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("connector", CONNECTORS)
@served("connector", flags={"direct": "refuse"})
async def test_it_is_rejected_if_nobody_is_to_serve_it(
    site: Site, connector: str, kind: str
) -> None:
    """`--direct refuse` reaches no engine."""
    path, values, param = KINDS[kind]
    answer = await site.post(path, values, ID)
    assert answer.status == 400
    error = answer.json["error"]
    assert path == MESSAGES or error["param"] == param  # Anthropic's has none.
    assert param in error["message"]
    assert "this deployment does not serve" in error["message"]
    assert site.seen == []
    (record,) = site.world.ended
    assert record.outcome is Outcome.CLIENT_ERROR
    assert (await site.post(COMPLETIONS, BODY, ID)).status == 200


@pytest.mark.parametrize("connector", CONNECTORS)
@served("connector")
async def test_by_default_no_rank_of_vllm_ascend_computes_a_prompt(
    site: Site, connector: str
) -> None:
    """A decode rank without the weights for it dies, and all its requests with it."""
    await asyncio.sleep(1.0)
    for path, values, _ in KINDS.values():
        assert (await site.post(path, values, ID)).status == 200
    role = "prefill" if connector in ASCEND else "decode"
    assert len(site.received(role)) == len(site.seen) == len(KINDS)


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("direct", [Direct.PREFILL, Direct.DECODE])
@served("connector", flags=lambda direct: {"direct": direct.value})
async def test_responses_of_engines_that_have_none_are_not_implemented(
    site: Site, connector: str, direct: Direct
) -> None:
    kind = [(b"content-type", b"application/json")]
    site.handlers[RESPONSES.encode()] = lambda _, __, reply: reply.send(
        404, kind, b'{"detail":"Not Found"}'
    )
    answer = await site.post(RESPONSES, {"model": "tiny", "input": "t1"}, ID)
    assert answer.status == 501
    # The other role is asked too if it may do all of it.
    asked = {direct.value if connector in ASCEND else "prefill"}
    asked |= {"decode"} if direct is Direct.DECODE else set()
    assert {seen.engine.partition("/")[0] for seen in site.seen} == asked


# A prefill without a KV cache.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("direct", Direct)
@pytest.mark.parametrize("connector", ["nixl", "mooncake-ascend"])
@served("connector", flags=lambda direct: {"direct": direct.value})
async def test_without_a_kv_cache_a_request_is_served_as_direct_ones_are(
    site: Site, connector: str, direct: Direct, stream: bool
) -> None:
    values = BODY | STREAM if stream else BODY
    right = await alone(site, COMPLETIONS, values)
    site.fleet.faults.set("prefill/0", drop_kv_params=1.0)
    first = site.send(COMPLETIONS, values, headers=ID)
    await first.end()
    same(first, right)
    seen = [one.engine for one in site.seen]
    if direct is Direct.DECODE:
        assert seen[0] == "prefill/0"
        assert seen[1].startswith("decode")
        assert "kv_transfer_params" not in site.seen[1].values
    elif direct is Direct.PREFILL:
        assert seen == ["prefill/0", "prefill/1"]
        sent = site.seen[1].values
        sent.pop("stream_options", None)
        assert sent == BODY | ({"stream": True} if stream else {})
    else:
        assert seen[:2] == ["prefill/0", "prefill/1"]
        assert seen[2].startswith("decode")
        assert site.seen[2].values["kv_transfer_params"]
    (record,) = site.world.ended
    assert record.output_tokens == 12
    assert record.retries == (direct is Direct.REFUSE)


@served(connector="mooncake-ascend", prefillers=1)
async def test_alone_a_prefiller_that_kept_nothing_serves_the_request_itself(site: Site) -> None:
    right = await alone(site, COMPLETIONS, BODY)
    site.fleet.faults.set("prefill", drop_kv_params=1.0)
    same(await site.post(COMPLETIONS, BODY, ID), right)
    assert [one.engine for one in site.seen] == ["prefill/0", "prefill/0"]


@served(connector="mooncake-ascend")
async def test_an_answer_that_was_handed_back_goes_on_without_a_kv_cache(site: Site) -> None:
    right = await alone(site, COMPLETIONS, BODY | STREAM)
    site.fleet.faults.set("decode", recomputed_after_tokens=4)
    exchange = site.send(COMPLETIONS, BODY | STREAM, headers=ID)
    await site.until(lambda: len(site.received("decode")) == 1)
    site.fleet.faults.clear()
    site.fleet.faults.set("prefill", drop_kv_params=1.0)
    same(await exchange.end(), right)
    assert len(site.received("decode")) == 1
    assert [one.values["max_tokens"] for one in site.received("prefill")] == [1, 1, 8]


# What it holds, and what ends it.


@served(connector="mooncake-ascend")
async def test_it_holds_its_prefiller_and_no_slot_until_it_ends(site: Site) -> None:
    exchange = site.send(COMPLETIONS, BODY | STREAM | {"n": 3, "max_tokens": 200}, headers=ID)
    await exchange.until_events(1)
    state = await site.state()
    assert [one["direct"] for one in state["prefillers"]] == [3, 0]
    (session,) = site.world.proxy.deployment.driver.sessions.values()
    estimate = session.record.prompt_estimate
    assert [one["held_tokens"] for one in state["prefillers"]] == [3 * estimate, 0]
    assert [one["bound"] for one in state["ranks"]] == [0, 0]
    (row,) = state["requests"]
    assert (row["state"], row["rank"]) == ("prefilling", "")
    page = (await site.admin("/metrics")).body.decode()
    gauge = re.compile(r"^balanceroute_prefiller_direct_sequences\{.*\} (.*)$", re.MULTILINE)
    assert gauge.findall(page) == ["3", "0"]
    exchange.call.abort()
    await site.until(lambda: site.fleet.idle, limit_s=0.1)
    (record,) = site.world.ended
    assert record.outcome is Outcome.CANCELLED


@served(connector="mooncake-ascend", flags={"pool_limit": 1})
async def test_many_of_them_leave_prefillers_to_the_others(site: Site) -> None:
    direct = [site.send(COMPLETIONS, BODY | STREAM | {"n": 2, "max_tokens": 400}) for _ in range(9)]
    await direct[0].until_events(1)
    assert (await site.post(COMPLETIONS, BODY, ID)).status == 200
    assert not any(one.over for one in direct)
    assert max(site.world.scheduler.prefillers.direct) == 4
    for one in direct:
        assert (await one.end()).done


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["status_500", "status_503", "reset_before_headers"])
@served(connector="mooncake-ascend")
async def test_another_prefiller_does_what_the_first_one_fails_to(
    site: Site, fault: str, stream: bool
) -> None:
    values = BODY | {"n": 2} | (STREAM if stream else {})
    right = await alone(site, COMPLETIONS, values)
    site.fleet.faults.set("prefill/0", **{fault: 1.0})
    same(await site.post(COMPLETIONS, values, ID), right)
    assert [one.engine for one in site.seen] == ["prefill/0", "prefill/1"]
    (record,) = site.world.ended
    assert record.retries == 1


@pytest.mark.parametrize("stream", [False, True])
@served(connector="mooncake-ascend")
async def test_one_that_dies_with_it_is_noticed(site: Site, stream: bool) -> None:
    values = BODY | {"n": 2, "max_tokens": 300} | (STREAM if stream else {})
    right = await alone(site, COMPLETIONS, values)
    exchange = site.send(COMPLETIONS, values, headers=ID)
    if stream:
        await exchange.until_events(1)
    else:
        await site.until(lambda: len(site.seen) == 1)
    site.fleet.kill(site.seen[0].engine)
    await exchange.end()
    if stream:
        assert exchange.error is not None
        assert exchange.chunks[-1]["error"]["code"] == 502
    else:
        same(exchange, right)
    prefillers = site.world.proxy.deployment.instances.prefillers
    await site.until(lambda: prefillers[0].status is Status.QUARANTINED)
    assert prefillers[1].status is Status.UP
    await site.fleet.restore("prefill/0")


@pytest.mark.parametrize(
    ("fault", "values", "limit"),
    [
        ({"hang": True}, STREAM, "no token came within 2 s"),
        ({"stall_after_tokens": 3}, STREAM, "the stream stood still for 3 s"),
        ({"hang": True}, {}, "no answer came within 4 s"),
    ],
)
def test_its_time_limits_are_those_of_an_answer(
    fault: dict[str, Any], values: dict[str, Any], limit: str
) -> None:
    async def scenario(site: Site) -> None:
        site.fleet.faults.set("prefill", **fault)
        answer = await site.post(COMPLETIONS, BODY | {"n": 2} | values, ID)
        (record,) = site.world.ended
        assert record.reason == limit
        messages = answer.chunks[-1:] if answer.events else [answer.json]
        assert messages[0]["error"]["message"] == limit
        site.fleet.faults.clear()

    flags = {
        "prefill_timeout_s": 0.5,
        "first_token_timeout_s": 2.0,
        "idle_stream_timeout_s": 3.0,
        "answer_timeout_s": 4.0,
    }
    play(scenario, connector="mooncake-ascend", flags=flags)


@served(connector="mooncake-ascend")
async def test_a_removed_prefiller_hands_it_to_another_unless_it_was_heard(site: Site) -> None:
    values = BODY | {"n": 2, "max_tokens": 300}
    right = await alone(site, COMPLETIONS, values)
    whole = site.send(COMPLETIONS, values, headers=ID)
    await site.until(lambda: len(site.seen) == 1)
    engine = site.fleet.engine(site.seen[0].engine)
    order = {"role": "prefill", "url": engine.url}
    drained = await site.admin("/admin/instances/drain", order)
    row = next(one for one in drained.json["instances"] if one["url"] == order["url"])
    assert row["in_flight"] == 1
    removed = await site.admin("/admin/instances/remove", order | {"force": True})
    assert removed.status == 200
    same(await whole.end(), right)
    stream = site.send(COMPLETIONS, values | STREAM, headers=ID)
    await stream.until_events(1)
    other = site.fleet.engine(site.seen[-1].engine)
    order = {"role": "prefill", "url": other.url}
    removed = await site.admin("/admin/instances/remove", order | {"force": True})
    assert removed.status == 200
    assert (await stream.end()).error is not None
    assert "was removed" in json.dumps(stream.chunks[-1])


@served(connector="mooncake-ascend")
async def test_a_refusal_of_the_engine_is_the_clients(site: Site) -> None:
    refused = await site.post(COMPLETIONS, BODY | {"n": 2, "temperature": 0}, ID)
    assert refused.status == 400
    assert "greedy" in refused.json["error"]["message"]
    assert len(site.seen) == 1
    # What an engine refuses is not held against it.
    assert all(one.status is Status.UP for one in site.world.proxy.deployment.instances.prefillers)


@served(connector="mooncake-ascend", prefillers=3)
async def test_a_request_that_ends_engines_ends_two_at_most(site: Site) -> None:
    """A request under which its engine died is tried on one more, never on a third."""
    exchange = site.send(COMPLETIONS, BODY | {"n": 2, "max_tokens": 400}, headers=ID)
    for count in (1, 2):
        await site.until(lambda count=count: len(site.seen) == count)  # type: ignore[misc]
        site.fleet.kill(site.seen[-1].engine)
    assert (await exchange.end()).status == 502
    assert len(site.seen) == 2
    for number in range(3):
        if not site.fleet.engine(f"prefill/{number}").alive:
            await site.fleet.restore(f"prefill/{number}")
