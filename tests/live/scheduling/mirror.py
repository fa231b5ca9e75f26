"""A load, and how true the scheduler's mirror of the ranks' loads is under it."""

import asyncio
import random
from typing import TYPE_CHECKING, Any

from tests.support.site import Site

from balanceroute.proxy.core.events import Admit, Tick, TokensEmitted

if TYPE_CHECKING:
    from tests.support.chaos.world import SchedulerStep

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "t1 t2 t3",
    "max_tokens": 20,
    "ignore_eos": True,
}
STREAM: dict[str, Any] = BODY | {"stream": True}


def body(i: int, **more: Any) -> dict[str, Any]:
    return STREAM | {"prompt": f"t{i} u"} | more


def watch(site: Site, saw: Any) -> None:
    """Have a function see every step of the scheduler."""
    site.world.observer.watch = saw


class Mirror:
    """Compares the loads of the ledger with the truth, at every decision."""

    def __init__(self, site: Site) -> None:
        self.off = 0
        self.load = 0
        self.decisions = 0
        self.corrections = 0
        self._site = site
        watch(site, self._saw)

    def _saw(self, step: "SchedulerStep") -> None:
        self.corrections += isinstance(step.event, TokensEmitted)
        if not isinstance(step.event, Tick):
            return
        scheduler, fleet = self._site.world.scheduler, self._site.fleet
        # What this decision binds is on its way only.
        new = {action.request for action in step.actions if isinstance(action, Admit)}
        counted = [0] * fleet.settings.ranks
        for number, request in scheduler.requests.items():
            if request.rank is not None and number not in new:
                counted[request.rank] += scheduler.ledger.kv_tokens(number)
        true = [
            sum(one.kv_tokens for exchange in engine.exchanges for one in exchange.sequences)
            for engine in fleet.engines[fleet.settings.prefillers :]
        ]
        self.off += sum(abs(a - b) for a, b in zip(true, counted, strict=True))
        self.load += sum(true)
        self.decisions += 1

    @property
    def deviation(self) -> float:
        """Mean absolute deviation of a rank's load, as a share of the mean load."""
        return self.off / self.load


async def run_load(site: Site, *, streamed: float, requests: int) -> None:
    """Send requests of many sizes, more than the slots, and wait for all answers."""
    rng = random.Random(3)
    exchanges = []
    for i in range(requests):
        values = body(
            i,
            prompt=f"t{i} " * rng.randint(50, 300),
            max_tokens=rng.randint(10, 60),
            stream=rng.random() < streamed,
        )
        exchanges.append(site.send(COMPLETIONS, values))
        await asyncio.sleep(rng.expovariate(1 / 0.005))
    for exchange in exchanges:
        assert (await exchange.end()).status == 200


FLEET: dict[str, Any] = {
    "prefillers": 4,
    "ranks": 8,
    "batch_limit": 16,
    "prefill_ns_per_token": 10_000.0,
    "flags": {"batch": 16, "policy": "br-0"},
}
