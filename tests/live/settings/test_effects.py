"""Settings that do nothing beside the others: told by name, from flags, files, groups and a reload."""

import logging
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.live.settings.configs import SETTINGS, of_file, of_flags
from tests.support.site import Site, play

from balanceroute.proxy.live.settings.configure import make_config
from balanceroute.proxy.live.settings.effects import _TABLE, without_effect
from balanceroute.topologies.topology import read_topology

if TYPE_CHECKING:
    from balanceroute.proxy.live.security import Credentials
    from balanceroute.proxy.live.settings.config import ProxyConfig

LAYERWISE: dict[str, object] = {"connector": "mooncake-layerwise", "host": "10.0.0.1"}
FIXED: dict[str, object] = {"aimd": "post5", "aimd_min": 4, "aimd_max": 4}
WIDER: dict[str, object] = {"aimd_max": 5}
KNOBS: dict[str, object] = {
    "aimd_first": 4,
    "aimd_tick_s": 1.0,
    "aimd_window_s": 5.0,
    "aimd_band": 0.1,
    "aimd_cooldown": 1,
    "aimd_factor": 0.5,
    "aimd_step": 2,
}
# What does nothing, what is given beside it, and what it needs to do something.
CASES: list[tuple[dict[str, object], dict[str, object], dict[str, object]]] = [
    ({"kv_block_tokens": 32}, {}, {"prefill_choice": "prefix-aware", "kv_events_port": 5557}),
    ({"insecure_engines": True}, {}, {"prefill": ["https://p"]}),
    ({"insecure_engines": True}, {}, {"discover": ["decode=dns:d:8000"]}),
    (
        {"discover_hold_s": 9.0},
        {},
        {"discover": ["kubernetes:app=x"], "kubernetes_api": "http://k"},
    ),
    ({"discover_limit": 9}, {}, {"discover": ["decode=dns:d:8000"]}),
    ({"discover_interval_s": 9.0}, {}, {"discover": ["decode=dns:d:8000"]}),
    ({"kubernetes_api": "http://k"}, {}, {"discover": ["kubernetes:app=x"]}),
    ({"http3_order": "edf"}, {}, {"http3": True}),
    ({"http3_hard_deadlines": True}, {"http3_order": "edf"}, {"http3": True}),
    ({"http3_streams": 7}, {}, {"http3": True}),
    ({"http2_streams": 7}, {}, {"http2": True}),
    ({"pick_host": "127.0.0.3"}, {}, {"pick": "sidecar"}),
    ({"pick_port": 7}, {}, {"pick": "sidecar"}),
    ({"pick_fallbacks": 3}, {}, {"pick": "sidecar"}),
    ({"pick_test_header": True}, {}, {"pick": "coordinator"}),
    ({"native_threads": 2}, {"native": "off"}, {"native": "auto"}),
    ({"http3_handshakes": 7}, {}, {"http3": True}),
    ({"admin_port": 7}, {"admin": False}, {"admin": True}),
    ({"admin_host": "127.0.0.3"}, {"admin": False}, {"admin": True}),
    ({"aimd_ttft_s": 2.0}, {}, {"aimd": "post4"}),
    ({"aimd_tpot_ms": 50.0}, {}, {"aimd": "post5"}),
    ({"aimd_tpot_ms": 50.0}, FIXED, {"aimd_max": 5}),
    ({"aimd_min": 40}, {}, {"aimd": "post5"}),
    ({"aimd_max": 100}, {}, {"aimd": "post5"}),
    *(({name: value}, {}, FIXED | WIDER) for name, value in KNOBS.items()),
    *(({name: value}, FIXED, WIDER) for name, value in KNOBS.items()),
    ({"s1_weights": [0.2, 0.8]}, {}, {"prefill_choice": "s1-enhanced"}),
    ({"s2_weights": [0.2, 0.8, 0]}, {}, {"policy": "s2-enhanced"}),
    ({"s2_dynamic_weights": [0.2, 0.2, 0.2]}, {}, {"prefill_choice": "s2-dynamic-waiting"}),
    ({"admission": "early"}, {}, {"client_deadline": True}),
    ({"queue_order": "edf"}, {}, {"client_deadline": True}),
    ({"queue_order": "abs"}, {}, {"client_priority": True}),
    ({"queue_order": "ml"}, {}, {"client_priority": True}),
    ({"client_priority": True}, {"queue_order": "srpt"}, {"queue_order": "ml"}),
    ({"prefill_waiting_limit": 3}, {}, {"prefill_choice": "s1-enhanced"}),
    ({"prefill_running_limit": 3}, {}, {"prefill_choice": "s2-enhanced"}),
    ({"prefill_share_limit": 0.5}, {}, {"prefill_choice": "s2-dynamic-waiting"}),
    ({"predictor": "exact-match"}, {"policy": "br-0"}, {"policy": "br-h"}),
    ({"predictor": "exact-match"}, {"policy": "br-0"}, {"policy": "llmd-token-load"}),
    ({"predictor": "exact-match"}, {"policy": "jsq"}, {"queue_order": "srpt"}),
    ({"predictor": "exact-match"}, {"policy": "br-0"}, {"kv_peak_quantile": 0.9}),
    ({"predictor": "exact-match"}, {"policy": "jsq"}, {"policy": "math:floor"}),
    ({"seed": 3}, {}, {"policy": "power-of-two"}),
    ({"seed": 3}, {}, {"prefill_choice": "random"}),
    ({"rank_kv_tokens": 90_000}, {"policy": "jsq"}, {"policy": "fifo"}),
    ({"rank_kv_tokens": 90_000}, {"policy": "least-kv"}, {"policy": "smg-least-load"}),
    ({"rank_speeds": "1,2"}, {"policy": "fifo"}, {"policy": "br-0-bypass"}),
    ({"learn_speeds": True}, {"paper": True}, {"paper": False}),
    ({"learn_speeds": True}, {"policy": "jsq"}, {"policy": "br-0"}),
    ({"direct_limit": 9}, {"direct": "refuse"}, {"direct": "prefill"}),
    ({"direct_decode_tokens": 9}, {"direct": "prefill"}, {"direct": "decode"}),
    ({"prefix_affinity": 1.0}, {"policy": "fifo"}, {"policy": "br-0"}),
    ({"prefix_affinity": 1.0}, {"policy": "jsq"}, {"policy": "br-0-bypass"}),
    ({"prefix_affinity": 1.0}, {"paper": True}, {"paper": False}),
    ({"prefix_affinity": 1.0}, LAYERWISE, {"connector": "nixl"}),
    ({"pool_limit": 9}, LAYERWISE, {"admission": "early", "client_deadline": True}),
    ({"pool_limit": 9}, LAYERWISE, {"connector": "nixl"}),
    ({"probe_limit": 9}, LAYERWISE, {"connector": "nixl"}),
    ({"lease_s": 99.0}, LAYERWISE, {"connector": "nixl"}),
    ({"on_missing_kv": "fail"}, LAYERWISE, {"connector": "nixl"}),
    ({"prefill_choice": "sticky"}, LAYERWISE | {"direct": "refuse"}, {"direct": "prefill"}),
    ({"prefiller_kv_tokens": 900}, LAYERWISE | {"direct": "refuse"}, {"connector": "nixl"}),
    ({"queue_ttl_s": 5.0}, LAYERWISE | {"direct": "refuse"}, {"aimd": "post5"}),
    ({"first_token": "prefill"}, LAYERWISE, {"connector": "nixl"}),
    ({"lease_margin_s": 4.0}, {"lease_s": inf}, {"lease_s": 30.0}),
    ({"projection": "point"}, {"policy": "br-0"}, {"policy": "br-h"}),
    ({"horizon": 80}, {"policy": "br-0"}, {"policy": "br-h"}),
    ({"gamma": 0.5}, {"horizon": 0}, {"horizon": 1}),
    ({"alpha": 2.0}, {"policy": "br-0"}, {"policy": "br-h"}),
    ({"beta": 2.0}, {"policy": "br-0"}, {"policy": "br-h"}),
    ({"refresh_tokens": 2}, {"policy": "jsq"}, {"policy": "br-h"}),
    ({"theta": 2}, {"policy": "jsq"}, {"policy": "br-0"}),
    ({"window": 2}, {"policy": "jsq"}, {"policy": "br-0"}),
    ({"patience": 2.0}, {"paper": True}, {"paper": False}),
    ({"hold_s": 1.0}, {"policy": "fifo"}, {"policy": "br-0"}),
    ({"hold_s": 0}, {"paper": True}, {"paper": False}),
    ({"paper": True}, {"policy": "jsq"}, {"policy": "br-0"}),
    ({"bypass_slots": 0}, {}, {"policy": "br-0-bypass"}),
    ({"kv_peak_quantile": 0.99}, {"policy": "jsq"}, {"policy": "fifo"}),
    ({"pool_deadline_s": 9.0}, {"policy": "fifo"}, {"policy": "br-0"}),
    ({"retry_backoff_s": 0.5}, {"retry_attempts": 1}, {"retry_attempts": 2}),
    ({"retry_backoff_limit_s": 5.0}, {"retry_attempts": 1}, {"retry_attempts": 2}),
    ({"log_level": "error"}, {"log": "none"}, {"log": "-"}),
    ({"load_log_interval_s": 1.0}, {}, {"load_log": "loads"}),
    ({"leader_lease_s": 9}, {}, {"leader_lease": "x", "kubernetes_api": "http://k"}),
    ({"kubernetes_api": "http://k"}, {}, {"leader_lease": "balanceroute"}),
]
# They need a file, and are tried below.
OF_FILES = {
    *(
        "roster_state",
        "engine_ca_file",
        "kubernetes_account",
        "admin_token_file",
        "admin_name",
        "select_host",
        "select_port",
        "tenants",
    ),
    "fair_queue",
    "native",
}
# They do something whatever else is set, or are refused where they would not.
ALWAYS = {
    *("prefill", "decode", "bootstrap", "kv_events", "kv_replay", "kv_events_port"),
    *("rank_kv_events_port", "rank_kv_replay_port"),
    *("kv_replay_port", "metaserver_url", "connector", "model", "engine_key_file", "check_pairs"),
    *("discover", "host", "port", "tls_cert", "tls_key", "api_key", "api_key_file"),
    *(
        "cors_origin",
        "public_metrics",
        "picker_metrics",
        "scaling_signals",
        "http2",
        "pick",
        "select_key_file",
        "admin",
        "control_on_api_port",
        "http3",
        "aimd",
    ),
    *("queue_limit",),
    *("client_deadline", "policy", "local_prefill_tokens", "predictor_state"),
    *("shadow_predictor", "batch", "prefiller_utilisation_limit"),
    *("single_engine_limit", "direct", "pass_priority", "count_tokens", "resume"),
    *("pool_ttl_s", "expired_status", "connect_timeout_s", "tcp_timeout_s"),
    *("prefill_timeout_s", "first_token_timeout_s", "idle_stream_timeout_s", "answer_timeout_s"),
    *("drain_timeout_s", "retry_attempts", "health_interval_s", "health_timeout_s"),
    *("scrape_interval_s", "scrape_timeout_s", "quarantine_failures", "connection_limit"),
    *("peer_connection_limit", "body_limit_bytes", "body_budget_bytes", "header_limit_bytes"),
    *("header_limit", "target_limit_bytes", "header_timeout_s", "body_timeout_s"),
    *("keep_alive_timeout_s", "write_timeout_s", "write_buffer_bytes", "answer_limit_bytes"),
    *("log", "load_log", "otlp_traces_endpoint", "trace_share", "sse_keep_alive_s"),
    *("progress_veto", "warm_up", "dp_size", "group_return_s", "leader_lease", "leader_lock"),
}


