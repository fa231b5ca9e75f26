"""The configuration: flag before file before default."""

import ast
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from functools import cache
from math import inf
from pathlib import Path

import pytest
from tests.live.settings.configs import ENGINES, D, P, of_file, of_flags, secret_file
from tests.script import script

from balanceroute.proxy.core.admission import POST_4, POST_5
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.core.setting import Setting, settings_of
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.health import HealthSettings
from balanceroute.proxy.live.engines.instances import Role
from balanceroute.proxy.live.request.leg_settings import Direct, LegSettings
from balanceroute.proxy.live.security import Credentials, Secret
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.configure import ENGINE_KEY_VARIABLE, make_config
from balanceroute.proxy.live.settings.declared import (
    SECTIONS,
    EngineSource,
    ListeningSettings,
    LogSettings,
    engine_source,
)
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer
from balanceroute.proxy.wire.messages import ServerLimits
from balanceroute.topologies import CONNECTORS, TopologyError
from balanceroute.topologies.topology import read_topology


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
        select_key_file=secret_file(folder, "d", "hunter2-f\n"),
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
        "select_keys": ["***"],
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


# Several [[model]] tables: what they may say, and where.


ONE = """
[[model]]
name = "small"
prefill = [{ url = "http://p1" }]
decode = [{ url = "http://d1" }]
"""
TWO = ONE + ONE.replace("small", "large").replace("1", "2")


def made(folder: Path, text: str, **flags: object) -> ProxyConfig:
    path = folder / "fleet.toml"
    path.write_text(text)
    return make_config(read_topology(path), flags)


def test_groups_are_deployments_with_the_settings_of_all_and_their_own(tmp_path: Path) -> None:
    text = TWO + "proxy = { batch = 7, policy = 'jsq' }\n[proxy]\nbatch = 5\nport = 1234\n"
    config = made(tmp_path, text)
    small, large = config.groups
    assert (small.name, large.name) == ("small", "large")
    assert [one.scheduling.batch for one in config.deployments] == [5, 7]
    assert [one.scheduling.policy for one in config.deployments] == ["br-h", "jsq"]
    assert [one.listening.port for one in config.deployments] == [1234, 1234]
    assert [one.prefillers[0].url.base for one in config.deployments] == [
        "http://p1:80",
        "http://p2:80",
    ]
    assert not config.prefillers
    # A flag goes before the file, as everywhere.
    assert [one.scheduling.batch for one in made(tmp_path, text, batch=9).deployments] == [9, 9]


def test_one_table_is_a_group_too(tmp_path: Path) -> None:
    (group,) = made(tmp_path, ONE).groups
    assert (group.name, group.models) == ("small", ())


