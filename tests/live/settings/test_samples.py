"""Every setting by its flag and by its key of a file, and where its value arrives."""

from pathlib import Path

import pytest
from tests.live.settings.configs import SETTINGS, of_file, toml

from balanceroute.proxy.core.admission import AimdSettings
from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.core.projection import Form
from balanceroute.proxy.live.engines.health import HealthSettings
from balanceroute.proxy.live.request.leg_settings import Direct, FirstTokenFrom, LegSettings, Resume
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.settings.declared import ListeningSettings, LogSettings
from balanceroute.proxy.wire.messages import ServerLimits

# A value for each setting that is neither its default nor a file.
OFF = ("insecure_engines", "pass_priority", "client_priority", "client_deadline", "paper")
SAMPLES: dict[str, object] = dict.fromkeys(OFF, True) | {
    "host": "0.0.0.0",  # noqa: S104 - nothing is bound.
    "port": 8001,
    "admin": False,
    "check_pairs": False,
    "admin_host": "127.0.0.2",
    "admin_port": 9001,
    "native": "off",
    "native_threads": 2,
    "http3_order": "ml",
    "http3_hard_deadlines": True,
    "http3_streams": 20,
    "http3_handshakes": 5,
    "policy": "br-0",
    "predictor": "none",
    "seed": 1,
    "batch": 16,
    "rank_kv_tokens": 100_000,
    "rank_speeds": "1,1.5",
    "learn_speeds": True,
    "progress_veto": False,
    "warm_up": False,
    "dp_size": 2,
    "group_return_s": 60.0,
    "prefill_choice": "least-conn",
    "local_prefill_tokens": 512,
    "prefill_waiting_limit": 3,
    "prefill_running_limit": 5,
    "prefill_share_limit": 0.6,
    "s1_weights": "0.3,0.7",
    "s2_weights": "0.2,0.3,0.4",
    "s2_dynamic_weights": "0.5,0.1,0.2",
    "kv_block_tokens": 32,
    "discover": "decode=dns:decode.serving:8000",
    "discover_interval_s": 3.75,
    "discover_hold_s": 7.25,
    "discover_limit": 90,
    "leader_lease_s": 15,
    "probe_limit": 4,
    "prefiller_kv_tokens": 200_000,
    "prefiller_utilisation_limit": 0.5,
    "pool_limit": 9,
    "queue_limit": 10,
    "prefix_affinity": 0.75,
    "single_engine_limit": 12,
    "lease_s": 60.0,
    "lease_margin_s": 4.75,
    "direct": "refuse",
    "direct_limit": 7,
    "direct_decode_tokens": 999,
    "on_missing_kv": "fail",
    "queue_order": "edf",
    "fair_queue": "request",
    "admission": "early",
    "aimd": "post4",
    "aimd_ttft_s": 3.0,
    "aimd_tpot_ms": 90.0,
    "aimd_min": 5,
    "aimd_max": 50,
    "aimd_first": 7,
    "aimd_tick_s": 2.5,
    "aimd_window_s": 12.0,
    "aimd_band": 0.1,
    "aimd_cooldown": 1,
    "aimd_factor": 0.9,
    "aimd_step": 3,
    "expired_status": 504,
    "count_tokens": "events",
    "resume": "valid",
    "first_token": "prefill",
    "projection": "point",
    "horizon": 7,
    "gamma": 0.5,
    "alpha": 2.0,
    "beta": 3.5,
    "theta": 4,
    "window": 6,
    "patience": 11.0,
    "kv_peak_quantile": 0.95,
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
    "sse_keep_alive_s": 20.0,
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
    "picker_metrics": "lora=a:b",
    "http2": True,
    "scaling_signals": True,
    "http2_streams": 7,
    "pick": "sidecar",
    "pick_host": "127.0.0.5",
    "pick_port": 9102,
    "pick_fallbacks": 3,
    "pick_test_header": True,
    "select_host": "127.0.0.3",
    "select_port": 8093,
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
    "kv_peak_quantile": "none",
    "rank_kv_tokens": "none",
    "probe_limit": "none",
    "local_prefill_tokens": "none",
    "prefill_waiting_limit": "none",
    "prefill_running_limit": "none",
    "prefill_share_limit": "none",
    "prefiller_kv_tokens": "none",
    "aimd_tpot_ms": "none",
    "sse_keep_alive_s": "off",
    "resume": "off",
    "first_token": "decode",
}
FILES = {
    "tls_cert",
    "tls_key",
    "api_key_file",
    "admin_token_file",
    "select_key_file",
    "control_on_api_port",  # Needs that one.
    "engine_key_file",
    "engine_ca_file",
    "predictor_state",
    "shadow_predictor",
    "load_log",
    "kubernetes_account",
    "roster_state",
    "tenants",
}
AT_TOP = {"prefill", "decode", "bootstrap", "kv_events", "kv_replay", "connector", "model"}
# Means something with one connector alone.
LAYERWISE = {"metaserver_url"}
# Means something with another setting alone.
WITH_DISCOVERY = {"kubernetes_api", "leader_lease", "leader_lock"}
WITH_CERTIFICATE = {"http3"}
# See test_kv_event_ports.
WITH_EVENTS = {
    *("kv_events_port", "kv_replay_port"),
    *("rank_kv_events_port", "rank_kv_replay_port"),
}
# See tests/test_settings.py: its default cannot be given.
SECRET = {"api_key"}
# See test_tracing_settings.
TRACED = {"otlp_traces_endpoint", "trace_share"}


