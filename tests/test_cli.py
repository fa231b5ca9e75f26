"""The command line: faults of the input end with status 2 and one clear line, never a traceback."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import refused, report, unwrapped

from balanceroute import __version__
from balanceroute.proxy.__main__ import main
from balanceroute.proxy.cli.outputs import PipedProgress
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies import PATIENCE_PER_SLOT, WINDOW, PolicySettings
from balanceroute.proxy.core.prefill import ScoreSettings
from balanceroute.proxy.core.projection import Form
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel, SimulatedEngineOptions
from balanceroute.proxy.lab.sim.experiment import FORECASTS, PolicyResult, run_experiment
from balanceroute.traces import read_trace, write_native

PUBLIC = Path(str(files("balanceroute.traces"))) / "public" / "azure_2023_code.csv.gz"
HEAD = "head.jsonl"  # Its first requests, in the folder where each test runs.
SMALL = ["simulate", "--trace", HEAD, "--requests", "200", "--ranks", "2", "--batch", "4"]
SATURATED = [*SMALL, "--backlog", "8"]
DEFAULTS = PolicySettings()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli")
    write_native(path / HEAD, read_trace(PUBLIC)[:250])
    return path


@pytest.fixture(autouse=True)
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    ("arguments", "flag", "reason"),
    [
        (["--policy", "psychic"], "--policy", "unknown ['psychic']; known: random, "),
        (["--policy", "jsq,br-9"], "--policy", "unknown ['br-9']; did you mean 'br-"),
        (["--policy", "jsq,jsq"], "--policy", "names a policy twice"),
        (["--policy", ","], "--policy", "known: random, "),
        (["--format", "parquet"], "--format", "invalid choice: 'parquet'"),
        (["--predictor", "crystal-ball"], "--predictor", "is no file, and none of survival"),
        (["--projection", "flat"], "--projection", "invalid choice"),
        (["--rate", "0"], "--rate", "is 0.0, must be from 1e-06 to 1e+06"),
        (["--rate", "-1"], "--rate", "is -1.0, must be"),
        (["--rate", "nan"], "--rate", "is nan, must be"),
        (["--rate", "inf"], "--rate", "is inf, must be"),
        (["--rate", "1e-300"], "--rate", "is 1e-300, must be"),
        (["--rate", "fast"], "--rate", "is 'fast', must be a number"),
        (["--backlog", "0"], "--backlog", "is 0, must be from 1"),
        (["--backlog", "-4"], "--backlog", "is -4, must be"),
        (["--backlog", "1.5"], "--backlog", "is '1.5', must be an integer"),
        (["--rate", "1", "--backlog", "8"], "--backlog", "not allowed with argument --rate"),
        (["--concurrency", "0"], "--concurrency", "is 0, must be from 1"),
        (["--concurrency", "few"], "--concurrency", "is 'few', must be an integer"),
        (["--backlog", "8", "--concurrency", "8"], "--concurrency", "not allowed with argument"),
        (["--requests", "0"], "--requests", "is 0, must be from 1"),
        (["--skip", "-1"], "--skip", "is -1, must be from 0"),
        (["--skip", "249"], "segment", "1 requests with output"),
        (["--known", "-1"], "--known", "is -1, must be from 0"),
        (["--known", "199"], "segment", "1 requests with output"),
        (["--requests", "-1"], "--requests", "is -1, must be"),
        (["--segments", "0"], "--segments", "is 0, must be from 1"),
        (["--segments", "11"], "segments", "200 requests with output make segments of 18"),
        (["--requests", "19"], "segment", "19 requests with output"),
        (["--ranks", "0"], "--ranks", "is 0, must be from 1 to 10000"),
        (["--ranks", "1000000000"], "--ranks", "is 1000000000, must be"),
        (["--batch", "0"], "--batch", "is 0, must be from 1"),
        (["--rank-speeds", "1,fast"], "--rank-speeds", "is 'fast', must be a number"),
        (["--rank-speeds", "1,0"], "--rank-speeds", "is 0.0, must be from 0.001 to 1000"),
        (["--rank-batches", "16,0"], "--rank-batches", "is 0, must be from 1"),
        (["--batch", "1" + 30 * "0"], "--batch", "must be from 1"),
        (["--gamma", "0"], "--gamma", "is 0.0, must be from"),
        (["--gamma", "1.5"], "--gamma", "is 1.5, must be from"),
        (["--gamma", "nan"], "--gamma", "is nan, must be from"),
        (["--alpha", "0"], "--alpha", "is 0.0, must be from"),
        (["--alpha", "inf"], "--alpha", "is inf, must be from"),
        (["--beta", "-1"], "--beta", "is -1.0, must be from"),
        (["--beta", "inf"], "--beta", "is inf, must be from"),
        (["--theta", "-1"], "--theta", "is -1, must be from 0"),
        (["--window", "0"], "--window", "is 0, must be from 1"),
        (["--horizon", "-1"], "--horizon", "is -1, must be from 0"),
        (["--horizon", "1000000000"], "--horizon", "is 1000000000, must be"),
        (["--patience", "0"], "--patience", "is 0.0, must be from"),
        (["--patience", "nan"], "--patience", "is nan, must be from"),
        (["--step-base-ms", "-1"], "--step-base-ms", "is -1.0, must be from 0.001"),
        (["--step-base-ms", "0"], "--step-base-ms", "is 0.0, must be from 0.001"),
        (["--step-base-ms", "nan"], "--step-base-ms", "is nan, must be"),
        (["--step-base-ms", "1e305"], "--step-base-ms", "is 1e+305, must be"),
        (["--step-us-per-token", "-0.1"], "--step-us-per-token", "is -0.1, must be from 0"),
        (["--step-us-per-token", "nan"], "--step-us-per-token", "is nan, must be"),
        (["--kv-capacity", "0"], "--kv-capacity", "is 0, must be from 1"),
        (["--kv-capacity", "1" + 30 * "0"], "--kv-capacity", "must be from 1"),
        (["--prefill-servers", "0"], "--prefill-servers", "is 0, must be from 1"),
        (["--prefill-base-ms", "-1"], "--prefill-base-ms", "is -1.0, must be from 0"),
        (["--prefill-us-per-token", "inf"], "--prefill-us-per-token", "is inf, must be"),
        (["--transfer-base-ms", "-1"], "--transfer-base-ms", "is -1.0, must be from 0"),
        (["--transfer-us-per-token", "nan"], "--transfer-us-per-token", "is nan, must be"),
        (["--pool-limit", "0"], "--pool-limit", "is 0, must be from 1"),
        (["--kv-peak-quantile", "0.9"], "--kv-peak-quantile", "needs --kv-capacity too"),
        (["--first-token", "prefill"], "--first-token", "needs --prefill-servers too"),
        (["--deadline", "0"], "--deadline", "is 0.0, must be from 0.001"),
        (["--deadline", "1e305"], "--deadline", "is 1e+305, must be"),
        (["--backlog", "500"], "segment", "never reached a steady state: .* smaller backlog"),
        (["--seed", "many"], "--seed", "is 'many', must be an integer"),
        (["--nonsense"], "--nonsense", "unrecognized arguments"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_setting_is_named_with_its_reason(
    arguments: list[str], flag: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused([*SMALL, *arguments], capsys)
    assert flag in line
    before, _, after = reason.partition(" .* ")
    assert before in line
    assert after in line


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,12,many\n", ":2: "),
        ('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n{"arrival_s"\n', ":2: "),
        ("hello\n", ":1: unknown trace format"),
        ("", ": the file is empty"),
    ],
    ids=["bad number", "bad JSON", "not a trace", "empty"],
)
def test_a_malformed_trace_is_named_with_its_line(
    content: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(content)
    assert f"{path}{place}" in refused(["simulate", "--trace", str(path)], capsys)


def test_a_trace_that_is_missing_or_a_directory_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent.csv")
    line = refused(["simulate", "--trace", absent], capsys)
    assert absent in line
    assert "No such file" in line
    line = refused(["simulate", "--trace", str(tmp_path)], capsys)
    assert str(tmp_path) in line
    assert "Is a directory" in line


def test_the_trace_and_the_command_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--trace" in refused(["simulate"], capsys)
    assert "COMMAND" in refused([], capsys)
    assert "'dance'" in refused(["dance"], capsys)


def test_outputs_that_cannot_be_written_are_refused_before_the_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("the simulation began")

    monkeypatch.setattr("balanceroute.proxy.cli.simulate.run_experiment", too_late)
    file = tmp_path / "file"
    file.write_text("mine")
    for arguments, words in (
        (
            ["--json", str(tmp_path / "absent" / "out.json")],
            ("--json", "absent", "not a directory"),
        ),
        (["--json", str(tmp_path)], ("--json", str(tmp_path), "is a directory")),
        (["--json", str(file / "out.json")], ("--json", str(file), "not a directory")),
        (["--plots", str(file)], ("--plots", str(file), "File exists")),
        (["--plots", str(file / "deeper")], ("--plots", str(file), "Not a directory")),
    ):
        line = refused([*SATURATED, *arguments], capsys)
        for word in words:
            assert word in line
    assert file.read_text() == "mine"


def test_a_refused_command_leaves_no_folder_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plots = tmp_path / "plots"
    refused([*SMALL, "--policy", "psychic", "--plots", str(plots)], capsys)
    refused([*SMALL, "--segments", "50", "--plots", str(plots)], capsys)
    assert not plots.exists()


def test_a_run_prints_its_table_and_its_terms(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SATURATED, "--segments", "2", "--policy", "jsq, br-0"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    words = unwrapped(captured.out)
    assert "Steady state: from a tenth of the requests finished to the last arrival." in words
    assert "head.jsonl: 200 requests, saturated, backlog 8, 2 ranks x batch 4" in words
    assert "Mean ± standard error of 2 segments." in words
    rows = [line.split("│")[1].strip() for line in captured.out.splitlines() if "│" in line]
    assert rows == ["jsq", "br-0"]


def test_the_json_echoes_what_every_default_came_to(tmp_path: Path) -> None:
    written = report([*SATURATED, "--policy", "jsq,br-h"], tmp_path)
    assert [row["policy"] for row in written["results"]] == ["jsq", "br-h"]
    config = written["config"]
    assert config["version"] == __version__
    expected = {
        "trace": HEAD,
        "rate": None,
        "backlog": 8,
        "concurrency": None,
        "skip": 0,
        "requests": 200,
        "requests_per_segment": 200,
        "requests_without_output": 0,
        "segments": 1,
        "seed": 0,
        "ranks": 2,
        "batch": 4,
        "step_base_ms": 30.0,
        "step_us_per_token": 0.2,
        "kv_capacity": None,
        "prefill_servers": None,
        "transfer_base_ms": 0.0,
        "transfer_us_per_token": 0.0,
        "pool_limit": None,
        "deadline": None,
        "policy": ["jsq", "br-h"],
        "predictor": "survival",
        "projection": "expected",
        "horizon": 40,
        "gamma": 0.8,
        "alpha": DEFAULTS.alpha,
        "beta": 2.0,
        "theta": 2,
        "window": WINDOW,
        "patience": PATIENCE_PER_SLOT * 2 * 4,
        "hold_s": DEFAULTS.hold_s,
        "paper": False,
    }
    assert {name: config[name] for name in expected} == expected
    assert not set(config) & {"json", "plots", "run"}


def test_the_json_echoes_what_was_given(tmp_path: Path) -> None:
    given = ["--beta", "9", "--theta", "0", "--patience", "7.5", "--projection", "point"]
    config = report([*SMALL, "--rate", "2.5", "--policy", "br-h", *given], tmp_path)["config"]
    assert config["beta"] == 9.0
    assert config["theta"] == 0
    assert config["patience"] == 7.5
    assert config["projection"] == "point"
    assert config["rate"] == 2.5
    assert config["backlog"] is None


def test_the_flags_reach_the_simulation_in_its_units(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def stop(*arguments: object, seed: int, **_: object) -> None:
        given.extend([*arguments, seed])
        raise ConfigError("seen enough")

    monkeypatch.setattr("balanceroute.proxy.cli.simulate.run_experiment", stop)
    command = (
        f"simulate --trace {HEAD} --backlog 8 --seed 7 --ranks 3 --batch 5 --step-base-ms 12.5 "
        "--step-us-per-token 0.5 --kv-capacity 9000 --prefill-servers 2 --prefill-base-ms 1.5 "
        "--prefill-us-per-token 4 --prefill-choice sticky --probe-limit none --prefix-cache 900 "
        "--prefill-waiting-limit 3 --prefill-running-limit none --prefill-share-limit 0.5 "
        "--prefiller-kv-tokens 7000 --prefix-block-tokens 16 --transfer-base-ms 2 --transfer-us-per-token 0.25 "
        "--pool-limit 9 --deep-pool --lease-s 1.5 --lease-margin-s 0.25 --deadline 2.5 "
        "--rank-speeds 1,0.5 --speeds-unknown --learn-speeds --rank-batches 5,4 --tokens-per-step 2.5 --speculation-seed 3 "
        "--pause-above 0.1 --policy fifo,br-h --predictor oracle "
        "--projection point --horizon 9 --gamma 0.5 --alpha 2 --beta 3 --theta 4 --window 6 "
        "--patience 11 --paper"
    )
    assert main(command.split()) == 2
    deployment, _, policies, settings, forecast, seed = given
    assert deployment == SimulatedDeployment(
        ranks=3,
        batch_limit=5,
        step_base_ns=12_500_000,
        step_ns_per_token=500.0,
        rank_kv_tokens=9_000,
        prefill=PrefillModel(2, 1_500_000, 4_000.0, cache_tokens=900, block_tokens=16),
        prefill_choice="sticky",
        scores=ScoreSettings(prefill_waiting_limit=3, prefill_share_limit=0.5),
        prefiller_kv_tokens=7_000,
        probe_limit=None,
        transfer_base_ns=2_000_000,
        transfer_ns_per_token=250.0,
        pool_limit=9,
        deep_pool=True,
        deadline_ns=2_500_000_000,
        lease_ns=1_500_000_000,
        lease_margin_ns=250_000_000,
        engines=SimulatedEngineOptions((1.0, 0.5), (5, 4), 2.5, 0.1, 3),
        speeds_known=False,
        learn_speeds=True,
    )
    assert policies == ["fifo", "br-h"]
    assert settings == PolicySettings(
        horizon_steps=9,
        gamma=0.5,
        alpha=2.0,
        beta=3.0,
        theta=4,
        window=6,
        patience=11.0,
        form=Form.POINT,
        paper=True,
    )
    assert forecast is FORECASTS["oracle"]
    assert seed == 7


def test_without_a_pace_the_trace_is_played_as_it_was_recorded(tmp_path: Path) -> None:
    assert report([*SMALL, "--policy", "jsq"], tmp_path)["config"]["rate"] == 1.0


def test_a_closed_loop_keeps_as_many_under_way_as_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = report([*SMALL, "--concurrency", "12", "--policy", "jsq,br-0"], tmp_path)
    assert written["config"]["concurrency"] == 12
    assert written["config"]["rate"] is None
    assert "200 requests, 12 under way, 2 ranks x batch 4" in unwrapped(capsys.readouterr().out)


def test_the_requests_are_those_behind_what_is_skipped(tmp_path: Path) -> None:
    arguments = [*SMALL, "--backlog", "8", "--policy", "jsq"]
    behind = report([*arguments, "--skip", "50"], tmp_path)["results"]
    assert behind != report(arguments, tmp_path)["results"]
    write_native(tmp_path / "rest.jsonl", read_trace(HEAD)[50:])
    rest = report([*arguments, "--trace", str(tmp_path / "rest.jsonl")], tmp_path)["results"]
    for row in (*behind, *rest):
        del row["dispatch_us_p50"], row["dispatch_us_p99"]
    assert behind == rest


@pytest.mark.parametrize(
    "given", [{}, {"horizon": 9}, {"gamma": 0.5}, {"beta": 3.0}, {"window": 20}, {"horizon": 0}]
)
def test_the_papers_form_is_at_its_operating_point_but_for_what_is_given(
    tmp_path: Path, given: dict[str, float]
) -> None:
    flags = [word for name, value in given.items() for word in (f"--{name}", f"{value}")]
    config = report([*SMALL, "--policy", "br-h", "--paper", *flags], tmp_path)["config"]
    paper = {"horizon": 80, "gamma": 0.9, "beta": 48.0, "window": 8, "projection": "point"}
    assert {name: config[name] for name in paper} == paper | given


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--policy jsq --paper", "--paper has no effect with --policy jsq"),
        ("--policy jsq,br-0 --horizon 9", "--horizon has no effect with --policy jsq"),
        ("--policy br-h --aimd-ttft-s 3", "--aimd-ttft-s has no effect without --aimd"),
        ("--policy jsq,br-0 --paper --window 9", ""),
        ("--policy br-h --projection point --aimd post5 --aimd-ttft-s 3", ""),
    ],
)
def test_what_has_no_effect_with_any_policy_is_told(
    capsys: pytest.CaptureFixture[str], given: str, told: str
) -> None:
    assert main([*SMALL, *given.split()]) == 0
    warnings = [one for one in capsys.readouterr().err.splitlines() if "has no effect" in one]
    assert warnings == ([f"balanceroute: warning: {told}"] if told else [])


def test_infinite_patience_is_a_word_in_the_json(tmp_path: Path) -> None:
    written = report([*SATURATED, "--policy", "br-0", "--patience", "inf"], tmp_path)
    assert written["config"]["patience"] == "inf"
    (row,) = written["results"]
    assert row["steps"] > 0


@pytest.mark.parametrize(
    ("arguments", "projection"),
    [
        (["--paper"], "point"),
        (["--paper", "--projection", "expected"], "expected"),
        (["--projection", "point"], "point"),
        (["--predictor", "oracle"], "expected"),
        (["--predictor", "none"], "expected"),
        (["--horizon", "0"], "expected"),
        (["--gamma", "1"], "expected"),
        (["--kv-capacity", "30000"], "expected"),
        (["--prefill-servers", "2"], "expected"),
        (["--deadline", "0.5"], "expected"),
        (["--pool-limit", "6"], "expected"),
        (["--rank-speeds", "1,1.5", "--rank-batches", "4,3"], "expected"),
        (["--tokens-per-step", "3", "--speculation-seed", "7"], "expected"),
        (["--pause-above", "0.2"], "expected"),
        (["--transfer-base-ms", "2", "--transfer-us-per-token", "1"], "expected"),
        (["--policy", "random,round-robin,power-of-two,br-0-bypass"], "expected"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_mode_runs(arguments: list[str], projection: str, tmp_path: Path) -> None:
    written = report([*SATURATED, "--policy", "br-0,br-h", *arguments], tmp_path)
    assert written["config"]["projection"] == projection
    for row in written["results"]:
        assert 0.0 < row["idle_fraction"] < 1.0
        assert row["output_tokens_per_s"] > 0.0


def test_requests_without_output_are_counted_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(
            f'{{"arrival_s": {i}, "prompt_tokens": 9, "output_tokens": {0 if i % 5 == 0 else 40}}}\n'
            for i in range(50)
        )
    )
    written = report(["simulate", "--trace", str(trace), "--policy", "jsq"], tmp_path)
    assert written["config"]["requests_without_output"] == 10
    assert written["config"]["requests_per_segment"] == 40
    assert "10 requests without output left out" in unwrapped(capsys.readouterr().out)


def test_pictures_are_written_where_told(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "plots"
    assert main([*SATURATED, "--policy", "jsq,br-0", "--plots", str(folder)]) == 0
    pictures = sorted(folder.iterdir())
    assert pictures
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_the_help_and_the_version_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["--version"], __version__), (["simulate", "--help"], "--trace")):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 0
        text = capsys.readouterr().out
        assert words in text
        assert "None" not in text


def test_a_process_whose_output_is_piped_prints_plain_text_and_no_progress() -> None:
    plain = {"FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CLICOLOR_FORCE"}
    command = [*SATURATED, "--trace", str(PUBLIC), "--policy", "jsq,br-0"]
    result = subprocess.run(
        [sys.executable, "-m", "balanceroute.proxy", *command],
        capture_output=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name not in plain},
    )
    assert result.returncode == 0
    assert result.stderr == b""
    assert b"\x1b" not in result.stdout
    assert b"\r" not in result.stdout
    assert "br-0" in result.stdout.decode()


def test_the_proxy_starts_without_what_it_does_not_run() -> None:
    program = """
