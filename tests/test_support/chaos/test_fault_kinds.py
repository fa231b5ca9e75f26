"""One kind of fault at a time, on one engine of several: which ones no client may notice."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.extended import USUAL_POLICIES, usually
from tests.support.chaos.clients import Visit
from tests.support.chaos.decision_faults import DecisionFault, InjectedError, Lapse
from tests.support.chaos.faults import Act, Injection
from tests.support.chaos.meddler import HARMLESS, Meddling
from tests.support.chaos.plan import MODEL, ChaosPlan, Weather
from tests.support.chaos.requests import MESSAGES, RequestMix, draw_request
from tests.support.chaos.trial import TrialReport, run_plan
from tests.support.chaos.world import World, WorldSettings
from tests.support.virtual.addresses import Link

from balanceroute.proxy.lab.emulate.faults import (
    ErrorForm,
    MalformedAnswer,
    MalformedScrape,
    MalformedStream,
)
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.request.shared import StallWatch
from balanceroute.proxy.live.scheduling.progress import StepClock

REQUESTS = 40
SPAN_S = 5.0
ENGINES = EmulationSettings(
    prefillers=2,
    ranks=3,
    batch_limit=8,
    step_base_ns=10_000_000,
    prefill_base_ns=5_000_000,
    lease_s=2.0,
    model=MODEL,
    mean_output_tokens=15.0,
)
FLAGS: Mapping[str, object] = {
    "batch": 8,
    "lease_s": 2.0,
    "connect_timeout_s": 1.0,
    "prefill_timeout_s": 3.0,
    "first_token_timeout_s": 3.0,
    "idle_stream_timeout_s": 3.0,
    "answer_timeout_s": 6.0,
    "health_interval_s": 1.0,
    "health_timeout_s": 0.3,
    "scrape_interval_s": 1.0,
    "scrape_timeout_s": 0.3,
}
BOTH = (Role.PREFILL, Role.DECODE)
# What is wrong is so on an engine of each role at once, and in `make test-all` on one alone too.
roles = pytest.mark.parametrize(
    "roles",
    usually({"both"}, [BOTH, *((role,) for role in BOTH)], ids=["both", "prefill", "decode"]),
)


def draw_visits() -> tuple[Visit, ...]:
    rng = random.Random("fault kinds")
    mix = RequestMix(MODEL, big=0.0, odd=0.0)
    visits = (
        Visit(rng.uniform(0.2, SPAN_S), (draw_request(rng, number, mix),))
        for number in range(REQUESTS)
    )
    return tuple(sorted(visits, key=lambda visit: visit.start_s))


VISITS = draw_visits()
STREAMED_MESSAGES = sum(
    request.stream and request.path == MESSAGES for visit in VISITS for request in visit.requests
)


def run_with(
    *injections: Injection,
    connector: str = "nixl",
    engines: EmulationSettings = ENGINES,
    **flags: object,
) -> TrialReport:
    """Send drawn requests while something is wrong, from before the first to after the last."""
    plan = ChaosPlan(
        seed=0,
        weather=Weather.FAULTS,
        world=WorldSettings(replace(engines, connector=connector), {**FLAGS, **flags}),
        visits=VISITS,
        injections=injections,
        storm_s=None,
        calm_s=SPAN_S + 1.0,
        shutdown_s=None,
    )
    report = run_plan(plan)
    assert not report.violations
    return report


def injection(
    role: Role, act: Act, end_s: float = SPAN_S + 0.5, *, engine: int = 0, **what: Any
) -> Injection:
    return Injection("fault", act, role, engine, 0.0, end_s, **what)


def one_each(
    act: Act, name: str, *, at_prefillers: Iterable[Any] = (), at_ranks: Iterable[Any] = ()
) -> list[Injection]:
    """Return a fault of each engine: the first one's of a role is the first of the role's values."""
    return [
        injection(role, act, engine=engine, **{name: value})
        for role, values in zip(BOTH, (at_prefillers, at_ranks), strict=True)
        for engine, value in enumerate(values)
    ]


def shares(values: Sequence[Any]) -> list[tuple[Sequence[Any], Sequence[Any]]]:
    """Return values for two prefillers and three ranks, of several runs: each engine's own, all at both roles."""
    ring = [*values, *values]
    return [(ring[at : at + 2], ring[at + 2 : at + 5]) for at in range(0, len(values), 2)]


