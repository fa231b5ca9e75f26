"""How the live proxy's configuration is made: of flags, the environment, a topology and defaults, in this order.

Every value is checked before the first socket is opened. An error names the flag, or the file and
key, and the reason; none shows a key, a token or a password.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from balanceroute.proxy.core.admission import EXPECTING, AimdOptions
from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.core.prefill import USING_EVENTS, ScoreSettings
from balanceroute.proxy.live.engines.health import HealthSettings
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.engines.scrape import ScrapeSettings
from balanceroute.proxy.live.prediction import make_predictor, predictor_name
from balanceroute.proxy.live.request.leg_settings import Direct, FirstTokenFrom, LegSettings
from balanceroute.proxy.live.security import (
    Credentials,
    Secret,
    Tenant,
    as_secret,
    engine_context,
    is_loopback,
    read_secret,
    read_secrets,
    server_context,
)
from balanceroute.proxy.live.settings.checks import base_address
from balanceroute.proxy.live.settings.config import (
    GroupConfig,
    ProxyConfig,
    check_apart,
    check_groups,
    check_names,
    check_own,
)
from balanceroute.proxy.live.settings.declared import (
    LOG_WORDS,
    SECTIONS,
    AdmissionSettings,
    DiscoverySettings,
    EngineAddresses,
    EngineSettings,
    GatewaySettings,
    Http3Settings,
    LeaderSettings,
    ListeningSettings,
    LogSettings,
    TimeLimits,
)
from balanceroute.proxy.live.settings.engines import (
    DecodeServer,
    PrefillServer,
    decode_servers,
    prefill_servers,
)
from balanceroute.proxy.live.settings.scheduling import SchedulingSettings
from balanceroute.proxy.live.settings.tracing import export_settings
from balanceroute.proxy.settings import Given
from balanceroute.proxy.wire.messages import ServerLimits, bracketed
from balanceroute.topologies import CONNECTORS, KvFlow, TopologyError

if TYPE_CHECKING:
    from balanceroute.topologies.topology import Topology

_QUEUE_TTL_S = 600.0
ENGINE_KEY_VARIABLE = "BALANCEROUTE_ENGINE_KEY"


def make_config(
    topology: "Topology | None",
    flags: Mapping[str, object],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ProxyConfig:
    """Return the configuration: flags before the file before the defaults.

    Args:
        topology: The file, if there is one.
        flags: The flags' values by name, with underscores; None for a flag that was not given.
        environment: The variables of settings, `BALANCEROUTE_ENGINE_KEY` if no file has the key, and those of
            OpenTelemetry.

    Raises:
        ConfigError: A value is unknown or cannot be served.
    """
    whole = _configured(topology, flags, environment)
    if topology is None or not topology.groups:
        return whole
    check_groups(topology, whole)
    groups = tuple(
        GroupConfig(one.name, one.models, _configured(topology.of(one), flags, environment))
        for one in topology.groups
    )
    check_apart(topology, groups)
    if not topology.aliases:
        return replace(whole, groups=groups)
    from balanceroute.proxy.live.settings.aliases import read_aliases  # noqa: PLC0415

    return replace(whole, groups=groups, aliases=read_aliases(topology))


def make_group(
    topology: "Topology",
    flags: Mapping[str, object],
    table: Mapping[str, object],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> GroupConfig:
    """Return the configuration of a group that is added to those of a file; see `make_config`.

    Args:
        topology: The file.
        flags: The flags' values by name.
        table: What the group's `[[model]]` table would have; engines may be added later.
        environment: See `make_config`.

    Raises:
        ConfigError: It cannot be served.
    """
    from balanceroute.topologies.topology import added_group  # noqa: PLC0415

    try:
        entry = added_group(topology.path, table)
    except TopologyError as error:
        raise ConfigError(str(error)) from None
    check_own(topology, entry)
    check_names(topology, entry)
    config = _configured(topology.of(entry), flags, environment, may_be_empty=True)
    return GroupConfig(entry.name, entry.models, config)


def _configured(
    topology: "Topology | None",
    flags: Mapping[str, object],
    environment: Mapping[str, str],
    *,
    may_be_empty: bool = False,
) -> ProxyConfig:
    """Return the configuration of one deployment, or what several have in common."""
    given = _given(topology, flags, environment)
    engines = given.read(EngineSettings)
    discovery = _discovery(given, environment)
    # Where there are groups, each of them has engines.
    may_be_empty = may_be_empty or (topology is not None and bool(topology.groups))
    prefillers, decoders = _servers(given, topology, engines, discovery, may_be_empty)
    _check_engines(given, engines)
    listening = given.read(ListeningSettings)
    _check_metaserver(given, engines, listening)
    credentials = _credentials(given, listening, environment)
    limits = _limits(given)
    _check_admin(given, listening, credentials.admin_token)
    scheduling = given.read(SchedulingSettings)
    _check_scheduling(given, scheduling, engines)
    legs = _legs(given, prefillers, engines, scheduling)
    _check_kv_events(prefillers, engines, scheduling)
    aimd = _aimd(given)
    times = given.read(TimeLimits)
    times = replace(times, queue_ttl_s=times.queue_ttl_s or aimd.queue_ttl_s or _QUEUE_TTL_S)
    if legs.lease_s is not None:
        _check_margin(given, legs, times)
    policies = given.read(PolicySettings)
    _check_rank_events(given, engines, scheduling, policies)
    return ProxyConfig(
        topology=None if topology is None else topology.name,
        engines=engines,
        discovery=discovery,
        leader=_leader(given),
        listening=listening,
        http3=_http3(given, listening),
        gateway=_gateway(given, listening),
        admission=given.read(AdmissionSettings),
        scheduling=scheduling,
        scheduler=given.read(SchedulerConfig, ranks=1, batch_limit=scheduling.batch),
        scores=given.read(ScoreSettings),
        policies=policies,
        times=times,
        aimd=aimd,
        legs=legs,
        health=given.read(HealthSettings),
        scrape=given.read(ScrapeSettings),
        limits=limits,
        log=_log(given),
        tracing=export_settings(given, environment),
        prefillers=prefillers,
        decoders=decoders,
        credentials=credentials,
        given=given.places,
    )


def read_credentials(
    topology: "Topology | None",
    flags: Mapping[str, object],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Credentials:
    """Read the files of keys, certificates and tenants again; see `make_config`.

    Raises:
        ConfigError: One of them cannot be used.
    """
    given = _given(topology, flags, environment)
    return _credentials(given, given.read(ListeningSettings), environment)


def _given(
    topology: "Topology | None", flags: Mapping[str, object], environment: Mapping[str, str]
) -> Given:
    if topology is None:
        return Given(SECTIONS, flags=flags, environment=environment)
    return Given(
        SECTIONS,
        flags=flags,
        environment=environment,
        top={"connector": topology.connector, "model": topology.models or None},
        table=topology.proxy,
        table_name=f"{topology.place}proxy",
        wider=topology.shared,
        file=topology.path,
    )


# Engines.


def _check_engines(given: Given, engines: EngineSettings) -> None:
    for model in engines.model:
        if engines.model.count(model) > 1:
            raise ConfigError(f"{given.where('model')} names {model!r} twice")
    if engines.engine_ca_file is not None:
        with given.blamed("engine_ca_file"):
            if engines.insecure_engines:
                reason = "means nothing with --insecure-engines"
                raise ConfigError(f"is {engines.engine_ca_file}: {reason}")
            engine_context(engines.engine_ca_file, insecure=False)


def _servers(
    given: Given,
    topology: "Topology | None",
    engines: EngineSettings,
    discovery: DiscoverySettings,
    may_be_empty: bool,
) -> tuple[tuple[PrefillServer, ...], tuple[DecodeServer, ...]]:
    addresses, found = given.read(EngineAddresses), discovery.covers
    needless = {role: may_be_empty or found(role) for role in Role}
    prefillers = prefill_servers(
        addresses, topology, engines.connector, given.where, may_be_none=needless[Role.PREFILL]
    )
    return prefillers, decode_servers(
        addresses, topology, prefillers, given.where, may_be_none=needless[Role.DECODE]
    )


def _discovery(given: Given, environment: Mapping[str, str]) -> DiscoverySettings:
    settings = given.read(DiscoverySettings)
    if settings.roster_state is not None:
        place = f"{given.where('roster_state')} is {settings.roster_state}"
        _check_place(place, settings.roster_state)
    asks = any(one.kind == "kubernetes" for one in settings.discover)
    name = "discover" if asks else "leader_lease"
    if settings.kubernetes_api or not (asks or given.read(LeaderSettings).leader_lease):
        return settings
    host, port = (environment.get(f"KUBERNETES_SERVICE_{what}") for what in ("HOST", "PORT"))
    if host is None or port is None:
        reason = "not in a pod of a cluster: needs --kubernetes-api"
        raise ConfigError(f"{given.where(name)}: {reason}")
    return replace(settings, kubernetes_api=base_address(f"https://{bracketed(host)}:{port}"))


def _leader(given: Given) -> LeaderSettings:
    leader = given.read(LeaderSettings)
    if leader.leader_lock is not None:
        place = f"{given.where('leader_lock')} is {leader.leader_lock}"
        if leader.leader_lease:
            raise ConfigError(f"{place}, and --leader-lease says who leads already")
        _check_place(place, leader.leader_lock)
    return leader


def _check_metaserver(given: Given, engines: EngineSettings, listening: ListeningSettings) -> None:
    is_called = CONNECTORS[engines.connector].flow is KvFlow.DECODE_FIRST
    if engines.metaserver_url and not is_called:
        raise ConfigError(f"{given.where('metaserver_url')}: {engines.connector} never calls back")
    unspecified = ("0.0.0.0", "::")  # noqa: S104 - recognised, not bound.
    if is_called and not engines.metaserver_url and listening.host in unspecified:
        reason = f"is {listening.host!r}, which no engine can call: needs --metaserver-url"
        raise ConfigError(f"{given.where('host')} {reason}")


# Clients and administrators.


def _credentials(
    given: Given, listening: ListeningSettings, environment: Mapping[str, str]
) -> Credentials:
    engine_key = engine_key_of(given, environment)
    _check_certificate(given, listening)
    api_keys = listening.api_key
    if listening.api_key_file is not None:
        with given.blamed("api_key_file"):
            api_keys += read_secrets(listening.api_key_file)
    admin_token = None
    if listening.takes_orders and listening.admin_token_file is not None:
        with given.blamed("admin_token_file"):
            admin_token = read_secret(listening.admin_token_file)
    select_keys: tuple[Secret, ...] = ()
    if (select_file := given.read(GatewaySettings).select_key_file) is not None:
        with given.blamed("select_key_file"):
            select_keys = read_secrets(select_file)
    return Credentials(
        *(api_keys, engine_key, admin_token),
        _tenants(given, given.read(AdmissionSettings), api_keys),
        select_keys,
    )


def engine_key_of(given: Given, environment: Mapping[str, str]) -> Secret | None:
    """Return the key to send to engines, of `engine_key_file` or the environment; None for no key.

    Raises:
        ConfigError: It cannot be used.
    """
    key_file = given.values["engine_key_file"]
    if isinstance(key_file, Path):
        with given.blamed("engine_key_file"):
            return read_secret(key_file)
    if ENGINE_KEY_VARIABLE not in environment:
        return None
    try:
        return as_secret(environment[ENGINE_KEY_VARIABLE].encode(errors="replace"))
    except ConfigError as error:
        raise ConfigError(f"{ENGINE_KEY_VARIABLE}: {error}") from None


def _tenants(
    given: Given, admission: AdmissionSettings, api_keys: tuple[Secret, ...]
) -> tuple[Tenant, ...]:
    if admission.tenants is None:
        return ()
    from balanceroute.proxy.live.settings.tenant_file import read_tenants  # noqa: PLC0415

    tenants = read_tenants(admission.tenants)
    if api_keys and not any(one.default for one in tenants):
        reason = f"means nothing with {given.where('tenants')} if no tenant there is the default"
        raise ConfigError(f"{given.where('api_key_file')}: {reason}")
    # What all may, each of them may.
    return tuple(
        replace(
            one,
            client_priority=one.client_priority or admission.client_priority,
            client_deadline=one.client_deadline or admission.client_deadline,
        )
        for one in tenants
    )


def _check_certificate(given: Given, listening: ListeningSettings) -> None:
    cert, key = listening.tls_cert, listening.tls_key
    if cert is not None and key is not None:
        with given.blamed("tls_cert"):
            server_context(cert, key)
    elif cert is not None:
        raise ConfigError(f"{given.where('tls_cert')}: needs --tls-key too")
    elif key is not None:
        raise ConfigError(f"{given.where('tls_key')}: needs --tls-cert too")


def _gateway(given: Given, listening: ListeningSettings) -> GatewaySettings:
    gateway = given.read(GatewaySettings)
    taken = [(listening.host, listening.port)]
    taken += [(listening.admin_host, listening.admin_port)] if listening.admin else []
    picks = gateway.pick != "off"
    for name, on, own in (
        ("select", gateway.select_key_file is not None, (gateway.select_host, gateway.select_port)),
        ("pick", picks, (gateway.pick_host, gateway.pick_port)),
    ):
        if on and own in taken and own[1] != 0:
            reason = f"is {own[1]}, which serves others already: name another"
            raise ConfigError(f"{given.where(f'{name}_port')} {reason}")
        taken += [own] if on else []
    if picks:
        _need(given.where("pick"), "gateway", "grpc", "envoy.service")
    names = list(gateway.picker_names.values())
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{given.where('picker_metrics')} names {name!r} twice")
    if gateway.http2:
        _need(given.where("http2"), "h2", "h2")
    return gateway


def _need(place: str, extra: str, *modules: str) -> None:
    """Check that an extra is installed, before anybody asks an engine."""
    for module in modules:
        try:
            found = find_spec(module)
        except ModuleNotFoundError:  # Its package is not there.
            found = None
        if found is None:
            raise ConfigError(f"{place}: needs the extra {extra}: pip install '.[{extra}]'")


def _http3(given: Given, listening: ListeningSettings) -> Http3Settings:
    http3 = given.read(Http3Settings)
    if not http3.http3:
        return http3
    if http3.http3_hard_deadlines and http3.http3_order != "edf":
        raise ConfigError(f"{given.where('http3_hard_deadlines')}: needs --http3-order edf")
    place = given.where("http3")
    if listening.tls_cert is None:
        raise ConfigError(f"{place}: needs --tls-cert and --tls-key, as HTTP/3 is always encrypted")
    _need(place, "h3", "aioquic")
    return http3


def _check_admin(given: Given, listening: ListeningSettings, token: Secret | None) -> None:
    if listening.control_on_api_port and token is None:
        reason = "clients reach it: needs --admin-token-file"
        raise ConfigError(f"{given.where('control_on_api_port')}: {reason}")
    if not listening.admin:
        return
    host, port = listening.admin_host, listening.admin_port
    if token is None and not is_loopback(host):
        reason = f"is {host!r}, which others reach: needs --admin-token-file"
        raise ConfigError(f"{given.where('admin_host')} {reason}")
    if port != 0 and (host, port) == (listening.host, listening.port):
        reason = f"is {port}, which serves clients already: name another"
        raise ConfigError(f"{given.where('admin_port')} {reason}")
    if token is not None and listening.admin_name:
        reason = "means nothing with --admin-token-file, which any name may be called with"
        raise ConfigError(f"{given.where('admin_name')} {reason}")


def _limits(given: Given) -> ServerLimits:
    limits = given.read(ServerLimits)
    budget, one = limits.body_budget_bytes, limits.body_limit_bytes
    if budget < one:
        reason = f"is {budget}, less than one body may have by --body-limit-bytes: {one}"
        raise ConfigError(f"{given.where('body_budget_bytes')} {reason}")
    return limits


# Scheduling.


def _check_kv_events(
    prefillers: Iterable[PrefillServer], engines: EngineSettings, scheduling: SchedulingSettings
) -> None:
    if engines.kv_replay_port is not None and engines.kv_events_port is None:
        raise ConfigError("--kv-replay-port: needs --kv-events-port too")
    if engines.rank_kv_replay_port is not None and engines.rank_kv_events_port is None:
        raise ConfigError("--rank-kv-replay-port: needs --rank-kv-events-port too")
    if engines.kv_events_port is None and all(one.kv_events is None for one in prefillers):
        return
    if scheduling.prefill_choice not in USING_EVENTS:
        choices = " or ".join(sorted(USING_EVENTS))
        raise ConfigError(f"--kv-events: nobody asks without --prefill-choice {choices}")
    _need("--kv-events", "kv-events", "zmq")


def _check_rank_events(
    given: Given,
    engines: EngineSettings,
    scheduling: SchedulingSettings,
    policies: PolicySettings,
) -> None:
    """Check the settings of the ranks' KV cache events."""
    if engines.rank_kv_events_port is None:
        return
    place = given.where("rank_kv_events_port")
    if policies.prefix_affinity == 0.0 and scheduling.local_prefill_tokens is None:
        reason = "nobody asks without --prefix-affinity or --local-prefill-tokens"
        raise ConfigError(f"{place}: {reason}")
    _need(place, "kv-events", "zmq")


