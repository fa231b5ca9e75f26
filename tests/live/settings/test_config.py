"""The configuration: flag before file before default, and each refusal with its place and reason."""

import json
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError
from math import inf
from pathlib import Path

import pytest

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.core.projection import Form
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.health import HealthSettings
from balanceroute.proxy.live.request.direct import Direct
from balanceroute.proxy.live.request.leg_settings import LegSettings
from balanceroute.proxy.live.security.credentials import Credentials, Secret
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import ENGINE_KEY_VARIABLE, make_config
from balanceroute.proxy.live.settings.declared import SECTIONS, ListeningSettings, LogSettings
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer
from balanceroute.proxy.live.settings.setting import settings_of
from balanceroute.proxy.wire.messages import ServerLimits
from balanceroute.topologies import CONNECTORS, read_topology

P = EngineUrl("http", "p", 80)
D = EngineUrl("http", "d", 80)
ENGINES = '[[prefill]]\nurl = "http://p"\n[[decode]]\nurl = "http://d"\n'


SETTINGS = {one.name: one for section in SECTIONS for one in settings_of(section)}


def of_flags(environment: Mapping[str, str] | None = None, /, **flags: object) -> ProxyConfig:
    """Return the configuration of two engines and some flags."""
    engines: dict[str, object] = {"prefill": ["http://p"], "decode": ["http://d"]}
    return make_config(None, engines | flags, environment=environment or {})


def of_file(
    folder: Path,
    proxy: str = "",
    *,
    engines: str = ENGINES,
    top: str = "",
    flags: Mapping[str, object] | None = None,
) -> ProxyConfig:
    """Return the configuration of a topology file and some flags."""
    path = folder / "fleet.toml"
    path.write_text(f'name = "x"\n{top}\n{engines}\n[proxy]\n{proxy}\n')
    return make_config(read_topology(path), flags or {})


def toml(value: object) -> str:
    return json.dumps(value)


def secret_file(folder: Path, name: str, content: str) -> str:
    path = folder / name
    path.write_text(content)
    path.chmod(0o600)
    return str(path)


def test_the_defaults_are_these() -> None:
    config = of_flags()
    assert config.topology is None
    listening = config.listening
    assert (listening.host, listening.port) == ("127.0.0.1", 8000)
    assert (listening.tls_cert, listening.tls_key) == (None, None)
    assert (listening.admin_host, listening.admin_port) == ("127.0.0.1", 9000)
    assert config.credentials == Credentials((), None, None)
    assert config.server_limits == ServerLimits(body_budget_bytes=512 << 20)
    assert config.prefillers == (PrefillServer(P),)
    assert config.decoders == (DecodeServer(D),)
    assert config.engines.connector == "nixl"
    assert config.lease_s == 30.0
    assert config.engines.model == ()
    assert (config.engines.engine_ca_file, config.engines.insecure_engines) == (None, False)
    assert config.times.connect_timeout_s == 2.5
    scheduling = config.scheduling
    assert (scheduling.policy, scheduling.predictor, scheduling.seed) == ("br-h", "survival", 0)
    assert config.policies == PolicySettings()
    assert scheduling.prefiller_utilisation_limit == 0.95
    assert (scheduling.queue_limit, config.times.queue_ttl_s) == (4096, 600.0)
    assert config.legs == LegSettings(
        prefill_timeout_s=300.0,
        first_token_timeout_s=60.0,
        idle_stream_timeout_s=300.0,
        answer_timeout_s=1800.0,
        retry_attempts=3,
        retry_backoff_s=0.05,
        retry_backoff_limit_s=1.0,
        answer_limit_bytes=256 << 20,
        direct=Direct.DECODE,
        on_missing_kv="recompute",
        count_tokens="usage",
        lease_margin_s=5.0,
        pass_priority=False,
    )
    assert config.health == HealthSettings(2.0, 2.0, quarantine_failures=3)
    assert config.scrape.scrape_interval_s == 1.0
    assert config.scrape.scrape_timeout_s == 1.0
    assert config.times.drain_timeout_s == 120.0
    assert config.log == LogSettings()


def test_a_configuration_cannot_be_changed() -> None:
    config = of_flags()
    with pytest.raises(FrozenInstanceError):
        config.lease_s = 1.0  # type: ignore[misc]


