"""Each setting that cannot be served is refused with its place and the reason."""

import sys
from math import inf
from pathlib import Path

import pytest
from tests.live.settings.configs import ENGINES, of_file, of_flags, secret_file
from tests.support.certificate import make_certificate

from balanceroute.proxy.core.errors import ConfigError


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
        ({"kv_events": ["p:5557"]}, "--kv-events", "is 'p:5557', must be tcp://HOST:PORT"),
        ({"kv_events": ["tcp://p:x"]}, "--kv-events", "has a port that is not from 1 to 65535"),
        ({"kv_events": ["tcp://p:1", "tcp://p:2"]}, "--kv-events", "2 for 1 of --prefill"),
        ({"kv_events": ["tcp://p:1"]}, "--kv-events", "without --prefill-choice prefix-aware"),
        ({"kv_replay": ["tcp://p:1"]}, "--kv-replay", "needs --kv-events too"),
        ({"connector": "smoke"}, "--connector", "is 'smoke', must be one of nixl, mooncake"),
        ({"model": ["a b"]}, "--model", "visible ASCII"),
        ({"model": ["a", "b", "a"]}, "--model", "names 'a' twice"),
        ({"host": ""}, "--host", "is '', must be a text"),
        ({"host": "a/b"}, "--host", "is 'a/b': it has a host that is neither"),
        ({"host": 7}, "--host", "is 7, must be a text"),
        ({"cors_origin": "chat.example"}, "--cors-origin", "is 'chat.example', must be *, or http"),
        (
            {"picker_metrics": ["sglang"]},
            "--picker-metrics",
            "is 'sglang', must be vllm or WHAT=NAME",
        ),
        (
            {"picker_metrics": ["queue=a"]},
            "--picker-metrics",
            "with WHAT of waiting, running, kv-us",
        ),
        ({"picker_metrics": ["lora="]}, "--picker-metrics", "is 'lora=', must be vllm or"),
        ({"picker_metrics": ["lora=a b"]}, "--picker-metrics", "is 'lora=a b', must be"),
        (
            {"picker_metrics": ["waiting=balanceroute_queue"]},
            "--picker-metrics",
            "NAME of a metric that is not the proxy's own",
        ),
        ({"picker_metrics": ["waiting=a", "running=a"]}, "--picker-metrics", "names 'a' twice"),
        ({"cors_origin": "http://a/"}, "--cors-origin", "is 'http://a/', must be *, or http"),
        (
            {"first_token": "prefill", "connector": "mooncake-hybrid"},
            "--first-token",
            "leave the last token of a prompt to the rank",
        ),
        ({"http3": True}, "--http3", "needs --tls-cert and --tls-key"),
        ({"http3_order": "lifo"}, "--http3-order", "must be one of rr, fcfs, edf, abs, ml"),
        (
            {"http3": True, "http3_hard_deadlines": True},
            "--http3-hard-deadlines",
            "needs --http3-order edf",
        ),
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
        ({"policy": "psychic"}, "--policy", "is 'psychic', which is no policy"),
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
        ({"kv_peak_quantile": 1}, "--kv-peak-quantile", "must be from 0.5 to 0.999999, or 'none'"),
        ({"paper": 1}, "--paper", "is 1, must be true or false"),
        ({"queue_ttl_s": 0}, "--queue-ttl-s", "is 0, must be from 0.001 to 1e+06"),
        ({"aimd": "post3"}, "--aimd", "must be one of off, post5, post4"),
        ({"aimd_min": 0}, "--aimd-min", "is 0, must be from 1"),
        ({"aimd_min": 9, "aimd_max": 8}, "--aimd-min", "is 9, beyond --aimd-max (8)"),
        ({"aimd_ttft_s": 0}, "--aimd-ttft-s", "is 0, must be from 0.001"),
        (
            {"aimd": "post4", "aimd_first": 4},
            "--aimd-first",
            "is 4, must be from 16 (--aimd-min) to 128 (--aimd-max)",
        ),
        ({"aimd": "post5", "aimd_first": 9, "aimd_max": 8}, "--aimd-first", "is 9, must be from 8"),
        ({"aimd_tick_s": 0}, "--aimd-tick-s", "is 0, must be from 0.1 to 600"),
        ({"aimd_window_s": 601}, "--aimd-window-s", "must be from 0.1 to 600, or 'auto'"),
        ({"aimd_band": 1}, "--aimd-band", "is 1, must be from 0 to 0.99"),
        ({"aimd_cooldown": -1}, "--aimd-cooldown", "is -1, must be from 0 to 1000"),
        ({"aimd_factor": 0}, "--aimd-factor", "is 0, must be from 0.01 to 1, or 'auto'"),
        (
            {"aimd": "post5", "aimd_factor": 1.0},
            "--aimd-factor",
            "is 1, and a decrease would change nothing: give an --aimd-step above 0 too",
        ),
        ({"aimd": "post4", "aimd_step": 0}, "--aimd-factor", "is 1, and a decrease would"),
        ({"aimd_step": 0.5}, "--aimd-step", "is 0.5, must be an integer"),
        (
            {"s1_weights": "0.1,0.8,0.1"},
            "--s1-weights",
            "is '0.1,0.8,0.1', must be 2 numbers with a sum above 0 and up to 1",
        ),
        ({"s2_weights": [0.5, 0.6, 0]}, "--s2-weights", "must be 3 numbers with a sum above 0"),
        ({"s2_dynamic_weights": "0,0,0"}, "--s2-dynamic-weights", "must be 3 numbers with a sum"),
        ({"s1_weights": "x,1"}, "--s1-weights", "is 'x', must be a number"),
        ({"s1_weights": "-0.1,1"}, "--s1-weights", "is -0.1, must be from 0 to 1"),
        ({"aimd_tpot_ms": "x"}, "--aimd-tpot-ms", "must be a number, or 'none'"),
        ({"expired_status": 200}, "--expired-status", "is 200, must be from 400 to 599"),
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


