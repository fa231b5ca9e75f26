"""Metrics for autoscalers: what bounds each group of engines, and how many of each role its load needs."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from balanceroute.proxy.capacity import Bound, LoadFollower, sample_of
from balanceroute.proxy.live.frontend.groups import Group, Groups

if TYPE_CHECKING:
    from balanceroute.proxy.capacity import FleetSample

_LOOK_S = 1.0
_RESOURCES = {
    Bound.PREFILL: "prefill",
    Bound.DECODE: "decode_slots",
    Bound.MEMORY: "kv_memory",
    Bound.BARRIER: "barrier",
    Bound.NOTHING: "none",
}


class OfLoads(Collector):
    """Exports what followed of each group's load; the label `group` is there where groups have names."""

    def __init__(self, followers: Mapping[str, LoadFollower]) -> None:
        self.followers = followers

    def collect(self) -> Iterator[Metric]:
        bound = Metric(
            "balanceroute_bound_by", "1 for what bounds the fleet, 0 for the rest.", "gauge"
        )
        wanted = {
            "prefillers": Metric(
                "balanceroute_wanted_prefillers", "Prefillers that the present load needs.", "gauge"
            ),
            "ranks": Metric(
                "balanceroute_wanted_ranks", "Decode ranks that the present load needs.", "gauge"
            ),
        }
        flips = Metric(
            "balanceroute_advised_role_flips",
            "Engines of the other role that would serve better in this one.",
            "gauge",
        )
        for name, one in self.followers.items():
            label = {"group": name} if name else {}
            for resource, word in _RESOURCES.items():
                bound.add_sample(bound.name, label | {"resource": word}, int(one.bound is resource))
            for role, number in (("prefillers", one.prefillers), ("ranks", one.ranks)):
                if number is not None:
                    wanted[role].add_sample(wanted[role].name, label, number)
            flips.add_sample(flips.name, label | {"role": "decode"}, max(0, one.flips))
            flips.add_sample(flips.name, label | {"role": "prefill"}, max(0, -one.flips))
        yield from (bound, *wanted.values(), flips)


class ScalingSignals(OfLoads):
    """Looks at each group once a second, and exports the signals.

    Args:
        kv_tokens: Returns the KV tokens that fit on a rank of a group, by its name; None if unknown.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        kv_tokens: Callable[[str], int | None],
        clock: Callable[[], float],
    ) -> None:
        self._groups, self._kv_tokens, self._clock = groups, kv_tokens, clock
        super().__init__({})

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)

    def look(self) -> None:
        kept = self.followers
        self.followers = {one.name: kept.get(one.name) or LoadFollower() for one in self._groups}
        for group in self._groups:
            self.followers[group.name].look(self._sample(group))

    def _sample(self, group: Group) -> "FleetSample":
        driver, now_s = group.intake, self._clock()
        return sample_of(
            driver.scheduler,
            time_s=now_s,
            arrived=driver.table.arrived,
            prefillers=[one.id for one in driver.instances.prefillers if one.usable],
            ranks=[one.id for one in driver.instances.ranks if one.usable],
            kv_tokens=self._kv_tokens(group.name),
            idle=driver.decisions.progress.barrier.share(now_s),
        )

    def rows(self) -> dict[str, dict[str, object]]:
        """Return the same for people, by group."""
        return {
            name: {
                "bound_by": _RESOURCES[one.bound],
                "wanted_prefillers": one.prefillers,
                "wanted_ranks": one.ranks,
                "role_flips": one.flips,
            }
            for name, one in self.followers.items()
        }
