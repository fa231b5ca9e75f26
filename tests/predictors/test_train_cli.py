"""`balanceroute train` and `evaluate`: a trace or a log in, a predictor and its scores out."""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import refused, report, unwrapped

from balanceroute import __version__
from balanceroute.predictors import PastRequest, Survival, files
from balanceroute.predictors import kinds as registry
from balanceroute.predictors.evaluation import GAINS
from balanceroute.predictors.past import past_requests
from balanceroute.proxy.__main__ import main
from balanceroute.traces import TraceRequest, write_native

TRACE = "trace.jsonl"  # In the folder where each test runs.
LOG = "requests.log"
MODEL = "model.json"
TRAIN = ["train", "survival", "--trace", TRACE, "--out", "new.json"]
EVALUATE = ["evaluate", "--trace", TRACE, "--model", MODEL]
needs_lightgbm = pytest.mark.skipif(
    find_spec("lightgbm") is None, reason="lightgbm is not installed"
)


def traced(count: int = 400) -> list[TraceRequest]:
    """Return requests whose prompts tell how long their answers are."""
    rng = random.Random(7)
    requests = []
    for number in range(count):
        kind = rng.randrange(8)
        output = 15 + 20 * kind + rng.randrange(8)
        requests.append(TraceRequest(number * 400_000_000, 600 + kind, output, (kind, 90 + kind)))
    return requests


def logged(request: TraceRequest, outcome: str = "ok") -> str:
    line = {
        "arrival_s": 1.7e9 + request.arrival_ns / 1e9,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "choices": 1,
        "outcome": outcome,
        "duration_s": 0.05 * request.output_tokens,
        "max_tokens": 400,
        "prompt_estimate": request.prompt_tokens,
        "keys": [f"{request.hash_ids[0]:016x}"],
    }
    return json.dumps(line) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("train")
    requests = traced()
    write_native(path / TRACE, requests)
    (path / LOG).write_text(
        "".join(logged(request) for request in requests) + logged(requests[0], "cancelled")
    )
    # From the first half alone.
    past = past_requests(requests[:200])
    files.save(path / MODEL, registry.train("exact-match", past))
    return path


