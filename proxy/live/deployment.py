"""One model's engines, and what decides about them: scheduler, driver, predictors, health checks."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, cast

from balanceroute.proxy.core.admission import ADMISSIONS, EXPECTING
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import HORIZON, Policy, PolicyInputs, is_outside, make_policy
from balanceroute.proxy.core.prefill import (
    PREFILL_CHOICES,
    USING_BLOCKS,
    USING_LOADS,
    PrefillInputs,
)
from balanceroute.proxy.core.queueing import PREDICTING_ORDERS, QUEUE_ORDERS
from balanceroute.proxy.core.scheduler import Intake, Scheduler, SchedulerConfig
from balanceroute.proxy.live.connectors import BootstrapIdentity, make_connector
from balanceroute.proxy.live.control.memory import KvCapacity, RankSlots
from balanceroute.proxy.live.control.order_store import OrderedState, basis_of, ordered_state
from balanceroute.proxy.live.control.roster import Roster, await_decoder
from balanceroute.proxy.live.control.state import take_snapshot
from balanceroute.proxy.live.engines.engine_facts import Identification
from balanceroute.proxy.live.engines.engine_gauges import (
    EngineGauges,
    MetricsPageError,
    parse_engine_gauges,
)
from balanceroute.proxy.live.engines.engine_url import EngineUrl, Fault, Fetcher, FetchError
from balanceroute.proxy.live.engines.health import Health, Quarantine
from balanceroute.proxy.live.engines.instances import (
    Instances,
    Prefiller,
    Rank,
    Role,
    Status,
    Target,
)
from balanceroute.proxy.live.engines.model_list import ModelList, ServedModels
from balanceroute.proxy.live.engines.pairing import Pairing
from balanceroute.proxy.live.engines.scrape import Scraper
from balanceroute.proxy.live.environment import EngineConnections, Environment
from balanceroute.proxy.live.frontend.groups import ModelRoutes
from balanceroute.proxy.live.frontend.pass_through import PassThrough, PassThroughLimits
from balanceroute.proxy.live.frontend.refusals import Tenancy
from balanceroute.proxy.live.prediction import (
    PredictorSet,
    make_predictor,
    named,
    predictor_name,
)
from balanceroute.proxy.live.request.shared import SessionContext, StallWatch, Suspects
from balanceroute.proxy.live.scheduling.decisions import (
    SWEEP_S,
    DriverSettings,
    Observers,
    StageTimes,
)
from balanceroute.proxy.live.scheduling.driver import Driver, UniqueTokens
from balanceroute.proxy.live.scheduling.scraped_loads import ForeignLoadMeter, feed_loads
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer, prefill_server
from balanceroute.proxy.live.telemetry.component_metrics import DecisionFailures
from balanceroute.proxy.live.telemetry.metrics import Metrics
from balanceroute.proxy.live.telemetry.process_log import log_level, set_log_level
from balanceroute.proxy.live.telemetry.snapshot import Held, LimitsState, Snapshot
from balanceroute.proxy.wire.messages import ServerLimits

if TYPE_CHECKING:
    from balanceroute.predictors.state import Savable
    from balanceroute.proxy.core.admission.overload import Budget, FirstTokens
    from balanceroute.proxy.core.fair_queueing import FairQueueing
    from balanceroute.proxy.core.local_prefill import LocalPrefill
    from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks
    from balanceroute.proxy.core.rank_memory import RankMemory
    from balanceroute.proxy.live.discovery.reconciler import Found, Reconciler
    from balanceroute.proxy.live.predictor_state import PredictorStateFile
    from balanceroute.proxy.live.request.continued import Continued


def snapshot_of(
    deployment: "Deployment",
    group: str,
    held: Held,
    limits: ServerLimits,
    *,
    requests: bool,
    scores: bool,
) -> Snapshot:
    config = deployment.config
    return take_snapshot(
        deployment.driver,
        group=group,
        policy=deployment.policy,
        predictor=predictor_name(config.scheduling.predictor),
        predictors=deployment.predictors.scores() if scores else [],
        tenants=deployment.tenancy.states(),
        rows_judged=deployment.predictors.judged,
        held=held,
        quarantines=deployment.quarantines(),
        gauges=deployment.scraper.gauges(),
        limits=LimitsState(
            config.scheduling.batch,
            config.admission.queue_limit,
            limits.connection_limit,
            limits.body_budget_bytes,
        ),
        requests=requests,
    )


_log = logging.getLogger(__name__)
# Between two looks at the limit on requests in flight, which moves every 5 s at most.
_LIMIT_S = 1.0
# Pages of engines longer than this are not read.
_PAGE_BYTES = 4 << 20
# Of each rank: four million tokens in blocks of 16.
_RANK_BLOCKS = 1 << 18
# Stands for the engines while there are none: the scheduler needs one of each role. Never called.
_PLACEHOLDER = EngineUrl("http", "127.0.0.1", 9)
_PULLED_LATE = (
    "a prefiller was told of KV caches that it kept no longer: their requests were called off, or they "
    "were pulled after their lease, and answers may be wrong (then --lease-s is too long)"
)


class Deployment:
    """The engines of one model. `start` it, run its `tasks`, and `close` it.

    Args:
        suspects: Prompts under which engines have died, of all deployments.
        beside: Of another deployment of the proxy: what tenants have there counts here too.
    """

    _state_file: "PredictorStateFile | None" = None  # None if nothing is kept.

    def __init__(
        self,
        config: ProxyConfig,
        environment: Environment,
        metrics: Metrics,
        failures: DecisionFailures,
        *,
        suspects: Suspects,
        beside: Tenancy | None = None,
    ) -> None:
        self.config, self.policy = config, config.scheduling.policy
        self._environment = environment
        self._suspects = suspects
        self._metrics, self._failures = metrics, failures
        connect = EngineConnections(config, environment.uptime_s)
        key = config.credentials.engine_key
        # For health probes, scrapes and discovery.
        self.fetcher = Fetcher(
            connect,
            timeout_s=2 * config.times.connect_timeout_s,
            key=None if key is None else key.value,
            room=environment.pages,
        )
        self.instances = Instances(*_make_blocks(config), dp_size=config.scheduling.dp_size)
        self.roster = _make_roster(
            self.instances, config, connect, self.fetcher, unix_s=environment.unix_s
        )
        self._loop = asyncio.get_running_loop()
        clock = self._loop.time
        self._stages = StageTimes(environment.stopwatch)
        self.predictors = self._make_predictors()
        self.health = Health(
            config.health,
            fetch=self.fetcher.status,
            on_change=self._health_changed,
            on_gone=self.roster.engine_gone,
            on_known=self.roster.health_known,
            on_error=failures.report,
            clock=clock,
            rng=environment.rng,
        )
        self._foreign_loads: ForeignLoadMeter
        self.scraper = self._make_scraper(clock)
        self.model_routes = ModelRoutes(self.instances)
        self.models = ModelList(self.instances)  # The models of its engines.
        # The limits of its tenants.
        self.tenancy = Tenancy(
            ADMISSIONS[config.admission.admission](config.admission.queue_limit),
            config.credentials.tenants,
            lambda: round(clock() * 1e9),
            beside=beside,
        )
        # Registers engines that are found; None if nothing finds any.
        self.discovery: Reconciler | None = None
        self.driver: Driver  # There after `start`, like the next.
        self.pass_through: PassThrough  # Serves requests that one engine answers alone.

    @property
    def _follows_events(self) -> bool:
        """Whether any engine reports what it has cached."""
        instances = self.instances
        return instances.engine_blocks is not None or instances.rank_blocks is not None

    async def start(self) -> None:
        """Find the engines.

        Raises:
            ConfigError: A decode server answers, but does not report its ranks.
        """
        config, roster, environment = self.config, self.roster, self._environment
        ordered = ordered_state(environment.orders, environment.group, self._settings())
        self.policy = ordered.policy
        if ordered.log_level:
            set_log_level(ordered.log_level)
        for prefill in ordered.prefillers:
            roster.enlist_prefiller(prefill)
        if not self.instances.prefillers:
            roster.reserve_prefiller(prefill_server(_PLACEHOLDER, None, config.engines.connector))
        for decode in ordered.decoders:
            await roster.enlist_decoder(decode)
        if not self.instances.ranks:
            roster.reserve_rank(DecodeServer(_PLACEHOLDER))
        if (reason := config.too_long_waits) is not None:
            fields = {"reason": reason}
            _log.warning("the target of --aimd cannot be kept", extra={"fields": fields})
        self.driver = self._make_driver(ordered.inflight_limit)
        self.pass_through = PassThrough(
            self.instances,
            self.driver,
            tenancy=self.tenancy,
            metrics=self._metrics.requests,
            retried=self._metrics.legs.retry,
            log=self._environment.log,
            limits=PassThroughLimits(
                config.scheduling.single_engine_limit, config.admission.queue_limit
            ),
        )
        roster.attach(
            self.driver,
            self.health,
            self.scraper,
            self._metrics.engines,
            reconfigure=self._reconfigure,
            ordered=self.ordered,
        )
        if config.discovery.discover:
            self.discovery = self._make_discovery(ordered)
        # Before the drains, each of which has all of it kept anew.
        roster.deadlines.restore(ordered.deadlines)
        if ordered.paused:
            self.driver.hold(held=True)
            _log.warning("paused as before: no prefill starts until POST /resume")
        with roster.one_change():
            for target in set(ordered.draining).intersection(roster.targets()):
                roster.drain(target.role, target.url)
        roster.go_on_removing(ordered.removing)
        asked = roster.pairing.ask(set(roster.targets()))
        await asyncio.gather(asked, self.health.probe_new())

    def tasks(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        yield "health", self.health.run
        yield "scrape", self.scraper.run
        clock, changed = asyncio.get_running_loop().time, self.model_routes.update
        yield (
            "models",
            ServedModels(self.models, fetch=self._page, clock=clock, changed=changed).run,
        )
        if self.roster.pairing.active:
            yield "pairs of engines", self.roster.pairing.run
        if self._follows_events:
            from balanceroute.proxy.live.kv_events import follow, subscribed  # noqa: PLC0415

            yield (
                "KV events",
                partial(
                    follow,
                    self.roster,
                    self.config.engines,
                    subscribe=subscribed(self._environment),
                    lost=self._metrics.engines.kv_events_lost,
                ),
            )
        if any(prefiller.bootstrap for prefiller in self.instances.prefillers):
            yield "bootstrap", Identification(self.instances, self._page, self._identified).run
        for server in self.roster.silent:
            yield "discovery", partial(await_decoder, self.roster, server)
        if self.discovery is not None:
            yield "discovery of engines", self.discovery.run
        if self._state_file is not None:
            yield "predictor state", self._state_file.run
        if (budget := self.driver.scheduler.intake.budget) is not None:
            yield "limit", partial(self._follow_limit, budget)

    async def close(self) -> None:
        self.driver.draining = True
        self.driver.shut_down()
        if self._state_file is not None:
            await self._state_file.close()
        self.roster.close()
        self.fetcher.close()

    async def hand_over(self) -> None:
        """Leave the predictors' state to another process."""
        if self._state_file is not None:
            await self._state_file.close()
            self._state_file = None

    async def read_loads(self) -> None:
        """Give the scheduler the foreign load of the ranks now: another process decided until now."""
        self._foreign_loads.forget()
        await asyncio.gather(
            *(self.scraper.again(one) for one in self.roster.targets() if one.role is Role.DECODE)
        )

    def quarantines(self) -> dict[Target, Quarantine]:
        return self.health.quarantines(self._environment.unix_s())

    def set_policy(self, name: str) -> None:
        """Decide by another policy from now on.

        Raises:
            ConfigError: No policy has that name. Of those from outside the one of the settings has: what
                an administrator sends is not imported.
        """
        if is_outside(name) and name != self.config.scheduling.policy:
            raise ConfigError(f"policy {name!r} is not the one that --policy names")
        before, self.policy = self.policy, name
        try:
            self._reconfigure()
        except ConfigError:
            self.policy = before
            raise
        self.ordered()
        self.driver.grown()

    def ordered(self) -> None:
        """Keep what an administrator or discovery has made of the settings."""
        if (store := self._environment.orders) is not None:
            store.changed(self._environment.group, self._ordered_state)

    def _ordered_state(self) -> OrderedState:
        servers, found = self.roster.servers.values(), self.discovery
        engines: list[Prefiller | Rank] = [*self.instances.prefillers, *self.instances.ranks]
        intake = self.driver.scheduler.intake
        return OrderedState(
            self.policy,
            tuple(one for one in servers if isinstance(one, PrefillServer)),
            tuple(one for one in servers if isinstance(one, DecodeServer)),
            tuple({one.target for one in engines if one.status is Status.DRAINING}),
            () if found is None else tuple(found.owned),
            () if found is None else tuple(found.leaving),
            self._settings_name,
            log_level(other_than=self.config.log.log_level),
            None if intake.budget is None else intake.budget.cap,
            intake.held,
            self.roster.deadlines.times(),
            tuple(self.roster.removing),
        )

    def _settings(self) -> OrderedState:
        config = self.config
        named = (config.scheduling.policy, config.prefillers, config.decoders)
        return OrderedState(*named, basis=self._settings_name)

    @cached_property
    def _settings_name(self) -> str:
        config = self.config
        return basis_of(
            config.scheduling.policy, config.prefillers, config.decoders, config.discovery.discover
        )

    async def _follow_limit(self, budget: "Budget") -> None:
        """Keep the limit on requests in flight whenever it has moved."""
        kept = budget.cap
        while True:
            await asyncio.sleep(_LIMIT_S)
            if budget.cap != kept:
                kept = budget.cap
                self.ordered()

    # Parts.

    def _make_driver(self, inflight_limit: int | None) -> Driver:
        config, environment = self.config, self._environment
        order, intake = config.admission.queue_order, self._make_intake(inflight_limit)
        return Driver(
            Scheduler(
                self._scheduler_config(),
                self._make_policy(),
                queue_order=QUEUE_ORDERS[order],
                intake=intake,
                prefill_choice=partial(
                    PREFILL_CHOICES[config.scheduling.prefill_choice],
                    PrefillInputs(
                        random.Random(config.scheduling.seed),
                        scores=config.scores,
                        engine_blocks=self.instances.engine_blocks,
                    ),
                ),
                on_failure=self._failures.report,
                observer=environment.observer,
            ),
            self.instances,
            self._session_context(),
            Observers(
                *(self.health, self.predictors, self._metrics, self._failures, environment.log),
                stages=self._stages,
            ),
            admission=self.tenancy.admission,
            settings=DriverSettings(
                uses_blocks=intake.memory is not None
                or config.scheduling.prefill_choice in USING_BLOCKS,
                expects_output=order in PREDICTING_ORDERS,
                progress_veto=config.scheduling.progress_veto,
                warm_up=config.scheduling.warm_up,
                group_return_s=config.scheduling.group_return_s,
                forbids=environment.forbids,
            ),
            rng=environment.rng,
        )

    # Here and below, what only some fleets use is loaded where it is made.

    def _make_intake(self, inflight_limit: int | None) -> Intake:
        config = self.config
        admission, limit = config.admission, config.aimd.settings
        local_tokens = config.scheduling.local_prefill_tokens
        fair: FairQueueing | None = None
        budget: Budget | None = None
        first_tokens: FirstTokens | None = None
        memory: RankMemory | None = None
        local: LocalPrefill | None = None
        if admission.fair_queue != "none":
            from balanceroute.proxy.core.fair_queueing import fair_queueing  # noqa: PLC0415

            fair = fair_queueing(admission.fair_queue, QUEUE_ORDERS[admission.queue_order])
        if limit is not None or admission.admission in EXPECTING:
            from balanceroute.proxy.core.admission import overload  # noqa: PLC0415

            if limit is not None:
                began = limit if inflight_limit is None else limit.beginning_at(inflight_limit)
                budget = overload.Budget(began)
            if admission.admission in EXPECTING:
                first_tokens = overload.FirstTokens()
        if local_tokens is not None or config.ranks_keep:
            from balanceroute.proxy.core import rank_memory  # noqa: PLC0415

            memory = rank_memory.RankMemory(
                lambda: self.roster.memory.least_tokens, self.instances.rank_blocks
            )
        if local_tokens is not None:
            from balanceroute.proxy.core import local_prefill  # noqa: PLC0415

            local = local_prefill.LocalPrefill(local_tokens, memory)
        return Intake(
            fair=fair,
            budget=budget,
            first_tokens=first_tokens,
            local_prefill=local,
            memory=memory,
        )

    def _session_context(self) -> SessionContext:
        engines, environment, loop = self.config.engines, self._environment, self._loop
        connector = make_connector(engines.connector, callback=engines.metaserver_url)
        name_prompt = None
        if self.config.follows_kv_events:
            from balanceroute.proxy.live.openai.prompt_keys import prompt_name  # noqa: PLC0415

            name_prompt = prompt_name
        return SessionContext(
            connector,
            self.config.legs,
            clock=loop.time,
            uptime_s=environment.uptime_s,
            call_later=loop.call_later,
            unique=UniqueTokens(environment.rng),
            stalls=StallWatch(SWEEP_S, environment.uptime_s),
            observe_gap=self._metrics.legs.observe_itl,
            max_model_len=self.models.max_model_len,
            suspects=self._suspects,
            name_prompt=name_prompt,
            resuming=self._resuming(recomputes=connector.facts.recomputes),
            pump=environment.pump,
        )

    def _resuming(self, *, recomputes: bool) -> "type[Continued] | None":
        if not (self.config.legs.keeps_answers or recomputes):
            return None
        from balanceroute.proxy.live.request.continued import Continued  # noqa: PLC0415

        return Continued

    def _make_discovery(self, ordered: OrderedState) -> "Reconciler":
        # Here, so that nothing of it is loaded where nothing is found so.
        from balanceroute.proxy.live.discovery.sources import make_reconciler  # noqa: PLC0415

        settings, rng = self.config.discovery, self._environment.rng
        return make_reconciler(settings, self.roster, ordered, rng=rng, ask=self._found)

    def _reconfigure(self) -> None:
        self.driver.scheduler.reconfigure(self._scheduler_config(), self._make_policy())

    def _scheduler_config(self) -> SchedulerConfig:
        instances = self.instances
        config = self.config.scheduler_config(len(instances.ranks), len(instances.prefillers))
        memory = self.roster.memory
        return replace(
            config,
            rank_kv_tokens=memory.tokens,
            prefiller_memory_tokens=memory.prefiller_tokens,
            leads=self._environment.forbids is not None,
        )

    def _make_policy(self) -> Policy:
        scheduling = self.config.scheduling
        policy = make_policy(
            self.policy,
            PolicyInputs(
                len(self.instances.ranks),
                scheduling.batch,
                self.config.policies,
                random.Random(scheduling.seed),
                self.predictors,
                self._stages.ended,
                self.roster.memory.tokens,
                len(self.instances.serving()),
                self.config.scores,
            ),
        )
        return self._environment.policy(policy)

    def _make_scraper(self, clock: Callable[[], float]) -> Scraper:
        foreign = self._foreign_loads = ForeignLoadMeter(
            self.instances,
            lambda rank: int(self.driver.scheduler.ledger.bound[rank]),
            lambda event: self.driver.feed(event),  # noqa: PLW0108 - it is not there yet.
        )
        return Scraper(
            self.config.scrape,
            fetch=self._page,
            on_utilisation=self.roster.utilisation_changed,
            on_gauges=partial(self._scraped, foreign),
            on_failure=partial(self._scrape_failed, foreign),
            on_error=self._failures.report,
            clock=clock,
            rng=self._environment.rng,
        )

    def _make_predictors(self) -> PredictorSet:
        scheduling, environment = self.config.scheduling, self._environment
        active = make_predictor(scheduling.predictor)
        path = scheduling.predictor_state
        if path is not None:
            from balanceroute.proxy.live.predictor_state import PredictorStateFile  # noqa: PLC0415

            self._state_file = PredictorStateFile(
                path,
                cast("Savable", active),  # The settings were checked for it.
                metrics=self._metrics.predictors,
                in_thread=environment.in_thread,
                observed=lambda: self.predictors.observed,
            )
            active = self._state_file.predictor
        return PredictorSet(
            named(scheduling.predictor, active),
            [named(word, make_predictor(word)) for word in scheduling.shadow_predictor],
            # Scores need a horizon, also if the policy looks at none.
            horizon_steps=self.config.policies.steps_ahead or HORIZON,
            metrics=self._metrics.predictors,
            on_failure=self._failures.report,
            stopwatch=environment.stopwatch,
        )

    # Engines.

    async def _page(self, url: str) -> bytes:
        return await _page(self.fetcher, url)

    async def _found(self, found: "Found") -> int | None:
        """Return the ranks of an engine that was found, None for a prefiller, if it answers.

        Raises:
            FetchError: It does not, or does not report its ranks.
        """
        url, ranks = found.target.url, found.ranks
        try:
            await _healthy(self.fetcher, url, self.config.health.health_timeout_s)
            if found.target.role is Role.DECODE and ranks is None:
                ranks = await _ranks_of(self._page, EngineUrl.parse(url))
        except FetchError:
            if not any(self.instances.has(Target(role, url)) for role in Role):
                self.fetcher.forget(url)
            raise
        return ranks

    def _health_changed(self, target: Target, up: bool, reason: str) -> None:
        self.roster.health_changed(target, up, reason)
        if not up:
            self.pass_through.lost(target)
            return
        for one in self.instances.of(target):
            self._suspects.group_returned(self.instances.groups.first(one))

    def _scraped(
        self, foreign: ForeignLoadMeter, target: Target, gauges: EngineGauges, late_pulls: int
    ) -> None:
        if late_pulls:
            self._metrics.engines.pulled_late(late_pulls)
            _log.warning(_PULLED_LATE, extra={"fields": {"url": target.url, "count": late_pulls}})
        self.roster.scraped(target, gauges)
        foreign.scraped(target, gauges)
        if (paces := self.driver.paces) is not None:
            paces.scraped(target, gauges)
        if self.config.scheduling.prefill_choice in USING_LOADS:
            feed_loads(self.instances, self.driver.feed, target, gauges)

    def _scrape_failed(self, foreign: ForeignLoadMeter, target: Target, reason: str) -> None:
        self._metrics.engines.scrape_failed(target)
        foreign.failed(target)
        _log.debug("scrape failed", extra={"fields": {"url": target.url, "reason": reason}})

    def _identified(self, prefiller: Prefiller, identity: BootstrapIdentity) -> None:
        self.driver.lost.engine_seen(prefiller, identity.engine_id)
        self.driver.reopen([prefiller])


