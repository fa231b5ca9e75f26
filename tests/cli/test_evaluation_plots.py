"""The pictures are drawn for every outcome, and tell the scores."""

import random
import struct
from pathlib import Path

import pytest

from balanceroute.predictors import (
    NoPrediction,
    PastRequest,
    Predictor,
    RequestFeatures,
    Survival,
)
from balanceroute.predictors.evaluation import PredictorJudgement, Replay, Rows, judge
from balanceroute.proxy.cli import evaluate
from balanceroute.proxy.cli.evaluate import WIDTH_INCHES, write_plots
from balanceroute.proxy.lab.pictures import DPI

NAMES = ["reliability.png", "roc.png", "mae_by_age.png"]


def judged(
    outputs: list[int], models: int = 1, age_step: int = 20
) -> tuple[Rows, dict[str, PredictorJudgement]]:
    past = [
        PastRequest(place, place + 0.05 * output, RequestFeatures(9), output)
        for place, output in enumerate(outputs)
    ]
    replay = Replay(past, age_step=age_step)
    predictors: dict[str, Predictor] = {"none": NoPrediction(), "survival": Survival()}
    predictors |= {
        f"models/${place}_{'long ' * 20}": Survival([30 + place] * 9) for place in range(models)
    }
    return replay.rows, judge(replay, predictors, baseline="survival")


def mixed(count: int = 60) -> list[int]:
    rng = random.Random(5)
    return [rng.randint(1, 300) for _ in range(count)]


@pytest.mark.parametrize(
    ("outputs", "models", "age_step"),
    [
        pytest.param(mixed(), 1, 20, id="one model", marks=pytest.mark.extended),
        pytest.param(mixed(), 9, 20, id="more models than colours"),
        pytest.param([3] * 5, 1, 20, id="all end", marks=pytest.mark.extended),
        pytest.param([50_000], 0, 20_000, id="none ends, and all are old"),
        pytest.param([50], 0, 20, id="one request", marks=pytest.mark.extended),
    ],
)
def test_writes_three_pictures(
    tmp_path: Path, outputs: list[int], models: int, age_step: int
) -> None:
    title = "$ " + "wide " * 40
    paths = write_plots(*judged(outputs, models, age_step), tmp_path, title=title, baselines=2)
    assert paths == [tmp_path / name for name in NAMES]
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", content[16:24])
        assert width == WIDTH_INCHES * DPI
        assert 0.5 * width < height < 1.5 * width


def test_the_same_answers_give_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        write_plots(*judged(mixed()), tmp_path / folder, title="t")
    for name in NAMES:
        one, other = ((tmp_path / folder / name).read_bytes() for folder in ("one", "other"))
        assert one == other


def test_legends_tell_the_scores() -> None:
    rows, judgements = judged(mixed(), models=0)
    looks = dict(zip(judgements, evaluate._BASELINE_LOOKS, strict=True))
    for draw, words in (
        (evaluate._draw_reliability, ("calibration error {0.ece:.3f}",)),
        (evaluate._draw_roc, ("area {0.auc:.3f}",)),
        (evaluate._draw_mae, ("{0.mae:.1f} tokens",)),
    ):
        figure = draw(rows, judgements, looks, "title")
        legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes)]
        told = [text.get_text() for legend in legends if legend for text in legend.get_texts()]
        for name, judgement in judgements.items():
            assert f"{name}, {words[0].format(judgement.scores)}" in told


def test_a_roc_curve_that_does_not_exist_is_left_out() -> None:
    rows, judgements = judged([3] * 5, models=0)
    looks = dict(zip(judgements, evaluate._BASELINE_LOOKS, strict=True))
    figure = evaluate._draw_roc(rows, judgements, looks, "title")
    assert figure.axes[0].get_legend() is None
