"""One request's life: its phases, each rule about failures, deadlines, and a client that may leave."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.live.request.session_site import (
    DONE,
    KV,
    LAST,
    Sent,
    Site,
    prefill_answer,
    token,
)

from balanceroute.proxy.core import events
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.live.engines.engine_url import Fault
from balanceroute.proxy.live.engines.instances import Role, Status, Target
from balanceroute.proxy.live.request.failures import RULES, Blame, Next, What
from balanceroute.proxy.live.request.phases import Phase
from balanceroute.proxy.live.telemetry.record import Leg, Outcome
from balanceroute.proxy.wire.messages import WireFault

NUMBER = events.RequestId(3)
WHOLE = b'{"choices":[{"index":0,"text":"a"}],"usage":{"prompt_tokens":7,"completion_tokens":5}}'
ERROR = b'{"error":{"message":"no","type":"x"}}'


def kinds(site: Site) -> list[str]:
    return [type(event).__name__ for event in site.fed]


# The way of a request that nothing happens to.


def test_a_streamed_request_goes_through_its_phases_and_leaves_nothing() -> None:
    site = Site()
    session, record = site.session, site.session.record
    assert site.is_in(Phase.QUEUED)
    probe = site.prefill()
    assert site.is_in(Phase.PREFILLING)
    assert probe.values["kv_transfer_params"]["do_remote_decode"] is True
    assert (probe.values["max_tokens"], probe.values["stream"]) == (1, False)
    probe.answer(200, prefill_answer())
    assert site.is_in(Phase.POOLED)
    assert site.fed == [events.PrefillDone(NUMBER, 7, 130_000_000_000, cached_tokens=4)]
    site.now_s += 2.0
    leg = site.decode(1)
    assert site.is_in(Phase.DECODING)
    assert session.work.pair == (site.prefillers[0], site.ranks[1])
    assert leg.values["kv_transfer_params"] == KV
    assert leg.headers == b"x-request-id: r\r\nx-data-parallel-rank: 1\r\n"
    leg.begin(token("x"))
    assert site.is_in(Phase.STREAMING)
    assert site.session.work.pair is None
    assert (session.rounds, session.emitted_tokens) == (1, 1)
    assert site.client.released
    leg.more(token("y"), LAST, DONE)
    leg.end()
    assert site.is_in(Phase.ENDED)
    assert site.client.body == token("x") + token("y") + LAST + DONE
    assert (site.client.status, site.client.over) == (200, "ended")
    assert kinds(site) == ["PrefillDone", "DecodeStarted", "RequestFinished"]
    assert site.praised == ["p0", "d1"]
    assert site.pulls == [("p0", "d1", None)]
    assert (record.outcome, record.status, record.output_tokens) == (Outcome.OK, 200, 3)
    assert (record.prompt_tokens, record.cached_tokens) == (7, 4)
    assert (record.prefiller, record.rank, record.pool_wait_ns) == ("p0", "d1", 2_000_000_000)
    assert site.ended_requests == 1
    assert site.at_rest


def test_an_answer_that_is_not_streamed_is_passed_on_as_a_whole() -> None:
    site = Site(stream=False)
    site.to_rank().answer(200, WHOLE)
    assert (site.client.status, site.client.body, site.client.over) == (200, WHOLE, "sent")
    assert kinds(site) == ["PrefillDone", "RequestFinished"]
    assert site.session.record.output_tokens == 5
    assert site.ended_requests == 1
    assert site.at_rest


def test_a_request_that_one_engine_does_whole_goes_to_the_pool_without_a_prefill() -> None:
    site = Site(members={"echo": True})
    assert site.is_in(Phase.POOLED)
    leg = site.decode()
    assert "kv_transfer_params" not in leg.values
    assert site.session.work.pair is None
    leg.stream(LAST, DONE)
    assert site.session.record.outcome is Outcome.OK
    assert site.pulls == []


def test_a_prefiller_may_do_the_whole_request() -> None:
    site = Site(members={"echo": True}, direct="prefill")
    leg = site.prefill()
    assert site.is_in(Phase.DECODING)
    assert leg.values["max_tokens"] == 9
    leg.begin(token("x"))
    assert site.is_in(Phase.STREAMING)
    leg.more(LAST, DONE)
    leg.end()
    assert kinds(site) == ["FirstToken", "RequestFinished"]  # No rank has it: nothing starts there.
    assert site.session.record.outcome is Outcome.OK


def test_a_prompt_that_ends_at_once_is_answered_by_its_prefill() -> None:
    site = Site()
    site.prefill().answer(200, prefill_answer(None, finish_reason="stop"))
    assert kinds(site) == ["FirstToken", "RequestFinished"]
    assert site.client.over == "ended"
    assert b'"text":"a"' in site.client.body.replace(b": ", b":")
    assert (site.session.record.outcome, site.session.record.output_tokens) == (Outcome.OK, 1)


@pytest.mark.parametrize(
    ("direct", "told"), [("decode", "PrefillDone"), ("prefill", "PrefillLost")]
)
def test_a_prefill_that_left_no_kv_cache_is_followed_by_an_engine_that_does_it_whole(
    direct: str, told: str
) -> None:
    site = Site(direct=direct, on_missing_kv="recompute")
    site.prefill().answer(200, prefill_answer(None))
    assert kinds(site) == [told]
    leg = site.decode() if direct == "decode" else site.prefill(1)
    assert "kv_transfer_params" not in leg.values
    leg.stream(token("x"), LAST, DONE)
    assert site.session.record.outcome is Outcome.OK
    assert site.pulls == []


def test_what_the_scheduler_answers_at_once_finds_the_session_where_it_will_be() -> None:
    """Whatever it decides comes from within the event: the next leg, on the same session."""
    site = Site()
    site.replies[events.PrefillDone] = site.decode
    site.replies[events.PrefillLost] = lambda: site.prefill(1)
    site.prefill().answer(500, b"")
    site.back_off()
    assert site.is_in(Phase.PREFILLING)
    site.last.answer(200, prefill_answer())
    assert site.is_in(Phase.DECODING)
    site.last.stream(LAST, DONE)
    assert [one.engine for one in site.sent] == ["p0", "p1", "d0"]
    assert site.session.record.outcome is Outcome.OK


@pytest.mark.parametrize("begin", [Site.prefill, Site.decode])
def test_a_leg_out_of_turn_is_an_error_and_sends_nothing(begin: Callable[[Site], Sent]) -> None:
    site = Site()
    site.prefill()
    with pytest.raises(LifecycleError, match="request 3: PREFILLING to"):
        begin(site)
    assert len(site.sent) == 1


# Failures: what each rule says is what is done.


def abort(site: Site, sent: Sent) -> None:
    if site.is_in(Phase.PREFILLING):
        sent.answer(200, prefill_answer(None, finish_reason="abort"))
    else:
        sent.begin(token("", finish_reason="abort"))


FAIL: dict[What, Callable[[Site, Sent], None]] = {
    What.REFUSED: lambda _, sent: sent.answer(400, ERROR),
    What.NO_ROUTE: lambda _, sent: sent.answer(404, b'{"detail":"Not Found"}'),
    What.BUSY: lambda _, sent: sent.answer(503, ERROR),
    What.UNAVAILABLE: lambda _, sent: sent.answer(503, b"upstream"),
    What.SERVER_ERROR: lambda _, sent: sent.answer(500, ERROR),
    What.NO_ANSWER: lambda _, sent: sent.answer(302, b""),
    What.UNREADABLE: lambda _, sent: sent.answer(200, b"<html>"),
    What.NO_KV: lambda _, sent: sent.answer(200, prefill_answer(None)),
    What.ERROR_EVENT: lambda _, sent: sent.begin(b'data: {"error":{"code":500}}\n\n'),
    What.ABORTED: abort,
    What.NOT_SENT: lambda _, sent: sent.break_off(sent=False),
    What.TOO_LATE: lambda _, sent: sent.break_off(WireFault.TOO_LATE, sent=False),
    What.STALE: lambda _, sent: sent.break_off(WireFault.STALE),
    What.BROKEN: lambda _, sent: sent.break_off(),
    What.TIMED_OUT: lambda site, _: site.wait(1e6),
    What.NO_PREFILL: lambda site, _: no_prefill(site),
}


def no_prefill(site: Site) -> None:
    (hand_off,) = site.context.hand_offs.values()
    hand_off({})
    while site.last.engine.startswith("p") and not site.last.done:
        site.last.answer(503, ERROR)


def on_leg(leg: Leg, what: What, **flags: Any) -> tuple[Site, Sent]:
    """Return a site with a request on a leg, and that leg."""
    if leg is Leg.PREFILL:
        site = Site(on_missing_kv="fail", **flags)
        return site, site.prefill()
    if leg is Leg.DIRECT:
        site = Site(members={"echo": True}, direct="prefill", **flags)
        return site, site.prefill()
    if what is What.NO_PREFILL:
        site = Site(connector="mooncake-layerwise", **flags)
        return site, site.decode()
    site = Site(**flags)
    return site, site.to_rank()


@pytest.mark.parametrize(("leg", "what"), RULES)
def test_a_failed_leg_goes_on_as_its_rule_says(leg: Leg, what: What) -> None:
    site, sent = on_leg(leg, what)
    rule = RULES[leg, what]
    told = len(site.fed)
    FAIL[what](site, sent)
    assert site.in_flight == []
    blamed = [("p0" if leg is not Leg.DECODE else "d0", site.blamed[0][1])] if site.blamed else []
    assert site.blamed == blamed
    assert bool(site.blamed) == (rule.blame is Blame.ENGINE)
    assert bool(site.pulls) == (rule.blame is Blame.PULL)
    assert site.engines[sent.engine].closed_idle == rule.close_idle
    if rule.then is Next.RELAY:
        assert (site.client.status, site.client.body) == (400, ERROR)
        assert kinds(site)[told:] == ["RequestFailed"]
        assert site.session.record.outcome is Outcome.CLIENT_ERROR
        return
    if what not in (What.STALE, What.NO_ROUTE, What.TOO_LATE):
        assert site.fed[told:] == []  # Until the backoff is over it is where it was.
        site.back_off()
    slow = what is What.TIMED_OUT
    lost = events.PrefillLost(NUMBER, elsewhere=rule.then is not Next.NEW_KV, decode=True)
    others = events.PrefillLost(NUMBER, elsewhere=True, same_rank=not slow)
    expected: dict[Next, events.Event] = {
        Next.OTHER_PREFILLER: events.PrefillLost(NUMBER, elsewhere=True, decode=leg is Leg.PREFILL),
        Next.OTHER_RANK: events.DecodeLost(NUMBER),
        Next.NEW_KV: lost,
        Next.NEW_KV_ELSEWHERE: others,
    }
    if what is What.NO_PREFILL:  # There is no prefill to repeat before the next rank calls for it.
        expected[Next.NEW_KV] = events.DecodeLost(NUMBER)
    assert site.fed[told:] == [expected[rule.then]]


def test_a_second_rank_gets_the_same_kv_cache_and_a_third_a_new_one() -> None:
    site = Site()
    site.to_rank().break_off(sent=False)
    site.back_off()
    leg = site.decode(1)
    assert leg.values["kv_transfer_params"] == KV
    leg.break_off(sent=False)
    site.back_off()
    assert kinds(site) == ["PrefillDone", "DecodeLost", "PrefillLost"]
    assert site.is_in(Phase.QUEUED)


def test_a_request_under_which_two_ranks_died_goes_to_no_third() -> None:
    site = Site()
    site.to_rank().break_off()
    site.back_off()
    site.to_rank().break_off()
    assert site.client.status == 502
    assert kinds(site)[-1] == "RequestFailed"


@pytest.mark.parametrize(("attempts", "budget"), [(1, 100), (3, 0)])
@pytest.mark.parametrize(
    ("what", "status"), [(What.BROKEN, 502), (What.TIMED_OUT, 504), (What.BUSY, 503)]
)
def test_without_an_attempt_or_budget_left_the_client_is_told(
    attempts: int, budget: int, what: What, status: int
) -> None:
    site = Site(retry_attempts=attempts, budget=budget)
    FAIL[what](site, site.prefill())
    assert site.client.status == status
    assert kinds(site) == ["RequestFailed"]
    assert site.session.record.outcome is Outcome.UPSTREAM_ERROR
    assert site.at_rest


def test_a_stream_that_breaks_off_ends_with_an_error_event_and_a_cut_body() -> None:
    site = Site()
    leg = site.to_rank()
    leg.begin(token("x"))
    leg.break_off()
    assert site.client.body.startswith(token("x"))
    assert json.loads(site.client.body.split(b"data: ")[-1])["error"]["code"] == 502
    assert site.client.over == "aborted"
    assert kinds(site)[-1] == "RequestFailed"
    assert site.session.record.output_tokens == 1


def ends_late(site: Site) -> "Callable[[], None]":
    leg = site.to_rank()
    leg.begin(token("x"), LAST)
    return leg.break_off


def stands_still(site: Site) -> "Callable[[], None]":
    ends_late(site)
    site.now_s += site.legs.idle_stream_timeout_s + 1
    return lambda: site.session.check_deadline(site.now_s)


def is_lost_with_its_rank(site: Site) -> "Callable[[], None]":
    ends_late(site)
    site.ranks[0].status = Status.QUARANTINED
    site.now_s += 2.0
    return lambda: site.session.check_deadline(site.now_s)


def loses_its_rank(site: Site) -> "Callable[[], None]":
    ends_late(site)
    return lambda: site.session.instance_removed(site.ranks[0].target)


@pytest.mark.parametrize(
    ("how", "blamed"),
    [
        (ends_late, Fault.RESET),
        (stands_still, Fault.TIMEOUT),
        (is_lost_with_its_rank, Fault.TIMEOUT),
        (loses_its_rank, None),
    ],
)
def test_a_stream_that_breaks_off_behind_its_last_token_ends_as_it_should(
    how: "Callable[[Site], Callable[[], None]]", blamed: Fault | None
) -> None:
    site = Site()
    act = how(site)
    act()
    assert site.client.body == token("x") + LAST + DONE
    assert site.client.over == "ended"
    record = site.session.record
    assert (record.outcome, record.output_tokens, record.retries) == (Outcome.OK, 2, 0)
    assert kinds(site)[-1] == "RequestFinished"
    assert [fault for _, fault in site.blamed] == ([] if blamed is None else [blamed])
    assert site.at_rest


def test_an_error_that_the_engine_reports_in_a_stream_ends_it_in_order() -> None:
    site = Site()
    site.to_rank().stream(token("x"), b'data: {"error":{"message":"out of memory"}}\n\n')
    record = site.session.record
    assert site.client.over == "ended"
    assert record.outcome is Outcome.UPSTREAM_ERROR
    assert record.reason == "the engine reported: out of memory"
    assert kinds(site)[-1] == "RequestFailed"


def test_a_stream_without_an_event_is_no_answer() -> None:
    site = Site()
    site.to_rank().stream()
    assert site.is_in(Phase.BACKOFF)


# Deadlines.


def test_a_leg_has_until_its_deadline_and_no_longer() -> None:
    site = Site(first_token_timeout_s=60.0, prefill_timeout_s=300.0)
    probe = site.prefill()
    site.wait(300.0)
    assert site.is_in(Phase.PREFILLING)
    probe.answer(200, prefill_answer())
    leg = site.decode()
    site.wait(60.0)
    assert site.is_in(Phase.DECODING)
    site.wait(0.1)
    assert site.is_in(Phase.BACKOFF)
    assert leg.aborted
    assert site.pulls == [("p0", "d0", Fault.TIMEOUT)]


def test_an_engine_that_computes_the_prompt_has_the_time_for_that_too() -> None:
    site = Site(members={"echo": True}, first_token_timeout_s=60.0, prefill_timeout_s=300.0)
    site.decode()
    site.wait(360.0)
    assert site.is_in(Phase.DECODING)
    site.wait(0.1)
    assert site.is_in(Phase.BACKOFF)


def test_a_stream_may_stand_still_for_a_while_and_longer_while_the_client_does_not_read() -> None:
    site = Site(idle_stream_timeout_s=300.0)
    leg = site.to_rank()
    leg.begin(token("x"))
    assert site.client.on_pause is not None
    assert site.client.on_resume is not None
    site.client.on_pause()
    assert [one.paused for one in site.sent] == [False, True]
    site.wait(1000.0)
    site.client.on_resume()
    assert [one.paused for one in site.sent] == [False, False]
    site.wait(300.0)
    assert site.is_in(Phase.STREAMING)
    site.wait(0.1)
    assert site.session.record.reason == "the stream stood still for 300 s"
    assert site.client.over == "aborted"


# The client leaves.


def queued(_: Site) -> None:
    """Leave it there."""


def prefilling(site: Site) -> None:
    site.prefill()


def pooled(site: Site) -> None:
    site.prefill().answer(200, prefill_answer())


def decoding(site: Site) -> None:
    site.to_rank()


def streaming(site: Site) -> None:
    site.to_rank().begin(token("x"), token("y"))


def backing_off(site: Site) -> None:
    site.to_rank().break_off()


@pytest.mark.parametrize(
    ("arrange", "phase"),
    [
        (queued, Phase.QUEUED),
        (prefilling, Phase.PREFILLING),
        (pooled, Phase.POOLED),
        (decoding, Phase.DECODING),
        (streaming, Phase.STREAMING),
        (backing_off, Phase.BACKOFF),
    ],
)
def test_a_client_may_leave_in_any_phase(arrange: Callable[[Site], None], phase: Phase) -> None:
    site = Site()
    arrange(site)
    assert site.is_in(phase)
    site.replies[events.RequestCancelled] = lambda: site.session.work.close()  # noqa: PLW0108 - what it holds then.
    site.client.leave()
    assert kinds(site)[-1] == "RequestCancelled"
    assert site.session.record.outcome is Outcome.CANCELLED
    assert site.session.record.output_tokens == (2 if phase is Phase.STREAMING else 0)
    assert site.at_rest
    assert site.client.on_closed is None
    site.session.client_left()
    site.session.check_deadline(1e9)
    assert site.ended_requests == 1


def test_a_client_that_leaves_with_the_whole_answer_has_been_served() -> None:
    site = Site()
    leg = site.to_rank()
    leg.begin(token("x"), LAST)
    site.client.leave()
    assert kinds(site)[-1] == "RequestFinished"
    assert site.session.record.outcome is Outcome.OK
    assert leg.aborted


@pytest.mark.parametrize("arrange", [queued, prefilling, pooled, decoding, streaming, backing_off])
def test_the_host_may_end_a_request_in_any_phase(arrange: Callable[[Site], None]) -> None:
    for end in ("give_up", "crash"):
        site = Site()
        arrange(site)
        if end == "give_up":
            site.session.give_up("the proxy is shutting down")
            assert kinds(site)[-1] == "RequestFailed"
        else:
            site.session.crash()
            assert site.session.record.outcome is Outcome.INTERNAL_ERROR
        if arrange is streaming:
            assert site.client.over == "aborted"
        else:
            assert site.client.status == (503 if end == "give_up" else 500)
        assert site.at_rest
        assert site.ended_requests == 1


def test_a_request_that_waited_too_long_is_told_when_to_come_back() -> None:
    site = Site()
    pooled(site)
    told = len(site.fed)
    site.session.expire("it waited")
    assert site.client.status == 503
    assert (b"retry-after", b"1") in site.client.headers
    assert site.fed[told:] == []  # The scheduler said so.
    assert site.session.record.outcome is Outcome.EXPIRED


# Engines and KV caches that are lost.

P0, P1, D0 = (
    Target(role, url)
    for role, url in ((Role.PREFILL, "p0"), (Role.PREFILL, "p1"), (Role.DECODE, "d0"))
)


@pytest.mark.parametrize(
    ("arrange", "on"),
    [
        (queued, set[Target]()),
        (prefilling, {P0}),
        (pooled, {P0}),
        (decoding, {P0, D0}),
        (streaming, {D0}),
        (backing_off, {P0, D0}),
    ],
)
def test_a_request_is_on_who_works_for_it_and_on_who_has_its_kv_cache(
    arrange: Callable[[Site], None], on: set[Target]
) -> None:
    site = Site()
    arrange(site)
    assert {target for target in (P0, P1, D0) if target in site.session.targets} == on


@pytest.mark.parametrize(
    ("arrange", "target", "lost"),
    [
        (prefilling, P0, events.PrefillLost(NUMBER, elsewhere=True)),
        (pooled, P0, events.PrefillLost(NUMBER, elsewhere=True)),
        (decoding, P0, events.PrefillLost(NUMBER)),
        (decoding, D0, events.PrefillLost(NUMBER)),
        (backing_off, D0, events.PrefillLost(NUMBER)),
    ],
)
def test_a_request_leaves_an_instance_that_is_removed(
    arrange: Callable[[Site], None], target: Target, lost: events.Event
) -> None:
    site = Site()
    arrange(site)
    site.session.instance_removed(target)
    assert site.fed[-1] == lost
    assert site.at_rest
    assert site.session.record.retries == (2 if arrange is backing_off else 1)


def test_a_stream_ends_with_the_instance_that_is_removed() -> None:
    site = Site()
    streaming(site)
    site.session.instance_removed(D0)
    assert site.session.record.reason == "the engine was removed"
    assert site.client.over == "aborted"


@pytest.mark.parametrize(
    ("arrange", "target", "leaves"),
    [
        (prefilling, P0, True),
        (decoding, D0, True),
        (decoding, P0, False),  # The rank finds out.
        (pooled, P0, False),
        (streaming, D0, False),
        (backing_off, D0, False),
    ],
)
def test_a_request_leaves_an_engine_that_is_silent_unless_that_answers_it(
    arrange: Callable[[Site], None], target: Target, leaves: bool
) -> None:
    site = Site()
    arrange(site)
    phase, budget = site.session.phase, site.budget
    site.session.engine_lost(target)
    assert site.is_in(Phase.QUEUED if leaves else phase)
    assert site.budget == budget - leaves


def test_a_kv_cache_that_went_with_its_engine_is_computed_again() -> None:
    site = Site()
    pooled(site)
    site.session.drop_lost_kv()
    assert site.is_in(Phase.POOLED)
    site.prefillers[0].lost_kv += 1
    site.session.drop_lost_kv()
    assert site.fed[-1] == events.PrefillLost(NUMBER)
    site.session.lease_ended(cheaper=False)
    assert site.abandoned == ["lost"]


def test_a_request_without_a_kv_cache_has_none_to_lose() -> None:
    site = Site()
    site.prefill().answer(200, prefill_answer(None))
    site.prefillers[0].lost_kv += 1
    site.session.drop_lost_kv()
    assert site.is_in(Phase.POOLED)


@pytest.mark.parametrize(
    ("stalled_since_s", "begins_s"), [(None, 104.0), (103.0, 103.0), (50.0, 100.0)]
)
def test_a_lease_began_when_its_answer_may_have_come_but_not_before_it_was_asked_for(
    stalled_since_s: float | None, begins_s: float
) -> None:
    site = Site()
    probe = site.prefill()
    site.now_s += 4.0
    site.stalled_since_s = stalled_since_s
    probe.answer(200, prefill_answer())
    assert site.fed == [
        events.PrefillDone(NUMBER, 7, round((begins_s + 30.0) * 1e9), cached_tokens=4)
    ]


@pytest.mark.parametrize(("flags", "expires_s"), [({}, 27.5), ({"lease_margin_s": 20.0}, 22.5)])
def test_a_rank_is_asked_in_the_first_half_of_the_margin_at_the_latest(
    flags: dict[str, Any], expires_s: float
) -> None:
    site = Site(**flags)
    asked_s = site.now_s
    assert site.to_rank().expires_s == asked_s + expires_s


def test_a_lease_began_earlier_by_the_loops_clock_if_the_machine_was_suspended() -> None:
    site = Site()
    probe = site.prefill()
    asked_s = site.now_s
    site.stalled_since_s = asked_s
    site.now_s += 4.0
    site.suspended_s += 10.0
    probe.answer(200, prefill_answer())
    assert site.fed == [events.PrefillDone(NUMBER, 7, round(120.0 * 1e9), cached_tokens=4)]
    assert site.decode().expires_s == asked_s + 27.5  # By the clock that counts the suspension.


def test_a_kv_cache_that_is_lost_during_a_backoff_goes_to_no_other_rank() -> None:
    site = Site()
    site.to_rank().break_off(sent=False)
    site.prefillers[0].lost_kv += 1
    site.back_off()
    assert site.fed[-1] == events.PrefillLost(NUMBER)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_lease_that_ends_on_the_way_to_a_rank_costs_nothing(*, stream: bool) -> None:
    site = Site(retry_attempts=1, budget=0, stream=stream)
    for lapses in (1, 2):
        site.to_rank().break_off(WireFault.TOO_LATE, sent=False)
        assert site.fed[-1] == events.PrefillLost(NUMBER)
        record = site.session.record
        assert (record.lease_lapses, record.cheaper_lapses, record.retries) == (lapses, 0, 0)
        assert site.abandoned == ["lapsed"] * lapses
    assert (site.budget, site.blamed) == (0, [])
    # No clock has it tried for ever.
    site.to_rank().break_off(WireFault.TOO_LATE, sent=False)
    assert (site.client.status, site.session.record.retries) == (502, 0)
    assert site.at_rest


@pytest.mark.parametrize(("cheaper", "why"), [(True, "cheaper"), (False, "lapsed")])
def test_a_lease_that_ends_sends_the_request_back_to_the_prefillers(
    *, cheaper: bool, why: str
) -> None:
    site = Site()
    pooled(site)
    site.session.lease_ended(cheaper=cheaper)
    assert site.abandoned == [why]
    assert site.is_in(Phase.QUEUED)
    record = site.session.record
    assert (record.lease_lapses, record.cheaper_lapses) == (1, int(cheaper))
    assert site.prefill(1).engine == "p1"


# A rank that calls for its prefill.


def layerwise() -> tuple[Site, Sent]:
    site = Site(connector="mooncake-layerwise")
    assert site.is_in(Phase.POOLED)
    return site, site.decode()


def test_a_rank_that_comes_first_calls_for_its_prefill() -> None:
    site, leg = layerwise()
    assert leg.values["kv_transfer_params"]["metaserver"] == "http://proxy/v1/metaserver/1234"
    site.context.hand_offs["1234"]({"do_remote_decode": True})
    probe = site.last
    assert probe.engine == "p0"
    assert P0 in site.session.targets
    probe.answer(200, prefill_answer(None))
    assert P0 not in site.session.targets
    leg.stream(token("x"), LAST, DONE)
    record = site.session.record
    assert (record.prefiller, record.prompt_tokens, record.cached_tokens) == ("p0", 7, 4)
    assert record.outcome is Outcome.OK
    assert site.at_rest


def test_a_prefill_that_a_rank_called_for_moves_off_an_instance_that_goes() -> None:
    site, leg = layerwise()
    site.context.hand_offs["1234"]({})
    site.session.engine_lost(P0)
    assert [one.engine for one in site.in_flight] == ["d0", "p1"]
    site.session.instance_removed(P1)
    assert [one.engine for one in site.in_flight] == ["d0", "p0"]
    assert not leg.aborted
    site.client.leave()
    assert site.at_rest


def test_a_prefill_that_never_comes_is_the_prefillers_fault_and_another_is_asked_next() -> None:
    site, _ = layerwise()
    site.context.hand_offs["1234"]({})
    site.wait(61.0)
    assert site.blamed == [("p0", Fault.TIMEOUT)]
    assert site.at_rest is False  # The backoff.
    site.back_off()
    assert site.fed == [events.DecodeLost(NUMBER)]
    site.decode(1)
    site.context.hand_offs["1234"]({})
    assert site.last.engine == "p1"


# The host's answers may come late.


def silent(site: Site) -> None:
    site.session.engine_lost(D0)


def broken(site: Site) -> None:
    site.last.break_off()


def test_a_retry_takes_from_the_retry_budget() -> None:
    site = Site(budget=1)
    site.to_rank()
    broken(site)
    assert (len(site.timers), site.session.record.retries, site.budget) == (1, 1, 0)
    site.back_off()
    assert site.fed[-1] == events.PrefillLost(NUMBER)


def test_a_budget_that_is_used_up_ends_a_request() -> None:
    site = Site(budget=0)
    site.prefill().answer(500, ERROR)
    assert (site.client.status, site.client.body) == (500, ERROR)
    assert site.timers == []
    assert site.ended_requests == 1


def test_a_lease_begins_with_the_head_of_the_answer_however_slow_the_rest_is() -> None:
    site = Site()
    probe = site.prefill()
    began_s = site.now_s
    probe.handler.on_head(200, [(b"content-type", b"application/json")])
    site.now_s += 4.0
    probe.handler.on_data(prefill_answer())
    probe.end()
    assert site.fed == [
        events.PrefillDone(NUMBER, 7, round((began_s + 30.0) * 1e9), cached_tokens=4)
    ]
