"""The bench of the hooks runs: what no check runs, rots."""

from pathlib import Path

import pytest
from tests.script import run_script, script


def test_the_share_of_a_real_step_is_that_of_hooks_and_writer() -> None:
    pairs = [
        [{"step_us": 1000.0, "timers_us": 2.0}, {"step_us": 1010.0, "timers_us": 2.0 + added}]
        for added in (7.0, 8.0, 9.0, 8.0, 300.0)
    ]
    row = script("bench.step_trace").summary(16, {"pairs": pairs, "steps": 100, "writer_us": 1.0})
    assert (row["requests"], row["steps"], row["step_us"]) == (16, 100, 1000.0)
    assert row["hooks_us"] == 8.0
    assert row["share"] == pytest.approx(0.009)
    assert 0.008 <= row["share_low"] <= row["share"] <= row["share_high"]
    assert row["ratio"] == row["ratio_low"] == row["ratio_high"] == pytest.approx(1.01)


def test_without_the_engines_venv_the_bench_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = script("bench.step_trace")
    monkeypatch.setattr(bench, "PYTHON", tmp_path / "bin" / "python")
    with pytest.raises(SystemExit, match="make test-vllm"):
        run_script("bench step-trace")