def idle(config: "ProxyConfig") -> list[str]:
    return without_effect(config.given, config.deployments)


def flags(given: Mapping[str, object], folder: Path) -> dict[str, object]:
    """Return flags, with what https needs and files where files are."""
    from tests.support.certificate import make_certificate  # noqa: PLC0415

    more: dict[str, object] = {}
    if given.get("http3"):
        pytest.importorskip("aioquic", reason="needs the extra h3")
        cert, key = make_certificate(folder)
        more = {"tls_cert": str(cert), "tls_key": str(key)}
    if given.get("load_log"):
        more["load_log"] = str(folder / "loads")
    return dict(given) | more


@pytest.mark.parametrize(("one", "beside", "needed"), CASES, ids=str)
def test_what_does_nothing_is_told_and_what_does_something_is_not(
    tmp_path: Path,
    one: dict[str, object],
    beside: dict[str, object],
    needed: dict[str, object],
) -> None:
    ((name, _),) = one.items()
    flag = f"--{name.replace('_', '-')} has no effect "
    told = idle(of_flags(**flags(beside | one, tmp_path)))
    assert len([message for message in told if message.startswith(flag)]) == 1
    given = flags(beside | one | needed, tmp_path)
    assert not [message for message in idle(of_flags(**given)) if message.startswith(flag)]


