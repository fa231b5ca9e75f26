"""The proxy with several groups under faults, and while groups are drained, removed and added."""

from collections.abc import Callable

import pytest
from tests.extended import usually
from tests.support.chaos.groups import GroupAct, draw_groups, run_seed_of_groups

from balanceroute.proxy.live.frontend.aliases import ModelAttempt
from balanceroute.proxy.live.frontend.groups import Groups

REQUESTS = 40


@pytest.mark.parametrize("seed", usually(range(3), range(5)))
def test_a_seed_violates_nothing(seed: int) -> None:
    report = run_seed_of_groups(seed, requests=REQUESTS)
    assert not report.violations, f"seed {seed}"
    assert sum(report.outcomes.values()) > 0


def test_the_seeds_are_of_every_kind() -> None:
    plans = [draw_groups(seed, requests=REQUESTS) for seed in range(40)]
    assert {len(plan.groups) for plan in plans} == {2, 3}
    assert {order.act for plan in plans for order in plan.orders} == set(GroupAct)
    choosers = {one.members["chooser"] for plan in plans for one in plan.aliases}
    assert choosers == {"static", "greedy", "ddqn"}
    assert any("fall_back" in one.members for plan in plans for one in plan.aliases)
    named = {request.values.get("model") for plan in plans for request in plan.whole.requests}
    assert named >= {"small", "medium", "large", "best", "cheap", None}


def test_orders_about_one_group_wait_for_each_other() -> None:
    # The proxy stands still when a group is to be removed, and still when it is to be drained again.
    report = run_seed_of_groups(92005, requests=3)
    assert not report.violations
    assert report.faults["proxy: stands still"]
    assert report.faults["group: is removed with all that it does"]
    assert report.faults["group: is drained, removed and added again"]


def test_a_group_may_get_a_request_before_the_order_to_remove_it() -> None:
    # Given while the proxy stands still, and carried out behind a request that was on its way.
    report = run_seed_of_groups(4029, requests=100)
    assert not report.violations
    assert report.faults["group: is drained, removed and added again"]


def test_a_seed_happens_again() -> None:
    first, again = (run_seed_of_groups(3, requests=8) for _ in range(2))
    assert first.digest == again.digest


def answers_of_the_wrong_group(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(Groups, "find", lambda groups, _: groups.first)
    return "it was served, and names no group"


def two_answers(patch: pytest.MonkeyPatch) -> str:
    # A group that is given up on goes on, and what it says reaches the client.
    patch.setattr(ModelAttempt, "give_up", lambda _: None)
    return " belongs"


# With the seed from which on it is soon met.
@pytest.mark.parametrize(("plant", "first"), [(answers_of_the_wrong_group, 2), (two_answers, 1)])
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], str], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = plant(monkeypatch)
    for seed in range(first, first + 20):
        violations = run_seed_of_groups(seed, requests=REQUESTS).violations
        if any(found in one for one in violations):
            return
    raise AssertionError("no seed found it")
