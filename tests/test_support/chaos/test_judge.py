"""What the judge of answers takes for right."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import pytest
from tests.support.chaos.clients import ClientEnding, Received, Visit
from tests.support.chaos.faults import CLIENTS, Act, Injection
from tests.support.chaos.judge import Judge
from tests.support.chaos.plan import draw_plan

from balanceroute.proxy.live.engines.instances import Role

if TYPE_CHECKING:
    from tests.support.chaos.clients import Client
    from tests.support.chaos.expectation import TextOracle


class Silent:
    """Who knows no answer."""

    merges = False


@pytest.mark.parametrize("resume", ["off", "exact", "valid"])
def test_the_proxy_draws_seeds_for_samples_that_it_may_begin_again(resume: str) -> None:
    plan = draw_plan(53, requests=10)
    flags = {**plan.world.flags, "resume": resume, "first_token": "decode"}
    plan = replace(plan, world=replace(plan.world, flags=flags))
    judge = Judge(plan, cast("TextOracle", Silent()))
    sampled = next(one for one in plan.requests if "seed" not in one.values)
    assert judge.may_draw_seed(sampled) is (resume == "valid")


@dataclass
class Unanswered:
    """A client whose connection ended without an answer."""

    visit: Visit
    comes_late: bool
    left: bool = False
    answers: list[Received] = field(
        default_factory=lambda: [Received(ending=ClientEnding.UNANSWERED)]
    )


def holders(host: str) -> Injection:
    times = (second / 10 for second in range(1000))
    drawn = (Injection("held", Act.HOLD, Role.DECODE, 0, one, one + 1.0) for one in times)
    return next(one for one in drawn if one.held_from == host)


@pytest.mark.parametrize(
    ("host", "late", "right"),
    [(CLIENTS, True, True), (CLIENTS, False, False), ("127.0.0.9", True, False)],
)
def test_who_comes_late_gives_way_to_holders_of_the_same_address(
    host: str, *, late: bool, right: bool
) -> None:
    plan = replace(draw_plan(53, requests=10), injections=(holders(host),), shutdown_s=None)
    request = plan.requests[0]
    client = Unanswered(Visit(0.0, (request,)), late)
    judge = Judge(plan, cast("TextOracle", Silent()))
    asked = cast("Client", client), request, client.answers[0]
    verdict = asyncio.run(judge.judge(*asked, reworded=False, seed=None))
    assert (not verdict.wrong) is right
