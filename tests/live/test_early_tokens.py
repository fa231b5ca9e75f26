"""Streams whose first token the client gets when the prefill ends (`--first-token prefill`)."""

import asyncio
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
from tests.support.site import Site, answering, play, served

from balanceroute.proxy.core.admission import Decision
from balanceroute.proxy.live.openai.legs import decode_body
from balanceroute.proxy.live.request import decode_attempt
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import RequestRecord
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

EARLY = {"first_token": "prefill"}
GREEDY: dict[str, Any] = {"temperature": 0, "stream": True}
STREAMS = {COMPLETIONS: BODY | GREEDY, CHAT: TALK | GREEDY}
# With the role.
FIRST = {COMPLETIONS: 1, CHAT: 2}
IDS = {
    "model": "tiny",
    "token_ids": [3, 5, 7],
    "sampling_params": {"temperature": 0, "max_tokens": 9},
    "stream": True,
}
WAIT_S = 5.0
NULL = {"index": 0, "text": "a", "finish_reason": "length", "prompt_token_ids": [1, 2]}
SPOILT = "an event that nobody can read"
SAID: dict[str, Any] = NULL | {"token_ids": [7]}


def prefilled(reply: "Reply", choice: dict[str, Any] = SAID) -> None:
    """Answer a prefill leg."""
    kv: dict[str, Any] = dict.fromkeys(PULL_KEYS, "k")
    kv |= {"do_remote_prefill": True, "remote_port": 1, "remote_block_ids": [1]}
    done = {"choices": [choice], "usage": {"prompt_tokens": 2}, "kv_transfer_params": kv}
    reply.send(200, [(b"content-type", b"application/json")], json.dumps(done).encode())


def say(reply: "Reply", *texts: str, finish: str | None = None) -> None:
    """Answer a decode leg: an event for each text, then its end."""
    reply.start(200, [(b"content-type", b"text/event-stream")])
    for number, text in enumerate(texts, start=1):
        reason = finish if number == len(texts) else None
        choice = {"index": 0, "text": text, "finish_reason": reason}
        data = json.dumps({"choices": [choice]}, separators=(",", ":"))
        reply.write(b"data: " + data.encode()[: 20 if text == SPOILT else None] + b"\n\n")
    if finish is not None:
        reply.write(b"data: [DONE]\n\n")
        reply.end()


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("more", [{}, USAGE], ids=["plain", "usage"])
@served(flags=EARLY)
async def test_the_first_token_comes_before_there_is_a_rank(
    site: Site, path: str, more: dict[str, Any]
) -> None:
    right = await alone(site, path, STREAMS[path] | more)
    site.fleet.faults.set("decode", delay_s=WAIT_S)
    begin_s = site.loop.time()
    exchange = site.send(path, STREAMS[path] | more, headers=ID)
    await exchange.until_events(FIRST[path])
    first_s = site.loop.time() - begin_s
    assert len(exchange.events) == FIRST[path]
    assert exchange.text == right.chunks[FIRST[path] - 1]["choices"][0].get("text", exchange.text)
    await exchange.until_events(FIRST[path] + 1)
    assert site.loop.time() - begin_s > WAIT_S > 10 * first_s
    same(await exchange.end(), right)
    await site.until(lambda: bool(site.world.ended))
    (record,) = site.world.ended
    assert record.early_first_token
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 20)
    first_ns, second_ns = record.first_token_ns, record.second_token_ns
    assert first_ns is not None
    assert second_ns is not None
    assert second_ns - first_ns == record.itl_max_ns > WAIT_S * 1e9
    (leg,) = site.received("decode")
    assert "return_token_ids" not in leg.values


