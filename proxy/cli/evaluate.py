"""`balanceroute evaluate`: judge predictors of output lengths on requests of the past."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute import __version__
from balanceroute.predictors import NoPrediction, Survival, files, measures
from balanceroute.predictors.evaluation import (
    PredictorJudgement,
    Replay,
    Rows,
    judge,
    stage_two_errors,
)
from balanceroute.proxy.cli.judgement_report import as_json, print_judgements, terms
from balanceroute.proxy.cli.outputs import (
    StageBar,
    add_output_flags,
    answer,
    as_json_text,
    check_output,
    make_plots_folder,
    options,
)
from balanceroute.proxy.cli.trace_flags import (
    MAX_HORIZON,
    Chosen,
    Past,
    add_past_flags,
    check_source,
    read_past,
    source_of,
    warn_of_limits,
)
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.setting import flag, integer, number
from balanceroute.proxy.lab.pictures import (
    SOFT,
    empty_figure,
    require_matplotlib,
    wrapped,
    write_pictures,
)
from balanceroute.proxy.settings import Given, add_flags, read_flags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from balanceroute.predictors import PastRequest, Predictor


# Pictures of how good predictors are, as PNG files.
#
# Without matplotlib the command fails at its start. The same answers give the same bytes; see
# `balanceroute.proxy.lab.pictures`.

WIDTH_INCHES = 7.0


class _Look(NamedTuple):
    colour: str
    marker: str
    dashes: str


# Each tells apart from the others with every common colour blindness (Okabe and Ito), and marks and
# dashes do without colour. The baselines come first and are grey.
_BASELINE_LOOKS = (_Look("#b4b9c0", "s", ":"), _Look("#858b94", "o", "--"))

_MODELS = (
    _Look("#0067a5", "D", "-"),
    _Look("#d55e00", "^", "-"),
    _Look("#009e73", "v", "-"),
    _Look("#cc79a7", "P", "-"),
    _Look("#e69f00", "X", "-"),
    _Look("#56b4e9", "*", "-"),
)
_STYLE = {"lines.linewidth": 1.4, "lines.markersize": 5.0}
_LINE_INCHES = 0.21  # Of a legend.
_BINS = 10
# Ages at which the bands of the third picture begin.
_BANDS = np.array([0, 20, 40, 80, 160, 320, 640, 1_280, 2_560, 5_120, 10_240])


def write_plots(
    rows: Rows,
    judgements: Mapping[str, PredictorJudgement],
    directory: Path,
    *,
    title: str,
    baselines: int = 0,
) -> list[Path]:
    """Write `reliability.png`, `roc.png` and `mae_by_age.png`.

    Args:
        judgements: Of each predictor, by name, in the order of the legend.
        baselines: How many of the predictors, from the first on, are drawn in grey.

    Returns:
        The files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    looks = (
        *_BASELINE_LOOKS[len(_BASELINE_LOOKS) - min(baselines, len(_BASELINE_LOOKS)) :],
        *_MODELS,
    )
    lines = {name: looks[place % len(looks)] for place, name in enumerate(judgements)}
    draws: dict[str, Callable[[], Figure]] = {
        "reliability": lambda: _draw_reliability(rows, judgements, lines, title),
        "roc": lambda: _draw_roc(rows, judgements, lines, title),
        "mae_by_age": lambda: _draw_mae(rows, judgements, lines, title),
    }
    return write_pictures(draws, directory, _STYLE)


def _draw_reliability(
    rows: Rows,
    judgements: Mapping[str, PredictorJudgement],
    lines: Mapping[str, _Look],
    title: str,
) -> "Figure":
    headline = f"Predicted to end within {rows.horizon_steps} steps, and did"
    figure = _figure(5.9 + _LINE_INCHES * len(judgements), headline, title)
    chart, counts = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    chart.plot([0, 1], [0, 1], color=SOFT, lw=0.8, label="as predicted")
    edges = np.linspace(0.0, 1.0, _BINS + 1)
    for name, judgement in judgements.items():
        diagram = measures.reliability(judgement.answers.p_finish, rows.finishes, bins=_BINS)
        filled = diagram.rows > 0
        label = f"{_shorten(name)}, calibration error {judgement.scores.ece:.3f}"
        predicted, observed = diagram.predicted[filled], diagram.observed[filled]
        _draw_line(chart, predicted, observed, lines[name], label)
        share = 100 * diagram.rows / diagram.rows.sum()
        counts.stairs(share, edges, color=lines[name].colour, ls=lines[name].dashes)
    chart.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), ylabel="share that did")
    counts.set(xlabel="predicted chance", ylabel="% of rows")
    figure.legend(frameon=False, loc="outside lower center")
    _grid(chart)
    return figure


