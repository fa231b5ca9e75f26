"""The soak's clients: each request is sent, or told to be lost."""

import asyncio
import socket

from tests.support.chaos.world import WorldSettings
from tests.support.played import in_real_time
from tests.support.soak.run import SoakLoad, draw_plan

from balanceroute.proxy.lab.emulate.settings import EmulationSettings


@in_real_time()
async def test_without_a_proxy_every_request_is_lost_while_the_plan_goes_on() -> None:
    world = WorldSettings(EmulationSettings(prefillers=2, ranks=4), {})
    plan = draw_plan(1, range(40), world, calm=True)
    with socket.socket() as bound:  # Bound, not listening: nobody else gets the port.
        bound.bind(("127.0.0.1", 0))
        load = SoakLoad(plan, "127.0.0.1", bound.getsockname()[1])
        running = asyncio.create_task(load.run(3))
        await load.reached(plan.calm_s / 2)
        assert 20 <= len(load.lost) < 40
        await running
        await load.reached(2 * plan.calm_s)
    assert sorted(load.lost) == sorted(request.request_id for request in plan.requests)
