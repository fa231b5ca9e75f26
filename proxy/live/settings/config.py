"""The live proxy's configuration: immutable values, complete and checked.

`balanceroute.proxy.live.settings.configure` makes it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from itertools import chain
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.core.admission import AimdOptions
from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.core.prefill import ScoreSettings
from balanceroute.proxy.core.ranks import repeated
from balanceroute.proxy.core.setting import settings_of
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.health import HealthSettings
from balanceroute.proxy.live.engines.scrape import ScrapeSettings
from balanceroute.proxy.live.request.leg_settings import (
    AnswerLimit,
    FirstTokenFrom,
    LegRetries,
    LegRules,
    LegSettings,
    LegTimes,
)
from balanceroute.proxy.live.security import Credentials, Secret
from balanceroute.proxy.live.settings.declared import (
    AdmissionSettings,
    DiscoverySettings,
    EngineSettings,
    GatewaySettings,
    Http3Settings,
    LeaderSettings,
    ListeningSettings,
    LogSettings,
    TimeLimits,
)
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer
from balanceroute.proxy.live.settings.scheduling import SchedulingSettings
from balanceroute.proxy.live.settings.tracing import ExportSettings
from balanceroute.proxy.wire.messages import ServerLimits
from balanceroute.topologies import CONNECTORS

if TYPE_CHECKING:
    from balanceroute.proxy.live.settings.aliases import AliasConfig
    from balanceroute.topologies.topology import GroupEntry, Topology

_NS_PER_S = 1e9
# Longer than any process runs.
_NEVER_NS = 1 << 62
# Without leases a deep pool costs only memory of the prefillers.
_POOL_WITHOUT_LEASES = 64
_POOL_PER_PREFILLER = 2

# How JSON groups settings that are declared apart.
_SHOWN: dict[str, tuple[type, ...]] = {
    "scheduling": (SchedulingSettings, SchedulerConfig, LegRules),
    "times": (TimeLimits, LegTimes),
    "failures": (LegRetries, HealthSettings, ScrapeSettings),
    "limits": (ServerLimits, AnswerLimit),
}


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """The configuration of the live proxy: the settings, and what follows from them."""

    topology: str | None
    engines: EngineSettings
    discovery: DiscoverySettings
    leader: LeaderSettings
    listening: ListeningSettings
    http3: Http3Settings
    gateway: GatewaySettings
    admission: AdmissionSettings
    scheduling: SchedulingSettings
    scheduler: SchedulerConfig  # The limits of its queues; see `scheduler_config` for the whole.
    scores: ScoreSettings
    policies: PolicySettings
    times: TimeLimits
    aimd: AimdOptions
    legs: LegSettings  # Time limits and retries of requests to engines.
    health: HealthSettings
    scrape: ScrapeSettings
    limits: ServerLimits
    log: LogSettings
    tracing: ExportSettings | None  # Where traces of requests go; None for nowhere.
    prefillers: tuple[PrefillServer, ...]
    # The decode servers; their ranks in order are the scheduler's.
    decoders: tuple[DecodeServer, ...]
    credentials: Credentials  # Keys, and the certificate's files.
    # The settings that were given and are not off, with what to call each. Not shown.
    given: Mapping[str, str] = field(repr=False, compare=False)
    # The deployments if there are several; then it has no engines of its own.
    groups: "tuple[GroupConfig, ...]" = ()
    aliases: "tuple[AliasConfig, ...]" = ()  # Names that stand for several of their models.

    @property
    def deployments(self) -> "tuple[ProxyConfig, ...]":
        """The settings of each deployment: its own if there are no groups."""
        return tuple(one.config for one in self.groups) or (self,)

    @property
    def lease_s(self) -> float | None:
        """How long a prefiller keeps a KV cache that no decoder asked for; None for ever."""
        return self.legs.lease_s

    @property
    def pass_authorization(self) -> bool:
        """Whether an engine gets the client's own key: only if the proxy has no key to check."""
        ours = self.credentials
        return ours.engine_key is None and not (ours.api_keys or ours.tenants)

    @property
    def too_long_waits(self) -> str | None:
        """Why the target of --aimd cannot be kept with these time limits; None if it can."""
        queue_ttl_s, aimd = self.times.queue_ttl_s, self.aimd
        assert queue_ttl_s is not None, "make_config replaces it"
        # With an early first token no client waits for one in the pool.
        early = self.legs.first_token is FirstTokenFrom.PREFILL
        pool_ttl_s = 0.0 if early else self.times.pool_ttl_s
        if aimd.aimd == "off" or queue_ttl_s + pool_ttl_s <= aimd.aimd_ttft_s:
            return None
        pool = "" if early else f" + --pool-ttl-s ({pool_ttl_s:g})"
        return (
            f"requests may wait for longer than --aimd-ttft-s ({aimd.aimd_ttft_s:g}): --queue-ttl-s "
            f"({queue_ttl_s:g}){pool}"
        )

    @property
    def follows_kv_events(self) -> bool:
        """Whether prefillers report what they have cached, also those that are added later."""
        return self.legs.names_prompts

    @property
    def follows_rank_kv_events(self) -> bool:
        """Whether decode ranks report what they have cached."""
        return self.engines.rank_kv_events_port is not None

    @property
    def deep_pool_share(self) -> float | None:
        """How full prefillers may be until the rate at which a deep pool empties is known; None for no limit."""
        given = self.scheduler.pool_limit is not None
        deep = self.legs.first_token is FirstTokenFrom.PREFILL and not given
        return self.scheduling.prefiller_utilisation_limit if deep else None

    def scheduler_config(self, ranks: int, prefillers: int) -> SchedulerConfig:
        """Return the scheduler's configuration for G decode ranks and P prefillers."""
        pool_limit, deadline_s = self.scheduler.pool_limit, self.times.pool_deadline_s
        if pool_limit is None and self.lease_s is None:
            pool_limit = max(_POOL_WITHOUT_LEASES, ranks, _POOL_PER_PREFILLER * prefillers)
        return replace(
            self.scheduler,
            ranks=ranks,
            rank_speeds=repeated(self.scheduling.rank_speeds, ranks) or None,
            prefillers=prefillers,
            pool_limit=pool_limit,
            deep_pool=self.legs.first_token is FirstTokenFrom.PREFILL,
            deadline_ns=_NEVER_NS if deadline_s == inf else _ns(deadline_s),
            ttl_ns=_ns(self.times.pool_ttl_s),
            lease_ns=_ns(self.lease_s),
            lease_margin_ns=round(_NS_PER_S * self.legs.lease_margin_s),
            queue_ttl_ns=_ns(self.times.queue_ttl_s),
        )

    @property
    def ranks_keep(self) -> bool:
        """Whether it counts what ranks keep of earlier prompts."""
        pulls_missing = CONNECTORS[self.engines.connector].pulls_missing
        return self.policies.prefix_affinity > 0.0 and not self.policies.paper and pulls_missing

    def redacted(self) -> dict[str, object]:
        """Return the configuration for JSON; of a secret it only says that there is one."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        plain |= {"direct": self.legs.direct.value, "lease_s": self.lease_s}
        records = [getattr(self, one.name) for one in fields(self)]
        for key, sections in _SHOWN.items():
            plain[key] = {
                setting.name: _plain(getattr(record, setting.attribute))
                for section in sections
                for record in records
                if isinstance(record, section)
                for setting in settings_of(section)
            }
        for name in ("scheduler", "legs", "health", "scrape"):
            del plain[name]
        for name in ("groups", "aliases"):
            if not plain[name]:
                del plain[name]
        return plain


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """One of several deployments behind the proxy."""

    name: str
    # Its served names; empty for its name and those that its engines serve.
    models: tuple[str, ...]
    config: ProxyConfig  # All settings as they are for it.


def _ns(time_s: float | None) -> int | None:
    return None if time_s is None or time_s == inf else round(_NS_PER_S * time_s)


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
        case _ if is_dataclass(value):
            return {one.name: _plain(getattr(value, one.name)) for one in fields(value) if one.repr}
        case _:
            return value


# What several deployments behind one proxy must not say, or not all of them.

# There is one public listener, one log, and one list of tenants.
_OF_ALL = frozenset(
    {
        *chain.from_iterable(
            (one.name for one in settings_of(section))
            for section in (
                ListeningSettings,
                Http3Settings,
                GatewaySettings,
                LeaderSettings,
                *_SHOWN["limits"],
                LogSettings,
            )
        ),
        *("tenants", "client_priority", "client_deadline"),
        *("engine_key_file", "drain_timeout_s", "roster_state"),
    }
)
# They say which engines there are.
_OF_ONE = ("prefill", "decode", "bootstrap", "kv_events", "kv_replay", "connector", "model")


def check_groups(topology: "Topology", whole: "ProxyConfig") -> None:
    """Check the settings of all groups, and that no group has one of them.

    Raises:
        ConfigError: A setting is in the wrong place, or cannot be with several groups.
    """
    for name in _OF_ONE:
        if name in whole.given:
            reason = f"names engines of one deployment, and {topology.path} has [[model]] tables"
            raise ConfigError(f"{whole.given[name]}: {reason}")
    if whole.discovery.discover:
        raise ConfigError(
            f"{topology.path}: discover: each [[model]] table finds its own engines, by [model.proxy]"
        )
    for group in topology.groups:
        check_own(topology, group)


def check_own(topology: "Topology", group: "GroupEntry") -> None:
    """Check that a group says nothing that holds for all. Raises ConfigError."""
    for name in group.proxy:
        if name in _OF_ALL:
            place = f"{topology.path}: [{group.place}.proxy].{name}"
            raise ConfigError(f"{place}: belongs into [proxy]: it holds for all groups")


def check_names(topology: "Topology", group: "GroupEntry") -> None:
    """Check that a group that is added has no name of an alias. Raises ConfigError."""
    for name in (group.name, *group.models):
        if name in topology.aliases:
            raise ConfigError(f"{group.place}: {name!r} is an alias")


def check_apart(topology: "Topology", groups: "Iterable[GroupConfig]") -> None:
    """Check that no two groups have an engine or a file in common. Raises ConfigError."""
    owners: dict[object, str] = {}
    for group, entry in zip(groups, topology.groups, strict=True):
        config, place = group.config, f"{topology.path}: {entry.place}"
        urls = [*(one.url for one in config.prefillers), *(one.url for one in config.decoders)]
        found: list[tuple[object, str]] = [(url.base, f"the engine {url.base}") for url in urls]
        state = config.scheduling.predictor_state
        if state is not None:
            found.append((state, f"predictor_state {state}"))
        for key, what in found:
            if owners.setdefault(key, place) != place:
                raise ConfigError(f"{place} has {what}, which {owners[key]} has already")
