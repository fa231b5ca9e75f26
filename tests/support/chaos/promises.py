"""What the answers to orders promise, and whether the proxy keeps it.

An answered order is in force until another one is given: nothing starts on an engine that was drained
or removed, and nothing at all while the proxy is paused; aborted requests are gone. A new scheduler
process goes on with it. Where two orders cross, or one is lost with its process, either may have come
first, and nothing is promised.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from tests.support.chaos.world import Part, SchedulerStep, World

from balanceroute.proxy.core.events import Admit, StartPrefill
from balanceroute.proxy.core.lifecycle import LifecycleState
from balanceroute.proxy.live.engines.instances import Role, Status, Target

if TYPE_CHECKING:
    from balanceroute.proxy.live.control.roster import Roster


class Said(Enum):
    """What the answered orders make of an engine."""

    PRESENT = "present"
    DRAINED = "drained"
    LEAVING = "leaving"  # Drained, and removed as soon as it is idle.
    REMOVED = "removed"


_CLOSED = frozenset({Said.DRAINED, Said.LEAVING, Said.REMOVED})
_UP = frozenset({Status.UP, Status.QUARANTINED})
_MAY_BE = {
    Said.PRESENT: (_UP,),
    Said.DRAINED: (frozenset({Status.DRAINING}),),
    Said.LEAVING: (frozenset({Status.DRAINING}), frozenset()),
    Said.REMOVED: (frozenset(),),
}


@dataclass(slots=True)
class GivenOrders:
    """The orders about one thing."""

    given: int = 0  # How many there were.
    open: int = 0  # How many of them are not answered.

    def begin(self) -> tuple[int, bool]:
        """Note one that is given; return what `end` needs."""
        self.given += 1
        self.open += 1
        return self.given, self.open == 1

    def end(self, begun: tuple[int, bool]) -> bool:
        """Note its answer; return whether no other was given meanwhile."""
        self.open -= 1
        return begun == (self.given, True)


@dataclass(slots=True)
class OfEngine(GivenOrders):
    """Those about one engine."""

    said: Said | None = None  # None if that is not known.
    # The requests that may be on it; None if that is not known.
    sessions: frozenset[int] | None = None


@dataclass(slots=True)
class OfAll(GivenOrders):
    """Those that stop and begin all."""

    paused: bool | None = False  # None if that is not known.
    stopped_s: float | None = None  # Since when nothing runs; None if something may.


@dataclass(frozen=True, slots=True)
class Aborted:
    """Requests that must be gone at some time."""

    at_s: float
    driver: object
    sessions: Mapping[int, object]


@dataclass(slots=True)
class Promises:
    """What was promised about one part of a world.

    Args:
        clean: Whether what is sent to an engine arrives at once.
    """

    world: World
    part: Part
    clean: bool
    # By the name under which the proxy knows each.
    engines: dict[Target, OfEngine] = field(default_factory=dict)
    of_all: OfAll = field(default_factory=OfAll)
    aborted: list[Aborted] = field(default_factory=list)
    found: list[str] = field(default_factory=list)  # What was broken.
    _driver: object = None

    @property
    def roster(self) -> "Roster":
        return self.part.deployment.roster

    def broken(self, what: str) -> None:
        self.world.journal.write("admin: broken", what)
        self.found.append(f"admin: {what}")

    def of(self, target: Target) -> OfEngine:
        """Return what was ordered about an engine, which is not there if nothing was."""
        return self.engines.setdefault(target, OfEngine(said=Said.REMOVED))

    def saw(self, step: SchedulerStep) -> None:
        """Hold the scheduler to the answered orders."""
        instances = self.roster.instances
        for action in step.actions:
            if isinstance(action, StartPrefill):
                if self.of_all.paused:
                    self.broken(f"request {action.request} began while all was paused")
                self._check_open(instances.prefillers[action.prefiller].target, action)
            elif isinstance(action, Admit):
                self._check_open(instances.ranks[action.rank].target, action)

    def _check_open(self, target: Target, action: StartPrefill | Admit) -> None:
        orders = self.engines.get(target)
        if orders is not None and orders.said in _CLOSED:
            self.broken(f"request {action.request} was sent to {_name(target)}, which is closed")

    def look(self) -> None:
        """Compare what is with what was said."""
        if self._driver is not self.part.deployment.driver:
            self._driver = self.part.deployment.driver
            for orders in self.engines.values():
                orders.sessions = None  # Another process counts anew.
        for target, orders in self.engines.items():
            self._look_at(target, orders)
        self._look_at_pause()
        self._look_at_aborted()

    def _look_at(self, target: Target, orders: OfEngine) -> None:
        present = [one.status for one in self.roster.instances.of(target)]
        statuses = frozenset(present) - {Status.REMOVED}
        name, said = _name(target), orders.said
        if (
            said is not None
            and statuses not in _MAY_BE[said]
            and not (said is Said.PRESENT and statuses and statuses <= _UP)
        ):
            words = sorted(one.value for one in statuses)
            self.broken(f"{name} was said to be {said.value}, and is {words}")
            orders.said = None
        on_it = self.on(target)
        if said in _CLOSED and orders.sessions is not None and not on_it <= orders.sessions:
            late = sorted(on_it - orders.sessions)
            self.broken(f"requests {late} came to {name}, which is closed")
        orders.sessions = on_it

    def on(self, target: Target) -> frozenset[int]:
        return frozenset(int(one.number) for one in self.roster.sessions_on(target))

    def _look_at_pause(self) -> None:
        orders, is_paused = self.of_all, self.world.plane.pausing.paused
        if orders.paused is not None and orders.paused is not is_paused:
            self.broken(f"all was said to be paused: {orders.paused}, and is: {is_paused}")
            orders.paused = None
        if orders.stopped_s is None or self.world.loop.time() < orders.stopped_s + self.world.lag_s:
            return
        requests = self.part.deployment.driver.scheduler.requests.values()
        begun = [one.request for one in requests if one.state is not LifecycleState.QUEUED]
        busy = [one.name for one in self.part.fleet.engines if one.exchanges and self.clean]
        if begun or busy:
            self.broken(f"requests {begun} run, and engines {busy} work, while all is paused")
            orders.stopped_s = None

    def _look_at_aborted(self) -> None:
        due = [one for one in self.aborted if one.at_s <= self.world.loop.time()]
        for one in due:
            self.aborted.remove(one)
            live = self.part.deployment.driver.sessions
            left = [n for n, session in live.items() if one.sessions.get(n) is session]
            if left and one.driver is self.part.deployment.driver:
                self.broken(f"requests {left} were aborted, and live")


def _name(target: Target) -> str:
    return f"{target.role.value} {target.url}"


def other_role(target: Target) -> Target:
    role = Role.DECODE if target.role is Role.PREFILL else Role.PREFILL
    return Target(role, target.url)