def _check_predictors(given: Given, scheduling: SchedulingSettings) -> None:
    """Check that every predictor can be made, under a name of its own in the metrics."""
    predictor, shadows = scheduling.predictor, scheduling.shadow_predictor
    names: set[str] = set()
    for setting, words in (("predictor", (predictor,)), ("shadow_predictor", shadows)):
        for word in words:
            name = predictor_name(word)
            with given.blamed(setting):
                if name in names:
                    reason = "metrics cannot tell it from another one of that name"
                    raise ConfigError(f"has {name!r}: {reason}")
                names.add(name)
                make_predictor(word)
    path = scheduling.predictor_state
    if path is None:
        return
    place = f"{given.where('predictor_state')} is {path}"
    if predictor == "none":
        raise ConfigError(f"{place}, but --predictor none learns nothing")
    if not hasattr(make_predictor(predictor), "state"):
        raise ConfigError(f"{place}, but --predictor {predictor} has no state to keep")
    if Path(predictor) == path:
        raise ConfigError(f"{place}: the trained predictor is never written to")
    _check_place(place, path)


def _check_scheduling(
    given: Given, scheduling: SchedulingSettings, engines: EngineSettings
) -> None:
    _check_predictors(given, scheduling)
    facts = CONNECTORS[engines.connector]
    if scheduling.local_prefill_tokens is not None and not facts.ranks_prefill:
        reason = f"decode ranks with {engines.connector} may be unable to compute a prompt"
        raise ConfigError(f"{given.where('local_prefill_tokens')}: {reason}")


