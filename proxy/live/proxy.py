"""The whole proxy, put together from its configuration: what tests drive."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from socket import gethostname
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.connectors import make_connector
from balanceroute.proxy.live.control.admin import Admin
from balanceroute.proxy.live.control.order_store import keep_trying
from balanceroute.proxy.live.control.pages import Routes
from balanceroute.proxy.live.control.pausing import Pausing
from balanceroute.proxy.live.control.roster import EngineOrders, named
from balanceroute.proxy.live.control.state import (
    ended_rows,
    held_by,
    instance_rows,
    request_rows,
    view_of_all,
)
from balanceroute.proxy.live.deployment import Deployment, snapshot_of
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.frontend.groups import Group, Groups
from balanceroute.proxy.live.listeners import AdminListener, PublicListener, serve_selections
from balanceroute.proxy.live.request.shared import Death, Suspects
from balanceroute.proxy.live.scheduling.forecast import Forecast
from balanceroute.proxy.live.security import Credentials
from balanceroute.proxy.live.settings.config import GroupConfig, ProxyConfig
from balanceroute.proxy.live.settings.effects import without_effect
from balanceroute.proxy.live.telemetry.component_metrics import (
    DecisionFailures,
    Http3Metrics,
    TraceMetrics,
)
from balanceroute.proxy.live.telemetry.metrics import Metrics, MetricsPage
from balanceroute.proxy.live.telemetry.process_log import redact_too, set_log_level
from balanceroute.proxy.live.telemetry.record import RecentRequests
from balanceroute.proxy.live.telemetry.snapshot import Held, Snapshot
from balanceroute.proxy.wire.http1.server import Server

if TYPE_CHECKING:
    from balanceroute.proxy.live.frontend.gateway import Gateway
    from balanceroute.proxy.live.group_orders import GroupsInForce
    from balanceroute.proxy.live.leader.leadership import Leadership
    from balanceroute.proxy.live.scaling import ScalingSignals
    from balanceroute.proxy.live.select_service import SelectService
    from balanceroute.proxy.live.tracing.exporter import SpanExporter


_log = logging.getLogger(__name__)
# Until a task that failed is begun again.
_RESTART_S = 1.0
# So long a client may take to use a connection that it believes to be open, once it is handed over.
_IDLE_S = 2.0
# So long a new version waits for orders that are being carried out: engines may copy their weights.
_ORDERS_S = 120.0
# The name of the only deployment.
DEFAULT = ""


class Proxy:
    """One proxy. `start` it, then `drain` and `close` it."""

    # Where other routers ask; None if they ask nowhere.
    select_service: "SelectService | None" = None
    _groups_in_force: "GroupsInForce | None" = None

    def __init__(
        self,
        config: ProxyConfig,
        environment: Environment,
    ) -> None:
        if config.groups and environment.make_group is not None:
            from balanceroute.proxy.live.group_orders import GroupsInForce  # noqa: PLC0415

            kept = GroupsInForce(environment.orders, config.groups, environment.make_group)
            self._groups_in_force, config = kept, replace(config, groups=kept.load())
        self.server: Server  # The public listener; there after `start`, like the next.
        self.gateway: Gateway  # The application behind it.
        self._public: PublicListener
        self._groups: Groups
        self.config = config
        self.metrics = Metrics(
            lambda: list(self.snapshots(requests=False).values()),
            log_lines_dropped=environment.log_lines_dropped,
            descriptor_shortages=environment.descriptor_shortages,
            traces=config.tracing is not None,
        )
        if environment.pump is not None:
            self.metrics.legs.gaps.beside = environment.pump.new_gaps
        self._traces = _trace_export(config, environment, self.metrics.traces)
        if self._traces is not None:
            environment = replace(environment, log=self._traces)
        self._recent: RecentRequests | None = None
        if config.listening.admin:
            self._recent = RecentRequests(environment.log)
            environment = replace(environment, log=self._recent)
        environment = self._elect(environment)
        self._environment = environment
        self.failures = DecisionFailures(self.metrics.decisions, asyncio.get_running_loop().time)
        self.metrics.aliases.worth = {one.name: one.worth for one in config.aliases}
        loop = asyncio.get_running_loop()
        self.suspects = Suspects(loop.time, loop.call_later)
        self.suspects.on_refused = self._prompts_refused
        self.deployments: dict[str, Deployment]
        if config.groups:
            self.deployments = {}
            for group in config.groups:
                self.deployments[group.name] = self._make_group(group)
        else:
            alone = Deployment(
                *(config, environment, self.metrics, self.failures), suspects=self.suspects
            )
            self.deployments = {DEFAULT: alone}
        self.pausing = Pausing(self.deployments.values)
        # Of each deployment by its name, and of the whole proxy.
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}
        self._own_tasks: list[asyncio.Task[None]] = []
        self._scaling: ScalingSignals | None = None
        self._credentials = config.credentials
        self._idle: list[str] = []
        self._ends_s = math.inf
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.admin: Server | None = None
        # Takes the orders of administrators; None if they come in nowhere.
        self.pages: Admin | None = None
        self.page_of_metrics = MetricsPage(self.metrics.render, asyncio.get_running_loop().time)

    def _elect(self, environment: Environment) -> Environment:
        """Have the leadership say whether this process may decide, if there are other replicas."""
        self.leadership = _leadership(
            self.config,
            environment,
            lambda: self.deployments.values(),  # noqa: PLW0108 - they are not there yet.
        )
        if self.leadership is None:
            return environment
        self.metrics.collect_from(self.leadership.metrics)
        return replace(environment, forbids=self.leadership.forbids)

    @property
    def deployment(self) -> Deployment:
        """The first deployment, which is the only one unless there are groups."""
        return next(iter(self.deployments.values()))

    @property
    def called_back(self) -> bool:
        """Whether decode ranks call the process back that has their requests."""
        return any(one.driver.context.connector.decode_first for one in self.deployments.values())

    async def start(self) -> None:
        """Find the engines and listen.

        Raises:
            ConfigError: A decode server answers, but does not report its ranks, or an address cannot be bound.
        """
        self._warn_idle()
        for deployment in self.deployments.values():
            await deployment.start()
        # Before any task is begun, which would have to be ended if it fails.
        await self._listen()
        for name in self.deployments:
            self._begin(name)
        if self._traces is not None:
            self._own_tasks.append(self._task("traces", self._traces.run))
        if (store := self._environment.orders) is not None:
            self._own_tasks.append(self._task("orders", partial(keep_trying, store)))
        if self.leadership is not None:
            self._own_tasks.append(self._task("leader", self.leadership.run))
        if self._scaling is not None:
            self._own_tasks.append(self._task("scaling", self._scaling.run))

    def _warn_idle(self) -> None:
        """Warn of settings that do nothing, unless the check before has."""
        configs = [
            replace(one.config, credentials=self._credentials) for one in self.deployments.values()
        ]
        idle = without_effect(self.config.given, configs)
        for message in idle:
            if message not in self._idle:
                _log.warning(message)
        self._idle = idle

    def _make_group(self, group: GroupConfig) -> Deployment:
        """Return the deployment of a group. What tenants have in one counts in all."""
        environment = self._environment.of_group(group.name)
        # One whose decisions fail makes no other one unready.
        failures = DecisionFailures(self.metrics.decisions, asyncio.get_running_loop().time)
        beside = self.deployment.tenancy if self.deployments else None
        return Deployment(
            *(group.config, environment, self.metrics, failures),
            suspects=self.suspects,
            beside=beside,
        )

    def _prompts_refused(self, death: Death, count: int) -> None:
        self.metrics.legs.suspected_poison.inc(count)
        fields = {"count": count, "requests": death.ids, "engine": death.target.url}
        _log.warning(
            "two engines died under a prompt, which is refused now", extra={"fields": fields}
        )

    def _begin(self, name: str) -> None:
        deployment = self.deployments[name]
        works = list(deployment.tasks())
        if self._environment.write_loads is not None:
            from balanceroute.proxy.live.control.load_log import LoadLog  # noqa: PLC0415

            loads = LoadLog(
                deployment.driver,
                interval_s=self.config.log.load_log_interval_s,
                unix_s=self._environment.unix_s,
                write=self._environment.write_loads,
            )
            works.append(("load log", loads.run))
        self._tasks[name] = [self._task(what, run) for what, run in works]

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

        task = asyncio.create_task(go_on())
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._over.done() and (error := task.exception()):
            self._over.set_exception(error)

    async def watch(self) -> None:
        """Wait until the proxy is closed. Its own tasks go on after an exception; see `_task`."""
        await asyncio.wait([self._over])
        self._over.result()

    def servers(self) -> list[Server]:
        found = [self.server] if self.admin is None else [self.server, self.admin]
        return found if self.select_service is None else [*found, self.select_service.server]

    async def drain(self) -> None:
        """Take nothing new, and wait until everything that runs has ended or time is up."""
        drivers = [one.driver for one in self.deployments.values()]
        for driver in drivers:
            driver.draining = True
        if self.leadership is not None:
            await self.leadership.retire()
        if not self.called_back:
            self.server.stop_accepting()
        # Else decode ranks call back here until the last request has ended.
        ends_s = asyncio.get_running_loop().time() + self.config.times.drain_timeout_s
        try:
            async with asyncio.timeout_at(min(ends_s, self._ends_s)):
                for driver in drivers:
                    await driver.table.drained()
                self.server.stop_accepting()
                # Requests that are passed through, and answers that are still being read.
                await self.server.drain()
        except TimeoutError:
            count = sum(len(driver.sessions) for driver in drivers)
            fields = {"count": count, "connections": self.server.connections}
            _log.warning("cut at shutdown", extra={"fields": fields})

    async def stop_orders(self) -> None:
        """Refuse orders from now on; return when those that are carried out have ended, or time is up.

        A process that takes over gets the orders given until it begins, and none after that. It finds by
        itself what discovery finds meanwhile.
        """
        if self.pages is not None:
            await self.pages.stop_orders(_ORDERS_S)
        if (store := self._environment.orders) is not None:
            store.suspend()

    def take_orders(self) -> None:
        """Take orders again: that process does not take over."""
        if self.pages is not None:
            self.pages.takes_orders = True
        if (store := self._environment.orders) is not None:
            store.resume()

    async def hand_over(self) -> None:
        """Leave new connections to another process; return when every open one has ended, or time is up.

        Which is then up for `drain` too.
        """
        self._ends_s = asyncio.get_running_loop().time() + self.config.times.drain_timeout_s
        for deployment in self.deployments.values():
            await deployment.hand_over()
        if (store := self._environment.orders) is not None:
            store.hand_over()
        if self.leadership is not None:
            self.leadership.resign()
        # This process answers an order that it still gets with an error, and does not cut it off.
        for listener in (self.admin, self.server):
            if listener is not None:
                listener.hand_over(idle_s=_IDLE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._ends_s):
                # Not at once: the server does not count a client yet that has just connected.
                await asyncio.sleep(_IDLE_S)
                await self.server.drain()

    def hand_over_state(self) -> Mapping[str, object] | None:
        """Return what a process that takes over is to know of the leadership; None if it is alone."""
        return None if self.leadership is None else self.leadership.hand_over_state()

    async def succeed(self) -> None:
        """Wait until it leads, if the process did so from which it takes over."""
        if self.leadership is not None:
            await self.leadership.succeed()

    async def close(self) -> None:
        tasks = [*chain.from_iterable(self._tasks.values()), *self._own_tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._over.done():
            self._over.set_result(None)
        if self.pages is not None:
            self.pages.close()
        if self.leadership is not None:
            self.leadership.close()
        if self.select_service is not None:
            await self.select_service.close()
        for deployment in self.deployments.values():
            await deployment.close()
        if self.admin is not None:
            self.admin.close()
            await self.admin.drain()
        if self._traces is not None:
            await self._traces.close()
        self.gateway.refusals.log.report()
        self.server.close()
        await self.server.drain()
        await self._public.close()
        if self._environment.pump is not None:
            self._environment.pump.close()

    def snapshots(self, *, requests: bool, scores: bool = True) -> dict[str, Snapshot]:
        """Return the state of each deployment by its name.

        With each live request if asked, and with the predictors' scores.
        """
        held = self._held()
        return {
            name: snapshot_of(
                deployment, name, held, self.config.limits, requests=requests, scores=scores
            )
            for name, deployment in self.deployments.items()
        }

    def state(self, *, requests: bool) -> dict[str, object]:
        states = self.snapshots(requests=requests)
        more: dict[str, object] = {}
        if self.leadership is not None:
            more["leader"] = self.leadership.state()
        if self._scaling is not None:
            more["scaling"] = self._scaling.rows()
        return more | ({"state": states[DEFAULT]} if DEFAULT in states else {"groups": states})

    def view(self) -> dict[str, object]:
        # Scores are expensive, and the page has none.
        states = self.snapshots(requests=False, scores=False)
        return view_of_all(
            states,
            self.metrics,
            {name: one.driver for name, one in self.deployments.items()},
            self.config.aliases,
            forbidden="" if self.leadership is None else self.leadership.forbids(),
            scaling={} if self._scaling is None else self._scaling.rows(),
        )

    def request_rows(self, request_id: str) -> list[dict[str, object]]:
        ended = [] if self._recent is None else self._recent.find(request_id)
        return [
            *ended_rows(ended),
            *(
                row
                for one in self.deployments.values()
                for row in request_rows(one.driver, request_id)
            ),
        ]

    def instance_rows(self) -> list[dict[str, object]]:
        return [
            ({"group": name} if name else {}) | row
            for name, one in self.deployments.items()
            for row in instance_rows(one.roster, one.quarantines())
        ]

    def set_policy(self, name: str, group: str | None = None) -> None:
        """Decide by another policy from now on, in one of several groups.

        Raises:
            ConfigError: No policy has that name, or there are groups and none is named.
            UnknownInstanceError: There is no such group.
        """
        self.deployments[named(self.deployments, group)].set_policy(name)

    def set_log_level(self, level: str) -> None:
        """Change how much is logged. Raises ConfigError: no level has that name."""
        set_log_level(level)
        for deployment in self.deployments.values():
            deployment.ordered()

    def renew(self, read: Callable[[], Credentials]) -> dict[str, object]:
        """Read keys, certificates and tenants again and use them; return how many there are.

        All files are read and checked before any of them takes effect. Connections that are open, and
        requests that run, are not touched.

        Raises:
            ConfigError: One of them is bad; then everything stays.
        """
        credentials = read()
        self._public.load_certificate()
        redact_too(credentials.secrets)
        self._use(credentials)
        self._credentials = credentials
        self._warn_idle()
        return {"api_keys": len(credentials.api_keys), "tenants": len(credentials.tenants)}

    def reload(self) -> dict[str, object]:
        """Do so by an administrator's order; see `renew`."""
        read = self._environment.read_credentials
        if read is None:
            raise ConfigError("no file has keys, certificates or tenants")
        return self.renew(read)

    @property
    def ready(self) -> bool:
        return any(one.driver.ready for one in self.deployments.values())

    # Parts.

    def _held(self) -> Held:
        rosters = [one.roster for one in self.deployments.values()]
        endpoints = [endpoint for roster in rosters for endpoint in roster.endpoints.values()]
        connections = sum(endpoint.connections for endpoint in endpoints)
        return held_by(self.server, connections, self._environment.pump)

    def _use(self, credentials: Credentials) -> None:
        self._use_tenants(credentials)
        if self.pages is not None:
            self.pages.token = credentials.admin_token
        if credentials.engine_key is not None:
            for deployment in self.deployments.values():
                deployment.fetcher.use_key(credentials.engine_key.value)
        self._public.use(credentials)
        if self.select_service is not None:
            self.select_service.keys = credentials.select_keys

    def _use_tenants(self, credentials: Credentials) -> None:
        for deployment in self.deployments.values():
            deployment.tenancy.change(credentials.tenants)
        self.metrics.tenants.names = {one.name for one in credentials.tenants}

    def _group_routes(self, tasks: set[asyncio.Task[None]]) -> Routes:
        if self._groups_in_force is None:
            return {}
        from balanceroute.proxy.live.group_orders import GroupOrders, GroupPages  # noqa: PLC0415

        orders = GroupOrders(
            self.deployments, self._begin_group, self._end_group, self._groups_in_force
        )
        return GroupPages(orders, tasks).routes

    async def _begin_group(self, config: GroupConfig) -> None:
        deployment = self._make_group(config)
        await deployment.start()
        self._connect_back(deployment)
        # Orders to all groups hold for a new one too.
        deployment.driver.draining = self.deployment.driver.draining
        if self.pausing.paused:
            deployment.driver.hold(held=True)
            deployment.ordered()
        self.deployments[config.name] = deployment
        self._warn_idle()
        self._groups.add(_group(config.name, deployment))
        self._begin(config.name)

    async def _end_group(self, name: str) -> None:
        self._groups.remove(name)
        deployment, tasks = self.deployments.pop(name), self._tasks.pop(name)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await deployment.close()

    def _connect_back(self, deployment: Deployment) -> None:
        """Give the proxy's address to a connector whose engines call it."""
        engines = deployment.config.engines
        if not engines.metaserver_url:
            scheme = "http" if self._public.tls is None else "https"
            own = EngineUrl(scheme, self.config.listening.host, self.server.port)
            deployment.driver.use_connector(make_connector(engines.connector, callback=own.base))

    async def _listen(self) -> None:
        config = self.config
        self._groups = Groups(_group(*one) for one in self.deployments.items())
        if config.listening.takes_orders:
            self.pages = self._make_pages()
        public = self._public = PublicListener(
            *(config, self._groups, self._environment),
            metrics=self.metrics.requests,
            page_of_metrics=self.page_of_metrics,
            orders=self.pages if config.listening.control_on_api_port else None,
        )
        self.gateway, self.server = public.gateway, public.server
        if names := config.gateway.picker_names:
            from balanceroute.proxy.live.unit_metrics import page_of_unit  # noqa: PLC0415

            self.gateway.page_of_unit = page_of_unit(
                *(names, self._groups, self._environment.unix_s),
                gauges=lambda name: self.deployments[name].scraper.gauges(),
            )
        self._scaling = self._scaling_signals()
        if public.http3 is not None:
            self.metrics.collect_from(Http3Metrics(public.http3.counts))
        await public.start(self._environment.public_sockets)
        asked = (config, self._groups, self.gateway, self._environment)
        self.select_service = await serve_selections(*asked)
        for deployment in self.deployments.values():
            self._connect_back(deployment)
        self._use_tenants(config.credentials)
        if config.listening.admin and self.pages is not None:
            admin = AdminListener(config, self.pages)
            self.admin = admin.server
            await admin.start(self._environment.admin_sockets)

    def _scaling_signals(self) -> "ScalingSignals | None":
        """Return the metrics for autoscalers; None, and nothing of it is imported, where they are off."""
        if not self.config.gateway.scaling_signals:
            return None
        from balanceroute.proxy.live.scaling import ScalingSignals  # noqa: PLC0415

        signals = ScalingSignals(
            self._groups,
            kv_tokens=lambda name: self.deployments[name].roster.memory.least_tokens,
            clock=asyncio.get_running_loop().time,
        )
        self.metrics.collect_from(signals)
        return signals

    def _make_pages(self) -> Admin:
        config = self.config
        return Admin(
            self,
            EngineOrders(lambda: {name: one.roster for name, one in self.deployments.items()}),
            more_routes=self._group_routes,
            page_of_metrics=self.page_of_metrics,
            config=config.redacted(),
            token=config.credentials.admin_token,
            names={config.listening.admin_host, *config.listening.admin_name},
        )