# A value for each setting that is neither its default nor a file.
OFF = ("insecure_engines", "pass_priority", "client_priority", "client_deadline", "paper")
SAMPLES: dict[str, object] = dict.fromkeys(OFF, True) | {
    "host": "0.0.0.0",  # noqa: S104 - nothing is bound.
    "port": 8001,
    "admin": False,
    "admin_host": "127.0.0.2",
    "admin_port": 9001,
    "policy": "br-0",
    "predictor": "none",
    "seed": 1,
    "batch": 16,
    "rank_kv_tokens": 100_000,
    "rank_speeds": "1,1.5",
    "probe_limit": 4,
    "prefiller_kv_tokens": 200_000,
    "prefiller_utilisation_limit": 0.5,
    "pool_limit": 9,
    "queue_limit": 10,
    "single_engine_limit": 12,
    "lease_s": 60.0,
    "lease_margin_s": 4.75,
    "direct": "refuse",
    "direct_limit": 7,
    "on_missing_kv": "fail",
    "queue_order": "edf",
    "fair_queue": "request",
    "count_tokens": "events",
    "projection": "point",
    "horizon": 7,
    "gamma": 0.5,
    "alpha": 2.0,
    "beta": 3.5,
    "theta": 4,
    "window": 6,
    "patience": 11.0,
    "hold_s": 0.4,
    "refresh_tokens": 5,
    "bypass_slots": 1,
    "queue_ttl_s": 1.5,
    "pool_ttl_s": 2.5,
    "pool_deadline_s": 3.5,
    "connect_timeout_s": 4.5,
    "tcp_timeout_s": 12.0,
    "prefill_timeout_s": 5.5,
    "first_token_timeout_s": 6.5,
    "idle_stream_timeout_s": 7.5,
    "answer_timeout_s": 8.5,
    "drain_timeout_s": 9.5,
    "retry_attempts": 2,
    "retry_backoff_s": 0.5,
    "retry_backoff_limit_s": 2.0,
    "health_interval_s": 3.0,
    "health_timeout_s": 3.25,
    "scrape_interval_s": 4.0,
    "scrape_timeout_s": 4.25,
    "quarantine_failures": 5,
    "public_metrics": False,
    "cors_origin": "https://chat.example:8443",
    "admin_name": "OPS.example",
    "connection_limit": 70,
    "peer_connection_limit": 7,
    "body_limit_bytes": 1_000,
    "body_budget_bytes": 20_000_000,
    "header_limit_bytes": 2_000,
    "header_limit": 30,
    "target_limit_bytes": 400,
    "header_timeout_s": 1.25,
    "body_timeout_s": 2.25,
    "keep_alive_timeout_s": 3.75,
    "write_timeout_s": 4.75,
    "write_buffer_bytes": 5_000,
    "answer_limit_bytes": 6_000,
    "log": "none",
    "log_level": "debug",
    "load_log_interval_s": 0.75,
}
# How to ask for the defaults that are None; "auto" for the others.
WORDS = {
    "peer_connection_limit": "none",
    "rank_kv_tokens": "none",
    "probe_limit": "none",
    "prefiller_kv_tokens": "none",
}
FILES = {
    "tls_cert",
    "tls_key",
    "api_key_file",
    "admin_token_file",
    "engine_key_file",
    "engine_ca_file",
    "predictor_state",
    "shadow_predictor",
    "load_log",
}
AT_TOP = {"prefill", "decode", "bootstrap", "connector", "model"}
# Means something with one connector alone.
LAYERWISE = {"metaserver_url"}
# There is one of each so far: another value cannot be asked for.
THE_ONLY_ONE = {"admission", "prefill_choice"}


def test_no_setting_is_forgotten_here() -> None:
    assert SETTINGS.keys() == SAMPLES.keys() | FILES | AT_TOP | LAYERWISE | THE_ONLY_ONE
    assert {name for name, setting in SETTINGS.items() if setting.at_top} == AT_TOP


def test_the_layerwise_connector_is_told_where_the_engines_reach_the_proxy(tmp_path: Path) -> None:
    top = 'connector = "mooncake-layerwise"'
    config = of_file(tmp_path, 'metaserver_url = "http://proxy:8000/"', top=top)
    assert config.engines.metaserver_url == "http://proxy:8000"
    with pytest.raises(ConfigError, match="which no engine can call: needs --metaserver-url"):
        of_file(tmp_path, 'host = "0.0.0.0"', top=top, flags={"admin": False})
    with pytest.raises(ConfigError, match="metaserver_url: nixl never calls back"):
        of_file(tmp_path, 'metaserver_url = "http://proxy:8000"')


@pytest.mark.parametrize("name", SAMPLES)
def test_every_setting_has_an_effect_from_the_flag_and_from_the_file(
    name: str, tmp_path: Path
) -> None:
    value = SAMPLES[name]
    setting = SETTINGS[name]
    default = of_file(tmp_path)
    filed = of_file(tmp_path, f"{name} = {toml(value)}")
    assert filed != default
    assert of_file(tmp_path, flags={name: value}) == filed
    # The flag goes before the file, also where it asks for what is the default.
    word = WORDS.get(name, "auto") if setting.default is None else setting.default
    assert of_file(tmp_path, f"{name} = {toml(value)}", flags={name: word}) == default


@pytest.mark.parametrize("name", SAMPLES)
def test_the_command_line_gives_what_the_file_gives(name: str) -> None:
    value = SAMPLES[name]
    if not isinstance(value, bool):
        assert SETTINGS[name].parse(str(value)) == value


