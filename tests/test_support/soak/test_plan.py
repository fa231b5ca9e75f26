"""A soak's plan: drawn from its seed, and of what real processes can be made to do."""

from functools import cache

from tests.support.chaos.clients import ClientPhase
from tests.support.chaos.faults import Act
from tests.support.chaos.plan import ChaosPlan
from tests.support.chaos.world import WorldSettings
from tests.support.soak.run import draw_plan

from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.engines.instances import Role

WORLD = WorldSettings(EmulationSettings(prefillers=2, ranks=4), {})
SEEN_FROM_OUTSIDE = {
    ClientPhase.SENDING,
    ClientPhase.AFTER,
    ClientPhase.STREAMING,
    ClientPhase.LAST_WORD,
}


@cache
def plan() -> ChaosPlan:
    return draw_plan(5, range(2_000), WORLD, calm=False)


def test_a_seed_and_its_numbers_decide_the_plan() -> None:
    one, same, other = (
        draw_plan(5, range(first, first + 200), WORLD, calm=False) for first in (0, 0, 200)
    )
    assert one == same
    assert one.injections != other.injections
    assert {request.number for request in other.requests} == set(range(200, 400))


def test_its_clients_leave_at_what_they_see_over_plain_wires() -> None:
    visits = plan().visits
    assert {one.departure.phase for one in visits if one.departure} == SEEN_FROM_OUTSIDE
    assert not any(one.link or one.pauses for one in visits)


def test_the_engine_that_takes_the_orders_stays_within_reach() -> None:
    injections = plan().injections
    assert {one.act for one in injections} == {Act.BOARD, Act.KILL, Act.DRAIN}
    away = {
        (one.role, one.engine)
        for one in injections
        if one.act is Act.KILL or "refuse" in one.changes
    }
    assert (Role.PREFILL, 1) not in away
    assert len(away) > 3


def test_nothing_goes_wrong_in_a_calm_one() -> None:
    calm = draw_plan(5, range(200), WORLD, calm=True)
    assert not calm.injections
    assert not any(one.departure for one in calm.visits)
