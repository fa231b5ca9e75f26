"""The live proxy's configuration: immutable values, complete and checked.

`balanceroute.proxy.live.settings.configure` makes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from math import inf
from pathlib import Path

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.health import HealthSettings
from balanceroute.proxy.live.engines.scrape import ScrapeSettings
from balanceroute.proxy.live.request.leg_settings import LegSettings
from balanceroute.proxy.live.security.credentials import Secret
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer
from balanceroute.proxy.wire.messages import ServerLimits

_NS_PER_S = 1e9
_POOL_PER_WINDOW = 4
_POOL_PER_PREFILLER = 2


@dataclass(frozen=True, slots=True)
class ListenConfig:
    """Where clients come in, and what they may do.

    Attributes:
        host: Address to listen on.
        port: 0 for a free one.
        tls_cert: Certificate chain to serve https with; None for http.
        tls_key: Its private key.
        api_keys: The keys that clients may present; empty if all may come.
        limits: What is accepted from a client.
        public_metrics: Whether clients may read the metrics.
        cors_origins: Whose pages may use the API from a browser; `*` stands for all.
    """

    host: str
    port: int
    tls_cert: Path | None
    tls_key: Path | None
    api_keys: tuple[Secret, ...]
    limits: ServerLimits
    public_metrics: bool
    cors_origins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdminConfig:
    """Where health, metrics and administration are served; no token is needed if it is None.

    Without a token it answers only if called by `names`, its addresses or localhost.
    """

    host: str
    port: int
    token: Secret | None
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The engines, and how to talk to them.

    Attributes:
        prefill: The prefillers.
        decode: The decode servers; their ranks in order are the scheduler's.
        connector: A name in `CONNECTORS`.
        metaserver: Where decode engines reach this proxy, for connectors that call back; empty for
            the address it listens on.
        lease_s: How long a prefiller keeps a KV cache that no decoder asked for; None for ever. What
            the engine says of a single request goes first.
        models: The model names served; empty for those that the engines serve.
        key: Sent to the engines as their API key.
        ca_file: Certificates to trust from https engines; None for the system's.
        insecure: Whether to accept every certificate.
        connect_timeout_s: For a connection.
        tcp_timeout_s: A host that acknowledges nothing for so long has its connections ended.
    """

    prefill: tuple[PrefillServer, ...]
    decode: tuple[DecodeServer, ...]
    connector: str
    metaserver: str
    lease_s: float | None
    models: tuple[str, ...]
    key: Secret | None
    ca_file: Path | None
    insecure: bool
    connect_timeout_s: float
    tcp_timeout_s: float

    @property
    def ranks(self) -> tuple[EngineUrl, ...] | None:
        """The decode ranks in the scheduler's order; None if some are still to be discovered."""
        if any(server.discover for server in self.decode):
            return None
        return tuple(url for server in self.decode for url in server.ranks)


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """What the scheduler is told; None is no limit, never, or as the attribute says.

    Attributes:
        policy: A name in `POLICIES`.
        settings: The policies' knobs.
        predictor: A name in `PREDICTORS`, or a file with a trained one.
        predictor_state: The file that keeps what it learns.
        shadow_predictors: More of them, which are scored and decide nothing.
        seed: Of randomised policies.
        batch_limit: B, slots of a rank's batch.
        rank_kv_tokens: KV tokens that fit on one rank.
        probe_limit: Probes on one prefiller at a time.
        direct_limit: Sequences that one prefiller answers whole at a time.
        prefiller_kv_tokens: KV tokens that one prefiller may hold.
        prefiller_utilisation_limit: KV cache use, 0 to 1, above which a prefiller gets no probe.
        pool_limit: Requests in prefill or in the pool; None for the most of four windows, one per
            rank and two per prefiller. It is shallow because what it holds has leases.
        queue_limit: Requests that may wait before prefill.
        single_engine_limit: Requests that one prefiller answers alone at a time.
        queue_ttl_s: Wait before prefill after which a request is given up.
        pool_ttl_s: Wait in the pool after which an entry is given up.
        pool_deadline_s: Wait in the pool after which an entry goes first.
        lease_margin_s: How long before its lease ends a KV cache counts as lost.
    """

    policy: str
    settings: PolicySettings
    predictor: str
    predictor_state: Path | None
    shadow_predictors: tuple[str, ...]
    seed: int
    batch_limit: int
    rank_kv_tokens: int | None
    probe_limit: int | None
    direct_limit: int
    prefiller_kv_tokens: int | None
    prefiller_utilisation_limit: float
    pool_limit: int | None
    queue_limit: int
    single_engine_limit: int
    queue_ttl_s: float
    pool_ttl_s: float | None
    pool_deadline_s: float | None
    lease_margin_s: float


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where and what to log.

    Attributes:
        to: The name of a file, "-" for standard error, or "none".
        level: "debug", "info", "warning" or "error".
        loads: The file that takes samples of the ranks' loads; None for none.
        loads_interval_s: Between two of them.
    """

    to: str
    level: str
    loads: Path | None
    loads_interval_s: float


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """Everything the live proxy is told.

    Attributes:
        topology: The topology's name, if there is one.
        listen: Where clients come in.
        admin: Where administrators come in; None for nowhere.
        fleet: The engines.
        scheduling: The scheduler.
        legs: Time limits and retries of what is sent to engines.
        health: How engines are watched.
        scrape: How their metrics are read.
        drain_timeout_s: For running requests to end after SIGTERM.
        log: Where to log.
    """

    topology: str | None
    listen: ListenConfig
    admin: AdminConfig | None
    fleet: FleetConfig
    scheduling: SchedulingConfig
    legs: LegSettings
    health: HealthSettings
    scrape: ScrapeSettings
    drain_timeout_s: float
    log: LogConfig

    @property
    def pass_authorization(self) -> bool:
        """Whether an engine gets the client's own key: only if nobody here has a key to check."""
        return self.fleet.key is None and not self.listen.api_keys

    def scheduler_config(self, ranks: int) -> SchedulerConfig:
        """Return the scheduler's configuration for G decode ranks."""
        scheduling = self.scheduling
        prefillers = len(self.fleet.prefill)
        return SchedulerConfig(
            ranks=ranks,
            batch_limit=scheduling.batch_limit,
            rank_kv_tokens=scheduling.rank_kv_tokens,
            prefillers=prefillers,
            probe_limit=scheduling.probe_limit,
            direct_limit=scheduling.direct_limit,
            prefiller_kv_tokens=scheduling.prefiller_kv_tokens,
            pool_limit=scheduling.pool_limit
            or max(
                _POOL_PER_WINDOW * scheduling.settings.window,
                ranks,
                _POOL_PER_PREFILLER * prefillers,
            ),
            deadline_ns=_ns(scheduling.pool_deadline_s),
            ttl_ns=_ns(scheduling.pool_ttl_s),
            lease_margin_ns=round(_NS_PER_S * scheduling.lease_margin_s),
            queue_ttl_ns=_ns(scheduling.queue_ttl_s),
        )

    def redacted(self) -> dict[str, object]:
        """Return the configuration for JSON; of a secret it only tells that there is one."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return plain


def _ns(time_s: float | None) -> int | None:
    return None if time_s is None else round(_NS_PER_S * time_s)


def _plain(value: object) -> object:
    """Return a value as JSON has it, without secrets."""
    match value:
        case Secret():
            return "***"
        case EngineUrl() | Path():
            return str(value)
        case Enum():
            return value.value
        case float() if value == inf:
            return "inf"
        case tuple():
            return [_plain(item) for item in value]
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case _ if is_dataclass(value):
            return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        case _:
            return value