def _group(name: str, deployment: Deployment) -> Group:
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


def _trace_export(
    config: ProxyConfig, environment: Environment, metrics: TraceMetrics | None
) -> "SpanExporter | None":
    """Return what exports traces; None, and nothing of it is imported, if the settings ask for none."""
    settings = config.tracing
    if settings is None or metrics is None:
        return None
    from balanceroute.proxy.live.security import engine_context  # noqa: PLC0415
    from balanceroute.proxy.live.tracing.exporter import SpanExporter  # noqa: PLC0415
    from balanceroute.proxy.wire.http1.client import Endpoint  # noqa: PLC0415

    is_https = settings.scheme == "https"
    return SpanExporter(
        environment.log,
        settings,
        Endpoint(
            settings.host,
            settings.port,
            ssl=engine_context(settings.ca_file, insecure=False) if is_https else None,
            connect_timeout_s=config.times.connect_timeout_s,
        ),
        metrics,
        in_thread=environment.in_thread,
        rng=environment.rng,
    )


def _leadership(
    config: ProxyConfig, environment: Environment, groups: Callable[[], Iterable[Deployment]]
) -> "Leadership | None":
    """Return what says whether this process leads; None, and nothing of it is imported, if it is alone."""
    settings = config.leader
    if not settings.has_replicas:
        return None
    from balanceroute.proxy.live.leader.leadership import Leadership, LeaderStore  # noqa: PLC0415

    led, clock = environment.led or {}, environment.uptime_s
    # A process that starts anew under a host's name is another one.
    name = str(led.get("name") or f"{gethostname()}_{environment.rng.getrandbits(64):016x}")
    store: LeaderStore
    if settings.leader_lock is not None:
        from balanceroute.proxy.live.leader.lock_file import LockFile  # noqa: PLC0415

        descriptor = led.get("descriptor")
        store = LockFile(
            settings.leader_lock,
            name=name,
            duration_s=settings.leader_lease_s,
            clock=clock,
            in_thread=environment.in_thread,
            descriptor=descriptor if isinstance(descriptor, int) else None,
        )
    else:
        from balanceroute.proxy.live.discovery.sources import api_client  # noqa: PLC0415
        from balanceroute.proxy.live.leader.kubernetes_lease import KubernetesLease  # noqa: PLC0415

        namespace, _, lease = settings.leader_lease.rpartition("/")
        store = KubernetesLease(
            api_client(config.discovery),
            lease,
            namespace or None,
            name=name,
            duration_s=settings.leader_lease_s,
            clock=clock,
            unix_s=environment.unix_s,
            rng=environment.rng,
        )
    return Leadership(
        store,
        duration_s=settings.leader_lease_s,
        clock=clock,
        rng=environment.rng,
        groups=groups,
        led=led,
    )
