"""Changes of the engines, by operators and by health checks, and what is notified of them.

One object owns every change of the instances, so that scheduler, health checks, scrapes and the list
itself cannot disagree.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import PrefillerId, RankId
from balanceroute.proxy.live.control.memory import KvCapacity, RankSlots
from balanceroute.proxy.live.control.orders import ConflictError, UnknownInstanceError
from balanceroute.proxy.live.engines.engine_gauges import EngineGauges
from balanceroute.proxy.live.engines.engine_url import EngineUrl, Fault, FetchError
from balanceroute.proxy.live.engines.health import Health
from balanceroute.proxy.live.engines.instances import (
    Instances,
    Prefiller,
    Rank,
    Role,
    Status,
    Target,
)
from balanceroute.proxy.live.engines.pairing import Pairing
from balanceroute.proxy.live.engines.scrape import Scraper
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.scheduling.driver import Driver, in_flight, sessions_on
from balanceroute.proxy.live.settings.engines import (
    DecodeServer,
    PrefillServer,
    check_ranks,
    prefill_server,
)
from balanceroute.proxy.live.telemetry.component_metrics import EngineMetrics
from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.topologies import MAX_RANKS

# A process that takes over has its engines by then.
_TAKEN_OVER_S = 1.0
_LONGEST_S = 86_400.0


class DrainDeadlines:
    """One timer for each engine that has a deadline.

    Args:
        unix_s: Wall-clock time, which a restart does not begin anew.
    """

    def __init__(self, due: Callable[[Target], None], unix_s: Callable[[], float]) -> None:
        self._due = due
        self._unix_s = unix_s
        self._at: dict[Target, tuple[float, asyncio.TimerHandle]] = {}

    def set(self, target: Target, after_s: float) -> None:
        """Have an engine left after so many seconds; the latest order holds."""
        self.forget(target)
        timer = asyncio.get_running_loop().call_later(after_s, self._expire, target)
        self._at[target] = self._unix_s() + after_s, timer

    def forget(self, target: Target) -> None:
        """Drop the deadline of an engine: it was taken back, or is gone."""
        found = self._at.pop(target, None)
        if found is not None:
            found[1].cancel()

    def times(self) -> tuple[tuple[Target, float], ...]:
        """Return each engine and the Unix time of its deadline."""
        return tuple((target, unix_s) for target, (unix_s, _) in self._at.items())

    def restore(self, times: Iterable[tuple[Target, float]]) -> None:
        """Set those that another process had: one that has passed meanwhile comes soon."""
        for target, unix_s in times:
            self.set(target, min(max(unix_s - self._unix_s(), _TAKEN_OVER_S), _LONGEST_S))

    def close(self) -> None:
        for _, timer in self._at.values():
            timer.cancel()

    def _expire(self, target: Target) -> None:
        del self._at[target]
        self._due(target)


_log = logging.getLogger(__name__)


class Readiness:
    """Whether each role has an engine that is up, as it was logged last."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self._missing: set[Role] = set()
        self._was_ready = False

    def log(self) -> None:
        """Log when a role has no engine left, and when each has one again."""
        missing = self._instances.missing
        self._was_ready |= not missing
        new = missing - self._missing - self._instances.unprobed  # These may be up.
        message = (
            "no engine of a role is up" if self._was_ready else "waiting for engines of a role"
        )
        for role in sorted(new, key=lambda role: role.value):
            _log.warning(message, extra={"fields": {"role": role.value}})
        if self._missing and not missing:
            _log.warning("the fleet is ready: an engine of each role is up")
        self._missing = self._missing & missing | new


# Between two questions for the ranks of a decode server that does not answer yet.
_DISCOVERY_S = 1.0


async def await_decoder(roster: "Roster", server: DecodeServer) -> None:
    """Ask a decode server for its ranks until it reports them, then add them."""
    while True:
        await asyncio.sleep(_DISCOVERY_S)
        try:
            await roster.add(Addition(Role.DECODE, server.url.base))
        except ConflictError:
            return  # It was added meanwhile.
        except ConfigError as error:
            _log.debug("no ranks yet", extra={"fields": {"reason": str(error)}})
        else:
            return