import contextlib, sys
from balanceroute.proxy.__main__ import main
with contextlib.suppress(SystemExit):
    main(["serve", "--help"])
print(*sys.modules, file=sys.stderr)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, text=True
    )
    loaded = set(result.stderr.split())
    assert "balanceroute.proxy.live.settings.declared" in loaded
    for package in ("emulate", "sim", "replay", "validate"):
        assert f"balanceroute.proxy.{package}" not in loaded


def test_a_process_with_a_bad_setting_exits_with_2() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "balanceroute.proxy", *SMALL, "--ranks", "0"],
        capture_output=True,
        check=False,
        text=True,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "balanceroute: --ranks is 0, must be from 1 to 10000\n"


def test_an_interrupt_while_a_command_is_imported_shows_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("balanceroute.proxy.cli.command_line.import_module", interrupted)
    assert main(SMALL) == 130
    assert capsys.readouterr() == ("", "")


def test_an_interrupt_prints_the_policies_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interrupted comparison printed nothing."""

    def interrupted(*arguments: Any, **options: Any) -> Iterator[PolicyResult]:
        results = run_experiment(*arguments, **options)
        yield next(results)
        raise KeyboardInterrupt

    monkeypatch.setattr("balanceroute.proxy.cli.simulate.run_experiment", interrupted)
    out = tmp_path / "out.json"
    command = [*SATURATED, "--policy", "fifo,jsq,br-0", "--json", str(out)]
    assert main(command) == 130
    text = unwrapped(capsys.readouterr().out)
    assert "Interrupted before the end of jsq, br-0." in text
    written = json.loads(out.read_text())
    assert [row["policy"] for row in written["results"]] == ["fifo"]
    assert written["config"]["interrupted"] is True
    assert written["results"][0]["stderr"]["idle_fraction"] is None


def test_an_output_that_cannot_be_written_is_named_and_not_left_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk was told without the path, and an empty file stayed."""

    def full(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "out.json"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert main([*SATURATED, "--policy", "fifo", "--json", str(out)]) == 2
    assert f"--json: {out}: No space left on device" in capsys.readouterr().err
    assert not out.exists()


def test_the_pictures_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SATURATED, "--policy", "fifo", "--plots", str(tmp_path)]) == 0
    named = capsys.readouterr().out.rpartition("Pictures: ")[2].strip().split(", ")
    assert sorted(named) == sorted(str(path) for path in tmp_path.glob("*.png"))
    assert named


