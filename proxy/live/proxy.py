"""The whole proxy, put together from its configuration: what `serve` runs and tests drive.

Everything that is not the event loop's comes in through `Environment`, so that the same proxy runs
on real sockets and in virtual time.
"""

import asyncio
import logging
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.admission import BoundedQueue
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import (
    Ingredients,
    Policy,
    PolicySettings,
    make_policy,
)
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.live.connectors import make_connector
from balanceroute.proxy.live.control.admin import MAX_BODY_BYTES, Admin
from balanceroute.proxy.live.control.load_log import LoadLog
from balanceroute.proxy.live.control.roster import Roster
from balanceroute.proxy.live.control.state import instance_rows, take_snapshot
from balanceroute.proxy.live.engines.bootstrap import MAX_BYTES, read_identity
from balanceroute.proxy.live.engines.engine_gauges import MetricsPageError, parse_engine_gauges
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.faults import Fault, FetchError
from balanceroute.proxy.live.engines.health import Health, Quarantine
from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Status, Target
from balanceroute.proxy.live.engines.scrape import Scraper
from balanceroute.proxy.live.engines.served_models import ServedModels
from balanceroute.proxy.live.frontend.cors import Cors
from balanceroute.proxy.live.frontend.gateway import Gateway, GatewaySettings
from balanceroute.proxy.live.frontend.model_choice import AnyModel, ListedModels
from balanceroute.proxy.live.frontend.model_routes import ModelRoutes
from balanceroute.proxy.live.frontend.pass_through import PassThroughLimits
from balanceroute.proxy.live.openai.api_error import JSON_HEADERS, error_body
from balanceroute.proxy.live.prediction.names import predictor_name
from balanceroute.proxy.live.prediction.predictor_set import PredictorSet
from balanceroute.proxy.live.prediction.predictors import (
    InThread,
    StateKeeper,
    make_predictor,
    named,
)
from balanceroute.proxy.live.scheduling.driver import Driver, DriverSettings, Log
from balanceroute.proxy.live.security.tls import engine_context, server_context
from balanceroute.proxy.live.telemetry.decision_failures import DecisionFailures
from balanceroute.proxy.live.telemetry.metrics import Metrics
from balanceroute.proxy.live.telemetry.metrics_page import MetricsPage
from balanceroute.proxy.wire.client import Endpoint
from balanceroute.proxy.wire.server import Server

if TYPE_CHECKING:
    from ssl import SSLContext

    from balanceroute.proxy.core.scheduler import SchedulerConfig
    from balanceroute.proxy.live.settings.config import ProxyConfig
    from balanceroute.proxy.live.telemetry.snapshot import Snapshot
    from balanceroute.proxy.wire.heads import RequestHead
    from balanceroute.proxy.wire.messages import Headers, Rejection

_log = logging.getLogger(__name__)
# Pages of metrics longer than this are not read.
_PAGE_BYTES = 4 << 20
_IDENTITY_INTERVAL_S = 1.0
# Until a task that failed is begun again.
_RESTART_S = 1.0
_ADMIN_CONNECTIONS = 16


class Fetcher(Protocol):
    """The client for the small exchanges with engines."""

    async def status(self, url: str) -> int:
        """GET a page; return its status. Raises FetchError."""
        ...

    async def body(self, url: str, *, max_bytes: int) -> bytes:
        """GET a page; return its body. Raises FetchError."""
        ...