def board(role: Role, **changes: Any) -> Injection:
    return injection(role, Act.BOARD, changes=changes)


def assert_nobody_noticed(report: TrialReport) -> None:
    assert report.endings == {"exact": REQUESTS}


def test_without_a_fault_every_answer_is_exact() -> None:
    assert_nobody_noticed(run_with())


@roles
@pytest.mark.parametrize(
    "changes",
    [
        {"refuse": True},
        {"unhealthy": True},
        {"slow_scrape_s": 1.0},
        *({"malformed_scrape": kind} for kind in MalformedScrape if kind.value != "huge"),
    ],
    ids=str,
)
def test_an_engine_that_is_not_fit_is_gone_around(
    roles: Sequence[Role], changes: dict[str, Any]
) -> None:
    assert_nobody_noticed(run_with(*(board(role, **changes) for role in roles)))


@pytest.mark.parametrize(("at_prefillers", "at_ranks"), shares(HARMLESS))
def test_what_http_allows_harms_nobody(
    at_prefillers: Sequence[Meddling], at_ranks: Sequence[Meddling]
) -> None:
    meddlings = one_each(Act.MEDDLE, "meddling", at_prefillers=at_prefillers, at_ranks=at_ranks)
    assert_nobody_noticed(run_with(*meddlings))


@pytest.mark.parametrize("role", BOTH)
def test_engines_that_end_what_is_reused_harm_nobody(role: Role) -> None:
    report = run_with(injection(role, Act.MEDDLE, meddling=Meddling.CLOSE_ON_REUSE))
    assert report.endings.keys() == {"exact"}
    # What a rank may have pulled is computed again; a prefill is sent again.
    assert bool(report.counters["retries"]) == (role is Role.DECODE)


BAD_WIRES = [
    Link(split_bytes=1),
    Link(split_bytes=7),
    Link(coalesce_s=0.1),
    Link(latency_s=0.02, jitter_s=0.1),
    Link(window_bytes=200, latency_s=0.001),
    Link(stall_after_download_bytes=300, stall_s=1.0),
]


@pytest.mark.parametrize(("at_prefillers", "at_ranks"), shares(BAD_WIRES), ids=range(3))
def test_bad_wires_slow_and_change_nothing(
    at_prefillers: Sequence[Link], at_ranks: Sequence[Link]
) -> None:
    links = one_each(Act.LINK, "link", at_prefillers=at_prefillers, at_ranks=at_ranks)
    assert_nobody_noticed(run_with(*links))


@pytest.mark.parametrize(
    "kinds",
    [
        (MalformedStream.CRLF, MalformedStream.CR, MalformedStream.MIXED_ENDS),
        (MalformedStream.COMMENTS, MalformedStream.FIELDS, MalformedStream.BOM),
        (MalformedStream.BYTES, MalformedStream.JOINED),
        (MalformedStream.USAGE_FIRST, MalformedStream.NO_LAST_BLANK),
    ],
)
def test_odd_events_that_are_valid_pass(kinds: Sequence[MalformedStream]) -> None:
    changes = [{"malformed": kind} for kind in kinds]
    assert_nobody_noticed(run_with(*one_each(Act.BOARD, "changes", at_ranks=changes)))


