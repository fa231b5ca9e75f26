"""Which engine instances are fit to use, from what requests and probes see of them.

An instance is up, or quarantined and probed until it answers again. Rules:
- A refused connection quarantines at once: the engine is not there. Every other fault has to
  happen `quarantine_failures` times in a row. Requests and probes count apart, because /health can
  be well while every request fails.
- 4xx never counts, and 429 and 503 say "busy", not "broken"; but an instance whose /health answers
  503 calls itself broken.
- Panic rule: only failed connections may quarantine more than half of a role. If most instances
  answer 5xx or nothing at all, the fault is probably common to all, and half a fleet that fails
  sometimes serves more than none. It follows that the last instance is never given up so.
- One good probe brings an instance back, on trial: its next fault quarantines it again. An instance
  that falls back soon waits twice as long for its next probe, up to a limit.
- An instance at fault for KV caches that cannot be pulled (`instances.KvTransfers`) is quarantined by the panic rule
  alone. If it was on trial for that, its back-off goes on to double, however long ago that was.
- After a stall of this process, timeouts say nothing of the engines: they are not counted.
- Of a new instance nothing is known until a probe succeeded, it is quarantined, or as many probes as
  quarantine one have failed and the panic rule keeps it. It serves nothing before.

Times are float seconds of the clock given.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from heapq import nsmallest
from operator import attrgetter

from balanceroute.proxy.core.setting import integer, seconds
from balanceroute.proxy.live.engines.engine_url import Fault, FetchError
from balanceroute.proxy.live.engines.instances import Role, Target

_CONNECT_FAULTS = frozenset({Fault.CONNECT, Fault.UNREACHABLE, Fault.CONNECT_TIMEOUT})
# After these nothing more is to be expected of an engine.
_GONE_FAULTS = _CONNECT_FAULTS | {Fault.TIMEOUT}
_TIMEOUTS = frozenset({Fault.CONNECT_TIMEOUT, Fault.TIMEOUT})
# Of the interval or back-off, so that probes of many instances do not fall together.
_JITTER = 0.1
_TICK_S = 0.1
_MOST_DUE = 25
"""Probes that begin in a tick: of more than 500 engines each is probed less often, so that the loop is free."""
# How long a start, and an order to add one, wait for the first probes.
_PATIENCE_S = 2.0
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """How instances are watched."""

    health_interval_s: float = seconds(2.0, "between two health checks of an engine")
    health_timeout_s: float = seconds(2.0, "for such a check")
    quarantine_failures: int = integer(
        3, "failures in a row after which an engine gets nothing until it is healthy", 1, 10**6
    )
    backoff_s: float = 1.0  # Time in quarantine before the first probe.
    # Limit of that time, which doubles with every quarantine, and of the time between later probes. An
    # instance that stays up for this long starts over.
    backoff_max_s: float = 30.0
    stall_s: float = 1.0  # A timer this late means that the process itself stood still.


@dataclass(frozen=True, slots=True)
class HealthState:
    """The known state of one instance."""

    target: Target
    up: bool
    reason: str  # Why it was quarantined last; empty if it never was.


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The last quarantine of one instance."""

    reason: str = ""  # Why; empty if it never was quarantined.
    since: float | None = None  # When, in unix seconds; None if it never was.
    # Seconds until it is probed next; None unless it is quarantined.
    next_probe_s: float | None = None


NO_QUARANTINE = Quarantine()


@dataclass(slots=True, eq=False)
class _Watch:
    """One instance."""

    target: Target
    next_probe_s: float
    backoff_s: float  # The wait that its next quarantine begins with.
    up: bool = True
    on_trial: bool = False
    gone: bool = False
    probing: bool = False
    known: bool = False  # Whether its state is more than a guess.
    probes: int = 0  # How many have ended.
    request_failures: int = 0
    probe_failures: int = 0
    quarantined_s: float | None = None
    recovered_s: float | None = None
    answered_s: float | None = None  # When its /health last answered 200 to a probe.
    reason: str = ""