@served(flags=EARLY)
async def test_metrics_tell_both_tokens(site: Site) -> None:
    site.fleet.faults.set("decode", delay_s=WAIT_S)
    assert (await site.post(CHAT, STREAMS[CHAT])).done
    assert (await site.post(CHAT, STREAMS[CHAT] | {"stop": "never"})).done
    metrics = (await site.get("/metrics")).body.decode()
    told = dict(
        line.replace('{model="tiny"}', "").rsplit(" ", 1)
        for line in metrics.splitlines()
        if line.startswith(("balanceroute_time_to_", "balanceroute_early"))
    )
    first, second = (f"balanceroute_time_to_{one}_token_seconds" for one in ("first", "second"))
    assert told[f"{first}_count"] == told[f"{second}_count"] == "2"
    assert WAIT_S < float(told[f"{first}_sum"]) < 2 * WAIT_S < float(told[f"{second}_sum"])
    assert told["balanceroute_early_first_tokens_total"] == "1.0"


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("seed", [None, 0, 5])
@served(flags=EARLY)
async def test_both_legs_of_a_sampled_stream_have_one_seed(
    site: Site, path: str, seed: int | None
) -> None:
    values = STREAMS[path] | {"temperature": 0.9, "seed": seed}
    exchange = await site.post(path, values, ID)
    (record,) = site.world.ended
    (prefill,), (decode,) = site.received("prefill"), site.received("decode")
    assert prefill.values["seed"] == decode.values["seed"]
    assert record.seed == (decode.values["seed"] if seed is None else None)
    assert record.early_first_token
    assert record.first_token_differences == 0
    same(exchange, await alone(site, path, values | {"seed": decode.values["seed"]}))


