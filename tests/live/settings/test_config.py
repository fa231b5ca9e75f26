"""The configuration: flag before file before default."""

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from math import inf
from pathlib import Path

import pytest
from tests.live.settings.configs import ENGINES, D, P, of_file, of_flags, secret_file

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.core.setting import settings_of
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.health import HealthSettings
from balanceroute.proxy.live.request.leg_settings import Direct, LegSettings
from balanceroute.proxy.live.security import Credentials, Secret
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import ENGINE_KEY_VARIABLE, make_config
from balanceroute.proxy.live.settings.declared import ListeningSettings, LogSettings
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer
from balanceroute.proxy.wire.messages import ServerLimits
from balanceroute.topologies import CONNECTORS, read_topology


def test_the_defaults_are_these() -> None:
    config = of_flags()
    assert config.topology is None
    listening = config.listening
    assert (listening.host, listening.port) == ("127.0.0.1", 8000)
    assert (listening.tls_cert, listening.tls_key) == (None, None)
    assert (listening.admin_host, listening.admin_port) == ("127.0.0.1", 9000)
    assert config.credentials == Credentials((), None, None)
    assert config.limits == ServerLimits()
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
    assert (config.admission.queue_limit, config.times.queue_ttl_s) == (4096, 600.0)
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
        direct_decode_tokens=2048,
        on_missing_kv="recompute",
        count_tokens="usage",
        lease_s=30.0,
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
        config.topology = "other"  # type: ignore[misc]


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


def test_kv_cache_events_are_named_for_each_prefiller(tmp_path: Path) -> None:
    config = of_flags(
        prefill=["http://p:1", "http://p:2"],
        kv_events=["tcp://P:5", "tcp://p:7"],
        kv_replay=["tcp://p:6", "tcp://p:8"],
        prefill_choice="prefix-aware",
    )
    assert [(one.kv_events, one.kv_replay) for one in config.prefillers] == [
        ("tcp://p:5", "tcp://p:6"),
        ("tcp://p:7", "tcp://p:8"),
    ]
    engines = f'{ENGINES}[[prefill]]\nurl = "http://q"\nkv_events = "tcp://q:5"'
    config = of_file(tmp_path, engines=engines, flags={"prefill_choice": "prefix-aware"})
    assert [(one.kv_events, one.kv_replay) for one in config.prefillers] == [
        (None, None),
        ("tcp://q:5", None),
    ]
    for key, reason in (
        ('kv_replay = "tcp://q:5"', r"prefill\[1\].kv_replay: needs kv_events too"),
        ('kv_events = "q"', r"prefill\[1\].kv_events is 'q', must be tcp://HOST:PORT"),
    ):
        with pytest.raises(ConfigError, match=reason):
            of_file(tmp_path, engines=f'{ENGINES}[[prefill]]\nurl = "http://q"\n{key}')


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


@pytest.mark.parametrize(("first_token", "deep"), [("prefill", True), ("decode", False)])
def test_an_early_first_token_takes_a_deep_pool(first_token: str, deep: bool) -> None:
    assert of_flags(first_token=first_token).scheduler_config(8, 2).deep_pool is deep


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
        api_key=["hunter2-e"],
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
        "api_keys": ["***", "***", "***"],
        "engine_key": "***",
        "admin_token": "***",
        "tenants": [],
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