def note_sleep(instances: Instances, target: Target, *, asleep: bool) -> bool:
    """Take in whether an engine sleeps; return whether that is new."""
    present = instances.of(target)
    if all(one.asleep == asleep for one in present):
        return False
    for one in present:
        one.asleep = asleep
    fields = {"role": target.role.value, "url": target.url}
    _log.warning("instance %s", "sleeps" if asleep else "is awake", extra={"fields": fields})
    return True


# What concerns all engines is done anew at most so often while engines change by themselves.
_AGAIN_S = 0.1
_REMOVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class Addition:
    """An instance to add."""

    role: Role  # What it does.
    url: str  # Its address.
    ranks: int | None = None  # The number of a decode server's ranks.
    asked: bool = False  # Whether the server reported it: after a restart it is asked again.
    # The address of a prefiller's bootstrap server; None for the usual one.
    bootstrap: str | None = None
    # Where a prefiller publishes its KV cache events; None if it does not say.
    kv_events: str | None = None
    kv_replay: str | None = None  # Where it sends them again; likewise.
    # Whether it was found, and may come and go again and again: it has the numbers that it had.
    found: bool = False


class Roster:
    """Owns the changes of `instances`.

    Args:
        instances: The list; empty at first.
        discover: Asks a decode server how many data-parallel ranks it has. Raises FetchError.
        utilisation_limit: KV-cache use of a prefiller above which it takes no prefill.
        pairing: Asks each engine what it is before it takes anything.
        left: Called with the address of an engine that is there no more.
    """

    def __init__(
        self,
        instances: Instances,
        *,
        connector: str,
        connect: Callable[[EngineUrl], Endpoint],
        discover: Callable[[EngineUrl], Awaitable[int]],
        memory: KvCapacity,
        slots: RankSlots,
        utilisation_limit: float,
        pairing: Pairing,
        unix_s: Callable[[], float],
        left: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.instances = instances
        self.pairing = pairing
        self.memory = memory
        self.endpoints: dict[str, Endpoint] = {}
        # The server of each engine that is not removed, with its settings.
        self.servers: dict[Target, PrefillServer | DecodeServer] = {}
        # The decode servers that have not reported their ranks yet.
        self.silent: list[DecodeServer] = []
        self._slots = slots
        self._connector = connector
        self._connect = connect
        self._discover, self._left = discover, left
        self._utilisation_limit = utilisation_limit
        # Set with `attach`.
        self._driver: Driver
        self._health: Health
        self._scraper: Scraper
        self._metrics: EngineMetrics
        self._readiness = Readiness(instances)
        # Makes the scheduler fit the instances; set with `attach`.
        self._reconfigure: Callable[[], None] = lambda: None
        self._ordered = self._reconfigure  # Called after each change by order.
        # When requests leave the engines that are drained.
        self.deadlines = DrainDeadlines(self._deadline_came, unix_s)
        # See `one_change`: how many are open, what they have added, and whether they changed anything.
        self._open_changes = 0
        self._added: list[Target] = []
        self._changed = False
        self._settled_s = -_AGAIN_S
        # Engines that are drained, to be forgotten when they have no request.
        self.removing: set[Target] = set()
        self._removal: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def attach(
        self,
        driver: Driver,
        health: Health,
        scraper: Scraper,
        metrics: EngineMetrics,
        *,
        reconfigure: Callable[[], None],
        ordered: Callable[[], None],
    ) -> None:
        """Set what is notified from now on, and notify it of the present instances at once."""
        self._driver, self._health, self._scraper = driver, health, scraper
        self._metrics, self._reconfigure, self._ordered = metrics, reconfigure, ordered
        self.pairing.attach(driver.feed, driver.reopen)
        self._watch(self.targets())
        driver.reopen()
        self._readiness.log()

    def targets(self) -> list[Target]:
        present: list[Prefiller | Rank] = [*self.instances.prefillers, *self.instances.ranks]
        return list(dict.fromkeys(i.target for i in present if i.status is not Status.REMOVED))

    def enlist_prefiller(self, server: PrefillServer, *, again: bool = False) -> Target:
        """Add a prefiller to the list; `again` if it may have been there before, with its number."""
        target, name = Target(Role.PREFILL, server.url.base), server.url.base
        self.servers[target] = server
        endpoint, asked = self._endpoint(server.url), not self.pairing.active
        bootstrap = None if server.bootstrap is None else server.bootstrap.base
        instances = self.instances
        # KV cache events are followed once for each number.
        again = again and instances.engine_blocks is None
        if again and instances.bring_back(target, [name], endpoint, asked=asked):
            (prefiller,) = instances.of(target)
            assert isinstance(prefiller, Prefiller)
            prefiller.bootstrap = bootstrap
            return target
        number = PrefillerId(len(instances.prefillers))
        instances.prefillers.append(
            Prefiller(number, name, target, endpoint, bootstrap=bootstrap, asked=asked)
        )
        return target

    async def enlist_decoder(self, server: DecodeServer) -> None:
        """Add the ranks of a decode server to the list, asking it for them if need be.

        One that is asked and does not answer is one of `silent`.

        Raises:
            ConfigError: It answers, but does not report them.
        """
        self.servers[Target(Role.DECODE, server.url.base)] = server
        if server.discover:
            try:
                count = await self._discover(server.url)
            except FetchError as error:
                if error.fault is Fault.PROTOCOL:
                    raise _undiscovered(server.url, error) from None
                fields = {"url": server.url.base, "reason": str(error)}
                _log.warning("its ranks are asked for until it answers", extra={"fields": fields})
                self.silent.append(server)
                return
            check_ranks(server.url, count)
            server = DecodeServer(server.url, tuple(range(count)))
        check_ranks(server.url, len(server.ranks), MAX_RANKS - len(self.instances.ranks))
        self._enlist_ranks(server)

    def reserve_rank(self, server: DecodeServer) -> None:
        """Put a removed rank on the list, as the scheduler needs one, until there is another."""
        self._enlist_ranks(DecodeServer(server.url))
        self.instances.ranks[-1].status = Status.REMOVED

    def reserve_prefiller(self, server: PrefillServer) -> None:
        """Put a removed prefiller on the list, for the same reason."""
        del self.servers[self.enlist_prefiller(server)]
        self.instances.prefillers[-1].status = Status.REMOVED

    def _enlist_ranks(self, server: DecodeServer, *, again: bool = False) -> Target:
        target = Target(Role.DECODE, server.url.base)
        endpoint, asked = self._endpoint(server.url), not self.pairing.active
        names = [url.name for url in server.ranks]
        if again and self.instances.bring_back(target, names, endpoint, asked=asked):
            return target
        for url in server.ranks:
            header = None if url.rank is None else b"%d" % url.rank
            number = RankId(len(self.instances.ranks))
            rank = Rank(number, url.name, target, endpoint, header, asked=asked)
            self.instances.ranks.append(rank)
        return target

    async def add(self, addition: Addition) -> None:
        """Add an instance while the proxy serves, or take a draining one back.

        A decode server is asked for its ranks if the addition has none.

        Raises:
            ConfigError: An address is none, something is said of an instance that it cannot have,
                it has too many ranks, or the server does not report them.
            ConflictError: It is there already.
        """
        address = EngineUrl.parse(addition.url)
        target = Target(addition.role, address.base)
        discovers = addition.ranks is None and addition.bootstrap is None and address.rank is None
        if discovers and target.role is Role.DECODE and not self.instances.has(target):
            try:
                ranks = await self._discover(address)
            except FetchError as error:
                raise _undiscovered(address, error) from None
            addition = replace(addition, ranks=ranks, asked=True)
        (reason,) = self.add_all([addition])
        if reason is not None:
            raise reason
        await asyncio.gather(self.pairing.ask([target]), self._health.probe_new())
        self._readiness.log()

    def add_all(self, additions: Sequence[Addition]) -> list[ConfigError | ConflictError | None]:
        """Add instances, or take draining ones back, all of them as one change.

        Returns:
            For each why it is not added, as `add` raises it; else None.
        """
        reasons: list[ConfigError | ConflictError | None] = []
        room = MAX_RANKS - len(self.instances.serving())
        with self.one_change():
            for addition in additions:
                try:
                    room -= self._add(addition, room)
                except (ConfigError, ConflictError) as error:
                    reasons.append(error)
                else:
                    reasons.append(None)
        return reasons

    def _add(self, addition: Addition, room: int) -> int:
        """Enlist an instance, or take it back; return how many ranks are new."""
        address, ranks = EngineUrl.parse(addition.url), addition.ranks
        if address.rank is not None:
            raise ConfigError(f"{address.name}: give the server and the number of its ranks")
        target = Target(addition.role, address.base)
        if self._take_back(target):
            return 0
        if addition.role is Role.PREFILL:
            if ranks is not None:
                raise ConfigError("only decode servers have ranks")
            own = None if addition.bootstrap is None else EngineUrl.parse(addition.bootstrap)
            server = prefill_server(address, own, self._connector)
            events, replay = addition.kv_events, addition.kv_replay
            server = replace(server, kv_events=events, kv_replay=replay)
            self.enlist_prefiller(server, again=addition.found)
        else:
            if addition.bootstrap is not None:
                raise ConfigError("only prefillers have bootstrap servers")
            assert ranks is not None, "an addition of a decode server has its ranks"
            check_ranks(address, ranks, room)
            ids = None if ranks == 1 and not addition.asked else tuple(range(ranks))
            decoder = DecodeServer(address, ids)
            asks = DecodeServer(address, discover=True)
            self.servers[target] = asks if addition.asked else decoder
            self._enlist_ranks(decoder, again=addition.found)
        self._added.append(target)
        return 0 if ranks is None else ranks

    @contextmanager
    def one_change(self) -> Iterator[None]:
        """Make several changes at the cost of one: what concerns all engines is done at the end."""
        self._open_changes += 1
        try:
            yield
        finally:
            self._open_changes -= 1
            if not self._open_changes and (self._changed or self._added):
                self._end_change()

    def _end_change(self) -> None:
        added, self._added, self._changed = self._added, [], False
        if added:
            self._reconfigure()
            self._watch(added)
        self._ordered()
        self._settle()
        if added:
            self._driver.decisions.wake()
        for target in added:
            _note("added", target)

    def drain(self, role: Role, url: str, *, deadline_s: float | None = None) -> None:
        """Send nothing new to an instance, and have it left after `deadline_s` seconds; None for never.

        Raises:
            UnknownInstanceError: It is not there.
        """
        target = self._find(role, url)
        if deadline_s is not None:
            self.deadlines.set(target, deadline_s)
        with self.one_change():
            self._set(target, Status.DRAINING, "drained")

    def move_away(self, role: Role, url: str) -> None:
        """Have the requests on an instance that is drained go on elsewhere, as far as they can.

        Nothing happens if it was taken back, or is gone. An answer that no other instance can end, and
        one for which no other is up, goes on where it is.
        """
        target = Target(role, EngineUrl.parse(url).base)
        if any(one.status is not Status.DRAINING for one in self.instances.of(target)):
            return
        for session in self.sessions_on(target):
            if role not in self.instances.missing_for(session.ticket.eligible):
                session.instance_removed(target, gently=True)

    def remove(self, role: Role, url: str, *, force: bool) -> None:
        """Forget an instance.

        Raises:
            UnknownInstanceError: It is not there.
            ConflictError: Requests are in flight on it, and `force` does not say to end them.
        """
        target = self._find(role, url)
        busy = self.sessions_on(target)
        if busy and not force:
            raise ConflictError(
                f"{len(busy)} requests are in flight on {target.url}: drain it first"
            )
        with self.one_change():
            self._forget(target)
        for session in busy:
            session.instance_removed(target)

    def remove_when_idle(self, role: Role, url: str) -> None:
        """Drain an instance, have its requests go on elsewhere, and forget it once it has none."""
        self.removing.add(self._find(role, url))
        self.drain(role, url)
        self.move_away(role, url)
        self.go_on_removing(())

    def go_on_removing(self, targets: Iterable[Target]) -> None:
        """Forget instances that are drained once they have no request."""
        self.removing.update(self.servers.keys() & targets)
        if self.removing and self._removal is None:
            self._removal = asyncio.get_running_loop().create_task(_remove_idle(self))
            self._removal.add_done_callback(self._removed)

    def _removed(self, task: asyncio.Task[None]) -> None:
        self._removal = None
        if not task.cancelled():
            self.go_on_removing(())  # One may have come since.

    def remove_idle(self, targets: Collection[Target]) -> set[Target]:
        """Forget those of some instances on which no request is in flight; return which they are."""
        busy = self.in_flight()
        idle = {target for target in targets if target not in busy}
        with self.one_change():
            for target in idle:
                self._forget(target)
        return idle

    def _forget(self, target: Target) -> None:
        self._health.remove(target)
        self._scraper.remove(target)
        self.deadlines.forget(target)
        self.removing.discard(target)
        del self.servers[target]
        self._set(target, Status.REMOVED, "removed")
        # One engine may have both roles.
        if not any(self.instances.has(Target(role, target.url)) for role in Role):
            self.endpoints.pop(target.url).close()
            self._left(target.url)

    def sessions_on(self, target: Target) -> list[Session]:
        return sessions_on(self._driver.sessions, target)

    def in_flight(self) -> Counter[Target]:
        return in_flight(self._driver.sessions)

    def health_changed(self, target: Target, up: bool, reason: str) -> None:
        """Take a result of the health checks; an operator's order goes before theirs."""
        if not up:
            self._metrics.quarantined(target)
        instances = self.instances.of(target)
        for instance in instances:
            if instance.status in (Status.UP, Status.QUARANTINED):
                instance.status = Status.UP if up else Status.QUARANTINED
            if isinstance(instance, Prefiller) and not up:
                instance.identity = None  # A restarted engine has another id.
                instance.without_kv = ""
        if up:
            self.pairing.doubt(target)  # It may have been updated.
        _log.warning(
            "instance is up" if up else "instance is quarantined",
            extra={"fields": {"role": target.role.value, "url": target.url, "reason": reason}},
        )
        self._changed_itself(target)

    def engine_gone(self, target: Target) -> None:
        """Note that an engine does not answer any more."""
        self._driver.lost.gone(target)
        for instance in self.instances.of(target):
            if isinstance(instance, Prefiller):
                self._driver.lost.kv_lost(instance)

    def health_known(self, target: Target) -> None:
        """Note that a new instance was probed: it may serve."""
        for instance in self.instances.of(target):
            instance.probed = True
        self._changed_itself(target)

    def utilisation_changed(self, target: Target, utilisation: float) -> None:
        crowded = utilisation > self._utilisation_limit
        for instance in self.instances.of(target):
            if isinstance(instance, Prefiller):
                instance.utilisation = utilisation
                if instance.crowded != crowded:
                    instance.crowded = crowded
                    self._driver.reopen([instance])

    def scraped(self, target: Target, gauges: EngineGauges) -> None:
        """Take what an engine says of its memory, its slots and its sleep."""
        if note_sleep(self.instances, target, asleep=gauges.asleep):
            self._changed_itself(target)
        if target.role is Role.DECODE:
            self.instances.groups.scraped(target, gauges.engines)
        self._slots.scraped(target, gauges)
        self.memory.scraped(target, gauges)
        if self.memory.is_due(asyncio.get_running_loop().time()) and self.memory.settle(
            self.instances.has
        ):
            self._reconfigure()

    def reopen(self) -> None:
        """Note that instances have opened or closed otherwise than by an order."""
        self._driver.reopen()
        self._readiness.log()

    def _changed_itself(self, target: Target) -> None:
        """Note that an instance has opened or closed by itself, as many may at the same time.

        The scheduler gets it at once. The work for all engines follows now, or a moment later together with
        further changes.
        """
        self._driver.reopen(self.instances.of(target))
        loop = asyncio.get_running_loop()
        again_s = self._settled_s + _AGAIN_S
        if loop.time() >= again_s:
            self._settle()
        elif self._timer is None:
            self._timer = loop.call_at(again_s, self._settle)

    def _settle(self) -> None:
        """Do what concerns all engines after some have changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._settled_s = asyncio.get_running_loop().time()
        self.pairing.update()
        self.reopen()

    def close(self) -> None:
        self.deadlines.close()
        if self._timer is not None:
            self._timer.cancel()
        if self._removal is not None:
            self._removal.cancel()
        for endpoint in self.endpoints.values():
            endpoint.close()

    def _deadline_came(self, target: Target) -> None:
        self._ordered()
        self.move_away(target.role, target.url)

    def _watch(self, targets: Iterable[Target]) -> None:
        for target in targets:
            self.pairing.doubt(target)
            for instance in self.instances.of(target):
                instance.probed = False
            self._health.add(target)
            self._scraper.add(target)
            self._metrics.added(target)

    def _endpoint(self, url: EngineUrl) -> Endpoint:
        endpoint = self.endpoints.get(url.base)
        if endpoint is None:
            endpoint = self.endpoints[url.base] = self._connect(url.at(None))
        return endpoint

    def _find(self, role: Role, url: str) -> Target:
        target = Target(role, EngineUrl.parse(url).base)
        if not self.instances.has(target):
            raise UnknownInstanceError(f"there is no {role.value} {target.url}")
        return target

    def _take_back(self, target: Target) -> bool:
        """Take a draining instance back, up or down as its health is; return whether it is there.

        Raises:
            ConflictError: It is there, and not draining.
        """
        present = [i for i in self.instances.of(target) if i.status is not Status.REMOVED]
        if any(instance.status is not Status.DRAINING for instance in present):
            raise ConflictError(f"{target.role.value} {target.url} is there already")
        if present:
            self.deadlines.forget(target)
            self.removing.discard(target)
            self.pairing.doubt(target)  # It may have been updated.
            is_up = self._health.is_up(target)
            with self.one_change():
                self._set(target, Status.UP if is_up else Status.QUARANTINED, "taken back")
        return bool(present)

    def _set(self, target: Target, status: Status, word: str) -> None:
        for instance in self.instances.of(target):
            if instance.status is not Status.REMOVED:
                instance.status = status
        self._changed = True
        _note(word, target)


def _note(word: str, target: Target) -> None:
    fields = {"role": target.role.value, "url": target.url}
    _log.info("instance %s", word, extra={"fields": fields})


def _undiscovered(url: EngineUrl, error: FetchError) -> ConfigError:
    return ConfigError(f"{url.base}: cannot discover its ranks: {error}")


async def _remove_idle(roster: Roster) -> None:
    """Forget instances that are to be removed and have no request, now and every quarter of a second."""
    while roster.removing:
        roster.remove_idle(roster.removing)
        if roster.removing:
            await asyncio.sleep(_REMOVAL_S)


class EngineOrders:
    """Finds the group that an order is about; see `Roster`.

    Args:
        rosters: Returns those of the groups by name, and that of a proxy without groups by "".
    """

    def __init__(self, rosters: Callable[[], Mapping[str, Roster]]) -> None:
        self._rosters = rosters

    async def add(self, addition: Addition, group: str | None) -> None:
        """Add an instance to a group; None without groups, or to take a draining one back.

        Raises:
            ConfigError: The order cannot be carried out, names no group where there are some, or names KV
                cache events that the proxy would not follow.
            ConflictError: It is there already, perhaps in another group.
            UnknownInstanceError: There is no such group.
        """
        rosters, base = self._rosters(), EngineUrl.parse(addition.url).base
        both = [Target(either, base) for either in Role]
        owners = [name for name, one in rosters.items() if any(map(one.instances.has, both))]
        name = owners[0] if group is None and owners else group
        name = named(rosters, name)
        if any(one != name for one in owners):
            raise ConflictError(f"{base} is an engine of the group {owners[0]!r}")
        roster = rosters[name]
        if addition.kv_events is not None and addition.role is not Role.PREFILL:
            raise ConfigError("kv_events: only prefillers tell what they have cached")
        if addition.kv_events is not None and roster.instances.engine_blocks is None:
            raise ConfigError(
                "kv_events: none are followed: start the proxy with --kv-events or --kv-events-port"
            )
        await roster.add(addition)

    def having(self, role: Role, url: str) -> Roster:
        """Return the roster that has an instance, or one that says that it has not."""
        rosters = list(self._rosters().values())
        target = Target(role, EngineUrl.parse(url).base)
        return next((one for one in rosters if one.instances.has(target)), rosters[0])


def named(groups: Mapping[str, object], group: str | None) -> str:
    """Return the name of a group that an order is about; None stands for the only one.

    Raises:
        ConfigError: There are groups, and none is named.
        UnknownInstanceError: There is no such group.
    """
    if group is None and "" not in groups:
        raise ConfigError(f"group is missing, one of {', '.join(groups)}")
    name = group or ""
    if name not in groups:
        raise UnknownInstanceError(f"there is no group {name!r}")
    return name