class Health:
    """Watches instances. `run` probes them; the driver reports what its requests meet.

    `on_change(target, up, reason)` is called when an instance changes between up and quarantined,
    `on_gone(target)` when one in quarantine turns out not to answer at all, and `on_known(target)` once, when
    its state is first known.

    Args:
        fetch: GETs a URL and returns the status; raises FetchError if no answer came.
        on_error: Called with what a probe raised beyond `FetchError`: that says nothing of the
            engine.
    """

    def __init__(
        self,
        settings: HealthSettings,
        *,
        fetch: Callable[[str], Awaitable[int]],
        on_change: Callable[[Target, bool, str], None],
        on_gone: Callable[[Target], None],
        on_known: Callable[[Target], None],
        on_error: Callable[[str, Exception], None],
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._settings = settings
        self._fetch = fetch
        self._on_change, self._on_gone = on_change, on_gone
        self._on_known = on_known
        self._on_error = on_error
        self._clock = clock
        self._rng = rng
        self._watches: dict[Target, _Watch] = {}
        # Of each role, the instances, and those in quarantine.
        self._watched: Counter[Role] = Counter()
        self._down: Counter[Role] = Counter()
        self._ticked_s: float | None = None  # None until `run` ticks.
        self._stall_ended_s: float | None = None

    @property
    def enough(self) -> int:
        """Faults in a row that quarantine."""
        return self._settings.quarantine_failures

    def add(self, target: Target) -> None:
        """Watch an instance, up until something says otherwise; the first probe comes soon."""
        assert target not in self._watches
        first_s = self._clock() + self._rng.uniform(0.0, min(1.0, self._settings.health_interval_s))
        self._watches[target] = _Watch(target, first_s, self._settings.backoff_s)
        self._watched[target.role] += 1

    def remove(self, target: Target) -> None:
        """Forget an instance: it takes nothing new, so its role counts without it."""
        watch = self._watches.pop(target, None)
        if watch is not None:
            self._watched[target.role] -= 1
            self._down[target.role] -= not watch.up

    def states(self) -> list[HealthState]:
        return [
            HealthState(watch.target, watch.up, watch.reason) for watch in self._watches.values()
        ]

    def is_up(self, target: Target) -> bool:
        return self._watches[target].up

    def quarantines(self, unix_s: float) -> dict[Target, Quarantine]:
        """Return the last quarantine of every instance; `unix_s` is the wall-clock time now."""
        now_s = self._clock()
        return {
            watch.target: Quarantine(
                watch.reason,
                None
                if watch.quarantined_s is None
                else round(unix_s - now_s + watch.quarantined_s, 3),
                None if watch.up else round(max(0.0, watch.next_probe_s - now_s), 3),
            )
            for watch in self._watches.values()
        }

    def succeeded(self, target: Target) -> None:
        watch = self._watches.get(target)
        # In quarantine this means nothing: the request had begun before, and a probe decides.
        if watch is not None:
            watch.request_failures = watch.probe_failures = 0
            watch.on_trial = False

    def is_on_trial(self, target: Target) -> bool:
        """Return whether an instance came back from quarantine and has served nothing since."""
        watch = self._watches.get(target)
        return watch is not None and watch.up and watch.on_trial

    def hasten(self, target: Target) -> None:
        """Probe an instance now, unless it is in quarantine: its requests make no progress."""
        watch = self._watches.get(target)
        if watch is not None and watch.up:
            watch.next_probe_s = self._clock()

    def verify(self, target: Target) -> None:
        """Probe an instance now, in quarantine too: it may be dead."""
        watch = self._watches.get(target)
        if watch is not None and not watch.gone:
            watch.next_probe_s = self._clock()

    def answered_s(self, target: Target) -> float | None:
        """Return when /health of an instance last answered 200; None for never."""
        watch = self._watches.get(target)
        return None if watch is None else watch.answered_s

    def convict(self, target: Target, reason: str, again: bool) -> bool:
        """Quarantine an instance for a reason that no probe found, if its role can spare it.

        Returns:
            Whether it is quarantined now.
        """
        watch = self._watches.get(target)
        if watch is None:
            return False
        if watch.up and self._can_spare_one(target.role):
            watch.gone = False
            self._quarantine(watch, reason, starts_over=not again)
        return not watch.up

    def failed(self, target: Target, fault: Fault, reason: str = "") -> None:
        """Report a request that failed at the instance; 4xx and 503 are no such failure."""
        watch = self._watches.get(target)
        if watch is None or not watch.up or not self._counts(fault):
            return
        watch.request_failures += 1
        self._judge(watch, fault, watch.request_failures, reason)

    async def probe_new(self) -> None:
        """Probe those of which nothing is known, and wait for their answers, but not for long."""
        new = [watch for watch in self._watches.values() if not (watch.known or watch.probing)]
        some: list[_Watch] = []
        try:
            async with asyncio.timeout(_PATIENCE_S):
                for begin in range(0, len(new), _AT_ONCE):
                    batch = new[begin : begin + _AT_ONCE]
                    some = [watch for watch in batch if not (watch.known or watch.probing)]
                    for watch in some:
                        watch.probing = True
                    await asyncio.gather(*(self._probe(watch.target) for watch in some))
        except TimeoutError:
            for watch in some:  # One may have been cancelled before it began.
                watch.probing = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as probes:
            while True:
                for target in self.due():
                    probes.create_task(self._probe(target))
                await asyncio.sleep(_TICK_S)

    def due(self) -> list[Target]:
        """Return the instances to probe now, each of which then awaits its `probed`.

        Of very many those that wait longest come first, and the rest with the next ticks.
        """
        now_s = self._clock()
        if self._is_stalled(now_s):
            self._stall_ended_s = now_s
        self._ticked_s = now_s
        due = [
            watch
            for watch in self._watches.values()
            if not watch.probing and watch.next_probe_s <= now_s
        ]
        if len(due) > _MOST_DUE:
            due = nsmallest(_MOST_DUE, due, key=attrgetter("next_probe_s"))
        for watch in due:
            watch.probing = True
        return [watch.target for watch in due]

    async def _probe(self, target: Target) -> None:
        watch = self._watches.get(target)
        if watch is None:  # Removed since it was due.
            return
        fault: Fault | None = None
        reason = ""
        try:
            async with asyncio.timeout(self._settings.health_timeout_s):
                status = await self._fetch(f"{target.url}/health")
            if status != 200:
                fault, reason = Fault.SERVER_ERROR, f"status {status}"
        except TimeoutError:
            fault = Fault.TIMEOUT
        except FetchError as error:
            fault, reason = error.fault, str(error)
        except asyncio.CancelledError:
            watch.probing = False
            raise
        except Exception as error:
            # Whatever it is, it must not end the probes of all other instances.
            fault, reason = Fault.LOCAL, str(error)
            self._on_error("probe", error)
        # It may have been removed meanwhile, and even added again.
        if self._watches.get(target) is watch:
            try:
                self.probed(target, fault, reason)
            except Exception as error:
                self._on_error("probe", error)

    def probed(self, target: Target, fault: Fault | None, reason: str = "") -> None:
        """Take in the outcome of a probe; `fault` is None if /health answered 200."""
        watch = self._watches[target]
        watch.probing = False
        watch.probes += 1
        if fault is None:
            watch.answered_s = self._clock()
            watch.probe_failures = 0
            if not watch.up:
                self._recover(watch)
        elif not watch.up:
            # Only what comes back and fails again waits longer: a probe costs an engine nothing, and
            # one that was away for minutes should not idle for half a minute more.
            settings = self._settings
            self._schedule(watch, min(settings.health_interval_s, settings.backoff_max_s))
            if fault in _CONNECT_FAULTS and not watch.gone:
                watch.gone = True
                self._on_gone(target)
        elif self._counts(fault):
            watch.probe_failures += 1
            self._judge(watch, fault, watch.probe_failures, reason)
        if not watch.known and (fault is None or not watch.up or watch.probes >= self.enough):
            watch.known = True
            self._on_known(target)
        if watch.up:
            interval_s = self._settings.health_interval_s
            if not watch.known:
                interval_s = min(interval_s, self._settings.backoff_s)
            self._schedule(watch, interval_s)

    def _counts(self, fault: Fault) -> bool:
        """Return whether a fault says something of the engine."""
        if fault is Fault.LOCAL:
            return False
        if fault not in _TIMEOUTS:
            return True
        now_s = self._clock()
        # Timers that came due in a stall fire together, some before the tick that notices it.
        ended_s = now_s if self._is_stalled(now_s) else self._stall_ended_s
        return ended_s is None or now_s - ended_s > self._settings.health_timeout_s

    def _is_stalled(self, now_s: float) -> bool:
        return (
            self._ticked_s is not None and now_s - self._ticked_s > _TICK_S + self._settings.stall_s
        )

    def _judge(self, watch: _Watch, fault: Fault, failures: int, reason: str) -> None:
        """Quarantine an instance if its faults are enough and the panic rule lets it go."""
        enough = fault is Fault.CONNECT or failures >= self._settings.quarantine_failures
        if not enough or not (fault in _CONNECT_FAULTS or self._can_spare_one(watch.target.role)):
            return
        watch.gone = fault in _GONE_FAULTS
        self._quarantine(watch, reason or fault.value, starts_over=True)

    def _quarantine(self, watch: _Watch, reason: str, *, starts_over: bool) -> None:
        now_s = self._clock()
        long_ago = (
            watch.recovered_s is None or now_s - watch.recovered_s > self._settings.backoff_max_s
        )
        if long_ago and starts_over:
            watch.backoff_s = self._settings.backoff_s
        watch.up = False
        self._down[watch.target.role] += 1
        watch.reason = reason
        watch.quarantined_s = now_s
        self._back_off(watch)
        self._on_change(watch.target, False, watch.reason)
        if watch.gone:
            self._on_gone(watch.target)

    def _can_spare_one(self, role: Role) -> bool:
        return (self._down[role] + 1) * 2 <= self._watched[role]

    def _back_off(self, watch: _Watch) -> None:
        self._schedule(watch, watch.backoff_s)
        watch.backoff_s = min(2 * watch.backoff_s, self._settings.backoff_max_s)

    def _recover(self, watch: _Watch) -> None:
        watch.up = watch.on_trial = True
        self._down[watch.target.role] -= 1
        watch.recovered_s = self._clock()
        # On trial: one more fault is enough.
        watch.request_failures = watch.probe_failures = self._settings.quarantine_failures - 1
        self._on_change(watch.target, True, "its health probe succeeded")

    def _schedule(self, watch: _Watch, delay_s: float) -> None:
        spread = self._rng.uniform(1.0 - _JITTER, 1.0 + _JITTER)
        watch.next_probe_s = self._clock() + delay_s * spread
