"""The bench of the hooks runs: what no check runs, rots."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "scripts" / "bench_step_trace.py"


def test_the_bench_prints_a_cost_per_batch_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("bench_step_trace", PATH)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(["--steps", "200", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["requests"] for row in rows] == [16, 256]
    assert capsys.readouterr().out.count("µs per step") == 2
