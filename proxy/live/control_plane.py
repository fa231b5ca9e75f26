"""What decides, put together from the settings, with the admin listener in front of it."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.control.load_log import LoadLog
from balanceroute.proxy.live.control.state import instance_rows, request_rows, take_snapshot
from balanceroute.proxy.live.control.view import view_of
from balanceroute.proxy.live.deployment import Deployment
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.listeners import AdminListener
from balanceroute.proxy.live.prediction.predictors import predictor_name
from balanceroute.proxy.live.telemetry.decision_failures import DecisionFailures
from balanceroute.proxy.live.telemetry.metrics import Metrics, MetricsPage
from balanceroute.proxy.live.telemetry.process_log import redact_too, set_log_level
from balanceroute.proxy.live.telemetry.recent_requests import RecentRequests
from balanceroute.proxy.live.telemetry.snapshot import LimitsState

if TYPE_CHECKING:
    from balanceroute.proxy.live.control.admin import Admin
    from balanceroute.proxy.live.request.live_request import LiveRequest
    from balanceroute.proxy.live.scheduling.step_clock import Counts
    from balanceroute.proxy.live.security.credentials import Credentials
    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.proxy.live.telemetry.snapshot import Held, Snapshot
    from balanceroute.proxy.wire.http1.server import Server

# Until a task that failed is begun again.
_RESTART_S = 1.0
# The name of the only deployment.
DEFAULT = ""


class ControlPlane(ABC):
    """Everything of a proxy but its clients. `start` it, then `drain` and `close` it.

    Args:
        config: All settings.
        environment: See `Environment`.
        counts: How far streams are; None to ask the sessions.

    Attributes:
        pages: The application behind the admin listener; None without that.
    """

    def __init__(
        self,
        config: "ProxyConfig",
        environment: Environment,
        counts: "Counts[LiveRequest] | None" = None,
    ) -> None:
        self.config = config
        self._recent: RecentRequests | None = None
        if config.listening.admin:
            self._recent = RecentRequests(environment.log)
            environment = replace(environment, log=self._recent)
        self._environment = environment
        self.metrics = Metrics(
            lambda: self.snapshot(requests=False),
            log_lines_dropped=environment.log_lines_dropped,
            descriptor_shortages=environment.descriptor_shortages,
            processes=environment.processes,
        )
        self.failures = DecisionFailures(self.metrics.decisions, asyncio.get_running_loop().time)
        self.deployments = {
            DEFAULT: Deployment(config, environment, self.metrics, self.failures, counts),
        }
        self._tasks: list[asyncio.Task[None]] = []
        self.admin: Server | None = None
        self.pages: Admin | None = None
        self.page_of_metrics = MetricsPage(self.metrics.render, asyncio.get_running_loop().time)

    @abstractmethod
    async def drain(self) -> None:
        """Take nothing new, and wait until everything that runs has ended or time is up."""

    @abstractmethod
    def _held(self) -> "Held":
        """Return what is open."""

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

    def hand_over(self) -> None:
        """Leave administrators, and what is kept of their orders, to another process."""
        self.deployment.orders.hand_over()
        if self.admin is not None:
            self.admin.stop_accepting()

    async def close(self) -> None:
        """End what is left and close every socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.pages is not None:
            self.pages.close()
        await self.deployment.close()
        if self.admin is not None:
            self.admin.close()
            await self.admin.drain()

    def snapshot(self, *, requests: bool, scores: bool = True) -> "Snapshot":
        """Return the state, with each live request if asked, and with the predictors' scores."""
        config, deployment = self.config, self.deployment
        return take_snapshot(
            deployment.driver,
            policy=deployment.policy,
            predictor=predictor_name(config.scheduling.predictor),
            predictors=deployment.predictors.scores() if scores else [],
            tenants=deployment.tenancy.states(),
            rows_judged=deployment.predictors.judged,
            held=self._held(),
            quarantines=deployment.quarantines(),
            gauges=deployment.scraper.gauges(),
            limits=LimitsState(
                config.scheduling.batch,
                config.admission.queue_limit,
                config.limits.connection_limit,
                config.limits.body_budget_bytes,
            ),
            requests=requests,
        )

    def view(self) -> dict[str, object]:
        """Return what the page shows."""
        # Scores are expensive, and the page has none.
        state = self.snapshot(requests=False, scores=False)
        return view_of(state, self.metrics.latencies(), ready=self.ready)

    def request_rows(self, request_id: str) -> list[dict[str, object]]:
        """Return the requests that have an id, of those that live and the latest that ended."""
        ended = [] if self._recent is None else self._recent.find(request_id)
        return request_rows(self.deployment.driver, request_id, ended)

    def instance_rows(self) -> list[dict[str, object]]:
        """Return every instance, with what is in flight on it."""
        return instance_rows(self.deployment.roster, self.deployment.quarantines())

    def set_policy(self, name: str) -> None:
        """Decide by another policy from now on.

        Raises:
            ConfigError: No policy has that name.
        """
        self.deployment.set_policy(name)

    def set_log_level(self, level: str) -> None:
        """Change how much this process logs.

        Raises:
            ConfigError: No level has that name.
        """
        set_log_level(level)
        self.deployment.ordered()

    def renew(self, read: Callable[[], "Credentials"]) -> dict[str, object]:
        """Read keys, certificates and tenants again and use them; return how many there are.

        All files are read and checked before any of them takes effect. Connections that are open, and
        requests that run, are not touched.

        Raises:
            ConfigError: One of them is bad; then everything stays.
        """
        credentials = read()
        self._load_certificate()
        redact_too(credentials.secrets)
        self._use(credentials)
        return {"api_keys": len(credentials.api_keys), "tenants": len(credentials.tenants)}

    def reload(self) -> dict[str, object]:
        """Do so by an administrator's order; see `renew`."""
        read = self._environment.read_credentials
        if read is None:
            raise ConfigError("no file has keys, certificates or tenants")
        return self.renew(read)

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self.deployment.driver.ready

    # Parts.

    def _load_certificate(self) -> None:
        """Serve clients with the newest certificate, if it serves any. Raises ConfigError."""
        return

    def _use(self, credentials: "Credentials") -> None:
        """Take newer keys and tenants."""
        self._use_tenants(credentials)
        if self.pages is not None:
            self.pages.token = credentials.admin_token
        if credentials.engine_key is not None:
            self.deployment.fetcher.use_key(credentials.engine_key.value)

    def _use_tenants(self, credentials: "Credentials") -> None:
        self.deployment.tenancy.change(credentials.tenants)
        self.metrics.tenants.names = {one.name for one in credentials.tenants}

    async def _listen(self) -> None:
        """Open the listeners."""
        self._use_tenants(self.config.credentials)
        if self.config.listening.admin:
            admin = AdminListener(self.config, self, self.deployment.roster, self.page_of_metrics)
            self.pages, self.admin = admin.pages, admin.server
            await admin.start(self._environment.admin_sockets)