@pytest.mark.parametrize(
    "fault",
    [
        {"reset_before_headers": 1.0},
        {"reset_after_tokens": 0},
        {"reset_after_tokens": 1},
        {"end_after_tokens": 1},
        {"error_event_after_tokens": 1},
        {"status_503": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("resume", ["off", "exact"])
@pytest.mark.parametrize("path", STREAMS)
@served(flags=lambda resume: EARLY | {"resume": resume})
async def test_until_a_rank_says_more_it_may_be_asked_elsewhere(
    site: Site, path: str, resume: str, fault: dict[str, float]
) -> None:
    right = await alone(site, path, STREAMS[path] | USAGE)
    site.fleet.faults.set("decode/0", **fault)
    same(await site.send(path, STREAMS[path] | USAGE, headers=ID).end(), right)
    (record,) = site.world.ended
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 20)
    assert (record.retries > 0, record.resumes) == (True, 0)


@pytest.mark.parametrize("path", STREAMS)
@served(flags=EARLY | {"resume": "exact", "quarantine_failures": 1_000})
async def test_a_rank_that_fails_later_is_resumed_as_ever(site: Site, path: str) -> None:
    for resumes, tokens in ((1, 2), (1, 9), (0, 1)):
        right = await alone(site, path, STREAMS[path])
        begun = len(site.world.ended)
        site.fleet.faults.set("decode/0", reset_after_tokens=tokens)
        same(await site.send(path, another(STREAMS[path], tokens), headers=ID).end(), right)
        site.fleet.faults.set("decode/0", reset_after_tokens=None)
        assert [one.resumes for one in site.world.ended[begun:]] == [resumes]


@served(flags=EARLY)
async def test_without_a_rank_the_stream_ends_with_an_error(site: Site) -> None:
    site.fleet.faults.set("decode", status_500=1.0)
    exchange = await site.post(CHAT, STREAMS[CHAT])
    assert (exchange.status, exchange.done) == (200, False)
    assert b'"code":502' in exchange.body
    (record,) = site.world.ended
    assert (record.outcome, record.output_tokens) == (Outcome.UPSTREAM_ERROR, 1)


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("details", [False, True])
def test_an_answer_that_its_first_token_ends_needs_no_rank(path: str, *, details: bool) -> None:
    async def scenario(site: Site) -> None:
        site.fleet.faults.set("all", eos_first=1.0)
        right = await alone(site, path, STREAMS[path] | USAGE)
        same(await site.send(path, STREAMS[path] | USAGE, headers=ID).end(), right)
        assert site.received("decode") == []
        (prefill,) = site.received("prefill")
        assert prefill.values["min_tokens"] == 0

    # With its null members, which a stream leaves out.
    caches: dict[str, Any] = {"prompt_tokens_details": details, "prefix_cache_tokens": 1_000}
    play(scenario, flags=EARLY, **caches)


@served(flags=EARLY)
async def test_a_stop_token_that_comes_first_ends_the_answer(site: Site) -> None:
    whole = await site.ask("decode/0", COMPLETIONS, BODY | {"return_token_ids": True})
    first = whole.json["choices"][0]["token_ids"][0]
    values = STREAMS[COMPLETIONS] | USAGE | {"stop_token_ids": [first]}
    same(
        await site.send(COMPLETIONS, values, headers=ID).end(),
        await alone(site, COMPLETIONS, values),
    )
    assert len(site.received("prefill")) == 1
    # But not where more tokens are wanted.
    values |= {"min_tokens": 3}
    same(
        await site.send(COMPLETIONS, values, headers=ID).end(),
        await alone(site, COMPLETIONS, values),
    )
    assert site.received("prefill")[-1].values["min_tokens"] == 1


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("least", [0, 1, 2, 7])
@served(flags=EARLY, mean_output_tokens=5.0)
async def test_the_least_tokens_are_the_answers(site: Site, path: str, least: int) -> None:
    site.fleet.faults.set("decode", delay_s=WAIT_S)
    values = STREAMS[path] | USAGE | {"min_tokens": least, "ignore_eos": False}
    exchange = site.send(path, values, headers=ID)
    await exchange.until_events(FIRST[path])
    same(await exchange.end(), await alone(site, path, values))
    (prefill,), (decode,) = site.received("prefill"), site.received("decode")
    # The first token must not end an answer that has to go on; else it may.
    assert (prefill.values["min_tokens"], decode.values["min_tokens"]) == (min(least, 1), least)
    assert site.world.ended[0].early_first_token


@pytest.mark.parametrize("path", STREAMS)
@served(flags=EARLY, partial_utf8=1.0)
async def test_a_token_within_a_character_waits_for_its_rank(site: Site, path: str) -> None:
    right = await alone(site, path, STREAMS[path])
    same(await site.send(path, STREAMS[path], headers=ID).end(), right)
    assert not site.world.ended[0].early_first_token


@pytest.mark.parametrize("path", STREAMS)
@served(flags=EARLY, merged_outputs=1.0)
async def test_what_comes_in_one_event_with_the_first_token_is_not_lost(
    site: Site, path: str
) -> None:
    right = await alone(site, path, STREAMS[path])
    exchange = await site.send(path, STREAMS[path], headers=ID).end()
    assert exchange.done
    assert exchange.text == right.text
    assert site.world.ended[0].early_first_token


LATE: list[tuple[str, dict[str, Any]]] = [
    *((path, {"stream": False}) for path in STREAMS),
    *((path, {"max_tokens": 1}) for path in STREAMS),
    *((path, {"stop": "x"}) for path in STREAMS),
    *((path, {"frequency_penalty": 0.5}) for path in STREAMS),
    *((path, {"bad_words": ["x"]}) for path in STREAMS),
    *((path, {"return_token_ids": True}) for path in STREAMS),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, {"logprobs": True}),
    (COMPLETIONS, {"logprobs": 0}),
    (COMPLETIONS, {"structured_outputs": {"regex": "a"}}),
    (COMPLETIONS, {"unheard_of": 1}),
    (CHAT, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
]


@pytest.mark.parametrize(("path", "more"), LATE, ids=str)
def test_what_a_client_might_see_otherwise_waits_for_its_rank(
    path: str, more: dict[str, Any]
) -> None:
    legs: list[Any] = []

    async def scenario(site: Site) -> None:
        right = await alone(site, path, STREAMS[path] | more)
        same(await site.send(path, STREAMS[path] | more, headers=ID).end(), right)
        assert not site.world.ended[0].early_first_token
        legs.append([site.received(role)[0].values for role in ("prefill", "decode")])

    for flags in ({}, EARLY):
        play(scenario, flags=flags)
    without, with_it = legs
    for one in (without, with_it):
        for leg in one:
            leg.pop("kv_transfer_params")
    assert without == with_it


@pytest.mark.parametrize("path", STREAMS)
@served(flags=EARLY)
async def test_what_only_a_rank_refuses_has_no_early_token(site: Site, path: str) -> None:
    # More than the context has room for; the prefiller is asked for one token.
    values = STREAMS[path] | {"max_tokens": None, "min_tokens": 10**6}
    exchange = await site.post(path, values)
    assert (exchange.status, len(site.received("prefill"))) == (400, 1)
    assert site.world.ended[0].outcome is Outcome.CLIENT_ERROR


@pytest.mark.parametrize("path", STREAMS)
@served(flags=EARLY)
async def test_an_answer_that_may_exceed_the_context_has_no_early_token(
    site: Site, path: str
) -> None:
    await asyncio.sleep(2.0)  # By then the length of the context is known.
    longest = site.fleet.settings.max_model_len
    exchange = await site.post(path, STREAMS[path] | {"max_tokens": longest})
    assert exchange.status == 400
    assert "maximum context length" in exchange.json["error"]["message"]
    assert site.received("prefill")


@pytest.mark.parametrize("path", STREAMS)
@served(flags=EARLY)
async def test_where_no_engine_tells_its_context_the_rank_says_the_first_token(
    site: Site, path: str
) -> None:
    site.handlers[b"/v1/models"] = answering(404, b"", kind=None)
    await asyncio.sleep(70.0)  # Lists are read again every minute.
    same(
        await site.post(path, STREAMS[path], headers=ID),
        await alone(site, path, STREAMS[path]),
    )
    assert not site.world.ended[-1].early_first_token


@pytest.mark.parametrize("more", [{"n": 2, "temperature": 1}, {"echo": True}], ids=str)
@served(flags=EARLY)
async def test_what_one_engine_does_alone_has_no_early_token(
    site: Site, more: dict[str, Any]
) -> None:
    assert (await site.post(COMPLETIONS, STREAMS[COMPLETIONS] | more)).done
    assert site.received("prefill") == []


@served(flags=EARLY, reasoning_parser=True)
async def test_a_reasoning_parser_is_not_second_guessed(site: Site) -> None:
    right = await alone(site, CHAT, STREAMS[CHAT])
    same(await site.send(CHAT, STREAMS[CHAT], headers=ID).end(), right)
    assert not site.world.ended[0].early_first_token


@pytest.mark.parametrize(
    "choice",
    [
        SAID | {"token_ids": None},
        SAID | {"prompt_token_ids": None},
        SAID | {"token_ids": [7, 8]},
        SAID | {"text": ""},
        SAID | {"text": "\ufffd"},
        SAID | {"text": None},
    ],
    ids=str,
)
@served(flags=EARLY, at_rest=False)
async def test_an_engine_that_tells_no_ids_is_served_as_before(
    site: Site, choice: dict[str, Any]
) -> None:
    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        if engine.startswith("prefill"):
            prefilled(reply, choice)
        else:
            say(reply, "b", "c", finish="stop")

    site.handlers[b"/v1/completions"] = answer
    exchange = await site.post(COMPLETIONS, {"prompt": "a b", **GREEDY, "max_tokens": 9})
    assert (exchange.text, exchange.done) == ("bc", True)


@pytest.mark.parametrize("said", [("b",), ("", "b"), ("",), (SPOILT, "a", "b")], ids=str)
@pytest.mark.parametrize("resume", ["off", "exact"])
@served(flags=lambda resume: EARLY | {"resume": resume, "count_tokens": "events"}, at_rest=False)
async def test_a_rank_that_says_something_else_is_left_for_the_ids(
    site: Site, said: tuple[str, ...], resume: str
) -> None:
    asked: list[dict[str, Any]] = []

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        body = json.loads(request.body)
        asked.append(body)
        if engine.startswith("prefill"):
            prefilled(reply)
        elif body["prompt"] == [1, 2, 7]:
            say(reply, "X", "Y", finish="stop")
        else:
            say(reply, *said, finish="stop")

    site.handlers[b"/v1/completions"] = answer
    exchange = await site.post(COMPLETIONS, {"prompt": "a b", **GREEDY, "max_tokens": 9})
    assert (exchange.text, exchange.done) == ("aXY", True)
    (record,) = site.world.ended
    assert record.first_token_differences == 1
    assert (record.retries, record.resumes, record.recomputes) == (0, 0, 0)
    assert record.outcome is Outcome.OK
    assert [one["max_tokens"] for one in asked] == [1, 9, 1, 8]
    assert [one["prompt"] for one in asked] == ["a b", "a b", [1, 2, 7], [1, 2, 7]]


def test_a_chat_goes_on_behind_its_first_token_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the rank draws otherwise: it is given another seed."""

    async def scenario(site: Site) -> None:
        values = STREAMS[CHAT] | USAGE | {"temperature": 0.9}
        exchange = await site.post(CHAT, values, ID)
        assert exchange.done
        (record,) = site.world.ended
        assert record.first_token_differences == 1
        assert (record.outcome, record.output_tokens) == (Outcome.OK, 20)
        _, again = site.received("prefill")
        first = again.values["prompt"][-1]
        ids = await site.ask("prefill/0", CHAT, TALK | {"return_token_ids": True})
        assert again.values["prompt"] == [*ids.json["prompt_token_ids"], first]
        assert {one["id"] for one in exchange.chunks} == {"chatcmpl-mine"}
        assert {one["object"] for one in exchange.chunks} == {"chat.completion.chunk"}
        usage = exchange.chunks[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (record.prompt_tokens, 20)

    def otherwise(body: Any, members: Any, *rest: Any, **more: Any) -> bytes:
        return bytes(decode_body(body, {**members, "seed": 77}, *rest, **more))

    monkeypatch.setattr(decode_attempt, "decode_body", otherwise)
    play(scenario, flags=EARLY)


@pytest.mark.parametrize("first_token", ["prefill", "decode"])
@pytest.mark.parametrize("more", [{}, USAGE], ids=["plain", "usage"])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("path", STREAMS)
@served(flags=lambda first_token: {"first_token": first_token})
async def test_ids_of_an_answer_that_the_prefiller_ended_are_told_to_who_asked(
    site: Site, path: str, ids: bool, more: dict[str, Any], first_token: str
) -> None:
    for engine in ("prefill/0", "prefill/1", "decode/0"):
        site.fleet.faults.set(engine, eos_first=1.0)
    values = STREAMS[path] | more | {"return_token_ids": ids}
    right = await alone(site, path, values)
    same(await site.post(path, values, ID), right)
    assert not site.received("decode", path)


@pytest.mark.parametrize("by_tenant", [False, True])
def test_no_stream_is_cut_by_a_deadline_that_its_first_token_kept(*, by_tenant: bool) -> None:
    async def scenario(site: Site) -> None:
        # They take 2 s each, 4 at a time, and their first token is due after 2 s.
        due = [] if by_tenant else [(b"x-request-deadline-ms", b"2000")]
        asked = [site.send(COMPLETIONS, STREAMS[COMPLETIONS], headers=due) for _ in range(100)]
        assert [(await one.end()).done for one in asked] == [True] * 100
        ended = await site.ended(100)
        assert all(one.early_first_token for one in ended)
        took_s = [first_token_s(one) for one in ended]
        assert max(took_s) < 2.0
        assert max(one.pool_wait_ns for one in ended) > 30e9

    tenants = '[[tenant]]\nname = "a"\ndefault = true\ndeadline_s = 2.0\n' if by_tenant else ""
    flags = EARLY | {"batch": 2, "pool_limit": 100, "client_deadline": True, "lease_s": 1000.0}
    engines: dict[str, Any] = {"batch_limit": 2, "step_base_ns": 100_000_000, "lease_s": 1000.0}
    play(scenario, flags=flags, tenants=tenants, **engines)


def first_token_s(record: "RequestRecord") -> float:
    assert record.first_token_ns is not None
    return (record.first_token_ns - record.arrived_ns) / 1e9


def test_the_limit_in_flight_is_moved_by_what_clients_got() -> None:
    async def scenario(site: Site) -> None:
        asked = [site.send(COMPLETIONS, STREAMS[COMPLETIONS]) for _ in range(40)]
        await site.until(lambda: len(site.received("prefill")) == 40)
        await asyncio.sleep(5.0)
        budget = site.world.scheduler.intake.budget
        assert budget is not None
        told_s = (budget.ttft_ns or 0.0) / 1e9
        assert [(await one.end()).done for one in asked] == [True] * 40
        took_s = sorted(first_token_s(one) for one in await site.ended(40))
        assert told_s == pytest.approx(took_s[-1], rel=0.1)
        assert told_s < 1.0
        assert budget.decisions[Decision.DECREASE] == 0
        assert budget.cap >= 64

    flags = EARLY | {"batch": 2, "pool_limit": 100, "aimd": "post5", "lease_s": 1000.0}
    engines: dict[str, Any] = {"batch_limit": 2, "step_base_ns": 100_000_000, "lease_s": 1000.0}
    play(scenario, flags=flags | {"queue_ttl_s": 100.0}, **engines)


@served(flags=EARLY | {"client_deadline": True}, prefill_base_ns=1_000_000_000)
async def test_a_first_token_that_comes_after_it_was_due_is_not_begun_with(site: Site) -> None:
    late = await site.post(COMPLETIONS, STREAMS[COMPLETIONS], [(b"x-request-deadline-ms", b"900")])
    assert (late.status, late.header(b"retry-after")) == (503, b"1")
    assert site.received("decode") == []
    in_time = [(b"x-request-deadline-ms", b"1100")]
    assert (await site.post(COMPLETIONS, STREAMS[COMPLETIONS], in_time)).done
    assert [one.early_first_token for one in site.world.ended] == [False, True]


@pytest.mark.parametrize("fault", ["status_503", "reset_before_headers", "reset_after_tokens"])
def test_what_is_repeated_behind_its_first_token_is_not_due(fault: str) -> None:
    async def scenario(site: Site) -> None:
        right = await alone(site, COMPLETIONS, STREAMS[COMPLETIONS])
        site.fleet.faults.set("decode", **{fault: 1.0 if fault != "reset_after_tokens" else 0})
        due = [*ID, (b"x-request-deadline-ms", b"1000")]
        before = len(site.received("decode"))
        exchange = site.send(COMPLETIONS, STREAMS[COMPLETIONS], headers=due)
        await site.until(lambda: len(site.received("decode")) == before + 1)
        await asyncio.sleep(0.1)
        site.fleet.faults.set("decode", **{fault: None if fault == "reset_after_tokens" else 0.0})
        same(await exchange.end(), right)
        (record,) = await site.ended()
        assert record.retries > 0

    # The wait before the second try is longer than both limits of a first token.
    flags = EARLY | {"client_deadline": True, "retry_backoff_s": 1.5, "retry_backoff_limit_s": 1.5}
    play(scenario, flags=flags | {"queue_ttl_s": 1.0})


def test_a_request_that_waits_for_its_ranks_token_is_due_as_ever() -> None:
    async def scenario(site: Site) -> None:
        busy = [site.send(COMPLETIONS, STREAMS[COMPLETIONS]) for _ in range(4)]
        due = [(b"x-request-deadline-ms", b"1000")]
        kinds: list[dict[str, Any]] = [{"stream": False}, {"stop": "never"}, {}]
        asked = [site.send(COMPLETIONS, STREAMS[COMPLETIONS] | more, headers=due) for more in kinds]
        assert [(await one.end()).status for one in asked] == [503, 503, 200]
        assert all([(await one.end()).done for one in [*busy, asked[2]]])

    flags = EARLY | {"client_deadline": True, "batch": 2, "pool_limit": 100}
    play(scenario, flags=flags, batch_limit=2, step_base_ns=100_000_000)


@pytest.mark.parametrize("whose", ["prefill", "decode"])
@pytest.mark.parametrize("direct", ["prefill", "decode"])
def test_what_counts_for_the_limit_is_what_metrics_and_log_tell(whose: str, direct: str) -> None:
    async def scenario(site: Site) -> None:
        streams: list[tuple[str, dict[str, Any]]] = [
            *STREAMS.items(),
            (COMPLETIONS, STREAMS[COMPLETIONS] | {"stop": "never"}),
            (COMPLETIONS, STREAMS[COMPLETIONS] | {"max_tokens": 1}),
            (COMPLETIONS, STREAMS[COMPLETIONS] | {"n": 2, "temperature": 1.0}),
            ("/inference/v1/generate", IDS),
            ("/v1/messages", STREAMS[CHAT]),
        ]
        site.fleet.faults.set("decode", delay_s=1.0)
        for path, values in streams:
            answer = await site.post(path, values)
            assert answer.status == 200, answer.body
        site.fleet.faults.set("all", eos_first=1.0)
        assert (await site.post(COMPLETIONS, STREAMS[COMPLETIONS])).done
        ended = await site.ended(len(streams) + 1)
        budget = site.world.scheduler.intake.budget
        assert budget is not None
        counted = [took_ns / 1e9 for _, took_ns in budget._firsts._samples]
        assert counted == pytest.approx([first_token_s(one) for one in ended], abs=1e-6)
        early = sum(one.early_first_token for one in ended)
        assert early == (3 if whose == "prefill" else 0)

    flags = {"first_token": whose, "direct": direct, "aimd": "post4"}
    play(scenario, flags=flags)
