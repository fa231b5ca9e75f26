"""Whether this process leads, and so may give requests to engines; and what it does when that changes.

A term is shorter than the time that other processes wait: it ends two thirds of a duration after an accepted
write was sent, by this process's clock, which goes on while the process or the machine is suspended. No answer,
no clock of another machine and no silence prolongs it. Another process takes over a whole duration after it saw
the last change, and it saw none before it was sent. So no two terms overlap.

Beyond its term a process gives nothing to engines. Requests that run there go on. Waiting ones wait on for
as long as no other process is known to lead; then they end with an error.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.scheduling.driver import Driver

_log = logging.getLogger(__name__)
# Parts of a duration: a term, the time for one exchange, and the time between two.
_TERM, _EXCHANGE, _BETWEEN = 2 / 3, 1 / 3, 1 / 6
# So that several that follow do not ask together.
_JITTER = 0.2
_SOON_S = 0.005
# How long a process that resigns goes on with waiting requests, while none leads.
_LAST_S, _LOOK_S = 1.0, 0.02
_HAND_OVER_S = 0.1


class LeaderError(BalanceRouteError):
    """The leader is not known."""


class LeaderStore(Protocol):
    """The place where replicas agree on who leads.

    Attributes:
        name: By which this process leads there.
        handed_over: Whether two processes share the name, one of which takes over: an entry of either counts.
        due_s: When it may be free, by the clock; inf if that is not known.
    """

    name: str
    handed_over: bool
    due_s: float

    @property
    def place(self) -> str:
        """Its name in the log."""
        ...

    async def claim(self, *, leads: bool) -> str:
        """Lead, or go on leading, if that may be.

        Args:
            leads: Whether this process's term still runs.

        Returns:
            Who leads: its own name, another one, or nothing if no leader is known.

        Raises:
            BalanceRouteError: It is not known; likewise OSError and UnicodeDecodeError.
        """
        ...

    async def look(self) -> str:
        """Return a word that is new with each renewal under its name; empty under another. Raises as `claim`."""
        ...

    async def release(self) -> None:
        """Give it up, if this process has it. Raises as `claim`."""
        ...

    def hand_over_state(self) -> dict[str, object]:
        """Return what a process that takes over is to know, with the `descriptor` that it is to have."""
        ...

    def close(self) -> None: ...


class LedGroup(Protocol):
    """A decode group, of which one process at a time decides."""

    driver: Driver

    async def read_loads(self) -> None:
        """Give the scheduler the foreign load of the ranks now."""
        ...


@dataclass(frozen=True, slots=True)
class LeaderState:
    """Whether this process leads, for people and metrics."""

    leads: bool
    leader: str  # Who leads, as far as it is known; empty for none.
    place: str  # Where they agree.
    began: int  # How often this process has begun to lead.
    ended: int  # How often it has ceased to.
    failed: int  # Tries that failed, to lead or to go on.
    age_s: float  # Since it was last known who leads; that of its last renewal if it leads.


class Leadership:
    """Keeps to the rules above. `run` it.

    Args:
        store: Where replicas agree.
        duration_s: How long another process waits before it takes over.
        clock: Seconds, which go on while the machine is suspended.
        groups: Returns the groups about which the leader decides.
        led: The `hand_over_state` of the process that this one takes over from; empty if there is none.
    """

    def __init__(
        self,
        store: LeaderStore,
        *,
        duration_s: float,
        clock: Callable[[], float],
        rng: random.Random,
        groups: Callable[[], Iterable[LedGroup]],
        led: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        store.handed_over, self._succeeds = bool(led), led.get("leads") is True
        self._began_to_lead = asyncio.Event()
        self._store, self._clock, self._rng, self._groups = store, clock, rng, groups
        self._term_s, self._exchange_s = _TERM * duration_s, _EXCHANGE * duration_s
        self._between_s = _BETWEEN * duration_s
        self._until_s = -inf  # Until when this process may decide,
        self._held_s = -inf  # and until when no other process may.
        self._leader = ""  # Who leads, by the last answer of the store.
        self._known_s = clock()
        self._failure = ""  # Why it is not known.
        self._led = self._retired = self._resigned = False
        # What the store said last of the process that has taken over, and when it was asked.
        self._heir, self._heir_s = "", -inf
        self._began = self._ended = self._failed = 0
        self._lapse: asyncio.TimerHandle | None = None
        self._one = asyncio.Lock()  # One exchange at a time: a write follows the one before.

    # What is asked for each request.

    def forbids(self) -> str:
        """Return why nothing may be given to an engine now; empty if it may."""
        return "" if self._clock() < self._until_s else self._reason()

    def _reason(self) -> str:
        if self._retired:
            return "the proxy is shutting down: another one takes over"
        name = self._store.name
        if self._leader == name:
            if self._clock() < self._held_s:
                return "this proxy is about to lead: it reads what the engines have"
            return "this proxy led, and could not renew that: it waits to know who leads"
        if self._leader:
            return f"follower of {self._leader}"
        return "this proxy waits to know who leads"

    # What runs in the background.

    async def run(self) -> None:
        while not self._retired:
            await self._turn()
            if not self._retired:
                await asyncio.sleep(self._pause_s())

    async def _turn(self) -> None:
        # Before whatever is sent. Of an exchange that asks first and then writes that is too early.
        sent_s = self._clock()
        leads = sent_s < self._held_s
        try:
            async with self._one, asyncio.timeout(self._exchange_s):
                if self._retired:  # While it waited for its turn.
                    return
                if self._resigned:
                    self._shares(await self._store.look(), sent_s)
                    return
                leader = await self._store.claim(leads=leads)
        except TimeoutError:
            self._is_unknown(f"no answer within {self._exchange_s:.3g} s")
        except (BalanceRouteError, OSError, UnicodeDecodeError) as error:
            self._is_unknown(str(error) or type(error).__name__)
        else:
            self._known_s, self._failure = sent_s, ""
            if leader == self._store.name:
                await self._leads(sent_s, goes_on=leads)
            else:
                self._follows(leader)

    def _shares(self, renewal: str, asked_s: float) -> None:
        """Decide for as long as the process renews that has taken over: both lead as one."""
        if not renewal:
            self._follows("")
        elif renewal != self._heir:
            # It is newer than the last look here, if it is another one.
            self._held_s = max(self._held_s, self._heir_s + self._term_s)
            self._go_on()
        self._heir, self._heir_s = renewal, asked_s

    def _pause_s(self) -> float:
        pause_s = self._between_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
        # When it may be free: not much later.
        due_s = self._store.due_s - self._clock()
        return min(pause_s, due_s + _SOON_S) if due_s > 0.0 else pause_s

    def _is_unknown(self, reason: str) -> None:
        self._failed += 1
        if reason != self._failure:
            fields = {"place": self._store.place, "reason": reason}
            _log.warning("it is not known who leads", extra={"fields": fields})
        self._failure = reason
        self._end_waiting()

    async def _leads(self, sent_s: float, *, goes_on: bool) -> None:
        """Decide until the term ends that began with a write; `goes_on` if the one before had not ended."""
        self._held_s = sent_s + self._term_s
        self._leader = self._store.name
        if not (self._led and goes_on):
            # Another process may have decided until now. The ledger here lacks the requests it gave to engines.
            with suppress(TimeoutError):  # Other loads stay as read last.
                async with asyncio.timeout(self._exchange_s):
                    await asyncio.gather(*(group.read_loads() for group in self._groups()))
            if self._clock() >= self._held_s or self._retired:
                return  # Too late: again with the next term.
        if not self._led:
            self._led = True
            self._began += 1
            self._began_to_lead.set()
            _log.info("this proxy leads", extra={"fields": self._fields()})
        self._go_on()

    def _go_on(self) -> None:
        """Decide until the term ends, unless this process leaves."""
        if self._retired:
            return
        self._until_s = self._held_s
        self._call_off()
        self._lapse = asyncio.get_running_loop().call_later(
            max(0.0, self._until_s - self._clock()), self._lapsed
        )
        self._bar(barred=False)

    def _lapsed(self) -> None:
        """Have waiting requests wait, unless the term is longer by now."""
        self._lapse = None
        if self._clock() >= self._until_s:
            self._bar(barred=True)
            fields = self._fields() | {"reason": self._failure}
            message = "this proxy could not renew its term: nothing is admitted"
            _log.error(message, extra={"fields": fields})

    def _follows(self, leader: str) -> None:
        """Decide nothing: another process leads, or none does."""
        self._until_s = self._held_s = -inf
        if self._led:
            self._led = False
            self._ended += 1
            _log.warning("this proxy does not lead any more", extra={"fields": {"leader": leader}})
        elif leader != self._leader and leader:
            _log.info("this proxy follows", extra={"fields": {"leader": leader}})
        self._leader = leader
        self._call_off()
        self._bar(barred=False)
        self._end_waiting()

    def _end_waiting(self) -> None:
        """End waiting requests, as another process leads: their clients may ask that one."""
        if not self._led:
            reason = self._reason()
            for group in self._groups():
                group.driver.end_waiting(reason)

    def _bar(self, *, barred: bool) -> None:
        for group in self._groups():
            group.driver.decisions.bar(barred=barred)

    def _call_off(self) -> None:
        if self._lapse is not None:
            self._lapse.cancel()
            self._lapse = None

    def _waits(self) -> bool:
        return any(group.driver.unsettled for group in self._groups())

    # The end, and hand-overs.

    async def retire(self) -> None:
        """Go on with waiting requests, for a second at most, and then give the leadership up."""
        end_s = self._clock() + _LAST_S
        while self._led and not self._resigned and self._waits() and self._clock() < end_s:  # noqa: ASYNC110 - no event says so.
            await asyncio.sleep(_LOOK_S)
        self._retired = True
        self._until_s = self._held_s = -inf
        self._call_off()
        was_led, self._led = self._led and not self._resigned, False
        self._bar(barred=False)
        self._end_waiting()
        if not was_led:
            return
        if self._store.handed_over:
            # The process before this one got the order to end, too, a moment ago.
            await asyncio.sleep(_HAND_OVER_S)
        self._ended += 1
        try:
            async with asyncio.timeout(2 * self._exchange_s), self._one:
                await self._store.release()
        except (TimeoutError, BalanceRouteError, OSError, UnicodeDecodeError) as error:
            fields = self._fields() | {"reason": str(error)}
            _log.warning("the leadership is not given up: it runs out", extra={"fields": fields})
        else:
            self._leader = ""
            _log.info("the leadership is given up", extra={"fields": self._fields()})

    def hand_over_state(self) -> dict[str, object]:
        """Return what a process that takes over is to know; see `LeaderStore`."""
        return self._store.hand_over_state() | {"leads": self.leads}

    async def succeed(self) -> None:
        """Wait until this process leads as the one did from which it takes over; not for long, if not."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._term_s if self._succeeds else 0.0):
                await self._began_to_lead.wait()

    def resign(self) -> None:
        """Leave the leadership to a process that has taken over. This one still decides about its waiting requests."""
        self._resigned = True
        self._store.close()

    def close(self) -> None:
        self._retired = True
        self._until_s = -inf
        self._call_off()
        self._store.close()

    # What people and metrics see.

    @property
    def leads(self) -> bool:
        """Whether this process may decide now."""
        return not self.forbids()

    def state(self) -> LeaderState:
        return LeaderState(
            self.leads,
            self._leader,
            self._store.place,
            self._began,
            self._ended,
            self._failed,
            self._clock() - self._known_s,
        )

    @property
    def metrics(self) -> "LeaderMetrics":
        return LeaderMetrics(self.state)

    def _fields(self) -> dict[str, object]:
        return {"name": self._store.name, "place": self._store.place}


class LeaderMetrics(Collector):
    """Exports whether this process leads."""

    def __init__(self, state: Callable[[], LeaderState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        now = self._state()
        yield GaugeMetricFamily(
            "balanceroute_leader", "Whether the proxy leads its replicas.", int(now.leads)
        )
        transitions = CounterMetricFamily(
            "balanceroute_leader_transitions",
            "Times the proxy began to lead, and ceased to.",
            labels=["to"],
        )
        transitions.add_metric(["leader"], now.began)
        transitions.add_metric(["follower"], now.ended)
        yield transitions
        yield CounterMetricFamily(
            "balanceroute_leader_renewals_failed",
            "Times it could not be learned who leads, nor the leadership be renewed.",
            now.failed,
        )
        yield GaugeMetricFamily(
            "balanceroute_leader_renewal_age_seconds",
            "Since the leadership was renewed last, or its leader seen.",
            now.age_s,
        )
