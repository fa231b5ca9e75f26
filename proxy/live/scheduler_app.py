"""The scheduler process: everything that decides, with relays in place of a public listener."""

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.live.control_plane import ControlPlane
from balanceroute.proxy.live.processes.hub import Hub
from balanceroute.proxy.live.processes.relay_desk import RelayDesk
from balanceroute.proxy.live.scheduling.pushed_counts import PushedCounts
from balanceroute.proxy.live.telemetry.snapshot import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from balanceroute.proxy.live.environment import Environment
    from balanceroute.proxy.live.processes.to_relay import ToRelay
    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.proxy.wire.http1.server import Server

_log = logging.getLogger(__name__)


class SchedulerApp(ControlPlane):
    """One scheduler process's proxy. `start` it, `connect` relays, then `drain` and `close` it.

    Args:
        config: All settings.
        environment: See `Environment`.
        relays: How many relays there are to be.
        digest: Of the settings.

    Attributes:
        hub: The relays.
    """

    def __init__(
        self, config: "ProxyConfig", environment: "Environment", *, relays: int, digest: str
    ) -> None:
        self._counts: PushedCounts[Any] = PushedCounts()
        super().__init__(config, environment, self._counts)
        self.hub: Hub
        self._relays = relays
        self._digest = digest

    def connect(self, write: "Callable[[Sequence[ToRelay]], None]") -> "RelayDesk":
        """Return who serves a relay's new connection; `write` sends messages as one frame."""
        return RelayDesk(self.hub, write)

    def servers(self) -> "list[Server]":
        """Return what listens."""
        return [] if self.admin is None else [self.admin]

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now: by a relay, of which there must be one."""
        return super().ready and bool(self.hub.desks)

    async def drain(self) -> None:
        """Have relays take nothing new, and wait until they are done or time is up."""
        driver, drained = self.deployment.driver, asyncio.Event()
        driver.draining = True
        self.hub.drain(drained.set)
        try:
            async with asyncio.timeout(self.config.times.drain_timeout_s):
                await drained.wait()
        except TimeoutError:
            fields = {"count": len(driver.sessions), "relays": len(self.hub.desks)}
            _log.warning("cut at shutdown", extra={"fields": fields})

    async def close(self) -> None:
        """End what is left."""
        self.hub.close()
        await super().close()

    def _held(self) -> Held:
        rejected: Counter[str] = Counter()
        all_of = [desk.occupancy for desk in self.hub.desks.values()]
        for one in all_of:
            rejected.update(one.rejected_connections)
        return Held(
            client_connections=sum(one.client_connections for one in all_of),
            engine_connections=sum(one.engine_connections for one in all_of),
            rejected_connections=dict(rejected),
            evicted_connections=sum(one.evicted_connections for one in all_of),
            body_bytes=sum(one.body_bytes for one in all_of),
            rejected_bodies=sum(one.rejected_bodies for one in all_of),
            pumped_streams=sum(one.pumped_streams for one in all_of),
            pumped_events=sum(one.pumped_events for one in all_of),
        )

    async def _listen(self) -> None:
        deployment = self.deployment
        self.hub = Hub(
            deployment.driver,
            asyncio.get_running_loop(),
            routes=deployment.model_routes,
            models=deployment.models,
            tenancy=deployment.tenancy,
            metrics=self.metrics,
            log=self._environment.log,
            settings=self._digest,
            name=f"{self._environment.rng.getrandbits(64):016x}",
            relays=self._relays,
            page_of_metrics=self.page_of_metrics,
            counts=self._counts,
        )
        await super()._listen()