def _draw_roc(
    rows: Rows,
    judgements: Mapping[str, PredictorJudgement],
    lines: Mapping[str, _Look],
    title: str,
) -> "Figure":
    headline = f"Which requests end within {rows.horizon_steps} steps (ROC)"
    figure = _figure(5.6, headline, title)
    chart = figure.subplots()
    chart.plot([0, 1], [0, 1], color=SOFT, lw=0.8)
    for name, judgement in judgements.items():
        auc = judgement.scores.auc
        if np.isnan(auc):  # All rows came out alike: there is no curve.
            continue
        false_rate, true_rate = measures.roc_curve(judgement.answers.p_finish, rows.finishes)
        look = lines[name]._replace(marker="")
        _draw_line(chart, false_rate, true_rate, look, f"{_shorten(name)}, area {auc:.3f}")
    chart.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01))
    chart.set(xlabel="false alarms, of those that stay", ylabel="found, of those that end")
    if chart.get_legend_handles_labels()[0]:
        chart.legend(frameon=False, loc="lower right")
    _grid(chart)
    return figure


def _draw_mae(
    rows: Rows,
    judgements: Mapping[str, PredictorJudgement],
    lines: Mapping[str, _Look],
    title: str,
) -> "Figure":
    headline = f"Error of the predicted end, of requests that end within {rows.horizon_steps} steps"
    figure = _figure(3.8 + _LINE_INCHES * len(judgements), headline, title)
    chart = figure.subplots()
    ages = rows.age[rows.finishes]
    for name, judgement in judgements.items():
        errors = stage_two_errors(rows, judgement.answers)[rows.finishes]
        means, _ = measures.mean_by_band(errors, ages, _BANDS)
        label = f"{_shorten(name)}, {judgement.scores.mae:.1f} tokens"
        _draw_line(chart, np.arange(len(means), dtype=np.float64), means, lines[name], label)
    last = int(np.searchsorted(_BANDS, ages.max(), side="right")) if ages.size else 1
    chart.set_xticks(range(last), [f"from {begin:,}" for begin in _BANDS[:last]])
    chart.set_xlim(-0.3, last - 0.7)
    chart.set_ylim(bottom=0)
    chart.set(xlabel="age, tokens emitted", ylabel="mean absolute error, tokens")
    figure.legend(frameon=False, loc="outside lower center")
    _grid(chart)
    return figure


def _draw_line(
    chart: "Axes", x: NDArray[np.float64], y: NDArray[np.float64], look: _Look, label: str
) -> None:
    chart.plot(x, y, color=look.colour, marker=look.marker, ls=look.dashes, label=label)


def _grid(chart: "Axes") -> None:
    chart.grid(color="#e6e8eb", lw=0.7)
    chart.set_axisbelow(True)


def _figure(height_inches: float, headline: str, title: str) -> "Figure":
    return empty_figure(
        WIDTH_INCHES,
        height_inches,
        headline,
        wrapped(title, 82),
        headline_points=12.0,
        indent=0.017,
    )


def _shorten(name: str, limit: int = 44) -> str:
    name = " ".join(name.split())
    # Long names tend to differ at the end.
    return name if len(name) <= limit else f"…{name[1 - limit :]}"


_BASELINE = "survival"
_BASELINES = ("none", _BASELINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFlags:
    """The questions to predictors, and the facts that they get."""

    horizon: int = integer(40, "steps ahead that are asked about", 1, MAX_HORIZON, metavar="H")
    age_step: int = integer(20, "tokens between two questions", 1, 10**6)
    train_share: float = number(
        0.0,
        "pass over the first share of the requests instead of --skip; survival begins with what is "
        "passed over",
        0,
        0.95,
        metavar="SHARE",
    )
    frozen: bool = flag("nobody learns from the requests that end")


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "evaluate",
        help="judge predictors of output lengths on requests of the past",
        description=f"{__doc__} Beside them stand two that need no file: none, and the empirical "
        "survival of the requests that have ended.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a predictor that `train` wrote; may be given more than once",
    )
    add_past_flags(parser)
    add_flags(parser.add_argument_group("questions"), QuestionFlags)
    add_output_flags(parser.add_argument_group("output"))