def test_a_dash_for_the_json_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """It made a file of that name."""
    assert main([*SATURATED, "--policy", "fifo", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert [row["policy"] for row in json.loads(captured.out)["results"]] == ["fifo"]
    assert "imbalance" in captured.err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["simulate", "--trace", HEAD, "--rnaks", "4"], "--rnaks; did you mean '--ranks'?"),
        (["simulate", "--trace", HEAD, "--rank", "4"], "--rank; did you mean '--ranks'?"),
        (["serve", "--bach=7"], "--bach=7; did you mean '--batch'?"),
        (["topology", "check", "x.toml", "--strickt"], "unrecognized arguments: --strickt"),
        (["simulate", "--rnaks", "4"], "--rnaks; did you mean '--ranks'?"),
        (["simulat"], "invalid choice: 'simulat'; did you mean 'simulate'?"),
        (["--versoin"], "unrecognized arguments: --versoin; did you mean '--version'?"),
        (
            ["serve", "--policy", "brh"],
            "--policy is 'brh', which is no policy; did you mean 'br-h'?",
        ),
        (["serve", "--direct", "x"], "invalid choice: 'x'; known: auto, prefill, decode, refuse"),
        (["simulate", "--trace", HEAD, "--policy", "brh"], "did you mean 'br-h'?"),
    ],
)
def test_a_misspelt_word_is_told_apart_and_no_flag_is_abbreviated(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--rank` was `--ranks`, and `--rnaks` printed 20 lines about nothing."""
    line = refused(words, capsys)
    assert meant in line
    assert line.startswith((f"balanceroute {words[0]}", "balanceroute: "))


def test_a_stream_that_knows_few_characters_gets_a_table_all_the_same() -> None:
    """It got a traceback for a ±."""
    command = [sys.executable, "-m", "balanceroute.proxy", *SATURATED, "--policy", "fifo,jsq"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"fifo" in done.stdout


def test_a_mix_is_reported_by_tenant_and_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mix, out = tmp_path / "mix.toml", tmp_path / "out.json"
    mix.write_text(
        f'[[part]]\ntrace = "{Path(HEAD).resolve()}"\ntenant = "a"\nrequests = 100\n'
        f'[[part]]\ntrace = "{Path(HEAD).resolve()}"\ntenant = "b"\nclass = 2\nrequests = 100\n'
    )
    flags = ["--policy", "fifo", "--ttft-target", "3", "--queue-limit", "9"]
    assert main(["simulate", "--mix", str(mix), *flags, "--json", str(out)]) == 0
    assert "good: TTFT up to 3 s" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert (report["config"]["trace"], report["config"]["mix"]) == (str(mix), True)
    groups = report["results"][0]["groups"]
    assert [(group["tenant"], group["class"]) for group in groups] == [("a", 0), ("b", 2)]
    assert sum(group["share_kv"] for group in groups) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--mix", "absent.toml"], "absent.toml: No such file or directory"),
        (["--mix", HEAD, "--format", "jsonl"], "--format and --columns are those of a --trace"),
        (["--mix", HEAD, "--sessions"], "--sessions is that of a --trace"),
        (["--mix", HEAD, "--trace", HEAD], "not allowed with argument"),
    ],
)
def test_a_mix_that_cannot_be_read_is_named(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refused(["simulate", *flags], capsys)


def test_a_trace_of_one_tenant_has_no_table_of_them(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*SATURATED, "--policy", "fifo", "--json", str(out)]) == 0
    assert "groups" not in json.loads(out.read_text())["results"][0]


def test_a_file_that_is_not_there_is_named_first(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["serve", "--topology"], ["topology", "check"], ["up"]):
        said = refused([*words, "absent.toml"], capsys)
        assert said == "balanceroute: absent.toml: No such file or directory"


def test_a_flag_that_is_an_argument_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["up", "--topology", "emulated-2p8d"], capsys)
    assert "unrecognized arguments: --topology; write TOPOLOGY alone (see" in said


def test_a_piped_command_tells_where_it_is_every_half_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [0.0]
    piped = PipedProgress(lambda: now[0])
    for second in range(70):
        now[0] = float(second)
        piped.write(f"br-h: {second} of 70 requests")
    assert capsys.readouterr().err.splitlines() == [
        "balanceroute: br-h: 30 of 70 requests",
        "balanceroute: br-h: 60 of 70 requests",
    ]