def of_samples(folder: Path) -> ProxyConfig:
    """Return the configuration in which every sample is given in the file."""
    text = "\n".join(f"{name} = {toml(value)}" for name, value in SAMPLES.items())
    return of_file(folder, text)


def test_the_samples_are_in_the_configuration(tmp_path: Path) -> None:
    config = of_samples(tmp_path)
    assert config.topology == "x"
    assert config.listening == ListeningSettings(
        host="0.0.0.0",  # noqa: S104 - nothing is bound.
        port=8001,
        admin=False,
        admin_host="127.0.0.2",
        admin_port=9001,
        public_metrics=False,
        cors_origin=("https://chat.example:8443",),
        admin_name=("ops.example",),
    )
    assert config.times.drain_timeout_s == 9.5
    assert config.log == LogSettings(log="none", log_level="debug", load_log_interval_s=0.75)


def test_the_samples_arrive_where_they_are_used(tmp_path: Path) -> None:
    config = of_samples(tmp_path)
    assert config.server_limits == ServerLimits(
        header_limit_bytes=2_000,
        header_limit=30,
        target_limit_bytes=400,
        body_limit_bytes=1_000,
        body_budget_bytes=20_000_000,
        header_timeout_s=1.25,
        body_timeout_s=2.25,
        keep_alive_timeout_s=3.75,
        write_timeout_s=4.75,
        write_buffer_bytes=5_000,
        connection_limit=70,
        peer_connection_limit=7,
    )
    assert config.policies == PolicySettings(
        horizon_steps=7,
        gamma=0.5,
        alpha=2.0,
        beta=3.5,
        theta=4,
        window=6,
        patience=11.0,
        hold_s=0.4,
        form=Form.POINT,
        refresh_tokens=5,
        bypass_slots=1,
        paper=True,
    )
    assert config.scheduler_config(ranks=3, prefillers=len(config.prefillers)) == SchedulerConfig(
        ranks=3,
        batch_limit=16,
        rank_kv_tokens=100_000,
        prefillers=1,
        probe_limit=4,
        direct_limit=7,
        prefiller_kv_tokens=200_000,
        pool_limit=9,
        deadline_ns=3_500_000_000,
        ttl_ns=2_500_000_000,
        lease_ns=60_000_000_000,
        lease_margin_ns=4_750_000_000,
        queue_ttl_ns=1_500_000_000,
        rank_speeds=(1.0, 1.5, 1.0),
    )
    assert config.legs == LegSettings(
        prefill_timeout_s=5.5,
        first_token_timeout_s=6.5,
        idle_stream_timeout_s=7.5,
        answer_timeout_s=8.5,
        retry_attempts=2,
        retry_backoff_s=0.5,
        retry_backoff_limit_s=2.0,
        answer_limit_bytes=6_000,
        direct=Direct.REFUSE,
        on_missing_kv="fail",
        count_tokens="events",
        lease_margin_s=4.75,
        pass_priority=True,
    )
    assert config.health == HealthSettings(3.0, 3.25, quarantine_failures=5)
    assert config.scrape.scrape_interval_s == 4.0
    assert config.scrape.scrape_timeout_s == 4.25


