"""Names that stand for several models: which of them answers a request."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import TYPE_CHECKING

from balanceroute.proxy.model_choice.arrival_rate import ArrivalRate
from balanceroute.proxy.model_choice.base import Outlook

if TYPE_CHECKING:
    from balanceroute.proxy.live.frontend.groups import Group, Groups
    from balanceroute.proxy.live.openai.shape import Shape
    from balanceroute.proxy.live.security.credentials import Tenant
    from balanceroute.proxy.live.settings.aliases import AliasConfig
    from balanceroute.proxy.wire.messages import Headers

_TASK = b"x-task"
_MOST_SHOWN = 64


class UnknownTaskError(Exception):
    """X-Task names no task of the alias, or is given twice."""


class Alias:
    """One alias.

    Args:
        config: Its settings.
        groups: Those of the listener.
        clock: The loop's time, in seconds.
    """

    def __init__(self, config: "AliasConfig", groups: "Groups", clock: Callable[[], float]) -> None:
        self.config = config
        self._groups = groups
        self._clock = clock
        self._choice = config.make_choice()
        self._rate = ArrivalRate()
        self._places = {task: place for place, task in enumerate(config.tasks)}
        self._by_path = dict(config.paths)

    def task(self, headers: "Headers", tenant: "Tenant", path: str) -> str:
        """Return what a request asks for: by its word, its tenant, its path, or by default.

        Raises:
            UnknownTaskError: It asks for something else.
        """
        given = [value for name, value in headers if name == _TASK]
        if given:
            task = given[0].decode("latin-1")
            if len(given) == 1 and task in self._places:
                return task
            known = ", ".join(self.config.tasks)
            raise UnknownTaskError(
                f"X-Task is {task[:_MOST_SHOWN]!r}, must be given once and be one of {known}"
            )
        if tenant.task in self._places:
            return tenant.task
        return self._by_path.get(path, self.config.default_task)

    def choose(self, task: str, shape: "Shape") -> "Iterator[Group]":
        """Yield the group that is to answer, and then who may in its place.

        Those of smaller models come first, as they have more room. A group that takes no requests when
        its turn comes is left out.
        """
        rate_per_s = self._rate.observe(1e3 * self._clock())
        found = [self._groups.get(name) for name in self.config.groups]
        outlooks = [self._outlook(one, shape) for one in found]
        if not any(one.healthy for one in outlooks):
            return
        chosen = self._choice.choose(self._places[task], rate_per_s, outlooks)
        first = found[chosen]
        assert first is not None, "it is healthy"
        yield first
        for place in (*range(chosen - 1, -1, -1), *range(chosen + 1, len(found))):
            # By now it may be gone, or another one.
            group = self._groups.get(self.config.groups[place])
            if group is not None and _takes(group):
                yield group

    def _outlook(self, group: "Group | None", shape: "Shape") -> Outlook:
        if group is None or not _takes(group):
            return Outlook(inf, healthy=False)
        targets = self.config.targets
        if targets is None or group.forecast is None:
            return Outlook(0.0)
        return Outlook(targets.share_used(*group.forecast(shape)))


def _takes(group: "Group") -> bool:
    """Return whether a group takes requests for its model now."""
    routes, model = group.routes, group.model
    return group.intake.ready and routes.refuse(model, routes.eligible(model)) is None


def make_aliases(
    configs: "Iterable[AliasConfig]", groups: "Groups", clock: Callable[[], float]
) -> Mapping[str, Alias]:
    """Return the aliases by name."""
    return {one.name: Alias(one, groups, clock) for one in configs}
