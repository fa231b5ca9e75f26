"""`balanceroute model-router`: a training and a judgement from end to end, and faults of the input."""

import json
from pathlib import Path

import pytest
from tests.command_line import refused

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.cli import model_router
from balanceroute.traces import TraceRequest, write_native


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.jsonl"
    write_native(
        path,
        [
            TraceRequest(arrival_ns=10**8 * place, prompt_tokens=500 + place, output_tokens=20)
            for place in range(50)
        ],
    )
    return path


@pytest.mark.parametrize(
    "aim", [[], pytest.param(["--window-mean", "0.98"], marks=pytest.mark.extended)]
)
def test_weights_are_trained_and_judged(
    aim: list[str],
    tmp_path: Path,
    trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(model_router, "RATES", (4.0, 16.0))
    monkeypatch.setattr(model_router, "_BURSTY_REQUESTS", 200)
    monkeypatch.setattr(model_router, "_LEAST_REQUESTS", 100)
    weights, pictures, figures = tmp_path / "w.npz", tmp_path / "plots", tmp_path / "out.json"
    common = ["--trace", str(trace), "--plots", str(pictures)]
    train = ["model-router", "train", "--out", str(weights), "--requests", "2000"]
    assert main([*train, *aim, *common]) == 0
    assert "Trained on 2,000 requests" in capsys.readouterr().out
    evaluate = ["model-router", "evaluate", "--weights", str(weights), "--json", str(figures)]
    assert main([*evaluate, *common]) == 0
    table = capsys.readouterr().out
    assert "ddqn" in table
    found = json.loads(figures.read_text())
    assert list(found) == ["always small", "always medium", "always large", "greedy", "ddqn"]
    assert found["always large"]["mean_by_rate"]["4.0"] == 1.0
    assert sorted(path.name for path in pictures.iterdir()) == ["mix.png", "training.png"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["train"], "required: --out"),
        (["train", "--out", "/nowhere/w.npz"], "not a directory"),
        (["train", "--out", "w.npz", "--requests", "5"], "--requests"),
        (["train", "--out", "w.npz", "--window-mean", "1.5"], "--window-mean"),
        (["train", "--out", "w.npz", "--trace", "none.csv"], "none.csv"),
        (["evaluate", "--weights", "none.npz"], "none.npz"),
        (["evaluate", "--scenario", "none.toml"], "none.toml"),
        (["teach"], "invalid choice"),
    ],
)
def test_faults_of_the_input_end_with_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reason in refused(["model-router", *arguments], capsys)