def test_the_same_in_a_file_is_told_by_its_key(tmp_path: Path) -> None:
    config = of_file(
        tmp_path, "aimd_ttft_s = 2.0\npaper = true\nhorizon = 0\n", flags={"policy": "jsq"}
    )
    place = f"{tmp_path / 'fleet.toml'}: [proxy]"
    assert idle(config) == [
        f"{place}.aimd_ttft_s has no effect without --aimd",
        f"{place}.horizon has no effect with --policy jsq",
        f"{place}.paper has no effect with --policy jsq",
    ]


def test_defaults_and_what_is_turned_off_do_not_count() -> None:
    assert idle(of_flags()) == []
    off = {"paper": False, "kv_peak_quantile": "none", "learn_speeds": False}
    assert idle(of_flags(policy="jsq", **off)) == []


def test_every_setting_is_known_to_depend_on_others_or_not_to() -> None:
    table = {name for row in _TABLE for name in row.names.split()}
    tried = {name for one, _, _ in CASES for name in one}
    assert table == tried | OF_FILES
    assert set(SETTINGS) == table | ALWAYS
    assert not table & ALWAYS


@pytest.mark.parametrize(
    "path", sorted(Path("topologies").glob("*.toml")), ids=lambda one: one.stem
)
def test_what_ships_has_no_setting_without_effect(path: Path) -> None:
    topology = read_topology(path)
    engines: dict[str, object] = {}
    if topology.emulation is not None:
        engines = {"prefill": ["http://p"], "decode": ["http://d"]}
    assert idle(make_config(topology, engines)) == []


