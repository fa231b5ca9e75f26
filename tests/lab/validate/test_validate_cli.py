"""The whole command, on runs whose answers are known."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from balanceroute.engine_patch.reader import read_steps
from balanceroute.proxy.__main__ import main
from balanceroute.proxy.cli import simulate
from balanceroute.proxy.lab.validate.traces import timeline_of

if TYPE_CHECKING:
    from tests.lab.validate.conftest import WriteLog, WriteSteps

MS = 1_000_000
START_NS = 1_795_000_000_000_000_000
BASE_MS, US_PER_TOKEN, LAG_MS = 12.0, 0.25, 60
NAMES = ("http://10.0.0.1:8000@0", "http://10.0.0.1:8000@1")


def header(rank: int, **more: Any) -> dict[str, Any]:
    known = {"port": 8000, "dp_rank": rank, "dp_size": 2, "barrier": True, "dp_group": "h:1"}
    return known | more


@pytest.fixture
def log_of_two(write_steps: "WriteSteps", write_log: "WriteLog") -> Path:
    """Two ranks in lock step for 40 s, and a proxy that is 60 ms late and right otherwise."""
    rng = np.random.default_rng(1)
    loads = np.maximum(1, 40_000 + np.cumsum(rng.integers(-900, 900, (1500, 2)), axis=0))
    step_ms = BASE_MS + US_PER_TOKEN / 1e3 * loads.max(axis=1)
    prefill = [int(step % 50 == 0) * 512 for step in range(1500)]
    step_ms[::50] += 100  # A chunk of a prompt in between, which the line must not see.
    timelines = [
        timeline_of(
            read_steps(
                write_steps(
                    f"dp{rank}",
                    loads[:, rank].tolist(),
                    step_ms.tolist(),
                    prefill=prefill,
                    in_barrier=True,
                    header=header(rank),
                )
            )
        )
        for rank in (0, 1)
    ]
    times_ns = np.arange(START_NS, int(timelines[0].end_ns[-1]), 100 * MS)
    started = {
        name: np.nan_to_num(one.loads_at(times_ns - LAG_MS * MS))
        for name, one in zip(NAMES, timelines, strict=True)
    }
    bound = {name: loads * 1.5 for name, loads in started.items()}
    return write_log(times_ns, started, bound)


def validated(tmp_path: Path, log: Path, *words: str) -> Any:
    out = tmp_path / "out.json"
    steps = tmp_path / "steps"
    command = ["validate", "--steps", str(steps), "--log", str(log), "--json", str(out), *words]
    assert main(command) == 0
    return json.loads(out.read_text())


def test_figures_go_to_standard_output_alone(
    tmp_path: Path, log_of_two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["validate", "--steps", str(tmp_path / "steps"), "--log", str(log_of_two)]
    assert main([*words, "--json", "-"]) == 0
    told = capsys.readouterr()
    assert [rank["rank"] for rank in json.loads(told.out)["ranks"]] == list(NAMES)
    assert "lag" in told.err


def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["validate", "--steps", "absent", "--log", "absent"]
    assert main([*words, "--json", str(tmp_path / "no" / "folder.json")]) == 2
    assert "--json" in capsys.readouterr().err


def test_known_answers_are_found(
    tmp_path: Path, log_of_two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = validated(tmp_path, log_of_two, "--plots", str(tmp_path / "plots"))
    assert [rank["rank"] for rank in report["ranks"]] == list(NAMES)
    assert [rank["file"] for rank in report["ranks"]] == ["dp0.steps", "dp1.steps"]
    for rank in report["ranks"]:
        assert abs(rank["lag"]["lag_ms"] - LAG_MS) <= 15
        assert rank["lag"]["tokens_p50"] == 0 < rank["lag"]["unshifted_tokens_p50"]
        assert 0 < rank["started"]["p50"] < 0.03
    assert report["started"]["bias"] == pytest.approx(0, abs=0.005)
    assert report["bound"]["bias"] == pytest.approx(0.5, abs=0.01)
    (unit,) = report["units"]
    assert unit["ranks"] == list(NAMES)
    assert unit["idle"]["steps"] == 1500 - 30
    assert 0 < unit["idle"]["time"] < unit["idle"]["tokens"] < 0.5
    fit = report["fit"]
    assert (fit["base_ms"], fit["us_per_token"]) == pytest.approx((BASE_MS, US_PER_TOKEN), rel=1e-4)
    assert fit["r2"] == pytest.approx(1)
    printed = capsys.readouterr().out
    assert "--step-base-ms 12 --step-us-per-token 0.25" in printed
    pictures = {path.name for path in (tmp_path / "plots").iterdir()}
    assert pictures == {"mirror.png", "mirror_error.png", "step_time.png"}


def test_the_printed_line_is_a_command_that_parses(
    tmp_path: Path, log_of_two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    validated(tmp_path, log_of_two)
    line = capsys.readouterr().out.splitlines()[-1].split()
    parser = argparse.ArgumentParser()
    simulate.add_parser(parser.add_subparsers())
    chosen = parser.parse_args([*line[1:], "--trace", "x"])
    assert chosen.step_base_ms == pytest.approx(BASE_MS, rel=1e-4)
    assert chosen.step_us_per_token == pytest.approx(US_PER_TOKEN, rel=1e-4)


def test_of_a_barrier_without_all_its_ranks_nothing_is_told(
    tmp_path: Path, log_of_two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "steps" / "dp1.steps").unlink()
    report = validated(tmp_path, log_of_two)
    assert report["without_trace"] == [NAMES[1]]
    assert report["ranks"][0]["started"]["samples"] > 300
    (unit,) = report["units"]
    assert (unit["whole"], unit["idle"], unit["fit"]) == (False, None, None)
    printed = capsys.readouterr().out
    assert f"without a trace: {NAMES[1]}" in printed
    assert "nothing is told of it" in printed
    assert "too few steps without prefill" in printed


def test_engines_without_a_barrier_are_fitted_one_by_one(
    tmp_path: Path, write_steps: "WriteSteps", write_log: "WriteLog"
) -> None:
    names = ["http://h:8201", "http://h:8202"]
    for port, base_ms in ((8201, 10.0), (8202, 20.0)):
        loads = np.arange(1_000, 31_000, 100)
        step_ms = base_ms + US_PER_TOKEN / 1e3 * loads
        write_steps(str(port), loads.tolist(), step_ms.tolist(), header={"port": port})
    times_ns = START_NS + np.arange(20) * 100 * MS
    log = write_log(times_ns, dict.fromkeys(names, [0.0] * 20))
    report = validated(tmp_path, log, "--min-tokens", "1")
    assert [unit["ranks"] for unit in report["units"]] == [[name] for name in names]
    assert [unit["fit"]["base_ms"] for unit in report["units"]] == pytest.approx([10, 20])
    assert all(unit["idle"] is None for unit in report["units"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--min-tokens", "0"], "--min-tokens is 0, must be from 1 to 1e+12"),
        (["--map", "x"], "--map is 'x', must be RANK=FILE"),
        (["--map", "x="], "--map is 'x=', must be RANK=FILE"),
        (["--map", "x=y", "--map", "x=z"], "--map names 'x' twice"),
        (["--map", "x=dp0.steps"], "--map: no rank is called 'x'"),
        (["--steps", "absent"], "absent: not a directory"),
        (["--log", "absent"], "absent"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    tmp_path: Path,
    log_of_two: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    command = ["validate", "--steps", str(tmp_path / "steps"), "--log", str(log_of_two), *words]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("balanceroute: ")
    assert error.count("\n") == 1
    assert reason in error


def test_files_of_different_runs_are_told(
    tmp_path: Path,
    write_steps: "WriteSteps",
    write_log: "WriteLog",
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_steps("a", [5], [10], header={"port": 80})
    log = write_log(np.array([START_NS + 10**11]), {"http://h": [5.0]})
    command = ["validate", "--steps", str(tmp_path / "steps"), "--log", str(log)]
    assert main(command) == 2
    assert "no trace fits a rank" in capsys.readouterr().err
    assert main([*command, "--map", "http://h=a.steps"]) == 2
    assert "no time in common" in capsys.readouterr().err
