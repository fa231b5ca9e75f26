"""Changes of the engines, by operators and by health checks, and who is notified of them.

One object owns every change of the instances, so that scheduler, health checks, scrapes and the list
itself cannot disagree.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import PrefillerId, RankId
from balanceroute.proxy.live.control.drain_deadlines import DrainDeadlines
from balanceroute.proxy.live.control.errors import ConflictError, UnknownInstanceError
from balanceroute.proxy.live.control.memory import RankMemory
from balanceroute.proxy.live.control.rank_slots import RankSlots
from balanceroute.proxy.live.control.readiness import Readiness
from balanceroute.proxy.live.control.sleepers import note_sleep
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.faults import Fault, FetchError
from balanceroute.proxy.live.engines.instances import (
    Instances,
    Prefiller,
    Rank,
    Role,
    Status,
    Target,
)
from balanceroute.proxy.live.request.lost_engines import sessions_on
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer, prefill_server

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.engine_gauges import EngineGauges
    from balanceroute.proxy.live.engines.health import Health
    from balanceroute.proxy.live.engines.pairing import Pairing
    from balanceroute.proxy.live.engines.scrape import Scraper
    from balanceroute.proxy.live.request.live_request import LiveRequest
    from balanceroute.proxy.live.scheduling.driver import Driver
    from balanceroute.proxy.live.telemetry.engine_metrics import EngineMetrics
    from balanceroute.proxy.wire.http1.client import Endpoint

_log = logging.getLogger(__name__)


class Roster:
    """Owns the changes of `instances`.

    Args:
        instances: The list; empty at first.
        connector: The name of the KV connector.
        connect: Makes the connections to an engine.
        discover: Asks a decode server how many data-parallel ranks it has. Raises FetchError.
        memory: How many KV tokens fit on a rank.
        slots: Warns where a rank has fewer than it should have.
        utilisation_limit: KV-cache use of a prefiller above which it takes no prefill.
        pairing: Asks each engine what it is before it takes anything.

    Attributes:
        pairing: As given.
        deadlines: When requests leave the engines that are drained.
        servers: What was said of each engine that is not removed.
        silent: The decode servers that have not told their ranks yet.
    """

    def __init__(
        self,
        instances: Instances,
        *,
        connector: str,
        connect: "Callable[[EngineUrl], Endpoint]",
        discover: Callable[[EngineUrl], Awaitable[int]],
        memory: RankMemory,
        slots: RankSlots,
        utilisation_limit: float,
        pairing: "Pairing",
        unix_s: Callable[[], float],
    ) -> None:
        self.instances = instances
        self.pairing = pairing
        self.memory = memory
        self.endpoints: dict[str, Endpoint] = {}
        self.servers: dict[Target, PrefillServer | DecodeServer] = {}
        self.silent: list[DecodeServer] = []
        self._slots = slots
        self._connector = connector
        self._connect = connect
        self._discover = discover
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
        self.deadlines = DrainDeadlines(self._deadline_came, unix_s)

    def attach(
        self,
        driver: "Driver",
        health: "Health",
        scraper: "Scraper",
        metrics: "EngineMetrics",
        *,
        reconfigure: Callable[[], None],
        ordered: Callable[[], None],
    ) -> None:
        """Set who is notified from now on; they are notified of the present instances at once."""
        self._driver, self._health, self._scraper = driver, health, scraper
        self._metrics, self._reconfigure, self._ordered = metrics, reconfigure, ordered
        self.pairing.attach(driver.feed, driver.reopen)
        for target in self.targets():
            self._watch(target)
        driver.reopen()
        self._readiness.log()

    def targets(self) -> list[Target]:
        """Return the instances that are not removed."""
        present: list[Prefiller | Rank] = [*self.instances.prefillers, *self.instances.ranks]
        return list(dict.fromkeys(i.target for i in present if i.status is not Status.REMOVED))

    def enlist_prefiller(self, server: PrefillServer) -> Target:
        """Add a prefiller to the list."""
        target = Target(Role.PREFILL, server.url.base)
        self.servers[target] = server
        self.instances.prefillers.append(
            Prefiller(
                PrefillerId(len(self.instances.prefillers)),
                server.url.base,
                target,
                self._endpoint(server.url),
                bootstrap=None if server.bootstrap is None else server.bootstrap.base,
                asked=not self.pairing.active,
            )
        )
        return target

    async def enlist_decoder(self, server: DecodeServer) -> None:
        """Add the ranks of a decode server to the list, asking it for them if need be.

        One that is asked and does not answer is one of `silent`.

        Raises:
            ConfigError: It answers, but does not tell.
        """
        self.servers[Target(Role.DECODE, server.url.base)] = server
        if server.discover:
            try:
                count = await self._discover(server.url)
            except FetchError as error:
                if error.fault is Fault.PROTOCOL:
                    raise _untold(server.url, error) from None
                fields = {"url": server.url.base, "reason": str(error)}
                _log.warning("its ranks are asked for until it answers", extra={"fields": fields})
                self.silent.append(server)
                return
            server = DecodeServer(server.url, tuple(range(count)))
        self._enlist_ranks(server)

    def reserve_rank(self, server: DecodeServer) -> None:
        """Put a removed rank on the list, as the scheduler needs one, until there is another."""
        self._enlist_ranks(DecodeServer(server.url))
        self.instances.ranks[-1].status = Status.REMOVED

    def reserve_prefiller(self, server: PrefillServer) -> None:
        """Put a removed prefiller on the list, for the same reason."""
        del self.servers[self.enlist_prefiller(server)]
        self.instances.prefillers[-1].status = Status.REMOVED

    async def _ask(self, url: EngineUrl) -> int:
        """Return the number of ranks of a decode server."""
        try:
            return await self._discover(url)
        except FetchError as error:
            raise _untold(url, error) from None

    def _enlist_ranks(self, server: DecodeServer) -> Target:
        target = Target(Role.DECODE, server.url.base)
        endpoint = self._endpoint(server.url)
        for url in server.ranks:
            header = None if url.rank is None else b"%d" % url.rank
            number = RankId(len(self.instances.ranks))
            asked = not self.pairing.active
            rank = Rank(number, url.name, target, endpoint, header, asked=asked)
            self.instances.ranks.append(rank)
        return target

    async def add(
        self,
        role: Role,
        url: str,
        *,
        ranks: int | None,
        bootstrap: str | None,
        kv_events: str | None = None,
        kv_replay: str | None = None,
    ) -> None:
        """Add an instance while the proxy serves, or take a draining one back.

        Args:
            role: What it does.
            url: Its address.
            ranks: The number of a decode server's ranks; None to ask it.
            bootstrap: The address of a prefiller's bootstrap server; None for the usual one.
            kv_events: Where a prefiller publishes its KV cache events; None if it does not say.
            kv_replay: Where it sends them again; likewise.

        Raises:
            ConfigError: An address is none, something is said of an instance that it cannot have,
                or the server does not tell its ranks.
            ConflictError: It is there already.
        """
        address = EngineUrl.parse(url)
        if address.rank is not None:
            raise ConfigError(f"{address.name}: give the server and the number of its ranks")
        target = Target(role, address.base)
        if self._take_back(target):
            await self.pairing.ask()
            return
        if role is Role.PREFILL:
            if ranks is not None:
                raise ConfigError("only decode servers have ranks")
            own = None if bootstrap is None else EngineUrl.parse(bootstrap)
            server = prefill_server(address, own, self._connector)
            self.enlist_prefiller(replace(server, kv_events=kv_events, kv_replay=kv_replay))
        else:
            if bootstrap is not None:
                raise ConfigError("only prefillers have bootstrap servers")
            known = None if ranks in (None, 1) else tuple(range(ranks or 0))
            if ranks is None:
                known = tuple(range(await self._ask(address)))
                if self._take_back(target):  # It was added while it was asked.
                    await self.pairing.ask()
                    return
            decoder = DecodeServer(address, known)
            self.servers[target] = decoder if ranks else DecodeServer(address, discover=True)
            self._enlist_ranks(decoder)
        self._reconfigure()
        self._driver.grown()
        self._watch(target)
        await self.pairing.ask()
        self._ordered()
        self._readiness.log()
        _log.info("instance added", extra={"fields": {"role": role.value, "url": address.base}})

    def drain(self, role: Role, url: str, *, deadline_s: float | None = None) -> None:
        """Send nothing new to an instance, and have it left after `deadline_s` seconds; None for never.

        Raises:
            UnknownInstanceError: It is not there.
        """
        target = self._find(role, url)
        if deadline_s is not None:
            self.deadlines.set(target, deadline_s)
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
        self._health.remove(target)
        self._scraper.remove(target)
        self.deadlines.forget(target)
        del self.servers[target]
        self._set(target, Status.REMOVED, "removed")
        for session in busy:
            session.instance_removed(target)
        if all(other.url != target.url for other in self.targets()):
            self.endpoints.pop(target.url).close()

    def sessions_on(self, target: Target) -> "list[LiveRequest]":
        """Return the requests in flight on an instance."""
        return sessions_on(self._driver.sessions, target)

    def health_changed(self, target: Target, up: bool, reason: str) -> None:
        """Take a result of the health checks; an operator's order goes before theirs."""
        if not up:
            self._metrics.quarantined(target)
        for instance in self.instances.of(target):
            if instance.status in (Status.UP, Status.QUARANTINED):
                instance.status = Status.UP if up else Status.QUARANTINED
            if isinstance(instance, Prefiller) and not up:
                instance.identity = None  # A restarted engine has another id.
        if up:
            self.pairing.doubt(target)  # It may have been updated.
        self.pairing.update()
        _log.warning(
            "instance is up" if up else "instance is quarantined",
            extra={"fields": {"role": target.role.value, "url": target.url, "reason": reason}},
        )
        self.reopen()
        if self._health.is_gone(target):
            self._driver.lost.gone(target)
            for instance in self.instances.of(target):
                if isinstance(instance, Prefiller):
                    self._driver.lost.kv_lost(instance)

    def utilisation_changed(self, target: Target, utilisation: float) -> None:
        """Take the result of a scrape."""
        for instance in self.instances.of(target):
            if isinstance(instance, Prefiller):
                instance.utilisation = utilisation
                instance.crowded = utilisation > self._utilisation_limit
        self._driver.reopen()

    def scraped(self, target: Target, gauges: "EngineGauges") -> None:
        """Take what an engine says of its memory, its slots and its sleep."""
        if note_sleep(self.instances, target, asleep=gauges.asleep):
            self.reopen()
        self._slots.scraped(target, gauges)
        if self.memory.scraped(target, gauges, self.targets()):
            self._reconfigure()

    def reopen(self) -> None:
        """Note that instances have opened or closed otherwise than by an order."""
        self._driver.reopen()
        self._readiness.log()

    def close(self) -> None:
        """Close every connection."""
        self.deadlines.close()
        for endpoint in self.endpoints.values():
            endpoint.close()

    def _deadline_came(self, target: Target) -> None:
        self._ordered()
        self.move_away(target.role, target.url)

    def _watch(self, target: Target) -> None:
        self.pairing.doubt(target)
        self._health.add(target)
        self._scraper.add(target)
        self._metrics.added(target)

    def _endpoint(self, url: EngineUrl) -> "Endpoint":
        endpoint = self.endpoints.get(url.base)
        if endpoint is None:
            endpoint = self.endpoints[url.base] = self._connect(url.at(None))
        return endpoint

    def _find(self, role: Role, url: str) -> Target:
        target = Target(role, EngineUrl.parse(url).base)
        if target not in self.targets():
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
            self.pairing.doubt(target)  # It may have been updated.
            is_up = {state.target: state.up for state in self._health.states()}[target]
            self._set(target, Status.UP if is_up else Status.QUARANTINED, "taken back")
        return bool(present)

    def _set(self, target: Target, status: Status, word: str) -> None:
        for instance in self.instances.of(target):
            if instance.status is not Status.REMOVED:
                instance.status = status
        self.pairing.update()
        self._ordered()
        self.reopen()
        _log.info(
            "instance %s", word, extra={"fields": {"role": target.role.value, "url": target.url}}
        )


def _untold(url: EngineUrl, error: FetchError) -> ConfigError:
    return ConfigError(f"{url.base}: cannot discover its ranks: {error}")