@pytest.mark.parametrize(
    ("module", "extra", "given"),
    [
        ("aioquic", "h3", {"http3": True}),
        ("h2", "h2", {"http2": True}),
        ("grpc", "gateway", {"pick": "coordinator"}),
        ("envoy.service", "gateway", {"pick": "sidecar"}),
        ("zmq", "kv-events", {"kv_events_port": 5557, "prefill_choice": "prefix-aware"}),
        ("zmq", "kv-events", {"rank_kv_events_port": 5557, "prefix_affinity": 1.0}),
    ],
)
def test_a_missing_extra_is_told_before_anybody_is_asked(
    module: str,
    extra: str,
    given: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if "http3" in given:
        cert, key = make_certificate(tmp_path)
        given = given | {"tls_cert": str(cert), "tls_key": str(key)}
    of_flags(**given)
    monkeypatch.setitem(sys.modules, module, None)
    flag = "kv-events" if "kv_events_port" in given else next(iter(given)).replace("_", "-")
    with pytest.raises(ConfigError, match=rf"^--{flag}: needs the extra {extra}: pip install '\."):
        of_flags(**given)
    of_flags()


@pytest.mark.parametrize(
    "taken",
    [{"port": 8123}, {"admin": True, "admin_port": 8123}, {"select_port": 8123}],
    ids=["clients", "admin", "routers"],
)
def test_the_port_of_the_picker_is_its_own(tmp_path: Path, taken: dict[str, object]) -> None:
    keys = {"select_key_file": secret_file(tmp_path, "keys", "a-key")}
    given = {"pick": "sidecar", "pick_port": 8123} | keys | taken
    with pytest.raises(ConfigError, match="--pick-port is 8123, which serves others already"):
        of_flags(**given)
    of_flags(**given | {"pick_port": 8124})
