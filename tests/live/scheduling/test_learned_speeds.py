"""`--learn-speeds` in a proxy, whose step times are inferred from streams."""

import random
from typing import Any

import pytest
from tests.support.site import Site, served

from balanceroute.proxy.lab.sim.engines import SimulatedEngineOptions

COMPLETIONS = "/v1/completions"
BATCH = 4


async def keep_busy(site: Site, requests: int) -> None:
    """Keep more requests in flight than two ranks have slots, until so many have ended."""
    rng = random.Random(3)

    def send() -> Any:
        values = {
            "model": "tiny",
            "prompt": [1 + rng.randrange(9) for _ in range(rng.choice((20, 100, 400)))],
            "max_tokens": rng.randint(30, 150),
            "ignore_eos": True,
            "stream": True,
        }
        return site.send(COMPLETIONS, values)

    flying = [send() for _ in range(4 * BATCH)]
    for _ in range(requests):
        await flying.pop(0).end()
        flying.append(send())
    for one in flying:
        await one.end()


@pytest.mark.parametrize("speeds", [(1.0, 0.6), ()])
@served(
    flags={"learn_speeds": True, "batch": BATCH, "policy": "br-0"},
    engines=lambda speeds: SimulatedEngineOptions(rank_speeds=speeds),
    step_base_ns=5_000_000,
    step_ns_per_token=20_000.0,
)
async def test_speeds_are_learned_where_they_differ(site: Site, speeds: tuple[float, ...]) -> None:
    await keep_busy(site, 120)
    scheduler = site.world.proxy.deployment.driver.scheduler
    learned = scheduler.ranks.speeds(scheduler.config)
    if speeds:
        assert learned is not None
        assert 0.5 < learned[1] / learned[0] < 0.75
        page = (await site.get("/metrics")).body.decode()
        assert 'balanceroute_rank_speed_ratio{rank="1"' in page
    else:
        assert learned is None