def test_the_native_library_moves_nothing_over_tls(tmp_path: Path) -> None:
    tls = flags({"http3": True}, tmp_path)
    (told,) = idle(of_flags(**tls, native="require"))
    assert told.startswith("--native has no effect with --tls-cert")
    assert idle(of_flags(**tls, native="off")) == []
    assert idle(of_flags(native="require")) == []


def test_a_setting_of_a_file_that_needs_files(tmp_path: Path) -> None:
    for name in ("ca", "token", "keys"):
        (tmp_path / name).write_text("x\n")
        (tmp_path / name).chmod(0o600)
    assert idle(of_flags(admin=False, admin_token_file=str(tmp_path / "token"))) == [
        "--admin-token-file has no effect with --no-admin"
    ]
    on_api_port: dict[str, object] = {
        "admin_token_file": str(tmp_path / "token"),
        "control_on_api_port": True,
    }
    stored: dict[str, object] = {"roster_state": str(tmp_path / "kept")}
    assert idle(of_flags(admin=False, **on_api_port, **stored)) == []
    assert idle(of_flags(admin=False, admin_name=["x"])) == [
        "--admin-name has no effect with --no-admin"
    ]
    assert idle(of_flags(kubernetes_account=str(tmp_path))) == [
        "--kubernetes-account has no effect without --discover of kubernetes and without --leader-lease"
    ]
    kept = {"roster_state": str(tmp_path / "kept"), "admin": False}
    (told_of,) = idle(of_flags(**kept))
    assert told_of.startswith("--roster-state has no effect with --no-admin")
    assert idle(of_flags(**kept, aimd="post5")) == []
    told = idle(of_flags(fair_queue="request"))
    assert told == ["--fair-queue has no effect without --tenants or --api-key-file"]
    assert idle(of_flags(fair_queue="request", api_key_file=str(tmp_path / "keys"))) == []


