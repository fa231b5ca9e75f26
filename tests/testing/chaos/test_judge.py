"""What the judge of answers takes for right."""

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from balanceroute.proxy.testing.chaos.judge import Judge
from balanceroute.proxy.testing.chaos.plan import draw_plan

if TYPE_CHECKING:
    from balanceroute.proxy.testing.chaos.oracle import Oracle


class Silent:
    """Who knows no answer."""

    merges = False


@pytest.mark.parametrize("resume", ["off", "exact", "valid"])
def test_the_proxy_draws_seeds_for_samples_that_it_may_begin_again(resume: str) -> None:
    plan = draw_plan(53, requests=10)
    flags = {**plan.world.flags, "resume": resume, "first_token": "decode"}
    plan = replace(plan, world=replace(plan.world, flags=flags))
    judge = Judge(plan, cast("Oracle", Silent()))
    sampled = next(one for one in plan.requests if "seed" not in one.values)
    assert judge.may_draw_seed(sampled) is (resume == "valid")
