"""Streams whose decode rank fails, and that another one continues from the ids of their tokens."""

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.test_proxy_connectors import (
    BODY,
    CHAT,
    COMPLETIONS,
    ID,
    PULL_KEYS,
    TALK,
    USAGE,
    alone,
    another,
    same,
)
from tests.support.site import Site, served

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

EXACT = {"resume": "exact"}
GREEDY: dict[str, Any] = {"temperature": 0, "stream": True}
STREAMS = {COMPLETIONS: BODY | GREEDY, CHAT: TALK | GREEDY}
EACH = USAGE | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
FAULTS = [
    {"reset_after_tokens": 7},
    {"end_after_tokens": 7},
    {"stall_after_tokens": 7},
    {"error_event_after_tokens": 7},
]


async def through_a_failure(site: Site, path: str, values: dict[str, Any], **faults: int) -> None:
    """Check that a stream is one engine's, event by event, though its first rank fails."""
    right = await alone(site, path, values)
    site.fleet.faults.set("decode/0", **faults)
    same(await site.send(path, values, headers=ID).end(), right)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: next(iter(one)))
@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("more", [{}, USAGE, EACH], ids=["plain", "usage", "each"])
@served(flags=EXACT | {"idle_stream_timeout_s": 2.0})
async def test_the_client_sees_one_unbroken_stream(
    site: Site, path: str, fault: dict[str, int], more: dict[str, Any]
) -> None:
    await through_a_failure(site, path, STREAMS[path] | more, **fault)
    (record,) = await site.ended()
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 20)
    assert (record.resumes, record.retries, record.recomputes) == (1, 0, 0)
    first, second = site.received("decode")
    assert (first.engine, first.path) == ("decode/0", path)
    assert (second.engine, second.path) == ("decode/1", COMPLETIONS)
    assert second.values["max_tokens"] == 13
    assert len(second.values["prompt"]) == record.prompt_tokens + 7
    assert site.received("prefill")[-1].values["prompt"] == second.values["prompt"]


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("odd", [{}, {"merged_outputs": 0.4}, {"partial_utf8": 0.4}], ids=str)
@served("**odd", flags=EXACT | {"quarantine_failures": 1_000})
async def test_a_stream_may_break_behind_each_of_its_tokens(
    site: Site, path: str, odd: dict[str, float]
) -> None:
    right = await alone(site, path, STREAMS[path])
    # Before the first token of a chat nobody knows that no reasoning is kept back.
    for tokens in range(1, 20):
        site.fleet.faults.set("decode/0", reset_after_tokens=tokens)
        begun = len(site.world.ended)
        values = another(STREAMS[path], tokens)
        exchange = await site.send(path, values, headers=ID).end()
        assert exchange.done, (tokens, exchange.body)
        assert exchange.text == right.text
        (record,) = (await site.ended(begun + 1))[begun:]
        assert record.output_tokens == 20


@pytest.mark.parametrize(("tokens", "tries", "emitted"), [(5, 3, 10), (5, 2, 10), (0, 3, 0)])
@served(flags=lambda tries: EXACT | {"retry_attempts": tries}, ranks=4)
async def test_a_stream_kills_few_ranks(site: Site, tokens: int, tries: int, emitted: int) -> None:
    right = await alone(site, CHAT, STREAMS[CHAT])
    site.fleet.faults.set("decode", reset_after_tokens=tokens)
    exchange = await site.post(CHAT, STREAMS[CHAT])
    assert not exchange.done
    assert b"two engines died" in exchange.body
    if tokens:
        assert exchange.error is not None
        assert exchange.text
        assert right.text.startswith(exchange.text)
    (record,) = await site.ended()
    assert record.outcome is Outcome.UPSTREAM_ERROR
    assert record.output_tokens == emitted
    assert len(site.received("decode")) == 2


@served(flags=EXACT, at_rest=False)
async def test_an_answer_that_goes_on_otherwise_ends_with_an_error(site: Site) -> None:
    """Two tokens in one event, and an engine whose numerics differ."""

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        body = json.loads(request.body)
        if engine.startswith("prefill"):
            kv: dict[str, Any] = dict.fromkeys(PULL_KEYS, "k")
            kv |= {"remote_port": 1, "remote_block_ids": [1]}
            done: dict[str, Any] = {
                "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]
            }
            done |= {"usage": {"prompt_tokens": 2}, "kv_transfer_params": kv}
            reply.send(200, [(b"content-type", b"application/json")], json.dumps(done).encode())
            return
        reply.start(200, [(b"content-type", b"text/event-stream")])
        again = isinstance(body["prompt"], list)
        first = [("a", [7]), ("X", [8])] if again else [("a", [7]), ("bc", [8, 9])]
        for text, ids in first:
            choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None}
            choice |= {"prompt_token_ids": [1, 2], "token_ids": ids}
            data = json.dumps({"choices": [choice]}, separators=(",", ":"))
            reply.write(b"data: " + data.encode() + b"\n\n")
        if not again:
            reply.abort()

    values = {"prompt": "a b", "temperature": 0, "stream": True, "max_tokens": 9}
    site.handlers[b"/v1/completions"] = answer
    exchange = await site.post(COMPLETIONS, values)
    assert exchange.text == "abc"
    assert b"goes on otherwise" in exchange.body
    assert not exchange.done


@pytest.mark.parametrize("path", STREAMS)
@served(flags=EXACT)
async def test_a_removed_engine_takes_no_stream_with_it(site: Site, path: str) -> None:
    values = STREAMS[path] | {"max_tokens": 200}
    right = await alone(site, path, values)
    exchange = site.send(path, values, headers=ID)
    await exchange.until_events(20)
    (on,) = site.received("decode")
    gone = {"role": "decode", "url": site.fleet.engine(on.engine).url, "force": True}
    assert (await site.admin("/admin/instances/remove", gone)).status == 200
    same(await exchange.end(), right)
    assert (await site.ended())[0].resumes == 1