@pytest.mark.parametrize(
    ("flags", "place", "reason"),
    [
        ({"prefill": None}, "--prefill", "at least one is needed"),
        ({"decode": None}, "--decode", "at least one is needed"),
        ({"prefill": ["p:1"]}, "--prefill", "is 'p:1': it must begin with http://"),
        ({"prefill": ["http://p@0"]}, "--prefill", "only decode engines are addressed by rank"),
        ({"prefill": ["http://p", "http://P:80/"]}, "--prefill", "names http://p:80 twice"),
        ({"prefill": 7}, "--prefill", "is 7, must be a list of texts"),
        ({"prefill": [7]}, "--prefill", "has 7, must be a list of texts"),
        ({"decode": ["http://d", "http://d"]}, "--decode", "names http://d:80 twice"),
        ({"decode": ["http://d@1", "http://d@1"]}, "--decode", "names http://d:80@1 twice"),
        ({"decode": ["http://d", "http://d@1"]}, "--decode", "names http://d:80 twice"),
        ({"decode": ["http://d@1", "http://d"]}, "--decode", "names http://d:80 twice"),
        ({"decode": ["http://d@discover", "http://d@1"]}, "--decode", "names http://d:80 twice"),
        ({"decode": ["http://d@all"]}, "--decode", "must not carry credentials"),
        ({"decode": ["http://p"]}, "--decode", "names http://p:80, which is a prefiller"),
        ({"bootstrap": ["http://p:8998"]}, "--prefill", "connector nixl has no bootstrap servers"),
        (
            {"connector": "mooncake", "bootstrap": ["http://p:1", "http://p:2"]},
            "--bootstrap",
            "2 for 1 of --prefill",
        ),
        (
            {"connector": "mooncake", "prefill": ["http://p:1", "http://p:2"]},
            "--prefill",
            "would share the bootstrap server http://p:8998",
        ),
        ({"connector": "smoke"}, "--connector", "is 'smoke', must be one of nixl, mooncake"),
        ({"model": ["a b"]}, "--model", "visible ASCII"),
        ({"model": ["a", "b", "a"]}, "--model", "names 'a' twice"),
        ({"host": ""}, "--host", "is '', must be a text"),
        ({"host": "a/b"}, "--host", "is 'a/b': it has a host that is neither"),
        ({"host": 7}, "--host", "is 7, must be a text"),
        ({"cors_origin": "chat.example"}, "--cors-origin", "is 'chat.example', must be *, or http"),
        ({"cors_origin": "http://a/"}, "--cors-origin", "is 'http://a/', must be *, or http"),
        ({"port": -1}, "--port", "is -1, must be from 0 to 65535"),
        ({"port": 65_536}, "--port", "is 65536, must be from 0 to 65535"),
        ({"port": "x"}, "--port", "is 'x', must be an integer"),
        ({"port": 80.0}, "--port", "is 80.0, must be an integer"),
        ({"port": True}, "--port", "is True, must be an integer"),
        ({"port": 8000, "admin_port": 8000}, "--admin-port", "is 8000, which serves clients"),
        ({"admin_host": "0.0.0.0"}, "--admin-host", "needs --admin-token-file"),  # noqa: S104
        ({"admin_host": "example.org"}, "--admin-host", "needs --admin-token-file"),
        ({"admin": "yes"}, "--admin", "is 'yes', must be true or false"),
        ({"tls_cert": "c.pem"}, "--tls-cert", "needs --tls-key too"),
        ({"tls_key": "k.pem"}, "--tls-key", "needs --tls-cert too"),
        ({"tls_cert": "absent", "tls_key": "k"}, "--tls-cert", "is absent: No such file"),
        ({"api_key_file": "absent"}, "--api-key-file", "is absent: No such file"),
        ({"admin_token_file": "absent"}, "--admin-token-file", "is absent: No such file"),
        ({"engine_key_file": "absent"}, "--engine-key-file", "is absent: No such file"),
        ({"engine_ca_file": "absent"}, "--engine-ca-file", "is absent: No such file"),
        (
            {"engine_ca_file": "c.pem", "insecure_engines": True},
            "--engine-ca-file",
            "means nothing with --insecure-engines",
        ),
        ({"policy": "psychic"}, "--policy", "is 'psychic', must be one of random, "),
        ({"predictor": "oracle"}, "--predictor", "is 'oracle', which is neither a predictor nor"),
        ({"predictor": "survivl"}, "--predictor", "did you mean 'survival'?"),
        ({"predictor": "/"}, "--predictor", "is /: not a regular file"),
        ({"shadow_predictor": ["none", "x"]}, "--shadow-predictor", "is 'x', which is neither"),
        ({"shadow_predictor": ["survival"]}, "--shadow-predictor", "has 'survival': metrics"),
        ({"shadow_predictor": 7}, "--shadow-predictor", "is 7, must be a list of texts"),
        ({"predictor_state": "/"}, "--predictor-state", "is /: a directory"),
        ({"predictor_state": "/absent/x"}, "--predictor-state", "/absent is not a directory"),
        ({"predictor_state": "x", "predictor": "none"}, "--predictor-state", "none learns nothing"),
        ({"seed": -1}, "--seed", "is -1, must be from 0"),
        ({"batch": 0}, "--batch", "is 0, must be from 1 to"),
        ({"rank_kv_tokens": 0}, "--rank-kv-tokens", "is 0, must be from 1 to 1e+09, or 'none'"),
        ({"rank_kv_tokens": "all"}, "--rank-kv-tokens", "must be an integer, or 'none'"),
        ({"rank_speeds": "1,fast"}, "--rank-speeds", "is 'fast', must be a number"),
        ({"rank_speeds": [1, 0]}, "--rank-speeds", "is 0, must be from 0.001 to 1000"),
        ({"rank_speeds": 2}, "--rank-speeds", "is 2, must be a list of numbers"),
        ({"probe_limit": 0}, "--probe-limit", "must be from 1"),
        ({"prefiller_kv_tokens": 0}, "--prefiller-kv-tokens", "must be from 1"),
        ({"prefiller_utilisation_limit": 0}, "--prefiller-utilisation-limit", "from 0.01 to 1"),
        ({"prefiller_utilisation_limit": 1.1}, "--prefiller-utilisation-limit", "is 1.1, must be"),
        ({"pool_limit": 0}, "--pool-limit", "is 0, must be from 1 to 1e+06, or 'auto'"),
        ({"pool_limit": "none"}, "--pool-limit", "must be an integer, or 'auto'"),
        ({"queue_limit": 0}, "--queue-limit", "must be from 1"),
        ({"lease_s": 0}, "--lease-s", "must be from 0.1 to inf, or 'auto'"),
        ({"lease_s": float("nan")}, "--lease-s", "is nan, must be"),
        ({"lease_margin_s": -1}, "--lease-margin-s", "is -1, must be from 0"),
        ({"on_missing_kv": "pray"}, "--on-missing-kv", "must be one of recompute, fail"),
        ({"projection": "flat"}, "--projection", "must be one of auto, point, expected"),
        ({"horizon": 10_001}, "--horizon", "is 10001, must be from 0 to 10000"),
        ({"gamma": 0}, "--gamma", "must be from 1e-09 to 1"),
        ({"alpha": inf}, "--alpha", "is inf, must be"),
        ({"beta": 0.0}, "--beta", "is 0.0, must be from 1e-09 to 1e+09, or 'auto'"),
        ({"theta": -1}, "--theta", "is -1, must be from 0"),
        ({"window": 0}, "--window", "is 0, must be from 1"),
        ({"patience": 0}, "--patience", "is 0, must be from 1e-09 to inf"),
        ({"refresh_tokens": 0}, "--refresh-tokens", "is 0, must be"),
        ({"bypass_slots": -1}, "--bypass-slots", "is -1, must be"),
        ({"paper": 1}, "--paper", "is 1, must be true or false"),
        ({"queue_ttl_s": 0}, "--queue-ttl-s", "is 0, must be from 0.001 to 1e+06"),
        ({"pool_ttl_s": 0}, "--pool-ttl-s", "must be from 0.001 to inf"),
        ({"pool_deadline_s": "never"}, "--pool-deadline-s", "must be a number, or 'auto'"),
        ({"connect_timeout_s": 0}, "--connect-timeout-s", "must be from 0.001"),
        ({"connect_timeout_s": inf}, "--connect-timeout-s", "is inf, must be"),
        ({"connect_timeout_s": 10**400}, "--connect-timeout-s", "is 1000"),
        ({"prefill_timeout_s": 0}, "--prefill-timeout-s", "must be from"),
        ({"first_token_timeout_s": 0}, "--first-token-timeout-s", "must be from"),
        ({"idle_stream_timeout_s": 0}, "--idle-stream-timeout-s", "must be from"),
        ({"answer_timeout_s": 0}, "--answer-timeout-s", "must be from"),
        ({"drain_timeout_s": -1}, "--drain-timeout-s", "must be from 0 to"),
        ({"retry_attempts": 0}, "--retry-attempts", "must be from 1 to 100"),
        ({"retry_backoff_s": -1}, "--retry-backoff-s", "must be from 0"),
        ({"retry_backoff_s": 2}, "--retry-backoff-s", "is 2, beyond --retry-backoff-limit-s (1)"),
        ({"retry_backoff_limit_s": -1}, "--retry-backoff-limit-s", "must be from 0"),
        ({"lease_margin_s": 2}, "--lease-margin-s", "is 2, must exceed --connect-timeout-s (2.5)"),
        ({"connect_timeout_s": 5}, "--lease-margin-s", "is 5, must exceed --connect-timeout-s (5)"),
        ({"health_interval_s": 0}, "--health-interval-s", "must be from"),
        ({"health_timeout_s": 0}, "--health-timeout-s", "must be from"),
        ({"scrape_interval_s": 0}, "--scrape-interval-s", "must be from"),
        ({"scrape_timeout_s": 0}, "--scrape-timeout-s", "must be from"),
        ({"quarantine_failures": 0}, "--quarantine-failures", "must be from 1"),
        ({"body_budget_bytes": 1 << 20}, "--body-budget-bytes", "is 1048576, less than one body"),
        ({"body_limit_bytes": 0}, "--body-limit-bytes", "must be from 1 to 1099511627776"),
        ({"header_limit_bytes": 255}, "--header-limit-bytes", "must be from 256"),
        ({"header_limit": 0}, "--header-limit", "must be from 1"),
        ({"target_limit_bytes": 63}, "--target-limit-bytes", "must be from 64"),
        ({"header_timeout_s": 0}, "--header-timeout-s", "must be from"),
        ({"body_timeout_s": 0}, "--body-timeout-s", "must be from"),
        ({"keep_alive_timeout_s": 0}, "--keep-alive-timeout-s", "must be from"),
        ({"write_timeout_s": 0}, "--write-timeout-s", "must be from"),
        ({"write_buffer_bytes": 0}, "--write-buffer-bytes", "must be from 1"),
        ({"answer_limit_bytes": 0}, "--answer-limit-bytes", "must be from 1024"),
        ({"log": "/absent/log"}, "--log", "is /absent/log: /absent is not a directory"),
        ({"log": "/"}, "--log", "is /: a directory"),
        ({"load_log": "/absent/log"}, "--load-log", "is /absent/log: /absent is not a directory"),
        ({"load_log": "x", "log": "./x"}, "--load-log", "is x, where --log goes already"),
        ({"load_log_interval_s": 0}, "--load-log-interval-s", "is 0, must be from 0.01"),
        ({"log_level": "loud"}, "--log-level", "must be one of debug, info"),
        ({"xyz": 1}, "unknown flag 'xyz'", ""),
        ({"polcy": 1}, "unknown flag 'polcy'", "did you mean 'policy'?"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_flag_is_refused_with_its_name_and_the_reason(
    flags: dict[str, object], place: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        of_flags(**flags)
    message = str(refused.value)
    assert message.startswith((f"{place} ", f"{place}:")) or place in message.split(";")
    assert reason in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("proxy", "place", "reason"),
    [
        ("port = 70000", "[proxy].port", "is 70000, must be from 0 to 65535"),
        ('port = "80"', "[proxy].port", "is '80', must be an integer"),
        ("batch = 16.0", "[proxy].batch", "is 16.0, must be an integer"),
        ("gamma = 2", "[proxy].gamma", "is 2, must be from"),
        ('polcy = "br-h"', "[proxy].polcy", "unknown key; did you mean 'policy'?"),
        ("pool-limit = 8", "[proxy].pool-limit", "did you mean 'pool_limit'?"),
        ('connector = "nixl"', "[proxy].connector", "belongs at the top of the file"),
        ('prefill = ["http://p"]', "[proxy].prefill", "belongs at the top of the file"),
        ("paper = 1", "[proxy].paper", "is 1, must be true or false"),
        ('tls_cert = "c.pem"', "[proxy].tls_cert", "needs --tls-key too"),
        ("admin_port = 8000", "[proxy].admin_port", "which serves clients already"),
        ('admin_host = "::"', "[proxy].admin_host", "needs --admin-token-file"),
        ("retry_backoff_s = 2", "[proxy].retry_backoff_s", "beyond --retry-backoff-limit-s"),
        ("horizon = { steps = 4 }", "[proxy].horizon", "is {'steps': 4}, must be an integer"),
    ],
)
def test_a_bad_value_in_a_file_is_refused_with_its_key_and_the_reason(
    proxy: str, place: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        of_file(tmp_path, proxy)
    message = str(refused.value)
    assert message.startswith(f"{tmp_path / 'fleet.toml'}: {place}")
    assert reason in message


@pytest.mark.parametrize(
    ("top", "engines", "place", "reason"),
    [
        (
            "",
            '[[prefill]]\nurl = "http://p"\n[[decode]]\nurl = "d"',
            "decode[0].url",
            "is 'd': it must begin with",
        ),
        (
            "",
            '[[prefill]]\nurl = "http://p"\n[[decode]]\nurl = "http://d@3"',
            "decode[0].url",
            "ranks are named by rank_ids = [3]",
        ),
        (
            "",
            '[[prefill]]\nurl = "http://p@3"\n[[decode]]\nurl = "http://d"',
            "prefill[0].url",
            "is 'http://p:80@3'",
        ),
        ("", ENGINES + '[[decode]]\nurl = "http://d:80"', "decode[1]", "names http://d:80 twice"),
        ("", ENGINES + '[[decode]]\nurl = "http://p"', "decode[1]", "which is a prefiller"),
        ("", ENGINES + '[[prefill]]\nurl = "http://p"', "prefill[1]", "names http://p:80 twice"),
        (
            "",
            '[[decode]]\nurl = "http://d"\n[[prefill]]\nurl = "http://p"\nbootstrap = "http://b"',
            "prefill[0]",
            "connector nixl has no bootstrap servers",
        ),
        (
            'connector = "mooncake"',
            '[[decode]]\nurl = "http://d"\n[[prefill]]\nurl = "http://p"\nbootstrap = "b"',
            "prefill[0].bootstrap",
            "is 'b': it must begin",
        ),
        ('model = ["a", "a"]', ENGINES, "model", "names 'a' twice"),
        ('model = "a b"', ENGINES, "model", "visible ASCII"),
    ],
)
def test_bad_engines_in_a_file_are_refused_with_their_place(
    top: str, engines: str, place: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        of_file(tmp_path, engines=engines, top=top)
    message = str(refused.value)
    start = f"{tmp_path / 'fleet.toml'}: {place}"
    assert message.startswith((f"{start} ", f"{start}:"))
    assert reason in message


def test_a_bad_value_in_the_file_is_refused_although_nothing_asks_for_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[proxy\].admin_port is -1"):
        of_file(tmp_path, "admin = false\nadmin_port = -1")


def test_a_flag_stands_in_for_a_bad_value_in_the_file(tmp_path: Path) -> None:
    assert of_file(tmp_path, "port = -1", flags={"port": 1}).listening.port == 1


def test_bootstrap_servers_go_with_prefillers_of_the_flags(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--bootstrap: goes with --prefill"):
        of_file(tmp_path, top='connector = "mooncake"', flags={"bootstrap": ["http://b"]})


def test_engines_of_the_flags_replace_those_of_the_file(tmp_path: Path) -> None:
    config = of_file(
        tmp_path,
        top='connector = "mooncake-ascend"\nmodel = "a"',
        flags={"prefill": ["http://q"], "connector": "nixl", "model": ["b", "c"]},
    )
    assert [server.url.host for server in config.prefillers] == ["q"]
    assert [server.url.host for server in config.decoders] == ["d"]
    assert config.engines.connector == "nixl"
    assert config.engines.model == ("b", "c")


def test_the_file_says_connector_and_models(tmp_path: Path) -> None:
    config = of_file(tmp_path, top='connector = "mooncake-ascend"\nmodel = "a"')
    assert config.engines.connector == "mooncake-ascend"
    assert config.engines.model == ("a",)


def test_ranks_behind_one_server_are_one_server(tmp_path: Path) -> None:
    decode = ["http://d@3", "http://e", "http://d@1"]
    config = of_flags(decode=decode)
    e = EngineUrl("http", "e", 80)
    assert config.decoders == (DecodeServer(D, (3, 1)), DecodeServer(e))
    assert config.decoders[0].ranks == (D.at(3), D.at(1))
    engines = '[[prefill]]\nurl = "http://p"\n[[decode]]\nurl = "http://d"\nranks = 2'
    assert of_file(tmp_path, engines=engines).decoders == (DecodeServer(D, (0, 1)),)


def test_ranks_to_discover_are_not_known_yet(tmp_path: Path) -> None:
    config = of_flags(decode=["http://d@discover", "http://e"])
    assert config.decoders[0] == DecodeServer(D, discover=True)
    assert config.decoders[0].ranks == ()
    engines = '[[prefill]]\nurl = "http://p"\n[[decode]]\nurl = "http://d"\nranks = "discover"'
    assert of_file(tmp_path, engines=engines).decoders == (DecodeServer(D, discover=True),)


def test_a_bootstrap_server_is_beside_its_prefiller_unless_told(tmp_path: Path) -> None:
    config = of_flags(connector="mooncake")
    assert config.prefillers == (PrefillServer(P, EngineUrl("http", "p", 8998)),)
    config = of_flags(
        connector="mooncake",
        prefill=["http://p:1", "http://p:2"],
        bootstrap=["http://p:11", "http://p:12"],
    )
    assert [server.bootstrap for server in config.prefillers] == [
        EngineUrl("http", "p", 11),
        EngineUrl("http", "p", 12),
    ]
    engines = f'{ENGINES}[[prefill]]\nurl = "http://q"\nbootstrap = "http://q:9"'
    config = of_file(tmp_path, engines=engines, top='connector = "mooncake"')
    assert [str(server.bootstrap) for server in config.prefillers] == [
        "http://p:8998",
        "http://q:9",
    ]


def test_an_emulated_topology_is_sent_to_up() -> None:
    with pytest.raises(ConfigError, match="start them with `balanceroute up`"):
        make_config(read_topology("emulated-2p8d"), {})


def test_the_shipped_emulated_topology_is_a_configuration_once_its_engines_run() -> None:
    topology = read_topology("emulated-2p8d")
    prefill = [f"http://127.0.0.1:{port}" for port in (8100, 8101)]
    decode = [f"http://127.0.0.1:{port}" for port in range(8200, 8208)]
    config = make_config(topology, {"prefill": prefill, "decode": decode})
    assert config.topology == "emulated-2p8d"
    assert (len(config.prefillers), len(config.decoders)) == (2, 8)
    assert (config.scheduling.policy, config.scheduling.batch) == ("br-h", 16)
    assert config.engines.model == ("emulated",)


@pytest.mark.parametrize("name", CONNECTORS)
def test_every_connector_is_served_with_its_own_lease(name: str, tmp_path: Path) -> None:
    config = of_file(tmp_path, top=f'connector = "{name}"')
    assert config.lease_s == CONNECTORS[name].lease_s


def test_without_leases_a_connection_may_take_any_time() -> None:
    config = of_flags(lease_s=inf, lease_margin_s=0, connect_timeout_s=60)
    assert config.times.connect_timeout_s == 60.0


def test_a_lease_that_is_told_goes_before_the_connectors() -> None:
    assert of_flags(lease_s=12).lease_s == 12.0
    assert of_flags(lease_s=inf).lease_s is None
    assert of_flags(lease_s="auto").lease_s == 30.0


@pytest.mark.parametrize(
    ("flags", "deadline_ns", "lease_ns"),
    [
        ({}, None, 30_000_000_000),  # The scheduler derives it from the lease.
        ({"lease_s": inf}, None, None),
        ({"pool_deadline_s": 2}, 2_000_000_000, 30_000_000_000),
        ({"pool_deadline_s": inf, "lease_s": 4}, 1 << 62, 4_000_000_000),
    ],
)
def test_the_scheduler_derives_the_deadline_unless_one_is_given(
    flags: dict[str, object], deadline_ns: int | None, lease_ns: int | None
) -> None:
    config = of_flags(**flags).scheduler_config(1, 1)
    assert (config.deadline_ns, config.lease_ns) == (deadline_ns, lease_ns)


@pytest.mark.parametrize(
    ("flags", "ranks", "limit"),
    [
        ({}, 8, None),  # The scheduler derives it from the lease.
        ({"lease_s": inf}, 8, 64),
        ({"lease_s": inf}, 144, 144),
        ({"pool_limit": 3}, 144, 3),
        ({"pool_limit": 3, "lease_s": inf}, 144, 3),
    ],
)
def test_without_leases_the_pool_still_has_a_limit(
    flags: dict[str, object], ranks: int, limit: int | None
) -> None:
    assert of_flags(**flags).scheduler_config(ranks, prefillers=1).pool_limit == limit


def test_a_time_to_live_of_inf_is_none_for_the_scheduler() -> None:
    assert of_flags(pool_ttl_s=inf).scheduler_config(1, 1).ttl_ns is None


def test_the_key_for_engines_comes_from_a_file_before_the_environment(tmp_path: Path) -> None:
    environment = {ENGINE_KEY_VARIABLE: "of-environment"}
    assert of_flags(environment).credentials.engine_key == Secret(b"of-environment")
    path = secret_file(tmp_path, "engine", "of-file\n")
    assert of_flags(environment, engine_key_file=path).credentials.engine_key == Secret(b"of-file")
    with pytest.raises(ConfigError, match=rf"^{ENGINE_KEY_VARIABLE}: a key has") as refused:
        of_flags({ENGINE_KEY_VARIABLE: "hunter2 hunter2"})
    assert "hunter2" not in str(refused.value)


def test_clients_keys_reach_engines_only_if_nobody_else_has_keys(tmp_path: Path) -> None:
    path = secret_file(tmp_path, "keys", "sk-one\n")
    assert of_flags().pass_authorization
    assert not of_flags(api_key_file=path).pass_authorization
    assert not of_flags(engine_key_file=path).pass_authorization


def test_files_named_in_a_topology_are_beside_it(tmp_path: Path) -> None:
    secret_file(tmp_path, "keys", "sk-one\nsk-two\n")
    config = of_file(tmp_path, 'api_key_file = "keys"\nlog = "proxy.log"\nload_log = "loads"')
    assert config.credentials.api_keys == (Secret(b"sk-one"), Secret(b"sk-two"))
    assert config.log.log == str(tmp_path / "proxy.log")
    assert config.log.load_log == tmp_path / "loads"
    assert of_file(tmp_path, 'log = "none"').log.log == "none"
    assert of_file(tmp_path, 'log = "-"').log.log == "-"


def test_a_flags_files_are_where_the_process_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    secret_file(tmp_path, "keys", "sk-one\n")
    assert of_flags(api_key_file="keys", log="proxy.log").log.log == "proxy.log"


def test_an_administrator_may_come_from_afar_with_a_token(tmp_path: Path) -> None:
    path = secret_file(tmp_path, "token", "let-me-in\n")
    config = of_flags(admin_host="::", admin_token_file=path)
    assert config.listening.admin_host == "::"
    assert config.credentials.admin_token == Secret(b"let-me-in")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_an_administrator_on_the_machine_needs_no_token(host: str) -> None:
    config = of_flags(admin_host=host)
    assert (config.listening.admin_host, config.credentials.admin_token) == (host, None)


def test_the_admin_pages_can_be_left_out() -> None:
    config = of_flags(admin=False, admin_host="0.0.0.0", admin_port=8000)  # noqa: S104
    assert not config.listening.admin
    assert of_flags(port=0, admin_port=0).listening.admin_port == 0


def secrets_everywhere(folder: Path) -> ProxyConfig:
    return of_flags(
        api_key_file=secret_file(folder, "a", "hunter2-a\nhunter2-b\n"),
        engine_key_file=secret_file(folder, "b", "hunter2-c\n"),
        admin_token_file=secret_file(folder, "c", "hunter2-d\n"),
    )


@pytest.mark.parametrize(
    "shown", [repr, str, lambda config: json.dumps(config.redacted(), allow_nan=False)]
)
def test_a_configuration_shows_no_secret(shown: Callable[..., str], tmp_path: Path) -> None:
    text = shown(secrets_everywhere(tmp_path))
    assert "hunter2" not in text
    assert "first_token_timeout_s" in text


def test_the_redacted_configuration_tells_everything_else(tmp_path: Path) -> None:
    config = secrets_everywhere(tmp_path).redacted()
    assert config["credentials"] == {
        "api_keys": ["***", "***"],
        "engine_key": "***",
        "admin_token": "***",
    }
    listening = config["listening"]
    assert isinstance(listening, dict)
    assert listening.keys() == {one.name for one in settings_of(ListeningSettings)}
    assert listening["api_key_file"] == str(tmp_path / "a")
    patient = of_flags(patience=inf, decode=["http://d@1", "http://d@2"]).redacted()
    assert patient["decoders"] == [{"url": "http://d:80", "rank_ids": [1, 2], "discover": False}]
    assert patient["policies"]["patience"] == "inf"  # type: ignore[index]
    assert patient["direct"] == "decode"
    assert patient["credentials"]["engine_key"] is None  # type: ignore[index]