def test_no_setting_is_forgotten_here() -> None:
    elsewhere = LAYERWISE | WITH_DISCOVERY | WITH_CERTIFICATE | WITH_EVENTS | TRACED | SECRET
    assert SETTINGS.keys() == SAMPLES.keys() | FILES | AT_TOP | elsewhere
    assert {name for name, setting in SETTINGS.items() if setting.at_top} == AT_TOP


def test_the_layerwise_connector_is_told_where_the_engines_reach_the_proxy(tmp_path: Path) -> None:
    top = 'connector = "mooncake-layerwise"'
    config = of_file(tmp_path, 'metaserver_url = "http://proxy:8000/"', top=top)
    assert config.engines.metaserver_url == "http://proxy:8000"
    with pytest.raises(ConfigError, match="which no engine can call: needs --metaserver-url"):
        of_file(tmp_path, 'host = "0.0.0.0"', top=top, flags={"admin": False})
    with pytest.raises(ConfigError, match="metaserver_url: nixl never calls back"):
        of_file(tmp_path, 'metaserver_url = "http://proxy:8000"')


def test_ranks_that_may_be_unable_to_compute_a_prompt_are_not_asked_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="local_prefill_tokens: decode ranks with mooncake-asc"):
        of_file(tmp_path, "local_prefill_tokens = 512", top='connector = "mooncake-ascend"')


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
    word = WORDS.get(name, "auto" if setting.default is None else setting.default)
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
        native="off",
        native_threads=2,
        public_metrics=False,
        cors_origin=("https://chat.example:8443",),
        admin_name=("ops.example",),
    )
    assert config.gateway.scaling_signals
    assert (config.gateway.http2, config.gateway.http2_streams) == (True, 7)
    assert (config.gateway.pick, config.gateway.pick_host) == ("sidecar", "127.0.0.5")
    assert (config.gateway.pick_port, config.gateway.pick_fallbacks) == (9102, 3)
    assert config.gateway.pick_test_header
    assert config.gateway.picker_names == {"lora": "a:b"}
    assert (config.gateway.select_host, config.gateway.select_port) == ("127.0.0.3", 8093)
    assert config.times.drain_timeout_s == 9.5
    assert config.log == LogSettings(log="none", log_level="debug", load_log_interval_s=0.75)


SERVER_LIMITS = ServerLimits(
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


def test_the_samples_arrive_where_they_are_used(tmp_path: Path) -> None:
    config = of_samples(tmp_path)
    assert config.limits == SERVER_LIMITS
    assert config.policies == PolicySettings(
        horizon_steps=7,
        gamma=0.5,
        alpha=2.0,
        beta=3.5,
        theta=4,
        window=6,
        patience=11.0,
        kv_peak_quantile=0.95,
        hold_s=0.4,
        prefix_affinity=0.75,
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
        deep_pool=True,
        deadline_ns=3_500_000_000,
        ttl_ns=2_500_000_000,
        lease_ns=60_000_000_000,
        lease_margin_ns=4_750_000_000,
        queue_ttl_ns=1_500_000_000,
        rank_speeds=(1.0, 1.5, 1.0),
        learn_speeds=True,
    )
    assert config.legs == LegSettings(
        prefill_timeout_s=5.5,
        first_token_timeout_s=6.5,
        idle_stream_timeout_s=7.5,
        sse_keep_alive_s=20.0,
        answer_timeout_s=8.5,
        retry_attempts=2,
        retry_backoff_s=0.5,
        retry_backoff_limit_s=2.0,
        answer_limit_bytes=6_000,
        direct=Direct.REFUSE,
        direct_decode_tokens=999,
        on_missing_kv="fail",
        count_tokens="events",
        resume=Resume.VALID,
        first_token=FirstTokenFrom.PREFILL,
        asks_early=True,
        lease_s=60.0,
        lease_margin_s=4.75,
        pass_priority=True,
        expired_status=504,
    )
    assert config.health == HealthSettings(3.0, 3.25, quarantine_failures=5)
    assert (config.scrape.scrape_interval_s, config.scrape.scrape_timeout_s) == (4.0, 4.25)


def test_the_samples_of_the_limit_are_in_its_settings(tmp_path: Path) -> None:
    assert of_samples(tmp_path).aimd.settings == AimdSettings(
        target_ns=3_000_000_000,
        tpot_target_ns=90_000_000,
        window_ns=12_000_000_000,
        tick_ns=2_500_000_000,
        band=0.1,
        cooldown_ticks=1,
        cap_min=5,
        cap_max=50,
        cap_initial=7,
        factor=0.9,
        step_down=3,
    )
