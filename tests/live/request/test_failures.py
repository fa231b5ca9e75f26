"""The table of what becomes of a request whose leg failed, and the same table in the docs."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.stream_client import DONE, LAST, OPENING
from tests.support.site import Site, served

from balanceroute.proxy.lab.emulate.faults import AfterPull, ErrorForm
from balanceroute.proxy.lab.emulate.settings import DpMode
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.openai.errors import error_in
from balanceroute.proxy.live.request.failures import (
    RULES,
    Blame,
    Failure,
    Next,
    Rule,
    What,
    breakage,
    refusal,
    reported,
    triage,
)
from balanceroute.proxy.live.telemetry.record import Leg, Outcome
from balanceroute.proxy.wire.messages import WireError, WireFault

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

DOCS = Path(__file__).parents[3] / "docs" / "appendix" / "failures.md"
HEADINGS = "| leg | failure | counted by | next |"


OWN = b'{"error": {"message": "busy", "type": "ServiceUnavailable"}}'


def failure(what: What) -> Failure:
    return Failure(what, Fault.RESET, "broken")


def judge(
    leg: Leg,
    one: Failure,
    *,
    stream_open: bool = False,
    pulls: bool = True,
    offers: int = 1,
    deaths: int = 0,
    continuable: bool = False,
) -> Rule:
    return triage(
        leg,
        one,
        stream_open=stream_open,
        continuable=continuable,
        pulls=pulls,
        offers=offers,
        deaths=deaths,
    )


def test_every_failure_of_a_leg_has_its_rule() -> None:
    of_some_legs = {
        What.NO_KV: [Leg.PREFILL],
        What.NO_PREFILL: [Leg.DECODE],
        What.TOO_LATE: [Leg.DECODE],
        What.ERROR_EVENT: [Leg.DECODE, Leg.DIRECT],
        What.STALE: [Leg.DECODE],  # The others are sent again at once.
    }
    for leg in Leg:
        for what in What:
            assert ((leg, what) in RULES) == (leg in of_some_legs.get(what, [leg])), (leg, what)
    for (leg, what), rule in RULES.items():
        assert judge(leg, failure(what)) == rule
        # A prefill has no rank to go to, and no rank computes another's prefill.
        prefill_only = rule.then is Next.OTHER_PREFILLER
        assert prefill_only == (leg is not Leg.DECODE and what is not What.REFUSED)


@pytest.mark.parametrize(("leg", "what"), [pair for pair in RULES if pair[0] is not Leg.PREFILL])
def test_a_leg_that_fails_behind_an_open_stream_ends_the_request(leg: Leg, what: What) -> None:
    rule = judge(leg, failure(what), stream_open=True)
    assert rule.then is Next.FAIL
    assert rule.blame == RULES[leg, what].blame


@pytest.mark.parametrize("what", [what for leg, what in RULES if leg is Leg.DECODE])
def test_a_stream_whose_ids_are_known_goes_on_unless_it_kills_or_is_refused(what: What) -> None:
    rule = judge(Leg.DECODE, failure(what), stream_open=True, continuable=True)
    assert rule.then is (Next.FAIL if what is What.REFUSED else Next.CONTINUE)
    dead = judge(Leg.DECODE, failure(what), stream_open=True, continuable=True, deaths=2)
    assert dead.then is Next.FAIL


@pytest.mark.parametrize("what", [what for leg, what in RULES if leg is Leg.PREFILL])
def test_a_resumed_answers_prefill_is_mended_behind_an_open_stream(what: What) -> None:
    then = judge(Leg.PREFILL, failure(what), stream_open=True).then
    assert then is (Next.FAIL if what is What.REFUSED else Next.OTHER_PREFILLER)


def test_a_kv_cache_is_offered_to_two_ranks_at_most() -> None:
    assert judge(Leg.DECODE, failure(What.BUSY), offers=1).then is Next.OTHER_RANK
    assert judge(Leg.DECODE, failure(What.BUSY), offers=2).then is Next.NEW_KV


@pytest.mark.parametrize("leg", Leg)
def test_an_engine_whose_answer_cannot_be_read_loses_its_idle_connections(leg: Leg) -> None:
    # The next answer on one of them may be to what was asked before.
    assert judge(leg, failure(What.UNREADABLE)).close_idle
    assert judge(leg, failure(What.NO_ANSWER)).close_idle == (leg is not Leg.PREFILL)
    assert not judge(leg, failure(What.BUSY)).close_idle


def test_a_kv_cache_is_offered_again_only_if_the_rank_never_took_the_request() -> None:
    again = {what for what in What if (Leg.DECODE, what) in RULES}
    again = {what for what in again if judge(Leg.DECODE, failure(what)).then is Next.OTHER_RANK}
    assert again == {What.BUSY, What.NOT_SENT, What.NO_ROUTE}
    assert judge(Leg.DECODE, failure(What.NO_ROUTE), offers=2).then is Next.OTHER_RANK


@pytest.mark.parametrize("sent", [False, True])
def test_what_broke_before_it_was_sent_was_never_taken(*, sent: bool) -> None:
    one = breakage(WireError(WireFault.RESET, "gone", sent=sent, answered=False))
    assert one.what is (What.BROKEN if sent else What.NOT_SENT)
    stale = breakage(WireError(WireFault.STALE, "gone", sent=True, answered=False))
    assert (stale.what, stale.fault) == (What.STALE, Fault.RESET)
    late = breakage(WireError(WireFault.TOO_LATE, "late", sent=False, answered=False))
    assert (late.what, late.fault) == (What.TOO_LATE, Fault.LOCAL)
    assert one.fault is Fault.RESET


@pytest.mark.parametrize(
    ("status", "body", "what"),
    [
        (204, b"", What.NO_ANSWER),
        (302, b"", What.NO_ANSWER),
        (400, OWN, What.REFUSED),
        (422, b"no", What.REFUSED),
        (404, OWN, What.REFUSED),
        (404, b'{"detail":"Not Found"}', What.NO_ROUTE),
        (405, b"", What.NO_ROUTE),
        (429, OWN, What.BUSY),
        (429, b"local_rate_limited", What.UNAVAILABLE),
        (500, OWN, What.SERVER_ERROR),
        (503, OWN, What.BUSY),
        (503, b"upstream connect error or disconnect/reset before headers", What.UNAVAILABLE),
        (504, b"", What.SERVER_ERROR),
    ],
)
def test_a_status_is_read_as_a_failure(status: int, body: bytes, what: What) -> None:
    one = refusal(status, [], body)
    assert one.what is what
    assert one.answer == (None if what is What.NO_ANSWER else (status, [], body))
    assert one.reason.startswith(("status ", "the engine answered ")), one.reason
    assert str(status) in one.reason


@pytest.mark.parametrize(
    "said",
    [
        b'{"error":{"message":"%s","type":"InternalServerError","code":500}}',
        b'{"object":"error","message":"%s","code":500}',
        b'{"detail":"%s"}',
        b'{"error":"%s"}',
    ],
)
def test_a_reason_has_the_engines_own_words_up_to_a_bound(said: bytes) -> None:
    words = "NIXL compatibility hash mismatch"
    body = said % words.encode()
    assert refusal(500, [], body).reason == f"status 500: {words}"
    error = error_in(body)
    assert error is not None
    assert reported(error, body).reason == f"status 500: {words}"
    assert len(refusal(500, [], said % (b"x" * 60_000)).reason) < 300
    assert refusal(500, [], said % (b"x" * 70_000)).reason == "status 500"


def test_a_failure_where_no_kv_cache_was_to_be_pulled_is_the_engines() -> None:
    judged = {what for (_, what), rule in RULES.items() if rule.blame is Blame.PULL}
    assert judged == {What.SERVER_ERROR, What.ERROR_EVENT, What.TIMED_OUT}
    for what in judged:
        assert judge(Leg.DECODE, failure(what), pulls=True).blame is Blame.PULL
        assert judge(Leg.DECODE, failure(what), pulls=False).blame is Blame.ENGINE


def test_a_request_under_which_two_ranks_died_goes_to_no_third() -> None:
    assert judge(Leg.DECODE, failure(What.BROKEN), deaths=1).then is Next.NEW_KV
    assert judge(Leg.DECODE, failure(What.BROKEN), deaths=2).then is Next.FAIL


def test_the_docs_show_these_rules() -> None:
    rows = [
        f"| {leg.value} | {what.value} | {rule.blame.value} | {rule.then.value} |"
        for (leg, what), rule in RULES.items()
    ]
    table = "\n".join([HEADINGS, "| --- | --- | --- | --- |", *rows])
    assert DOCS.read_text(encoding="utf-8").endswith(f"\n\n{table}\n"), table


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", [ErrorForm.DIGITS, ErrorForm.NO_CODE, ErrorForm.FLAT])
@served(dp_mode=DpMode.PORTS)
async def test_a_rank_that_is_busy_within_an_answer_of_200_is_left_for_another_one(
    site: Site, form: ErrorForm, stream: bool
) -> None:
    busy: dict[str, Any] = {"errors_in_200": True, "error_form": form, "status_429": 1.0}
    site.fleet.faults.set("decode/0", **busy)
    body = {"model": "tiny", "prompt": "t1 t2", "max_tokens": 4, "stream": stream}
    answers = [await site.post("/v1/completions", body) for _ in range(4)]
    assert [one.status for one in answers] == [200] * 4
    assert all(one.done or one.json["usage"]["completion_tokens"] for one in answers)
    site.fleet.faults.set("decode/1", **busy)
    refused = await site.post("/v1/completions", body)
    assert (refused.status, refused.header(b"retry-after")) == (429, b"1")
    rows = (await site.admin("/admin/instances")).json["instances"]
    assert {one["status"] for one in rows} == {"up"}


@pytest.mark.parametrize("told", [None, b"7"])
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/embeddings"])
@served()
async def test_who_is_to_come_again_is_told_when(
    site: Site, path: str, status: int, told: bytes | None
) -> None:
    def busy(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        headers = [(b"content-type", b"application/json")]
        headers += [] if told is None else [(b"retry-after", told)]
        error = {"message": "busy", "type": "RateLimitError", "param": None, "code": status}
        reply.send(status, headers, json.dumps({"error": error}).encode())

    site.handlers[path.encode()] = busy
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "prompt": "a", "input": "a"}
    body["messages"] = [{"role": "user", "content": "a"}]
    answer = await site.post(path, body)
    assert (answer.status, answer.header(b"retry-after")) == (status, told or b"1")


CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "t1 t2 t3"}]}


@pytest.mark.parametrize("after_pull", [AfterPull.ERROR, AfterPull.RESET])
@pytest.mark.parametrize("connector", ["nixl", "mooncake", "mooncake-layerwise"])
@pytest.mark.parametrize(
    "flags", [{}, {"resume": "exact"}, {"first_token": "prefill", "resume": "valid"}]
)
@served("connector", "flags")
async def test_a_chat_whose_role_was_told_goes_elsewhere_as_long_as_it_has_no_token(
    site: Site, after_pull: AfterPull, connector: str, flags: dict[str, object]
) -> None:
    """The role is named before vLLM tells that the KV cache could not be pulled."""
    values = CHAT | {"max_tokens": 8, "stream": True, "seed": 7}
    port = site.fleet.engine("decode/1").port
    right = await site.send("/v1/chat/completions", values, port=port).end()
    site.fleet.faults.set("decode/0", after_pull=after_pull)
    # One of them goes to that rank.
    both = [site.send("/v1/chat/completions", values) for _ in range(2)]
    for answer in [await one.end() for one in both]:
        assert (answer.status, answer.done) == (200, True)
        assert told(answer.body) == told(right.body)
    records = await site.ended(2)
    assert {record.outcome for record in records} == {Outcome.OK}
    assert any(record.retries or record.resumes for record in records)


def told(body: bytes) -> list[bytes]:
    """Return the events of a stream, without what differs between two, in one order for all choices."""
    return sorted(
        re.sub(rb'"(id|created|system_fingerprint)":("[^"]*"|\d+)', b"", body).split(b"\n\n")
    )


@served()
async def test_a_role_reaches_its_client_soon_though_nothing_follows(site: Site) -> None:
    """A parser of tools, for example, tells nothing before an argument is complete."""
    replies: list[Reply] = []

    def names_the_role(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        del engine, request
        reply.start(200, [(b"content-type", b"text/event-stream")])
        reply.write(OPENING)
        replies.append(reply)

    site.rank_handlers[b"/v1/chat/completions"] = names_the_role
    answer = site.send("/v1/chat/completions", CHAT | {"max_tokens": 8, "stream": True})
    await site.until(lambda: bool(replies))
    begun_s = site.loop.time()
    await answer.until_events(1)
    assert site.loop.time() - begun_s < 0.5
    assert answer.body == OPENING
    replies[0].write(LAST + DONE)
    replies[0].end()
    assert (await answer.end()).body == OPENING + LAST + DONE
