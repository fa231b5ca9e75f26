"""How the live proxy's configuration is made: of flags, a topology and defaults, in this order.

Every value is checked before the first socket is opened. An error names the flag, or the file and
key, and the reason; none shows a key, a token or a password.
"""

from collections.abc import Mapping
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.connectors import CONNECTORS
from balanceroute.proxy.live.engines.health import HealthSettings
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.engines.scrape import ScrapeSettings
from balanceroute.proxy.live.prediction.names import predictor_name
from balanceroute.proxy.live.prediction.predictors import make_predictor
from balanceroute.proxy.live.request.direct import Direct
from balanceroute.proxy.live.request.leg_settings import LegSettings
from balanceroute.proxy.live.security.credentials import (
    Credentials,
    Secret,
    as_secret,
    read_secret,
    read_secrets,
)
from balanceroute.proxy.live.security.host_check import is_loopback
from balanceroute.proxy.live.security.tls import engine_context, server_context
from balanceroute.proxy.live.settings import flags
from balanceroute.proxy.live.settings.config import (
    AdminConfig,
    FleetConfig,
    ListenConfig,
    LogConfig,
    ProxyConfig,
    SchedulingConfig,
)
from balanceroute.proxy.live.settings.engines import decode_servers, prefill_servers
from balanceroute.proxy.live.settings.options import Option, Values
from balanceroute.proxy.wire.messages import ServerLimits

if TYPE_CHECKING:
    from balanceroute.topologies import Topology

ENGINE_KEY_VARIABLE = "BALANCEROUTE_ENGINE_KEY"
# How much of the time for which a KV cache is good an entry waits its turn.
_DEADLINE_SHARE = 0.75