@dataclass(frozen=True, slots=True)
class Environment:
    """What the outside world gives the proxy.

    Attributes:
        fetcher: For health probes, scrapes and discovery.
        log: Takes a line per request.
        rng: Of every random choice.
        unix_s: Wall-clock time, for logs alone.
        stopwatch: Seconds of real time, for the cost of decisions.
        log_lines_dropped: Lines the logs had to drop.
        descriptor_shortages: How often no file descriptor was left.
        write_loads: Takes a line per sample of the ranks' loads; None for no samples.
        in_thread: Runs what may wait for a disk.
    """

    fetcher: Fetcher
    log: Log
    rng: random.Random
    unix_s: Callable[[], float]
    stopwatch: Callable[[], float]
    log_lines_dropped: Callable[[], int] = lambda: 0
    descriptor_shortages: Callable[[], int] = lambda: 0
    write_loads: Callable[[bytes], object] | None = None
    in_thread: InThread = asyncio.to_thread


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
        self._fetcher = environment.fetcher
        self._engine_tls: SSLContext | None = None
        self._policy_name = config.scheduling.policy
        self.instances = Instances()
        self.roster = Roster(
            self.instances,
            connector=config.engines.connector,
            connect=self._connect,
            discover=self._discover,
            utilisation_limit=config.scheduling.prefiller_utilisation_limit,
        )
        self.metrics = Metrics(
            lambda: self.snapshot(requests=False),
            log_lines_dropped=environment.log_lines_dropped,
            descriptor_shortages=environment.descriptor_shortages,
        )
        clock = asyncio.get_running_loop().time
        self.failures = DecisionFailures(self.metrics, clock)
        self._keeper: StateKeeper | None = None
        self.predictors = self._make_predictors()
        self.health = Health(
            config.health,
            fetch=self._fetcher.status,
            on_change=self._health_changed,
            on_error=self.failures.report,
            clock=clock,
            rng=environment.rng,
        )
        self.scraper = Scraper(
            config.scrape,
            fetch=self._page,
            on_utilisation=self.roster.utilisation_changed,
            on_failure=self._scrape_failed,
            on_late_pulls=self._pulled_late,
            on_error=self.failures.report,
            clock=clock,
            rng=environment.rng,
        )
        self.model_routes = ModelRoutes(self.instances)
        self.served_models = ServedModels(
            self.instances,
            fetch=self._page,
            clock=clock,
            changed=self.model_routes.update,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.driver: Driver
        self.server: Server
        self.tls: SSLContext | None = None
        self.admin: Server | None = None
        self.pages: Admin | None = None

    async def start(self) -> None:
        """Find the engines and listen.

        Raises:
            ConfigError: A decode server answers, but does not tell its ranks, or an address cannot be bound.
        """
        for prefill in self.config.prefillers:
            self.roster.enlist_prefiller(prefill)
        decode = self.config.decoders
        silent = [server for server in decode if not await self.roster.enlist_decoder(server)]
        if not self.instances.ranks:
            self.roster.reserve_rank(silent[0])
        self.driver = self._make_driver()
        self.roster.attach(self.driver, self.health, self.scraper, self.metrics, self._reshape)
        # First of all: if it fails, there is no task to end.
        await self._listen()
        self._tasks = [
            self._task("health", self.health.run),
            self._task("scrape", self.scraper.run),
            self._task("models", self.served_models.run),
        ]
        if any(prefiller.bootstrap for prefiller in self.instances.prefillers):
            self._tasks.append(self._task("bootstrap", self._identify))
        for server in silent:
            wait = partial(self.roster.await_decoder, server)
            self._tasks.append(self._task("discovery", wait))
        if self._keeper is not None:
            self._tasks.append(self._task("predictor state", self._keeper.run))
        if self._environment.write_loads is not None:
            loads = LoadLog(
                self.driver,
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
        self.driver.draining = True
        if not self.driver.connector.decode_first:
            self.server.stop_accepting()
        # Else decode ranks call back here until the last request has ended.
        try:
            async with asyncio.timeout(self.config.times.drain_timeout_s):
                await self.driver.drained()
                self.server.stop_accepting()
                # Requests that are passed through, and answers that are still being read.
                await self.server.drain()
        except TimeoutError:
            fields = {"count": len(self.driver.sessions), "connections": self.server.connections}
            _log.warning("cut at shutdown", extra={"fields": fields})

    async def close(self) -> None:
        """End what is left and close every socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.pages is not None:
            self.pages.close()
        self.driver.draining = True
        self.driver.shut_down()
        if self._keeper is not None:
            await self._keeper.close()
        self.roster.close()
        self.gateway.refusals.log.report()
        for server in (self.server, self.admin):
            if server is not None:
                server.close()
                await server.drain()

    def snapshot(self, *, requests: bool) -> "Snapshot":
        """Return the state, with each live request if asked."""
        return take_snapshot(
            self.driver,
            policy=self._policy_name,
            predictor=predictor_name(self.config.scheduling.predictor),
            predictors=self.predictors.scores(),
            rows_judged=self.predictors.judged,
            server=self.server,
            engine_connections=sum(e.connections for e in self.roster.endpoints.values()),
            quarantines=self.quarantines(),
            requests=requests,
        )

    def instance_rows(self) -> list[dict[str, object]]:
        """Return every instance, with what is in flight on it."""
        return instance_rows(self.roster, self.quarantines())

    def quarantines(self) -> "dict[Target, Quarantine]":
        """Return the last quarantine of every engine."""
        return self.health.quarantines(self._environment.unix_s())

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self.driver.ready

    def listening(self) -> list[int]:
        """Return the descriptors of the listening sockets."""
        servers = [self.server] if self.admin is None else [self.server, self.admin]
        return [number for server in servers for number in server.listening]

    def set_policy(self, name: str) -> None:
        """Decide by another policy from now on.

        Raises:
            ConfigError: No policy has that name.
        """
        before, self._policy_name = self._policy_name, name
        try:
            self._reshape()
        except ConfigError:
            self._policy_name = before
            raise
        self.driver.grown()

    # Parts.

    async def _listen(self) -> None:
        config = self.config
        page_of_metrics = MetricsPage(self.metrics.render, asyncio.get_running_loop().time)
        gateway = Gateway(
            self.driver,
            self.instances,
            ListedModels(config.engines.model) if config.engines.model else AnyModel(),
            served=self.served_models,
            routes=self.model_routes,
            metrics=self.metrics,
            page_of_metrics=page_of_metrics,
            log=self._environment.log,
            settings=GatewaySettings(
                api_keys=config.credentials.api_keys,
                engine_key=config.credentials.engine_key,
                pass_authorization=config.pass_authorization,
                pass_through=PassThroughLimits(
                    config.scheduling.single_engine_limit, config.scheduling.queue_limit
                ),
                public_metrics=config.listening.public_metrics,
            ),
            unix_s=self._environment.unix_s,
        )
        self.gateway = gateway
        origins = config.listening.cors_origin
        cors = Cors(origins, gateway, gateway.admit) if origins else None
        self.server = Server(
            cors or gateway,
            limits=config.server_limits,
            refuse=gateway.refusals.render,
            admit=gateway.admit if cors is None else cors.admit,
            common=None if cors is None else cors.fields,
        )
        if config.listening.tls_cert is not None and config.listening.tls_key is not None:
            self.tls = server_context(config.listening.tls_cert, config.listening.tls_key)
        place = "--host {} --port {}"
        await _listen_at(self.server, place, config.listening.host, config.listening.port, self.tls)
        if not config.engines.metaserver_url:
            scheme = "http" if self.tls is None else "https"
            own = EngineUrl(scheme, config.listening.host, self.server.port)
            self.driver.connector = make_connector(config.engines.connector, callback=own.base)
        if config.listening.admin:
            self.pages = Admin(
                self,
                self.roster,
                page_of_metrics=page_of_metrics,
                config=config.redacted(),
                token=config.credentials.admin_token,
                names={config.listening.admin_host, *config.listening.admin_name},
            )
            # Few and its own: it answers when the public listener is full.
            limits = replace(
                config.server_limits,
                body_limit_bytes=MAX_BODY_BYTES,
                connection_limit=_ADMIN_CONNECTIONS,
                peer_connection_limit=None,
            )
            self.admin = Server(self.pages, limits=limits, refuse=_refuse)
            place = "--admin-host {} --admin-port {}"
            await _listen_at(
                self.admin, place, config.listening.admin_host, config.listening.admin_port, None
            )

    def _make_driver(self) -> Driver:
        config, environment = self.config, self._environment
        connector = make_connector(config.engines.connector, callback=config.engines.metaserver_url)
        ranks = len(self.instances.ranks)
        return Driver(
            # The policy times its stages through the driver, which is not there yet.
            Scheduler(
                self._scheduler_config(),
                self._make_policy(ranks, self._lap),
                on_failure=self.failures.report,
            ),
            self.instances,
            connector,
            self.predictors,
            health=self.health,
            metrics=self.metrics,
            failures=self.failures,
            log=environment.log,
            admission=BoundedQueue(config.scheduling.queue_limit),
            settings=DriverSettings(config.legs, config.lease_s),
            rng=environment.rng,
            stopwatch=environment.stopwatch,
        )

    def _lap(self, stage: str) -> None:
        self.driver.lap(stage)

    def _reshape(self) -> None:
        ranks = len(self.instances.ranks)
        policy = self._make_policy(ranks, self._lap)
        self.driver.scheduler.reshape(self._scheduler_config(), policy)

    def _scheduler_config(self) -> "SchedulerConfig":
        config = self.config.scheduler_config(len(self.instances.ranks))
        return replace(config, prefillers=len(self.instances.prefillers))

    def _make_policy(self, ranks: int, lap: Callable[[str], None]) -> Policy:
        scheduling = self.config.scheduling
        return make_policy(
            self._policy_name,
            Ingredients(
                ranks,
                scheduling.batch,
                self.config.policies,
                random.Random(scheduling.seed),
                self.predictors,
                lap,
            ),
        )

    def _make_predictors(self) -> PredictorSet:
        scheduling, environment = self.config.scheduling, self._environment
        active = make_predictor(scheduling.predictor)
        path = scheduling.predictor_state
        if path is not None:
            assert not isinstance(active, NoPrediction)
            self._keeper = StateKeeper(
                path,
                active,
                metrics=self.metrics,
                in_thread=environment.in_thread,
                observed=lambda: self.predictors.observed,
            )
            active = self._keeper.predictor
        return PredictorSet(
            named(scheduling.predictor, active),
            [named(word, make_predictor(word)) for word in scheduling.shadow_predictor],
            # Scores need a horizon, also if the policy looks at none.
            horizon_steps=self.config.policies.horizon_steps or PolicySettings().horizon_steps,
            metrics=self.metrics,
            on_failure=self.failures.report,
            stopwatch=environment.stopwatch,
        )

    # Engines.

    def _connect(self, url: EngineUrl) -> Endpoint:
        engines, times = self.config.engines, self.config.times
        is_https = url.scheme == "https"
        if is_https and self._engine_tls is None:
            self._engine_tls = engine_context(
                engines.engine_ca_file, insecure=engines.insecure_engines
            )
        return Endpoint(
            url.host,
            url.port,
            ssl=self._engine_tls if is_https else None,
            connect_timeout_s=times.connect_timeout_s,
            tcp_timeout_s=times.tcp_timeout_s,
        )

    async def _page(self, url: str) -> bytes:
        return await self._fetcher.body(url, max_bytes=_PAGE_BYTES)

    async def _discover(self, url: EngineUrl) -> int:
        try:
            gauges = parse_engine_gauges(await self._page(f"{url.base}/metrics"))
        except MetricsPageError as error:
            raise FetchError(Fault.PROTOCOL, str(error)) from None
        return len(gauges.engines)

    def _health_changed(self, target: Target, up: bool, reason: str) -> None:
        self.roster.health_changed(target, up, reason)
        if not up:
            self.gateway.pass_through.lost(target)

    def _scrape_failed(self, target: Target, reason: str) -> None:
        self.metrics.scrape_failed(target.role)
        _log.debug("scrape failed", extra={"fields": {"url": target.url, "reason": reason}})

    def _pulled_late(self, target: Target, count: int) -> None:
        self.metrics.pulled_late(count)
        fields = {"url": target.url, "count": count}
        message = (
            "a prefiller was told of KV caches that it kept no longer: their requests were called "
            "off, or they were pulled after their lease, and answers may be wrong (then --lease-s "
            "is too long)"
        )
        _log.warning(message, extra={"fields": fields})

    async def _identify(self) -> None:
        """Ask bootstrap servers who their engines are, again and again: each start has a new id."""
        while True:
            asked = [
                self._ask_identity(prefiller, prefiller.bootstrap)
                for prefiller in self.instances.up()
                if prefiller.bootstrap is not None
            ]
            await asyncio.gather(*asked)
            await asyncio.sleep(_IDENTITY_INTERVAL_S)

    async def _ask_identity(self, prefiller: Prefiller, bootstrap: str) -> None:
        try:
            page = await self._fetcher.body(f"{bootstrap}/query", max_bytes=MAX_BYTES)
            identity = read_identity(page, bootstrap)
        except FetchError as error:
            if prefiller.identity is None:
                fields = {"url": prefiller.name, "reason": str(error)}
                _log.warning("no bootstrap", extra={"fields": fields})
            return
        # Quarantine says that the engine may be another one when it comes back.
        if prefiller.status is Status.UP and identity != prefiller.identity:
            prefiller.identity = identity
            self.driver.lost.engine_seen(prefiller, identity.engine_id)
            self.driver.reopen()


def _refuse(
    rejection: "Rejection", head: "RequestHead | None", peer: str
) -> "tuple[Headers, bytes]":
    del head, peer
    body = error_body(rejection.status, rejection.message, param=rejection.param)
    return [*JSON_HEADERS, *rejection.headers], body


async def _listen_at(
    server: Server, place: str, host: str, port: int, ssl: "SSLContext | None"
) -> None:
    try:
        await server.start(host, port, ssl=ssl)
    except OSError as error:
        # Resolvers have numbers of their own; a failed bind's text repeats the address.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise ConfigError(f"{place.format(host, port)}: {reason}") from None
