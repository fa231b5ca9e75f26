"""The whole proxy in one process, put together from its configuration: what tests drive."""

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from balanceroute.proxy.live.connectors import make_connector
from balanceroute.proxy.live.control.state import held_by
from balanceroute.proxy.live.control_plane import ControlPlane
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.frontend.groups import Group, Groups
from balanceroute.proxy.live.frontend.own_pages import OwnPages
from balanceroute.proxy.live.group_orders import GroupOrders
from balanceroute.proxy.live.kept_groups import KeptGroups
from balanceroute.proxy.live.listeners import PublicListener
from balanceroute.proxy.live.scheduling.forecast import Forecast

if TYPE_CHECKING:
    from balanceroute.proxy.live.deployment import Deployment
    from balanceroute.proxy.live.environment import Environment
    from balanceroute.proxy.live.frontend.gateway import Gateway
    from balanceroute.proxy.live.security.credentials import Credentials
    from balanceroute.proxy.live.settings.config import GroupConfig, ProxyConfig
    from balanceroute.proxy.live.telemetry.snapshot import Held
    from balanceroute.proxy.wire.http1.server import Server

_log = logging.getLogger(__name__)


class Proxy(ControlPlane):
    """One proxy. `start` it, then `drain` and `close` it.

    Attributes:
        gateway: The application behind the public listener.
    """

    def __init__(self, config: "ProxyConfig", environment: "Environment") -> None:
        self._kept: KeptGroups | None = None
        if config.groups and environment.make_group is not None:
            make = environment.make_group
            self._kept = KeptGroups(environment.orders, config.groups, make)
            config = replace(config, groups=self._kept.load())
        super().__init__(config, environment)
        self.server: Server
        self.gateway: Gateway
        self._public: PublicListener
        self._groups: Groups

    async def drain(self) -> None:
        """Take nothing new, and wait until everything that runs has ended or time is up."""
        drivers = [one.driver for one in self.deployments.values()]
        for driver in drivers:
            driver.draining = True
        if not any(one.context.connector.facts.decode_first for one in drivers):
            self.server.stop_accepting()
        # Else decode ranks call back here until the last request has ended.
        try:
            async with asyncio.timeout(self.config.times.drain_timeout_s):
                for driver in drivers:
                    await driver.drained()
                self.server.stop_accepting()
                # Requests that are passed through, and answers that are still being read.
                await self.server.drain()
        except TimeoutError:
            count = sum(len(driver.sessions) for driver in drivers)
            fields = {"count": count, "connections": self.server.connections}
            _log.warning("cut at shutdown", extra={"fields": fields})

    async def close(self) -> None:
        """End what is left and close every socket."""
        await super().close()
        self.gateway.refusals.log.report()
        self.server.close()
        await self.server.drain()
        self._public.close()
        if self._environment.pump is not None:
            self._environment.pump.close()

    def servers(self) -> "list[Server]":
        """Return what listens."""
        return [self.server] if self.admin is None else [self.server, self.admin]

    # Parts.

    def _held(self) -> "Held":
        rosters = [one.roster for one in self.deployments.values()]
        endpoints = [endpoint for roster in rosters for endpoint in roster.endpoints.values()]
        connections = sum(endpoint.connections for endpoint in endpoints)
        return held_by(self.server, connections, self._environment.pump)

    def _load_certificate(self) -> None:
        self._public.load_certificate()

    def _use(self, credentials: "Credentials") -> None:
        super()._use(credentials)
        self._public.use(credentials)

    async def _listen(self) -> None:
        config = self.config
        self._groups = Groups(_group(*one) for one in self.deployments.items())
        public = self._public = PublicListener(
            config,
            self._groups,
            metrics=self.metrics.requests,
            pages=OwnPages(self.page_of_metrics, self._live_requests),
            log=self._environment.log,
            unix_s=self._environment.unix_s,
            random_bits=self._environment.rng.getrandbits,
        )
        self.gateway, self.server = public.gateway, public.server
        if public.http3 is not None:
            self.metrics.follow_handshakes(public.http3.handshakes)
        await public.start()
        for deployment in self.deployments.values():
            self._connect_back(deployment)
        await super()._listen()

    def _group_orders(self) -> GroupOrders | None:
        make = self._environment.make_group
        if make is None or self._kept is None:
            return None
        return GroupOrders(
            self.deployments,
            make=make,
            begin=self._begin_group,
            end=self._end_group,
            kept=self._kept,
        )

    async def _begin_group(self, config: "GroupConfig") -> None:
        deployment = self._make_group(config)
        await deployment.start()
        self._connect_back(deployment)
        # What was said to all that there were holds for it too.
        deployment.driver.draining = self.deployment.driver.draining
        if self.pausing.paused:
            deployment.driver.hold(held=True)
            deployment.ordered()
        self.deployments[config.name] = deployment
        self._tell_idle()
        self._groups.add(_group(config.name, deployment))
        self._begin(config.name)

    async def _end_group(self, name: str) -> None:
        self._groups.remove(name)
        deployment, tasks = self.deployments.pop(name), self._tasks.pop(name)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await deployment.close()

    def _connect_back(self, deployment: "Deployment") -> None:
        """Tell a connector whose engines call the proxy where it is."""
        engines = deployment.config.engines
        if not engines.metaserver_url:
            scheme = "http" if self._public.tls is None else "https"
            own = EngineUrl(scheme, self.config.listening.host, self.server.port)
            deployment.driver.use_connector(make_connector(engines.connector, callback=own.base))

    def _live_requests(self) -> int:
        return sum(len(one.driver.sessions) for one in self.deployments.values())


def _group(name: str, deployment: "Deployment") -> Group:
    config = deployment.config
    return Group(
        name,
        config.engines.model,
        deployment.driver,
        served=deployment.models,
        routes=deployment.model_routes,
        pass_through=deployment.pass_through,
        tenancy=deployment.tenancy,
        key_is_tenant=config.admission.fair_queue != "none",
        forecast=Forecast(deployment.driver),
    )