def make_config(
    topology: "Topology | None",
    given: Mapping[str, object],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ProxyConfig:
    """Return the configuration: flags before the file before the defaults.

    Args:
        topology: The file, if there is one.
        given: The flags' values by name, with underscores; None for a flag that was not given.
        environment: Where `BALANCEROUTE_ENGINE_KEY` is looked up if no file has the key.

    Raises:
        ConfigError: A value is unknown or cannot be served.
    """
    values = _values(topology, given)
    fleet = _fleet(values, topology, environment)
    listen = _listen(values)
    return ProxyConfig(
        topology=None if topology is None else topology.name,
        listen=listen,
        admin=_admin(values, listen),
        fleet=fleet,
        scheduling=_scheduling(values, fleet.lease_s),
        legs=_legs(values, fleet.connector),
        health=HealthSettings(
            interval_s=values.get(flags.HEALTH_INTERVAL_S),
            timeout_s=values.get(flags.HEALTH_TIMEOUT_S),
            quarantine_failures=values.get(flags.QUARANTINE_FAILURES),
        ),
        scrape=ScrapeSettings(
            interval_s=MappingProxyType(dict.fromkeys(Role, values.get(flags.SCRAPE_INTERVAL_S))),
            timeout_s=values.get(flags.SCRAPE_TIMEOUT_S),
        ),
        drain_timeout_s=values.get(flags.DRAIN_TIMEOUT_S),
        log=_log(values),
    )


def read_credentials(
    topology: "Topology | None",
    given: Mapping[str, object],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Credentials:
    """Read the files of keys and certificates again; see `make_config`.

    Raises:
        ConfigError: One of them cannot be used.
    """
    values = _values(topology, given)
    listen = _listen(values)
    admin = _admin(values, listen)
    return Credentials(
        api_keys=listen.api_keys,
        engine_key=_engine_key(values, environment),
        admin_token=None if admin is None else admin.token,
        tls_cert=listen.tls_cert,
        tls_key=listen.tls_key,
    )


def _values(topology: "Topology | None", given: Mapping[str, object]) -> Values:
    if topology is None:
        return Values(flags.OPTIONS, flags=given)
    return Values(
        flags.OPTIONS,
        flags=given,
        top={"connector": topology.connector, "model": topology.models or None},
        table=topology.proxy,
        file=topology.path,
    )


def _listen(values: Values) -> ListenConfig:
    cert = values.get(flags.TLS_CERT)
    key = values.get(flags.TLS_KEY)
    if cert is not None and key is not None:
        try:
            server_context(cert, key)
        except ConfigError as error:
            raise ConfigError(f"{values.where(flags.TLS_CERT)} {error}") from None
    elif cert is not None or key is not None:
        there, lacking = flags.TLS_CERT, flags.TLS_KEY
        if cert is None:
            there, lacking = lacking, there
        raise ConfigError(f"{values.where(there)}: needs {lacking.flag} too")
    return ListenConfig(
        host=values.get(flags.HOST),
        port=values.get(flags.PORT),
        tls_cert=cert,
        tls_key=key,
        api_keys=_api_keys(values),
        limits=ServerLimits(
            header_bytes=values.get(flags.HEADER_LIMIT_BYTES),
            headers=values.get(flags.HEADER_LIMIT),
            target_bytes=values.get(flags.TARGET_LIMIT_BYTES),
            body_bytes=values.get(flags.BODY_LIMIT_BYTES),
            body_budget_bytes=_body_budget(values),
            header_timeout_s=values.get(flags.HEADER_TIMEOUT_S),
            body_timeout_s=values.get(flags.BODY_TIMEOUT_S),
            idle_timeout_s=values.get(flags.KEEP_ALIVE_TIMEOUT_S),
            write_timeout_s=values.get(flags.WRITE_TIMEOUT_S),
            write_buffer_bytes=values.get(flags.WRITE_BUFFER_BYTES),
            connections=values.get(flags.CONNECTION_LIMIT),
            connections_per_peer=values.get(flags.PEER_CONNECTION_LIMIT),
        ),
        public_metrics=values.get(flags.PUBLIC_METRICS),
        cors_origins=values.get(flags.CORS_ORIGIN),
    )


def _body_budget(values: Values) -> int:
    budget, one = values.get(flags.BODY_BUDGET_BYTES), values.get(flags.BODY_LIMIT_BYTES)
    if budget < one:
        reason = f"is {budget}, less than one body may have by {flags.BODY_LIMIT_BYTES.flag}: {one}"
        raise ConfigError(f"{values.where(flags.BODY_BUDGET_BYTES)} {reason}")
    return budget


def _admin(values: Values, listen: ListenConfig) -> AdminConfig | None:
    if not values.get(flags.ADMIN):
        return None
    host = values.get(flags.ADMIN_HOST)
    port = values.get(flags.ADMIN_PORT)
    token = _secret(values, flags.ADMIN_TOKEN_FILE)
    if token is None and not is_loopback(host):
        reason = f"is {host!r}, which others reach: needs {flags.ADMIN_TOKEN_FILE.flag}"
        raise ConfigError(f"{values.where(flags.ADMIN_HOST)} {reason}")
    if port != 0 and (host, port) == (listen.host, listen.port):
        reason = f"is {port}, which serves clients already"
        raise ConfigError(f"{values.where(flags.ADMIN_PORT)} {reason}")
    names = values.get(flags.ADMIN_NAME)
    if token is not None and names:
        reason = (
            f"means nothing with {flags.ADMIN_TOKEN_FILE.flag}, which any name may be called with"
        )
        raise ConfigError(f"{values.where(flags.ADMIN_NAME)} {reason}")
    return AdminConfig(host, port, token, names)


def _fleet(
    values: Values, topology: "Topology | None", environment: Mapping[str, str]
) -> FleetConfig:
    connector = values.get(flags.CONNECTOR)
    prefill = prefill_servers(values, topology, connector)
    models = values.get(flags.MODEL)
    for model in models:
        if models.count(model) > 1:
            raise ConfigError(f"{values.where(flags.MODEL)} names {model!r} twice")
    ca_file = values.get(flags.ENGINE_CA_FILE)
    insecure = values.get(flags.INSECURE_ENGINES)
    if ca_file is not None:
        place = values.where(flags.ENGINE_CA_FILE)
        if insecure:
            reason = f"means nothing with {flags.INSECURE_ENGINES.flag}"
            raise ConfigError(f"{place} is {ca_file}: {reason}")
        try:
            engine_context(ca_file, insecure=False)
        except ConfigError as error:
            raise ConfigError(f"{place} {error}") from None
    lease_s = values.get(flags.LEASE_S)
    if lease_s is None:
        lease_s = CONNECTORS[connector].lease_s
    return FleetConfig(
        prefill=prefill,
        decode=decode_servers(values, topology, prefill),
        connector=connector,
        metaserver=_metaserver(values, connector),
        lease_s=_finite(lease_s),
        models=models,
        key=_engine_key(values, environment),
        ca_file=ca_file,
        insecure=insecure,
        connect_timeout_s=values.get(flags.CONNECT_TIMEOUT_S),
        tcp_timeout_s=values.get(flags.TCP_TIMEOUT_S),
    )


def _engine_key(values: Values, environment: Mapping[str, str]) -> Secret | None:
    key = _secret(values, flags.ENGINE_KEY_FILE)
    if key is None and ENGINE_KEY_VARIABLE in environment:
        try:
            return as_secret(environment[ENGINE_KEY_VARIABLE].encode(errors="replace"))
        except ConfigError as error:
            raise ConfigError(f"{ENGINE_KEY_VARIABLE}: {error}") from None
    return key


def _metaserver(values: Values, connector: str) -> str:
    given = values.get(flags.METASERVER_URL)
    if given and not CONNECTORS[connector].decode_first:
        raise ConfigError(f"{values.where(flags.METASERVER_URL)}: {connector} never calls back")
    if CONNECTORS[connector].decode_first and not given:
        host = values.get(flags.HOST)
        if host in ("0.0.0.0", "::"):  # noqa: S104 - recognised, not bound.
            place = values.where(flags.HOST)
            reason = f"is {host!r}, which no engine can call: needs {flags.METASERVER_URL.flag}"
            raise ConfigError(f"{place} {reason}")
    return given


def _scheduling(values: Values, lease_s: float | None) -> SchedulingConfig:
    margin_s = values.get(flags.LEASE_MARGIN_S)
    deadline_s = values.get(flags.POOL_DEADLINE_S)
    if deadline_s is None and lease_s is not None:
        # As the scheduler has it: a margin never takes more than half of a lease.
        deadline_s = _DEADLINE_SHARE * (lease_s - min(margin_s, lease_s / 2))
    predictor, shadows = _predictors(values)
    return SchedulingConfig(
        policy=values.get(flags.POLICY),
        settings=flags.policy_settings(values),
        predictor=predictor,
        predictor_state=_predictor_state(values, predictor),
        shadow_predictors=shadows,
        seed=values.get(flags.SEED),
        batch_limit=values.get(flags.BATCH),
        rank_kv_tokens=values.get(flags.RANK_KV_TOKENS),
        probe_limit=values.get(flags.PROBE_LIMIT),
        direct_limit=values.get(flags.DIRECT_LIMIT),
        prefiller_kv_tokens=values.get(flags.PREFILLER_KV_TOKENS),
        prefiller_utilisation_limit=values.get(flags.PREFILLER_UTILISATION_LIMIT),
        pool_limit=values.get(flags.POOL_LIMIT),
        queue_limit=values.get(flags.QUEUE_LIMIT),
        single_engine_limit=values.get(flags.SINGLE_ENGINE_LIMIT),
        queue_ttl_s=values.get(flags.QUEUE_TTL_S),
        pool_ttl_s=_finite(values.get(flags.POOL_TTL_S)),
        pool_deadline_s=_finite(deadline_s),
        lease_margin_s=margin_s,
    )


def _predictors(values: Values) -> tuple[str, tuple[str, ...]]:
    """Return the predictor and its shadows, each of which can be made."""
    predictor, shadows = values.get(flags.PREDICTOR), values.get(flags.SHADOW_PREDICTOR)
    names: set[str] = set()
    for option, words in ((flags.PREDICTOR, (predictor,)), (flags.SHADOW_PREDICTOR, shadows)):
        for word in words:
            name = predictor_name(word)
            if name in names:
                reason = "metrics cannot tell it from another one of that name"
                raise ConfigError(f"{values.where(option)} has {name!r}: {reason}")
            names.add(name)
            try:
                make_predictor(word)
            except ConfigError as error:
                raise ConfigError(f"{values.where(option)} {error}") from None
    return predictor, shadows


def _predictor_state(values: Values, predictor: str) -> Path | None:
    path = values.get(flags.PREDICTOR_STATE)
    if path is None:
        return None
    place = f"{values.where(flags.PREDICTOR_STATE)} is {path}"
    if predictor == "none":
        raise ConfigError(f"{place}, but {flags.PREDICTOR.flag} none learns nothing")
    if Path(predictor) == path:
        raise ConfigError(f"{place}: the trained predictor is never written to")
    _check_place(place, path)
    return path


def _check_place(place: str, path: Path) -> None:
    """Check that a file can be in the place that a setting gives it."""
    if path.is_dir():
        raise ConfigError(f"{place}: a directory")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{place}: {path.parent} is not a directory")


def _direct(values: Values, connector: str) -> Direct:
    word = values.get(flags.DIRECT)
    if word != "auto":
        return Direct(word)
    return Direct.DECODE if CONNECTORS[connector].ranks_prefill else Direct.PREFILL


def _legs(values: Values, connector: str) -> LegSettings:
    backoff_s = values.get(flags.RETRY_BACKOFF_S)
    backoff_max_s = values.get(flags.RETRY_BACKOFF_LIMIT_S)
    if backoff_s > backoff_max_s:
        reason = f"is {backoff_s:g}, beyond {flags.RETRY_BACKOFF_LIMIT_S.flag} ({backoff_max_s:g})"
        raise ConfigError(f"{values.where(flags.RETRY_BACKOFF_S)} {reason}")
    return LegSettings(
        prefill_timeout_s=values.get(flags.PREFILL_TIMEOUT_S),
        first_token_timeout_s=values.get(flags.FIRST_TOKEN_TIMEOUT_S),
        idle_timeout_s=values.get(flags.IDLE_STREAM_TIMEOUT_S),
        answer_timeout_s=values.get(flags.ANSWER_TIMEOUT_S),
        attempts=values.get(flags.RETRY_ATTEMPTS),
        backoff_s=backoff_s,
        backoff_max_s=backoff_max_s,
        answer_bytes=values.get(flags.ANSWER_LIMIT_BYTES),
        direct=_direct(values, connector),
        recompute_missing_kv=values.get(flags.ON_MISSING_KV) == "recompute",
        count_by_usage=values.get(flags.COUNT_TOKENS) == "usage",
        pass_priority=values.get(flags.PASS_PRIORITY),
    )


def _log(values: Values) -> LogConfig:
    to = values.get(flags.LOG)
    if to not in flags.LOG.not_paths:
        _check_place(f"{values.where(flags.LOG)} is {to}", Path(to))
    loads = values.get(flags.LOAD_LOG)
    if loads is not None:
        place = f"{values.where(flags.LOAD_LOG)} is {loads}"
        _check_place(place, loads)
        if to not in flags.LOG.not_paths and Path(to).absolute() == loads.absolute():
            raise ConfigError(f"{place}, where {flags.LOG.flag} goes already")
    return LogConfig(to, values.get(flags.LOG_LEVEL), loads, values.get(flags.LOAD_LOG_INTERVAL_S))


def _secret(values: Values, option: Option[Path | None]) -> Secret | None:
    """Return the one key in the file that a setting names."""
    path = values.get(option)
    if path is None:
        return None
    try:
        return read_secret(path)
    except ConfigError as error:
        raise ConfigError(f"{values.where(option)} {error}") from None


def _api_keys(values: Values) -> tuple[Secret, ...]:
    path = values.get(flags.API_KEY_FILE)
    if path is None:
        return ()
    try:
        return read_secrets(path)
    except ConfigError as error:
        raise ConfigError(f"{values.where(flags.API_KEY_FILE)} {error}") from None


def _finite(time_s: float | None) -> float | None:
    return None if time_s == inf else time_s
