"""Orders of administrators while requests run: what they promise is kept, and the judge can tell."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.support.chaos.clients import Visit
from tests.support.chaos.expectation import Expectation
from tests.support.chaos.groups import draw_groups
from tests.support.chaos.orders import ADMIN, OF_ENGINES, Order, OrderKind
from tests.support.chaos.plan import MODEL, ChaosPlan, Weather, draw_plan
from tests.support.chaos.requests import RequestMix, draw_request
from tests.support.chaos.trial import TrialReport, run_plan
from tests.support.chaos.world import WorldSettings
from tests.test_support.chaos.test_fault_kinds import ENGINES, FLAGS, roles

from balanceroute.proxy.core.scheduler import Intake, Scheduler
from balanceroute.proxy.live.control import pausing
from balanceroute.proxy.live.control.admin import Admin
from balanceroute.proxy.live.control.roster import Roster
from balanceroute.proxy.live.engines.instances import Instances, Role, Status, Target
from balanceroute.proxy.live.scheduling.decisions import OpenInstances
from balanceroute.proxy.wire.messages import Response

REQUESTS = 40
SPAN_S = 5.0


def order(kind: OrderKind, role: Role = Role.DECODE, *, at_s: float = 1.5) -> Order:
    return Order(kind, role, 0, at_s, at_s + 2.5, seed=1)


def run_with(*orders: Order, **flags: object) -> TrialReport:
    """Send drawn requests while orders are given, and nothing else is wrong."""
    rng = random.Random("orders")
    mix = RequestMix(MODEL, big=0.0, odd=0.0, max_tokens=60)
    visits = [
        Visit(rng.uniform(0.2, SPAN_S), (draw_request(rng, number, mix),))
        for number in range(REQUESTS)
    ]
    plan = ChaosPlan(
        seed=0,
        weather=Weather.FAULTS,
        world=WorldSettings(
            replace(ENGINES, mean_output_tokens=60.0, step_base_ns=30_000_000),
            {**FLAGS, **ADMIN, **flags},
        ),
        visits=tuple(sorted(visits, key=lambda visit: visit.start_s)),
        injections=(),
        storm_s=None,
        calm_s=SPAN_S + 1.0,
        shutdown_s=None,
        orders=orders,
    )
    return run_plan(plan)


@roles
@pytest.mark.parametrize("kind", [kind for kind in OrderKind if kind in OF_ENGINES])
def test_orders_about_one_engine_are_kept(kind: OrderKind, roles: Sequence[Role]) -> None:
    report = run_with(*(order(kind, role) for role in roles))
    assert not report.violations
    assert {k: n for k, n in report.faults.items() if not k.startswith("proxy: ")} == {
        f"admin: {kind.value}": len(roles)
    }
    ends = kind in (OrderKind.REMOVE_BUSY, OrderKind.OTHER_ROLE, OrderKind.CONTRADICT)
    assert ends or report.endings == {"exact": REQUESTS}


@pytest.mark.parametrize("kind", [kind for kind in OrderKind if kind not in OF_ENGINES])
def test_orders_about_all_are_kept(kind: OrderKind) -> None:
    report = run_with(order(kind))
    assert not report.violations
    if kind in (OrderKind.PAUSE, OrderKind.SLEEP, OrderKind.ABORT):
        assert report.endings["aborted"]
    elif kind not in (OrderKind.ABORT_SOME, OrderKind.CONTRADICT_PAUSE, OrderKind.SLEEP_WAIT):
        assert report.endings == {"exact": REQUESTS}


def test_the_seeds_have_every_kind() -> None:
    plans = [draw_plan(seed, requests=REQUESTS) for seed in range(60)]
    assert {one.kind for plan in plans for one in plan.orders} == set(OrderKind)
    assert not any(plan.orders for plan in plans if plan.weather is Weather.CALM)
    groups = [draw_groups(seed, requests=REQUESTS).whole.orders for seed in range(40)]
    assert {one.kind for orders in groups for one in orders} == set(OrderKind) - OF_ENGINES


Patch = pytest.MonkeyPatch


def nothing_is_held(patch: Patch) -> None:
    patch.setattr(Intake, "hold", lambda *_, **__: None)


def what_is_held_starts(patch: Patch) -> None:
    start = Scheduler._start_prefills

    def begin(self: Scheduler, now_ns: int) -> Any:
        held, self.intake.held = self.intake.held, False
        try:
            return start(self, now_ns)
        finally:
            self.intake.held = held

    patch.setattr(Scheduler, "_start_prefills", begin)


def nobody_is_aborted(patch: Patch) -> None:
    patch.setattr(pausing, "_end", lambda *_: None)


def a_drain_is_forgotten(patch: Patch) -> None:
    place = Roster._set

    def forget(self: Roster, target: Target, status: Status, word: str) -> None:
        if status is not Status.DRAINING:
            place(self, target, status, word)

    patch.setattr(Roster, "_set", forget)


def health_ends_a_drain(patch: Patch) -> None:
    scraped = Roster.scraped

    def take_back(self: Roster, target: Target, *said: Any) -> None:
        for one in self.instances.of(target):
            one.status = Status.UP
        scraped(self, target, *said)

    patch.setattr(Roster, "scraped", take_back)


def the_scheduler_is_not_told(patch: Patch) -> None:
    update = OpenInstances.update
    patch.setattr(
        OpenInstances,
        "update",
        lambda self, *changed: None if _is_draining(self._instances) else update(self, *changed),
    )


def _is_draining(instances: Instances) -> bool:
    return any(one.status is Status.DRAINING for one in instances.ranks)


def one_is_added_twice(patch: Patch) -> None:
    patch.setattr(Roster, "_take_back", lambda *_: True)


def a_page_fails(patch: Patch) -> None:
    patch.setattr("balanceroute.proxy.live.control.admin._worker", lambda _: 1 / 0)


def an_order_is_not_answered(patch: Patch) -> None:
    patch.setattr(Admin, "_drain", lambda *_: None)


@pytest.mark.parametrize(
    ("plant", "kind", "found"),
    [
        (nothing_is_held, OrderKind.PAUSE_WAIT, "all was said to be paused: True, and is: False"),
        (what_is_held_starts, OrderKind.PAUSE, " began while all was paused"),
        (what_is_held_starts, OrderKind.PAUSE, "work, while all is paused"),
        (nobody_is_aborted, OrderKind.ABORT_SOME, " were aborted, and live"),
        (a_drain_is_forgotten, OrderKind.DRAIN, " was said to be drained, and is ['up']"),
        (health_ends_a_drain, OrderKind.DRAIN, " was said to be drained, and is ['up']"),
        (the_scheduler_is_not_told, OrderKind.DRAIN, ", which is closed"),
        (one_is_added_twice, OrderKind.ADD_AGAIN, "200 though it was present"),
        (a_page_fails, OrderKind.LOOK, "GET /workers None: 500"),
        (an_order_is_not_answered, OrderKind.DRAIN, "/drain got no answer"),
    ],
)
def test_a_broken_promise_is_found(
    plant: Callable[[Patch], None], kind: OrderKind, found: str, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    violations = run_with(order(kind)).violations
    assert any(found in one for one in violations), violations


def test_an_aborted_answer_has_to_be_a_beginning() -> None:
    request = draw_request(random.Random(0), 0, RequestMix(MODEL, big=0.0, odd=0.0))
    values = {"model": MODEL, "prompt": "one"}
    request = replace(request, values=values, path="/v1/completions")

    def body(text: str, reason: str) -> bytes:
        choice = f'{{"index":0,"text":"{text}","finish_reason":"{reason}"}}'
        return f'{{"choices":[{choice}]}}'.encode()

    expected = Expectation(request, Response(200, [], body("one two three", "length")))
    assert not expected.strays_until_aborted(body("one tw", "abort"))
    assert not expected.strays_until_aborted(body("", "abort"))
    assert " belongs" in expected.strays_until_aborted(body("one three", "abort"))
    assert " belongs" in expected.strays_until_aborted(body("one", "length"))