def test_what_tenants_say_counts(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"

    def told(members: str, **more: object) -> list[str]:
        path.write_text(f'[[tenant]]\nname = "a"\ndefault = true\n{members}\n')
        return idle(of_flags(tenants=str(path), **more))

    assert told("weight = 2.0\nlevel = 1") == [
        "--tenants: weight has no effect without --fair-queue",
        "--tenants: level has no effect with --queue-order fcfs",
    ]
    assert told("weight = 2.0\nlevel = 1", fair_queue="request", queue_order="abs") == []
    early = {"admission": "early", "queue_order": "edf"}
    assert len(told("", **early)) == 2
    assert told("deadline_s = 3", **early) == told("client_deadline = true", **early) == []
    assert len(told("", queue_order="ml")) == 1
    assert told("client_priority = true", queue_order="ml") == []


GROUPS = """
name = "x"
[proxy]
aimd_ttft_s = 3.0
horizon = 60
{of_all}
[[model]]
name = "small"
[[model.prefill]]
url = "http://10.0.0.1"
[[model.decode]]
url = "http://10.0.0.2"
[model.proxy]
{of_one}
[[model]]
name = "large"
[[model.prefill]]
url = "http://10.0.0.3"
[[model.decode]]
url = "http://10.0.0.4"
[model.proxy]
aimd = "post5"
"""


def test_what_all_groups_have_is_told_only_if_it_does_nothing_in_any(tmp_path: Path) -> None:
    path = tmp_path / "groups.toml"

    def told(of_all: str, of_one: str) -> list[str]:
        path.write_text(GROUPS.format(of_all=of_all, of_one=of_one))
        return idle(make_config(read_topology(path), {}))

    assert told("", "") == []
    assert told("", 'policy = "jsq"') == []
    assert told("http3_streams = 9", "") == [
        f"{path}: [proxy].http3_streams has no effect without --http3"
    ]
    # What neither uses is told once, though each has a reason of its own.
    assert told('policy = "jsq"', 'policy = "fifo"') == [
        f"{path}: [proxy].horizon has no effect with --policy fifo"
    ]
    (of_one,) = told("", 'policy = "jsq"\nwindow = 9')
    assert of_one.endswith("proxy].window has no effect with --policy jsq")
    assert [one.rpartition("has ")[2] for one in told('policy = "jsq"', "")] == [
        "no effect with --policy jsq"
    ]


def test_the_start_tells_of_it_and_so_does_a_reload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tenants.toml"
    tenant = '[[tenant]]\nname = "a"\ndefault = true\n'
    path.write_text(tenant + "deadline_s = 5.0\n")

    def told() -> list[str]:
        messages = [one.message for one in caplog.records if "no effect" in one.message]
        caplog.clear()
        return messages

    async def scenario(site: Site) -> None:
        assert told() == ["--aimd-ttft-s has no effect without --aimd"]
        path.write_text(tenant)
        for _ in range(2):
            site.world.plane.renew(lambda: credentials(given))
        (message,) = told()
        assert message.startswith("--queue-order has no effect where nobody can state a deadline")
        path.write_text(tenant + "client_deadline = true\n")
        site.world.plane.renew(lambda: credentials(given))
        assert told() == []

    given = {"aimd_ttft_s": 1.0, "queue_order": "edf", "tenants": str(path)}
    with caplog.at_level(logging.WARNING):
        play(scenario, flags=given)


def credentials(given: Mapping[str, object]) -> "Credentials":
    return of_flags(**given).credentials


def test_where_routers_ask_says_nothing_without_their_keys(tmp_path: Path) -> None:
    where: dict[str, object] = {"select_host": "127.0.0.3", "select_port": 8093}
    assert idle(of_flags(**where)) == [
        "--select-host has no effect without --select-key-file",
        "--select-port has no effect without --select-key-file",
    ]
    keys = tmp_path / "keys"
    keys.touch(0o600)
    keys.write_text("key\n")
    assert idle(of_flags(**where, select_key_file=str(keys))) == []