@pytest.fixture(autouse=True)
def _in_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def table_of(printed: str) -> dict[str, list[str]]:
    """Return the cells of each row of a table, by the first."""
    rows = ([cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines())
    return {row[0]: row[1:] for row in rows if row}


@pytest.mark.parametrize("source", [["--trace", TRACE], ["--log", LOG]], ids=["trace", "log"])
@pytest.mark.parametrize(
    "kind", ["survival", "exact-match", pytest.param("gbdt", marks=needs_lightgbm)]
)
def test_a_predictor_is_trained_checked_and_written(
    kind: str, source: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "predictor.json"
    assert main(["train", kind, *source, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert files.read_state(out).kind == kind
    assert files.load(out).state() == files.read_state(out)
    words = unwrapped(captured.out)
    tokens = sum(request.output_tokens for request in traced())
    assert f"trained {kind} on 400 requests of {source[1]} that emitted {tokens:,} tokens" in words
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    texts = sorted(
        path for path in tmp_path.iterdir() if path.name.startswith("predictor.") and path != out
    )
    names = words.partition("written to ")[2].partition(";")[0].split(", ")
    assert names[0] == str(out)
    assert sorted(names[1:]) == [str(path) for path in texts]
    assert f"; {size / 1e3:,.1f} kB" in words
    assert "Check on the last 20 % of the requests" in words
    assert "what was written is trained on all" in words
    rows = table_of(captured.out)
    assert list(rows) == list(dict.fromkeys(["none", "survival", kind]))
    if kind != "survival":
        # Its prompt tells how long an answer is: far better than the length alone.
        gain, _, error = rows[kind][6].partition(" ±")
        assert float(gain) > 4 * float(error) > 0


def test_what_is_written_has_learned_from_all_of_the_requests(tmp_path: Path) -> None:
    with_check, without = tmp_path / "one.json", tmp_path / "other.json"
    assert main(["train", "exact-match", "--trace", TRACE, "--out", str(with_check)]) == 0
    words = ["train", "exact-match", "--trace", TRACE, "--out", str(without), "--holdout", "0"]
    assert main(words) == 0
    assert files.read_state(with_check) == files.read_state(without)
    expected = registry.train("exact-match", past_requests(traced()))
    assert files.read_state(without) == expected.state()


def test_the_check_learns_from_nothing_that_it_is_judged_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[PastRequest]] = []

    def train(kind: str, past: list[PastRequest], **_: object) -> object:
        given.append(past)
        return Survival.of_past(past)

    monkeypatch.setattr("balanceroute.predictors.kinds.train", train)
    words = ["--out", str(tmp_path / "p.json"), "--holdout", "0.25"]
    assert main(["train", "exact-match", "--trace", TRACE, *words]) == 0
    past = past_requests(traced())
    known = [request for request in past if request.finished_s <= past[300].arrival_s]
    assert given == [known, past]


def test_without_a_holdout_there_is_no_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, "--out", str(tmp_path / "p.json"), "--holdout", "0"]) == 0
    assert "Check" not in capsys.readouterr().out


def test_the_requests_are_those_chosen(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    assert main([*TRAIN, "--out", str(out), "--skip", "100", "--requests", "50"]) == 0
    expected = registry.train("survival", past_requests(traced()[100:150]))
    assert files.read_state(out) == expected.state()


def test_the_flags_reach_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def train(kind: str, past: Sequence[object], **options: Any) -> object:
        del options["progress"]
        given.extend([kind, len(past), options])
        return Survival.of_past([])

    monkeypatch.setattr("balanceroute.predictors.kinds.train", train)
    words = ["--holdout", "0", "--horizon", "64", "--seed", "9"]
    assert main(["train", "gbdt", "--log", LOG, "--out", str(tmp_path / "p"), *words]) == 0
    assert given == ["gbdt", 400, {"horizon_steps": 64, "seed": 9}]


def test_a_token_takes_as_long_as_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def recorded(trace: list[TraceRequest], *, token_s: float) -> object:
        given.append(token_s)
        return past_requests(trace, token_s=token_s)

    monkeypatch.setattr("balanceroute.proxy.cli.trace_flags.past_requests", recorded)
    for words in ([], ["--token-ms", "20"]):
        assert main([*TRAIN, "--out", str(tmp_path / "p"), "--holdout", "0", *words]) == 0
    assert list(dict.fromkeys(given)) == [0.05, 0.02]


def test_a_predictor_may_be_replaced_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.json"
    for kind in ("survival", "exact-match"):
        assert main(["train", kind, "--trace", TRACE, "--out", str(out), "--holdout", "0"]) == 0
        assert files.read_state(out).kind == kind
    capsys.readouterr()
    before = Path(TRACE).read_bytes()
    line = refused([*TRAIN, "--out", TRACE], capsys)
    assert f"--out: {TRACE} exists and is not a predictor" in line
    assert Path(TRACE).read_bytes() == before


def test_gbdt_without_its_library_is_refused_before_the_trace_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    line = refused(["train", "gbdt", "--trace", "absent", "--out", "p.json"], capsys)
    assert "pip install '.[gbdt]'" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*TRAIN, "--holdout", "1"], "--holdout is 1.0, must be from 0 to 0.9"),
        ([*TRAIN, "--holdout", "nan"], "--holdout is nan, must be"),
        ([*TRAIN, "--horizon", "0"], "--horizon is 0, must be from 1"),
        ([*TRAIN, "--seed", "-1"], "--seed is -1, must be from 0"),
        ([*TRAIN, "--requests", "0"], "--requests is 0, must be from 1"),
        ([*TRAIN, "--skip", "-1"], "--skip is -1, must be from 0"),
        ([*TRAIN, "--skip", "400"], f"{TRACE}: none of the requests chosen has any output"),
        ([*TRAIN, "--token-ms", "-5"], "--token-ms is -5.0, must be from 0"),
        ([*TRAIN, "--format", "parquet"], "--format: invalid choice"),
        ([*TRAIN, "--log", LOG], "--log: not allowed with argument --trace"),
        ([*TRAIN, "--out", "absent/p.json"], "--out: absent is not a directory"),
        ([*TRAIN, "--out", "."], "--out: . is a directory"),
        ([*TRAIN, "--requests", "1"], "1 requests cannot be cut at 0.8 of them"),
        ([*TRAIN, "--token-ms", "90000"], "none of 400 requests had ended"),
        (["train", "oracle", "--trace", TRACE, "--out", "p"], "invalid choice: 'oracle'"),
        (["train", "survival", "--out", "p"], "--trace --log is required"),
        (["train", "survival", "--trace", TRACE], "required: --out"),
        (["train", "survival", "--log", TRACE, "--out", "p"], f"{TRACE}:1: "),
        (["train", "survival", "--log", "absent", "--out", "p"], "absent: No such file"),
        (
            ["train", "survival", "--log", LOG, "--token-ms", "50", "--out", "p"],
            "--token-ms is of traces",
        ),
        (
            ["train", "survival", "--log", LOG, "--format", "jsonl", "--out", "p"],
            "--format is of traces",
        ),
        ([*EVALUATE, "--train-share", "0.99"], "--train-share is 0.99, must be from 0 to 0.95"),
        ([*EVALUATE, "--train-share", "0.5", "--skip", "9"], "--train-share stands instead of"),
        ([*EVALUATE, "--train-share", "0.9", "--requests", "1"], "leaves none of 1 requests"),
        ([*EVALUATE, "--age-step", "0"], "--age-step is 0, must be from 1"),
        ([*EVALUATE, "--horizon", "1000000"], "--horizon is 1000000, must be"),
        ([*EVALUATE, "--model", MODEL], f"--model: {MODEL} is given twice"),
        ([*EVALUATE, "--model", TRACE], f"{TRACE}: not JSON, or cut off"),
        ([*EVALUATE, "--model", "absent"], "absent: cannot be read: No such file"),
        ([*EVALUATE, "--json", "absent/r.json"], "--json: absent is not a directory"),
        ([*EVALUATE, "--json", "."], "--json: . is a directory"),
        ([*EVALUATE, "--json", TRACE], f"--json: {TRACE} is what is to be read"),
        ([*EVALUATE, "--json", f"./{MODEL}"], f"--json: {MODEL} is what is to be read"),
        ([*EVALUATE, "--plots", TRACE], f"--plots: {TRACE} is not a directory"),
        ([*EVALUATE, "--plots", f"{TRACE}/deeper"], "Not a directory"),
        ([*EVALUATE, "--nonsense"], "unrecognized arguments"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_setting_is_named_with_its_reason(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(arguments, capsys)
    assert not Path("new.json").exists()


def test_what_cannot_be_written_is_found_out_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_late(*_: object) -> None:
        raise AssertionError("the trace was read")

    for command in ("train", "evaluate"):
        monkeypatch.setattr(f"balanceroute.proxy.cli.{command}.read_past", too_late)
    refused([*TRAIN, "--out", "absent/p.json"], capsys)
    refused([*TRAIN, "--out", TRACE], capsys)
    refused([*EVALUATE, "--json", "absent/r.json"], capsys)
    refused([*EVALUATE, "--plots", TRACE], capsys)
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused([*EVALUATE, "--plots", "pictures"], capsys)
    assert "--plots needs the extra plots" in line
    assert not Path("pictures").exists()


def test_the_models_stand_beside_two_that_need_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = report([*EVALUATE, "--train-share", "0.5"], tmp_path)
    captured = capsys.readouterr()
    assert captured.err == ""
    rows = {row["predictor"]: row for row in written["results"]}
    assert list(rows) == list(table_of(captured.out)) == ["none", "survival", MODEL]
    for row in rows.values():
        assert row["rows"] == rows["none"]["rows"]
        assert row["baseline"] == "survival"
        assert list(row["better_by"]) == list(GAINS)
        assert sum(row["reliability"]["rows"]) == row["rows"]
    assert rows["none"]["auc"] == 0.5
    gain = rows[MODEL]["better_by"]["brier"]
    assert gain["value"] > 4 * gain["stderr"] > 0
    assert gain["value"] == pytest.approx(rows["survival"]["brier"] - rows[MODEL]["brier"])
    words = unwrapped(captured.out)
    assert f"{rows['none']['rows']:,} questions about" in words
    assert "within H = 40 steps" in words
    assert "survival begins with" in words
    assert "All learned from the requests that ended." in words


def test_survival_begins_with_what_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", "--trace", TRACE, "--frozen"]
    skipped = report([*arguments, "--skip", "200"], tmp_path)["results"]
    shared = report([*arguments, "--train-share", "0.5"], tmp_path)["results"]
    assert skipped == shared
    assert skipped[1]["auc"] > 0.5
    past = past_requests(traced())
    ended = sum(request.finished_s <= past[200].arrival_s for request in past[:200])
    assert 150 < ended < 200
    words = f"survival begins with the {ended} requests that had ended before."
    assert unwrapped(capsys.readouterr().out).count(words) == 2
    # Nobody is judged on what is passed over.
    rows = sum(-(-request.output_tokens // 20) for request in past[200:])
    assert skipped[0]["rows"] == rows


def test_the_json_echoes_its_terms(tmp_path: Path) -> None:
    words = ["--horizon", "60", "--age-step", "5", "--frozen", "--skip", "10", "--requests", "300"]
    config = report([*EVALUATE, *words], tmp_path)["config"]
    assert config == {
        "model": [MODEL],
        "trace": TRACE,
        "log": None,
        "format": None,
        "columns": None,
        "sessions": False,
        "skip": 10,
        "requests": 300,
        "token_ms": None,
        "horizon": 60,
        "age_step": 5,
        "train_share": 0.0,
        "frozen": True,
        "version": __version__,
    }


def test_without_a_model_the_baselines_are_judged(tmp_path: Path) -> None:
    results = report(["evaluate", "--log", LOG], tmp_path)["results"]
    assert [row["predictor"] for row in results] == ["none", "survival"]


def test_what_is_undefined_is_null(tmp_path: Path) -> None:
    write_native(tmp_path / "one.jsonl", [TraceRequest(0, 9, 3)])
    results = report(["evaluate", "--trace", str(tmp_path / "one.jsonl")], tmp_path)["results"]
    assert results[0]["auc"] is None
    assert results[0]["better_by"]["brier"]["stderr"] is None
    assert None in results[0]["reliability"]["observed"]


def test_an_overlap_with_the_training_is_told_where_it_is_possible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "A predictor that was trained on some of these requests looks better than it is"
    for arguments, told in (
        (EVALUATE, True),
        ([*EVALUATE, "--requests", "300"], True),
        ([*EVALUATE, "--skip", "200"], False),
        ([*EVALUATE, "--train-share", "0.5"], False),
        (["evaluate", "--trace", TRACE], False),
    ):
        assert main(arguments) == 0
        assert (words in unwrapped(capsys.readouterr().out)) == told


def test_frozen_predictors_do_not_learn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", "--trace", TRACE]
    learning = report(arguments, tmp_path)["results"][1]
    assert learning["auc"] > 0.5
    capsys.readouterr()
    # From nothing and learning nothing, survival has nothing to tell.
    frozen = report([*arguments, "--frozen"], tmp_path)["results"][1]
    assert frozen["auc"] == 0.5
    words = unwrapped(capsys.readouterr().out)
    assert "Nobody learned from the requests that ended." in words
    assert "survival begins with nothing." in words


def test_a_model_may_be_called_as_a_baseline_is(tmp_path: Path) -> None:
    files.save("survival", Survival.of_past([]))
    results = report(["evaluate", "--trace", TRACE, "--model", "survival"], tmp_path)["results"]
    assert [row["predictor"] for row in results] == ["none", "survival", "./survival"]


def test_pictures_are_written_where_told(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "plots"
    assert main([*EVALUATE, "--skip", "200", "--plots", str(folder)]) == 0
    pictures = sorted(path.name for path in folder.iterdir())
    assert pictures == ["mae_by_age.png", "reliability.png", "roc.png"]


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(("share", "warned"), [(0.4, False), (0.6, True)])
def test_ends_that_are_the_clients_limits_are_warned_of(
    command: str, share: float, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A log of a replay made every predictor look perfect, without a word."""
    requests = [
        replace(one, max_tokens=one.output_tokens if i < share * 400 else 400)
        for i, one in enumerate(traced())
    ]
    write_native("cut.jsonl", requests)
    words = {"train": ["train", "survival", "--out", "new.json"], "evaluate": ["evaluate"]}
    assert main([*words[command], "--trace", "cut.jsonl"]) == 0
    error = capsys.readouterr().err
    assert ("240 of 400 requests ended at their max_tokens" in error) is warned
    assert bool(error) is warned
