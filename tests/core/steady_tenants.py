"""Backlogged tenants before BR-H on the machine of `make qos`, in virtual time: who holds what on the ranks."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from tests.script import script

from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

STEADY = SimulatedDeployment(4, 8, step_base_ns=50_000_000)
Draw = Callable[[random.Random], int]


def between(least: int, most: int) -> Draw:
    """Return a draw of any number from `least` to `most`."""
    return lambda rng: rng.randint(least, most)


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """What one tenant sends: its weight, and how its prompts and outputs are drawn."""

    tenant: str
    weight: float
    prompt_tokens: Draw
    output_tokens: Draw
    count: int

    def requests(self, rng: random.Random) -> list[TraceRequest]:
        """Draw the requests, which all come at once."""
        return [
            TraceRequest(
                0,
                self.prompt_tokens(rng),
                self.output_tokens(rng),
                tenant=self.tenant,
                weight=self.weight,
            )
            for _ in range(self.count)
        ]


def shares(pool: int, loads: Iterable[TenantLoad], *windows_s: int) -> list[NDArray[np.float64]]:
    """Return the first tenant's share in percent in all windows of each length, after 20 s.

    Args:
        pool: Requests that the pool may hold.
        loads: Of each tenant; the first one is looked at.
        windows_s: Lengths of windows.
    """
    loads, rng, module = list(loads), random.Random(0), script("reproduce.overload")
    requests = [one for load in loads for one in load.requests(rng)]
    deployment = replace(STEADY, pool_limit=pool, fair_queue="kv-token-seconds")
    held = module.held_by(loads[0].tenant, deployment, Workload(requests, []), "survival")
    return [100 * module.shares_in(held, window_s, 20) for window_s in windows_s]