@roles
@pytest.mark.parametrize("form", ErrorForm)
@pytest.mark.parametrize("in_200", [True, False])
def test_a_clients_own_error_costs_one_leg_however_it_is_worded(
    roles: Sequence[Role], form: ErrorForm, *, in_200: bool
) -> None:
    changes: dict[str, Any] = {"error_form": form, "errors_in_200": in_200, "status_400": 0.3}
    report = run_with(*(board(role, **changes) for role in roles))
    assert report.endings.keys() <= {"exact", "status 400"}
    assert report.endings["status 400"]
    # vLLM makes an error in a stream of messages its own fault, in words of its own; not one that it
    # does not know for an error.
    own = in_200 and Role.DECODE in roles and form is not ErrorForm.FLAT
    assert report.counters["retries"] <= (STREAMED_MESSAGES if own else 0)


@pytest.mark.parametrize("first_token", ["decode", "prefill"])
@pytest.mark.parametrize(
    "kind", [MalformedStream.BAD_JSON, MalformedStream.NUL, MalformedStream.NO_DATA]
)
def test_broken_events_are_no_answer(kind: MalformedStream, first_token: str) -> None:
    report = run_with(board(Role.DECODE, malformed=kind), first_token=first_token)
    # Or, as long as nothing has come that made sense, in another try.
    assert report.endings.keys() <= {"exact", "error event", "status 502"}
    assert report.counters["retries"] or report.endings["error event"]


@roles
def test_an_answer_that_trickles_is_waited_for(roles: Sequence[Role]) -> None:
    trickle = {"malformed_answer": MalformedAnswer.TRICKLE, "trickle_s": 1e-4}
    assert_nobody_noticed(run_with(*(board(role, **trickle) for role in roles)))


@pytest.mark.parametrize("kind", [kind for kind in MalformedAnswer if kind.value != "trickle"])
@roles
def test_nonsense_is_never_an_answer(roles: Sequence[Role], kind: MalformedAnswer) -> None:
    report = run_with(*(board(role, malformed_answer=kind) for role in roles))
    assert report.endings.keys() <= {"exact", "status 502"}
    assert report.counters["retries"]


@pytest.mark.parametrize("connector", ["nixl", "mooncake-ascend"])
def test_a_prefill_without_parameters_is_computed_again(connector: str) -> None:
    report = run_with(board(Role.PREFILL, drop_kv_params=1.0), connector=connector)
    assert_nobody_noticed(report)
    assert not report.counters["retries"]


def test_a_prefill_without_parameters_may_count_as_a_failure() -> None:
    report = run_with(board(Role.PREFILL, drop_kv_params=0.3), on_missing_kv="fail")
    assert report.counters["retries"]


def test_an_answer_of_one_token_is_the_prefillers() -> None:
    report = run_with(board(Role.PREFILL, eos_first=1.0))
    assert report.endings.keys() == {"exact", "ended by the prefiller"}
    assert report.endings["ended by the prefiller"] > 5


def test_an_answer_of_one_token_may_break_off() -> None:
    report = run_with(board(Role.PREFILL, eos_first=1.0, reset_after_tokens=1), direct="prefill")
    assert report.endings["ended by the prefiller"]
    assert report.endings["error event"]


@pytest.mark.parametrize("connector", ["mooncake-ascend", "mooncake-layerwise"])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_a_request_that_is_handed_back_goes_on(connector: str, tokens: int) -> None:
    report = run_with(board(Role.DECODE, recomputed_after_tokens=tokens), connector=connector)
    assert report.endings["exact"] > REQUESTS * 0.8
    assert report.endings.keys() <= {"exact", "error event"}
    assert report.counters["recomputes"]


@roles
def test_a_drained_engine_ends_what_it_has(roles: Sequence[Role]) -> None:
    drains = (injection(role, Act.DRAIN, end_s=SPAN_S / 2) for role in roles)
    assert_nobody_noticed(run_with(*drains))


CHANGED_TO = ["jsq", "br-0", "br-h", "br-0-bypass", "random"]


@pytest.mark.parametrize("policy", usually(USUAL_POLICIES, CHANGED_TO))
def test_a_change_of_policy_loses_nothing(policy: str) -> None:
    changes = [
        replace(injection(Role.DECODE, Act.POLICY, policy=name), start_s=SPAN_S * share)
        for name, share in ((policy, 0.3), ("fifo", 0.6))
    ]
    assert_nobody_noticed(run_with(*changes))


