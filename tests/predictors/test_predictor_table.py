"""The table of all predictors on all public traces is one command, and this is it."""

import json
from pathlib import Path

import pytest
from tests.script import ROOT, run_script, script

from balanceroute.predictors import files

table = script("reproduce.predictors")


def test_a_row_for_each_predictor_and_trace(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    out = tmp_path / "table.json"
    words = f"--requests 400 --kinds survival exact-match --json {out}"
    assert run_script(f"reproduce predictor-table {words}") == 0
    rows = json.loads(out.read_text())
    assert [(row["trace"], row["predictor"]) for row in rows] == [
        (trace.name, kind) for trace in table.JUDGED for kind in ("survival", "exact-match")
    ]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(rows)
    assert {line.count("|") for line in lines} == {len(table.COLUMNS) + 1}
    for row, line in zip(rows, lines[2:], strict=True):
        assert row["train_requests"] + row["judged_requests"] == 400
        assert f"| {row['brier']:.4f} |" in line
        if row["predictor"] != table.BASELINE:
            gain = row["better_by"]["brier"]
            told = f"{gain['value']:+.4f} ±{gain['stderr']:.4f}"
            assert told.replace("-", "−") in line


def test_all_predictors_are_compared_on_traces_that_are_there() -> None:
    assert set(files.KINDS) == {"survival", "exact-match", "gbdt"}
    assert all((ROOT / trace).is_file() for trace in table.JUDGED)