def _aimd(given: Given) -> AimdOptions:
    aimd = given.read(AimdOptions)
    aimd.check(given.where)
    return aimd


# The rest.


def _check_margin(given: Given, legs: LegSettings, times: TimeLimits) -> None:
    margin_s, connect_s = legs.lease_margin_s, times.connect_timeout_s
    if margin_s <= connect_s:
        reason = f"is {margin_s:g}, must exceed {given.where('connect_timeout_s')} ({connect_s:g})"
        raise ConfigError(
            f"{given.where('lease_margin_s')} {reason}: a rank's connection takes from the margin"
        )


def _legs(
    given: Given,
    prefillers: Iterable[PrefillServer],
    engines: EngineSettings,
    scheduling: SchedulingSettings,
) -> LegSettings:
    legs, connector = given.read(LegSettings), CONNECTORS[engines.connector]
    least_s, most_s = legs.retry_backoff_s, legs.retry_backoff_limit_s
    if least_s > most_s:
        reason = f"is {least_s:g}, beyond --retry-backoff-limit-s ({most_s:g})"
        raise ConfigError(f"{given.where('retry_backoff_s')} {reason}")
    early = legs.first_token is FirstTokenFrom.PREFILL
    if early and not connector.says_first:
        reason = f"prefillers with {engines.connector} leave the last token of a prompt to the rank"
        raise ConfigError(f"{given.where('first_token')}: {reason}, so theirs is not the first one")
    lease_s = scheduling.lease_s or connector.lease_s
    usual = Direct.DECODE if connector.ranks_prefill else Direct.PREFILL
    return replace(
        legs,
        direct=scheduling.direct or usual,
        lease_s=None if lease_s == inf else lease_s,
        asks_early=early and given.read(AdmissionSettings).admission in EXPECTING,
        names_prompts=engines.kv_events_port is not None
        or any(one.kv_events is not None for one in prefillers),
    )


def _log(given: Given) -> LogSettings:
    log = given.read(LogSettings)
    if log.log not in LOG_WORDS:
        _check_place(f"{given.where('log')} is {log.log}", Path(log.log))
    if log.load_log is not None:
        place = f"{given.where('load_log')} is {log.load_log}"
        _check_place(place, log.load_log)
        if log.log not in LOG_WORDS and Path(log.log).absolute() == log.load_log.absolute():
            raise ConfigError(f"{place}, where --log goes already")
    return log


def _check_place(place: str, path: Path) -> None:
    """Check that a file can be in the place that a setting gives it."""
    if path.is_dir():
        raise ConfigError(f"{place}: a directory")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{place}: {path.parent} is not a directory")
