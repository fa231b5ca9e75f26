"""The whole proxy, put together from its configuration: what `serve` runs and tests drive."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.connectors import make_connector
from balanceroute.proxy.live.control.load_log import LoadLog
from balanceroute.proxy.live.control.state import instance_rows, take_snapshot
from balanceroute.proxy.live.deployment import Deployment
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.frontend.own_pages import OwnPages
from balanceroute.proxy.live.listeners import AdminListener, PublicListener, clients_of
from balanceroute.proxy.live.prediction.predictors import predictor_name
from balanceroute.proxy.live.security.tls import load_certificate
from balanceroute.proxy.live.telemetry.decision_failures import DecisionFailures
from balanceroute.proxy.live.telemetry.metrics import Metrics, MetricsPage
from balanceroute.proxy.live.telemetry.process_log import redact_too

if TYPE_CHECKING:
    from ssl import SSLContext

    from balanceroute.proxy.live.control.admin import Admin
    from balanceroute.proxy.live.frontend.gateway import Gateway
    from balanceroute.proxy.live.security.credentials import Credentials
    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.proxy.live.telemetry.snapshot import Snapshot
    from balanceroute.proxy.wire.http1.server import Server

_log = logging.getLogger(__name__)
# Until a task that failed is begun again.
_RESTART_S = 1.0
# The name of the only deployment.
DEFAULT = ""


class Proxy:
    """One proxy. `start` it, then `drain` and `close` it.

    Attributes:
        gateway: The application behind the public listener.
        pages: The one behind the admin listener; None without that.
        tls: What the public listener serves https with; None for http.
    """

    def __init__(self, config: "ProxyConfig", environment: Environment) -> None:
        self.config = config
        self._environment = environment
        self.metrics = Metrics(
            lambda: self.snapshot(requests=False),
            log_lines_dropped=environment.log_lines_dropped,
            descriptor_shortages=environment.descriptor_shortages,
        )
        self.failures = DecisionFailures(self.metrics.decisions, asyncio.get_running_loop().time)
        self.deployments = {
            DEFAULT: Deployment(config, environment, self.metrics, self.failures),
        }
        self._tasks: list[asyncio.Task[None]] = []
        self.server: Server
        self.gateway: Gateway
        self.tls: SSLContext | None = None
        self.admin: Server | None = None
        self.pages: Admin | None = None

    @property
    def deployment(self) -> Deployment:
        """The one deployment that there is."""
        return self.deployments[DEFAULT]

    async def start(self) -> None:
        """Find the engines and listen.

        Raises:
            ConfigError: A decode server answers, but does not tell its ranks, or an address cannot be bound.
        """
        await self.deployment.start()
        # Before any task is begun, which would have to be ended if it fails.
        await self._listen()
        self._tasks = [self._task(what, run) for what, run in self.deployment.tasks()]
        if self._environment.write_loads is not None:
            loads = LoadLog(
                self.deployment.driver,
                interval_s=self.config.log.load_log_interval_s,
                unix_s=self._environment.unix_s,
                write=self._environment.write_loads,
            )
            self._tasks.append(self._task("load log", loads.run))

    def _task(self, what: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Return a task that runs something to its end, if it has one, however often it fails."""

        async def go_on() -> None:
            while True:
                try:
                    await run()
                except Exception as error:
                    self.failures.report(what, error)
                    await asyncio.sleep(_RESTART_S)
                else:
                    return

        return asyncio.create_task(go_on())

    async def watch(self) -> None:
        """Wait until the proxy is closed. Its own tasks go on after an exception; see `_task`."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if not task.cancelled():
                task.result()

    async def drain(self) -> None:
        """Take nothing new, and wait until everything that runs has ended or time is up."""
        driver = self.deployment.driver
        driver.draining = True
        if not driver.context.connector.facts.decode_first:
            self.server.stop_accepting()
        # Else decode ranks call back here until the last request has ended.
        try:
            async with asyncio.timeout(self.config.times.drain_timeout_s):
                await driver.drained()
                self.server.stop_accepting()
                # Requests that are passed through, and answers that are still being read.
                await self.server.drain()
        except TimeoutError:
            fields = {"count": len(driver.sessions), "connections": self.server.connections}
            _log.warning("cut at shutdown", extra={"fields": fields})

    async def close(self) -> None:
        """End what is left and close every socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.pages is not None:
            self.pages.close()
        await self.deployment.close()
        self.gateway.refusals.log.report()
        for server in (self.server, self.admin):
            if server is not None:
                server.close()
                await server.drain()

    def snapshot(self, *, requests: bool) -> "Snapshot":
        """Return the state, with each live request if asked."""
        deployment = self.deployment
        return take_snapshot(
            deployment.driver,
            policy=deployment.policy,
            predictor=predictor_name(self.config.scheduling.predictor),
            predictors=deployment.predictors.scores(),
            tenants=deployment.tenancy.states(),
            rows_judged=deployment.predictors.judged,
            server=self.server,
            engine_connections=sum(e.connections for e in deployment.roster.endpoints.values()),
            quarantines=deployment.quarantines(),
            requests=requests,
        )

    def instance_rows(self) -> list[dict[str, object]]:
        """Return every instance, with what is in flight on it."""
        return instance_rows(self.deployment.roster, self.deployment.quarantines())

    def set_policy(self, name: str) -> None:
        """Decide by another policy from now on.

        Raises:
            ConfigError: No policy has that name.
        """
        self.deployment.set_policy(name)

    def renew(self, read: Callable[[], "Credentials"]) -> dict[str, object]:
        """Read keys, certificates and tenants again and use them; return how many there are.

        All files are read and checked before any of them takes effect. Connections that are open, and
        requests that run, are not touched.

        Raises:
            ConfigError: One of them is bad; then everything stays.
        """
        credentials = read()
        if self.tls is not None:
            listening = self.config.listening
            assert listening.tls_cert is not None
            assert listening.tls_key is not None
            load_certificate(self.tls, listening.tls_cert, listening.tls_key)
        redact_too(credentials.secrets)
        self._use_tenants(credentials)
        self.gateway.use_keys(clients_of(self.config, credentials), credentials.engine_key)
        if self.pages is not None:
            self.pages.token = credentials.admin_token
        if credentials.engine_key is not None:
            self.deployment.fetcher.use_key(credentials.engine_key.value)
        return {"api_keys": len(credentials.api_keys), "tenants": len(credentials.tenants)}

    def reload(self) -> dict[str, object]:
        """Do so by an administrator's order; see `renew`."""
        read = self._environment.read_credentials
        if read is None:
            raise ConfigError("no file has keys, certificates or tenants")
        return self.renew(read)

    def _use_tenants(self, credentials: "Credentials") -> None:
        self.deployment.tenancy.change(credentials.tenants)
        self.metrics.tenants.names = {one.name for one in credentials.tenants}

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self.deployment.driver.ready

    def listening(self) -> list[int]:
        """Return the descriptors of the listening sockets."""
        servers = [self.server] if self.admin is None else [self.server, self.admin]
        return [number for server in servers for number in server.listening]

    # Parts.

    async def _listen(self) -> None:
        config, deployment = self.config, self.deployment
        page_of_metrics = MetricsPage(self.metrics.render, asyncio.get_running_loop().time)
        public = PublicListener(
            config,
            deployment.driver,
            served=deployment.served_models,
            routes=deployment.model_routes,
            pass_through=deployment.pass_through,
            metrics=self.metrics.requests,
            pages=OwnPages(page_of_metrics, deployment.driver.sessions),
            log=self._environment.log,
            tenancy=deployment.tenancy,
            unix_s=self._environment.unix_s,
        )
        self._use_tenants(config.credentials)
        self.gateway, self.server, self.tls = public.gateway, public.server, public.tls
        await public.start()
        if not config.engines.metaserver_url:
            scheme = "http" if self.tls is None else "https"
            own = EngineUrl(scheme, config.listening.host, self.server.port)
            deployment.driver.use_connector(
                make_connector(config.engines.connector, callback=own.base)
            )
        if config.listening.admin:
            admin = AdminListener(config, self, deployment.roster, page_of_metrics)
            self.pages, self.admin = admin.pages, admin.server
            await admin.start()