def run(arguments: argparse.Namespace) -> int:
    given = read_flags(arguments, Chosen, QuestionFlags)
    chosen, asked = given.read(Chosen), given.read(QuestionFlags)
    check_source(arguments)
    if chosen.skip and asked.train_share:
        raise ConfigError("--train-share stands instead of --skip, not beside it")
    _check_outputs(arguments)
    with StageBar() as bar:
        models = _models(arguments.model)
        bar.show(f"reading {source_of(arguments)}")
        history, judged = _parts(read_past(arguments, chosen), asked.train_share)
        replay = Replay(judged, horizon_steps=asked.horizon, age_step=asked.age_step)
        make_plots_folder(arguments.plots)
        baselines: dict[str, Predictor] = {
            "none": NoPrediction(),
            _BASELINE: Survival.of_past(history),
        }
        judgements = judge(
            replay,
            baselines | models,
            baseline=_BASELINE,
            learn=not asked.frozen,
            progress=lambda name, share: bar.show(f"judging {name}", share),
        )
    warn_of_limits(judged)
    title = f"{source_of(arguments)}: {len(judged):,} requests"
    caption = " ".join([terms(replay, age_step=asked.age_step), *_notes(given, models, history)])

    def report() -> str:
        results = as_json(replay.rows, judgements, baseline=_BASELINE)
        return as_json_text({"config": _config(arguments, given), "results": results})

    answer(
        arguments,
        lambda: print_judgements(judgements, baseline=_BASELINE, title=title, caption=caption),
        report,
    )
    if arguments.plots is not None:
        write_plots(
            replay.rows, judgements, arguments.plots, title=title, baselines=len(_BASELINES)
        )
    return 0


def _parts(past: Past, share: float) -> "tuple[list[PastRequest], list[PastRequest]]":
    """Return the requests that had ended when the first one came that is judged, and the judged.

    Requests that were passed over and still ran then are in neither: a model may have been trained on them.
    """
    place = round(share * len(past.chosen))
    judged = past.chosen[place:]
    if not judged:
        raise ConfigError(f"--train-share leaves none of {place} requests to judge on")
    begin_s = judged[0].arrival_s
    passed_over = [*past.skipped, *past.chosen[:place]]
    return [request for request in passed_over if request.finished_s <= begin_s], judged


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Find out now, not after the replay, that its figures cannot be written."""
    out = arguments.json
    check_output("--json", out)
    if out is not None:
        for path in (source_of(arguments), *arguments.model):
            if out.exists() and path.exists() and out.samefile(path):
                raise ConfigError(f"--json: {out} is what is to be read")
    if arguments.plots is not None:
        require_matplotlib()
        if arguments.plots.exists() and not arguments.plots.is_dir():
            raise ConfigError(f"--plots: {arguments.plots} is not a directory")


def _models(paths: "Sequence[Path]") -> "dict[str, Predictor]":
    """Return the predictors by their names in the report: their paths."""
    models: dict[str, Predictor] = {}
    for path in paths:
        name = str(path) if str(path) not in _BASELINES else f"./{path}"
        if name in models:
            raise ConfigError(f"--model: {path} is given twice")
        models[name] = files.load(path)
    return models


def _notes(
    given: Given, models: "Mapping[str, Predictor]", history: "Sequence[PastRequest]"
) -> list[str]:
    """Return the notes on the figures."""
    asked = given.read(QuestionFlags)
    notes = []
    known = f"the {len(history):,} requests that had ended before" if history else "nothing"
    notes.append(f"{_BASELINE} begins with {known}.")
    if asked.frozen:
        notes.append("Nobody learned from the requests that ended.")
    else:
        notes.append("All learned from the requests that ended.")
    if models and not asked.train_share and not given.read(Chosen).skip:
        notes.append(
            "A predictor that was trained on some of these requests looks better than it is: "
            "--skip or --train-share leaves them out."
        )
    return notes


def _config(arguments: argparse.Namespace, given: Given) -> dict[str, object]:
    chosen = options(arguments)
    for name in ("json", "plots"):
        del chosen[name]
    for name in ("trace", "log"):
        chosen[name] = None if chosen[name] is None else str(chosen[name])
    return (
        chosen
        | given.values
        | {"model": [str(path) for path in arguments.model], "version": __version__}
    )