def test_a_group_may_list_its_names(tmp_path: Path) -> None:
    (group,) = made(tmp_path, ONE + 'model = ["qwen", "qwen-sql"]').groups
    assert (group.name, group.models) == ("small", ("qwen", "qwen-sql"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ONE + ONE, "model[0].name: is 'small', as that of another group"),
        (TWO + "model = 'small'", "model[1].model: has 'small', which is served by model[0]"),
        (ONE.replace("small", "a b"), "model[0].name: may have letters, digits and . _ : / @ -"),
        (ONE.replace('name = "small"', ""), "model[0].name: is missing"),
        (ONE.replace("prefill", "prefil"), "model[0].prefil: unknown key; did you mean 'prefill'?"),
        (ONE.replace("decode = ", "#"), "model[0].decode: is missing: write [[model.decode]]"),
        (ONE.replace('url = "http://p1"', ""), "model[0].prefill[0].url: is missing"),
        ('connector = "nixl"' + ONE, "connector: belongs into a [[model]] table"),
        ("model = 'x'\n[alias.auto]", "alias: chooses among [[model]] tables, and there are none"),
    ],
)
def test_a_file_that_is_no_topology_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(TopologyError) as error:
        made(tmp_path, text)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            ONE + "proxy = { port = 1 }",
            "[model[0].proxy].port: belongs into [proxy]: it holds for all groups",
        ),
        (ONE + "proxy = { bach = 1 }", "[model[0].proxy].bach: unknown key; did you mean 'batch'?"),
        (ONE + "proxy = { batch = 0 }", "[model[0].proxy].batch is 0, must be from 1"),
        (ONE + "[proxy]\nbatch = 0", "[proxy].batch is 0, must be from 1"),
        (
            TWO.replace("http://d2", "http://p1"),
            "model[1] has the engine http://p1:80, which",
        ),
        (ONE + "[proxy]\ndiscover = ['file:x']", "discover: each [[model]] table finds its own"),
        (
            TWO + "[proxy]\npredictor_state = 'x'",
            "which",
        ),
        (ONE.replace("http://p1", "http://p1@3"), "model[0].prefill[0].url is 'http://p1:80@3'"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(tmp_path, text)
    assert reason in str(error.value)
    assert "fleet.toml" in str(error.value)


@pytest.mark.parametrize("flag", ["prefill", "decode", "connector", "model"])
def test_engines_of_flags_have_no_group(tmp_path: Path, flag: str) -> None:
    value = "nixl" if flag == "connector" else ["http://x"]
    with pytest.raises(ConfigError, match=f"--{flag}: names engines of one deployment"):
        made(tmp_path, TWO, **{flag: value})


# Each setting stands in few places: where it is declared, in the part that uses it, and where that is assembled.


house = script("house")

DECLARED: list[tuple[type, Setting]] = [
    (section, one) for section in SECTIONS for one in settings_of(section)
]
# What serves. The laboratory's commands have settings of their own, some of the same name.
SERVING = ("proxy.core", "proxy.wire", "proxy.live", "proxy.settings", "predictors")
# Rooms that are one part.
PARTS = ("proxy.core", "proxy.wire")
# A name of one word is a word of the field (`model`, `host`, `seed`): what else has it is no copy.
COMPOUND = [(section, one) for section, one in DECLARED if "_" in one.name]

# Settings in more than three parts.
SPREAD = {
    "client_priority": "tenants have their own, which goes before it",
    "client_deadline": "tenants have their own, which goes before it",
    "body_limit_bytes": "also of bodies that a gateway sends to the picker",
    "pool_limit": "the limit in effect is a metric, and on the page of the state",
    "queue_limit": "a tenant has one of its own, which the page shows",
    "warm_up": "also the part of the core that it switches on",
}
# Names that more than one record has.
REPEATED = {
    "client_priority": "a tenant's own",
    "client_deadline": "a tenant's own",
    "queue_limit": "a tenant's own",
    "kv_events": "of one prefiller, where the setting has those of all",
    "kv_replay": "of one prefiller, where the setting has those of all",
    "rank_speeds": "one for each rank, where the setting is repeated over them",
    "rank_kv_tokens": "for a policy, of the ranks as they are",
    "pool_limit": "as it is in effect, for metrics",
    "lease_s": "as it is in effect for a connector",
    "log_level": "as an administrator set it",
    "progress_veto": "the driver's, which is told it",
    "warm_up": "the driver's, which is told it",
    "group_return_s": "the driver's, which is told it",
    "prefix_affinity": "of one policy made of these parameters",
}


@cache
def serving() -> list[tuple[str, ast.Module]]:
    """Return the modules that serve."""
    return [
        (house.module(path), ast.parse(path.read_text(encoding="utf-8")))
        for path in house.python_files(*house.TOP_LEVEL)
        if house.is_within(house.module(path), SERVING)
    ]


@cache
def parts() -> dict[str, set[str]]:
    """Return in which parts each name is passed, read or declared."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, tree in serving():
        part = next((one for one in PARTS if house.is_within(name, [one])), house.room(name))
        assert part is not None
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=word) | ast.keyword(arg=str(word)) | ast.arg(arg=word):
                    found[word].add(part)
                case ast.AnnAssign(target=ast.Name(id=word)):
                    found[word].add(part)
                case _:
                    pass
    return found


@cache
def records() -> dict[str, set[str]]:
    """Return the classes that have a field of each name."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, tree in serving():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for one in node.body:
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                        found[one.target.id].add(f"{name}.{node.name}")
    return found


@pytest.mark.parametrize("setting", [one for _, one in COMPOUND], ids=lambda one: one.name)
def test_a_setting_is_in_three_parts_at_most(setting: Setting) -> None:
    where = parts()[setting.attribute] | parts()[setting.name]
    assert (len(where) > 3) == (setting.name in SPREAD), sorted(where)


@pytest.mark.parametrize(("section", "setting"), COMPOUND, ids=[one.name for _, one in COMPOUND])
def test_one_record_has_a_setting(section: type, setting: Setting) -> None:
    where = records()[setting.attribute]
    assert any(one.endswith(f".{section.__name__}") for one in where)
    assert (len(where) > 1) == (setting.name in REPEATED), sorted(where)


def test_no_two_sections_declare_a_setting() -> None:
    names = [one.name for _, one in DECLARED]
    assert sorted(names) == sorted(set(names))
    assert {*SPREAD, *REPEATED} <= set(names)


# Where prefillers that name no address publish their KV cache events.


KV_ENGINES = {"prefill": ["http://p:8000"], "decode": ["http://d:8000"]}
AWARE = KV_ENGINES | {"prefill_choice": "prefix-aware"}
ADDRESSES = {"kv_events": ["tcp://e:1"], "kv_replay": ["tcp://e:2"]}


def test_a_port_stands_for_those_that_name_no_address() -> None:
    ports = make_config(None, AWARE | {"kv_events_port": 5557, "kv_replay_port": 5558})
    assert ports.follows_kv_events
    server = PrefillServer(EngineUrl.parse("http://[fd00::1]:8000"))
    assert server.event_addresses(ports.engines) == ("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5558")
    own = make_config(None, AWARE | ADDRESSES | {"kv_events_port": 5557})
    (named,) = own.prefillers
    assert named.event_addresses(own.engines) == ("tcp://e:1", "tcp://e:2")
    assert server.event_addresses(own.engines) == ("tcp://[fd00::1]:5557", None)


def test_without_it_nobody_is_heard_who_names_no_address() -> None:
    config = make_config(None, AWARE)
    assert not config.follows_kv_events
    (server,) = config.prefillers
    assert server.event_addresses(config.engines) == (None, None)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (AWARE | {"kv_replay_port": 5558}, "--kv-replay-port: needs --kv-events-port too"),
        (KV_ENGINES | {"kv_events_port": 5557}, "nobody asks without --prefill-choice"),
        (AWARE | {"kv_events_port": 0}, "kv-events-port"),
        (KV_ENGINES | {"rank_kv_events_port": 5557}, "rank-kv-events-port: nobody asks without"),
        (KV_ENGINES | {"rank_kv_events_port": 60_000}, "rank-kv-events-port"),
        (
            KV_ENGINES | {"rank_kv_replay_port": 5558, "prefix_affinity": 1.0},
            "--rank-kv-replay-port: needs --rank-kv-events-port too",
        ),
    ],
)
def test_ports_that_are_of_no_use_are_refused(flags: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_config(None, flags)


@pytest.mark.parametrize("more", [{"prefix_affinity": 1.0}, {"local_prefill_tokens": 500}])
def test_ranks_are_heard_where_somebody_asks(more: dict[str, object]) -> None:
    config = make_config(None, KV_ENGINES | {"rank_kv_events_port": 5557} | more)
    assert config.follows_rank_kv_events
    assert not config.follows_kv_events


# What the flags of the limit on requests in flight come to.


def test_without_the_flag_nothing_is_limited() -> None:
    config = of_flags()
    assert config.aimd.settings is None
    assert config.times.queue_ttl_s == 600.0
    assert config.too_long_waits is None


def test_a_preset_has_its_own_values_and_its_own_timeout() -> None:
    assert of_flags(aimd="post5").aimd.settings == POST_5
    assert of_flags(aimd="post4").aimd.settings == POST_4
    assert of_flags(aimd="post5").times.queue_ttl_s == 1.0
    assert of_flags(aimd="post5", aimd_ttft_s=5.0).times.queue_ttl_s == 2.5
    assert of_flags(aimd="post4").times.queue_ttl_s == 30.0
    assert of_flags(aimd="post5", queue_ttl_s=7.0).times.queue_ttl_s == 7.0


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (None, 8, (8, 8, 8)),
        (300, None, (300, 300, 300)),
        (4, 80, (4, 64, 80)),
        (70, 90, (70, 70, 90)),
    ],
)
def test_the_bounds_of_the_limit(
    low: int | None, high: int | None, expected: tuple[int, int, int]
) -> None:
    settings = of_flags(aimd="post5", aimd_min=low, aimd_max=high).aimd.settings
    assert settings is not None
    assert (settings.cap_min, settings.cap_initial, settings.cap_max) == expected