async def _page(fetcher: Fetcher, url: str) -> bytes:
    return await fetcher.body(url, max_bytes=_PAGE_BYTES)


async def _healthy(fetcher: Fetcher, url: str, limit_s: float) -> None:
    """Return when an engine has answered that it is well. Raises FetchError."""
    status: int | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            status = await fetcher.status(f"{url}/health")
    if status is None:  # As in `fetch`, the error must not refer to the timeout.
        raise FetchError(Fault.TIMEOUT, f"/health did not answer within {limit_s:g} s")
    if status != 200:
        raise FetchError(Fault.SERVER_ERROR, f"/health answers with status {status}")


async def _ranks_of(fetch: Callable[[str], Awaitable[bytes]], url: EngineUrl) -> int:
    """Return the number of data-parallel ranks of a decode server. Raises FetchError."""
    try:
        gauges = parse_engine_gauges(await fetch(f"{url.base}/metrics"))
    except MetricsPageError as error:
        raise FetchError(Fault.PROTOCOL, str(error)) from None
    return len(gauges.engines)


def _make_blocks(config: ProxyConfig) -> "tuple[EngineBlocks | None, EngineBlocks | None]":
    """Return what tracks the prefix caches of prefillers and of ranks by their events; None for nothing."""
    if not (config.follows_kv_events or config.follows_rank_kv_events):
        return None, None
    from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks  # noqa: PLC0415

    tokens = config.engines.kv_block_tokens
    prefillers = EngineBlocks(tokens) if config.follows_kv_events else None
    if not config.follows_rank_kv_events:
        return prefillers, None
    texts = None if prefillers is None else prefillers.texts
    return prefillers, EngineBlocks(tokens, _RANK_BLOCKS, texts)


def _make_roster(
    instances: Instances,
    config: ProxyConfig,
    connect: EngineConnections,
    fetcher: Fetcher,
    *,
    unix_s: Callable[[], float],
) -> Roster:
    connector, active = config.engines.connector, config.engines.check_pairs
    page = partial(_page, fetcher)
    return Roster(
        instances,
        connector=connector,
        connect=connect,
        discover=partial(_ranks_of, page),
        memory=KvCapacity(
            config.scheduler.rank_kv_tokens,
            used=config.policies.kv_peak_quantile is not None,
            prefiller_share=config.deep_pool_share,
        ),
        slots=RankSlots(config.scheduling.batch),
        utilisation_limit=config.scheduling.prefiller_utilisation_limit,
        pairing=Pairing(instances, connector, page, active=active, models=config.engines.model),
        unix_s=unix_s,
        left=fetcher.forget,
    )