@pytest.mark.parametrize("status", [400, 413])
@roles
def test_an_engines_refusal_is_the_clients(roles: Sequence[Role], status: int) -> None:
    report = run_with(*(board(role, **{f"status_{status}": 1.0}) for role in roles))
    assert report.endings.keys() == {"exact", f"status {status}"}
    assert not report.counters["retries"]


@pytest.mark.parametrize("policy", usually({"br-h"}, ["br-h", "br-0", "fifo"]))
@pytest.mark.parametrize("fault", list(DecisionFault), ids=lambda fault: fault.name.lower())
def test_a_decision_that_fails_loses_nothing(fault: DecisionFault, policy: str) -> None:
    lapse = injection(Role.DECODE, Act.DECISION, lapse=Lapse(fault, 0.6, 1))
    # A rank is closed from the first round on, for an answer that names it.
    drain = injection(Role.DECODE, Act.DRAIN)
    report = run_with(lapse, drain, policy=policy, predictor="survival", batch=2)
    assert_nobody_noticed(report)
    assert report.counters["decision faults"]


def test_an_error_that_nobody_injected_is_found_among_those_that_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise InjectedError("policy")

    monkeypatch.setattr(StepClock, "advance", fail)
    lapse = injection(Role.DECODE, Act.DECISION, lapse=Lapse(DecisionFault.RAISES, 0.5, 1))
    with pytest.raises(AssertionError):
        run_with(lapse)


@pytest.mark.parametrize("seconds", [0.4, 2.0, 10.0])
def test_a_proxy_that_stood_still_takes_nothing_for_overdue(seconds: float) -> None:
    begin_s = 2.0
    still = injection(Role.DECODE, Act.STANDSTILL, end_s=begin_s + seconds)
    assert_nobody_noticed(run_with(replace(still, start_s=begin_s)))


@pytest.mark.parametrize("jump_s", [-86_400.0, 3_600.0])
def test_nobody_notices_that_the_wall_clock_jumps(jump_s: float) -> None:
    jump = injection(Role.DECODE, Act.WALL_CLOCK, end_s=SPAN_S / 2, jump_s=jump_s)
    assert_nobody_noticed(run_with(replace(jump, start_s=1.0)))


LONG_LEASES = replace(ENGINES, lease_s=8.0, prefill_base_ns=400_000_000)


def run_with_a_stop() -> TrialReport:
    still = replace(injection(Role.DECODE, Act.STANDSTILL, end_s=13.0), start_s=3.0)
    flags: dict[str, Any] = {"lease_s": 8.0, "lease_margin_s": 1.5, "prefill_timeout_s": 60.0}
    return run_with(still, engines=LONG_LEASES, **flags)


def test_a_lease_that_ended_in_a_standstill_is_not_used() -> None:
    assert_nobody_noticed(run_with_a_stop())


def test_a_lease_that_seems_young_after_a_standstill_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StallWatch, "waiting_since_s", lambda self: self._clock())
    with pytest.raises(AssertionError, match="lease: "):
        run_with_a_stop()


def run_with_a_suspension() -> TrialReport:
    asleep = injection(Role.DECODE, Act.SUSPENSION, end_s=3.0, jump_s=60.0)
    flags: dict[str, Any] = {"lease_s": 8.0, "lease_margin_s": 1.5, "prefill_timeout_s": 60.0}
    return run_with(replace(asleep, start_s=3.0), engines=LONG_LEASES, **flags)


def test_a_lease_that_ended_while_the_machine_was_suspended_is_not_used() -> None:
    assert_nobody_noticed(run_with_a_suspension())


def test_a_lease_by_a_clock_that_stops_in_a_suspension_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make = World._make_environment
    monkeypatch.setattr(
        World,
        "_make_environment",
        lambda self, read: replace(make(self, read), uptime_s=self.loop.time),
    )
    with pytest.raises(AssertionError, match=r"lease: |misread: "):
        run_with_a_suspension()