@pytest.mark.parametrize("path", STREAMS)
@served(flags=EXACT)
async def test_a_drain_with_a_deadline_takes_away_what_can_go_on(site: Site, path: str) -> None:
    def second(site: Site) -> dict[str, Any]:
        return {"role": "decode", "url": site.fleet.engine("decode/1").url}

    values = STREAMS[path] | {"max_tokens": 200}
    right = await alone(site, path, values)
    assert (await site.admin("/admin/instances/drain", second(site))).status == 200
    exchange = site.send(path, values, headers=ID)
    await exchange.until_events(9)
    other = site.send(path, values | {"temperature": 0.7, "max_tokens": 90})
    await other.until_events(9)
    assert {leg.engine for leg in site.received("decode")} == {"decode/0"}
    order = {"role": "decode", "url": site.fleet.engine("decode/0").url, "deadline_s": 0.5}
    assert (await site.admin("/admin/instances", second(site))).status == 200
    assert (await site.admin("/admin/instances/drain", order)).status == 200
    same(await exchange.end(), right)
    assert (await other.end()).done
    # Nobody else can end the other one.
    assert [record.resumes for record in await site.ended(2)] == [0, 1]
    assert {record.outcome for record in site.world.ended} == {Outcome.OK}
    assert [leg.engine for leg in site.received("decode")][2:] == ["decode/1"]


@pytest.mark.parametrize(
    ("ranks", "deadline_s"), [(2, 0.3), (1, 0)], ids=["taken back", "the last"]
)
@served("ranks", flags=EXACT)
async def test_an_engine_that_is_taken_back_before_the_deadline_or_is_the_last_keeps_its_streams(
    site: Site, ranks: int, deadline_s: float
) -> None:
    exchange = site.send(CHAT, STREAMS[CHAT] | {"max_tokens": 100}, headers=ID)
    await exchange.until_events(9)
    (on,) = site.received("decode")
    order = {"role": "decode", "url": site.fleet.engine(on.engine).url}
    drained = await site.admin("/admin/instances/drain", order | {"deadline_s": deadline_s})
    assert drained.status == 200
    if ranks > 1:
        assert (await site.admin("/admin/instances", order)).status == 200
    assert (await exchange.end()).done
    assert (await site.ended())[0].resumes == 0


@pytest.mark.parametrize("stalls", [True, False])
@served(flags=EXACT | {"idle_stream_timeout_s": 120.0, "policy": "fifo"})
async def test_a_stream_leaves_an_engine_that_is_quarantined_and_silent(
    site: Site, stalls: bool
) -> None:
    values = STREAMS[CHAT] | {"max_tokens": 400}
    right = await alone(site, CHAT, values)
    if stalls:
        site.fleet.faults.set("decode/0", stall_after_tokens=7)
    begin_s = site.loop.time()
    exchange = site.send(CHAT, values, headers=ID)
    await exchange.until_events(5)
    site.fleet.faults.set("decode/0", refuse=True)
    same(await exchange.end(), right)
    assert site.loop.time() - begin_s < 60.0
    assert (await site.ended())[0].resumes == stalls


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.7},
        {"temperature": 0.7, "seed": -1, "return_token_ids": True},
        {"temperature": None},
        {"temperature": 0.7, "tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
    ids=str,
)
@served(flags=EXACT)
async def test_what_might_go_on_otherwise_ends_as_without_the_setting(
    site: Site, more: dict[str, Any]
) -> None:
    site.fleet.faults.set("decode/0", reset_after_tokens=5)
    exchange = await site.post(CHAT, STREAMS[CHAT] | more)
    assert not exchange.done
    assert (await site.ended())[0].resumes == 0
    (leg,) = site.received("decode")
    assert leg.values.get("return_token_ids") == more.get("return_token_ids")


@served(flags={"resume": "valid"})
async def test_sampled_streams_go_on_where_any_valid_continuation_will_do(site: Site) -> None:
    # An emulated seed goes on by position, so that the text is the same.
    values = STREAMS[CHAT] | {"temperature": 0.7, "seed": 3}
    await through_a_failure(site, CHAT, values, reset_after_tokens=5)


@served(flags=EXACT, reasoning_parser=True)
async def test_a_reasoning_parser_keeps_back_what_no_id_tells(site: Site) -> None:
    await through_a_failure(site, CHAT, STREAMS[CHAT], reset_after_tokens=15)
    assert (await site.ended())[0].resumes == 1
    # A prefiller has shown it.
    first, second = site.received("decode")
    assert "return_token_ids" not in first.values | second.values


@pytest.mark.parametrize("path", STREAMS)
@served(connector="mooncake-ascend", flags=EXACT)
async def test_a_request_that_is_handed_back_goes_on_from_its_ids(site: Site, path: str) -> None:
    await through_a_failure(site, path, STREAMS[path], recomputed_after_tokens=6)
    (record,) = await site.ended()
    assert (record.recomputes, record.resumes, record.retries) == (3, 0, 0)
    assert isinstance(site.received("decode")[-1].values["prompt"], list)


@pytest.mark.parametrize("path", STREAMS)
@served()
async def test_without_the_setting_nothing_is_asked_for(site: Site, path: str) -> None:
    site.fleet.faults.set("decode/0", reset_after_tokens=5)
    exchange = await site.post(path, STREAMS[path])
    assert not exchange.done
    (leg,) = site.received("decode")
    assert "return_token_ids" not in leg.values
