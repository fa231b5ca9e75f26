"""What relays change of the decisions: nothing but the moments at which events are heard of."""

import random
from typing import TYPE_CHECKING

import pytest
from tests.live.scheduling.mirror import FLEET, Mirror, run_load

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.events import Action, Admit, Event, RequestArrived, StartPrefill
from balanceroute.proxy.core.policies import PolicyInputs, make_policy
from balanceroute.proxy.core.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.live.conftest import Play, Site

    from balanceroute.proxy.testing.chaos.scheduler_watch import Step


@pytest.mark.parametrize("policy", ["br-0", "jsq"])
def test_the_same_events_have_the_same_actions_as_in_one_process(play: "Play", policy: str) -> None:
    heard: list[tuple[Event, list[Action], int]] = []

    async def scenario(site: "Site") -> None:
        def saw(step: "Step") -> None:
            heard.append((step.event, step.actions, round(site.loop.time() * 1e9)))

        site.world.observer.watch = saw
        await run_load(site, streamed=0.7, requests=80)
        deployment = site.world.plane.deployment
        config = deployment.config
        ranks, prefillers = len(deployment.instances.ranks), len(deployment.instances.prefillers)
        alone = Scheduler(
            config.scheduler_config(ranks, prefillers),
            make_policy(
                policy,
                PolicyInputs(
                    *(ranks, config.scheduling.batch, config.policies, random.Random(0)),
                    NoPrediction(),
                ),
            ),
        )
        for event, actions, now_ns in heard:
            assert alone.handle(event, now_ns=now_ns) == actions
        kinds = {type(one) for _, actions, _ in heard for one in actions}
        assert {Admit, StartPrefill} <= kinds
        assert sum(isinstance(event, RequestArrived) for event, *_ in heard) == 80

    flags = {**FLEET["flags"], "policy": policy, "predictor": "none"}
    play(scenario, relays=3, **(FLEET | {"flags": flags}))


def test_the_mirror_of_the_loads_is_true_with_four_relays(play: "Play") -> None:
    async def scenario(site: "Site") -> None:
        mirror = Mirror(site)
        await run_load(site, streamed=1.0, requests=150)
        assert mirror.decisions > 100
        # The median of twenty such worlds is 1.6 %: a frame in a hundred is up to 0.3 s late.
        assert mirror.deviation < 0.04

    play(scenario, relays=4, **FLEET)