def test_waits_that_exceed_the_target_are_told() -> None:
    told = of_flags(aimd="post5").too_long_waits
    assert told == (
        "requests may wait for longer than --aimd-ttft-s (2): "
        "--queue-ttl-s (1) + --pool-ttl-s (600)"
    )
    assert of_flags(aimd="post5", pool_ttl_s=1.0).too_long_waits is None


# Where engines are found, as flags and files say it.


IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.mark.parametrize(
    ("word", "source"),
    [
        ("file:/run/engines.toml", EngineSource("file", "/run/engines.toml")),
        ("decode=dns:d.serving:8000", EngineSource("dns", "d.serving:8000", Role.DECODE)),
        (
            "kubernetes:app=x,tier in (a, b),!old@serving",
            EngineSource("kubernetes", "app=x,tier in (a, b),!old@serving"),
        ),
        (
            "prefill=kubernetes:app.kubernetes.io/name=p",
            EngineSource("kubernetes", "app.kubernetes.io/name=p", Role.PREFILL),
        ),
    ],
)
def test_sources_are_read(word: str, source: EngineSource) -> None:
    assert engine_source(word) == source


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("engines.toml", "must be file:PATH, ROLE=dns:HOST:PORT or"),
        ("router=dns:d:8000", "must be file:PATH"),
        ("file:", "must be file:PATH"),
        ("prefill=file:/x", "the file itself names the role"),
        ("dns:d:8000", "needs the role, as in decode=dns:HOST:PORT"),
        ("decode=dns:d:0", "a port that is not from 1 to 65535"),
        ("kubernetes:a=b@Serving", "no selector of labels"),
        ("kubernetes:a&b", "no selector of labels"),
    ],
)
def test_what_is_no_source_is_refused(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_config(None, {"discover": [word]})


def test_a_role_that_is_found_needs_no_address() -> None:
    config = make_config(None, {"discover": ["file:/run/engines.toml"]})
    assert (config.prefillers, config.decoders) == ((), ())
    with pytest.raises(ConfigError, match="--prefill: at least one is needed, or --discover"):
        make_config(None, {"discover": ["decode=dns:d:8000"]})
    config = make_config(None, {"discover": ["decode=dns:d:8000"], "prefill": ["http://p:8000"]})
    assert len(config.prefillers) == 1


def test_a_topology_may_leave_its_engines_to_discovery(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('[proxy]\ndiscover = ["prefill=dns:p:1", "decode=dns:d:1"]\n')
    assert len(make_config(read_topology(path), {}).discovery.discover) == 2


def test_the_api_server_is_that_of_the_pod() -> None:
    flags = {"discover": ["kubernetes:a=b"]}
    config = make_config(None, flags, environment=IN_A_POD)
    assert config.discovery.kubernetes_api == "https://10.96.0.1:443"
    config = make_config(None, flags, environment=IN_A_POD | {"KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert config.discovery.kubernetes_api == "https://[fd00::1]:443"
    other = flags | {"kubernetes_api": "http://127.0.0.1:8001"}
    assert make_config(None, other).discovery.kubernetes_api == "http://127.0.0.1:8001"
    with pytest.raises(ConfigError, match="--discover: not in a pod of a cluster: needs --kube"):
        make_config(None, flags)


def test_the_state_of_the_roster_can_be_where_it_is_to_be(tmp_path: Path) -> None:
    config = of_file(tmp_path, 'roster_state = "roster.json"')
    assert config.discovery.roster_state == tmp_path / "roster.json"
    with pytest.raises(ConfigError, match=r"roster_state is .*: a directory"):
        of_file(tmp_path, 'roster_state = "."')


def test_where_replicas_agree_on_who_leads(tmp_path: Path) -> None:
    flags = {"prefill": ["http://127.0.0.1:1"], "decode": ["http://127.0.0.1:2"]}
    assert not make_config(None, flags).leader.has_replicas
    lock = make_config(None, flags | {"leader_lock": str(tmp_path / "leader")})
    assert lock.leader.leader_lock == tmp_path / "leader"
    assert lock.leader.has_replicas
    lease = flags | {"leader_lease": "serving/balanceroute-leader"}
    config = make_config(None, lease, environment=IN_A_POD)
    assert config.leader.leader_lease == "serving/balanceroute-leader"
    assert config.discovery.kubernetes_api == "https://10.96.0.1:443"
    with pytest.raises(ConfigError, match="--leader-lease: not in a pod of a cluster"):
        make_config(None, lease)
    with pytest.raises(ConfigError, match="and --leader-lease says who leads already"):
        make_config(None, lease | {"leader_lock": str(tmp_path / "x")}, environment=IN_A_POD)
    with pytest.raises(ConfigError, match=r"--leader-lock is .*: a directory"):
        make_config(None, flags | {"leader_lock": str(tmp_path)})


@pytest.mark.parametrize("word", ["A", "a/b/c", "a_b", "-a", "a-", "/a", "a/", "x" * 254, "a b"])
def test_what_is_no_name_of_a_lease_is_refused(word: str) -> None:
    flags = {"prefill": ["http://127.0.0.1:1"], "decode": ["http://127.0.0.1:2"]}
    with pytest.raises(ConfigError, match=r"--leader-lease is .*must be NAME or NAMESPACE/NAME"):
        make_config(None, flags | {"leader_lease": word})
