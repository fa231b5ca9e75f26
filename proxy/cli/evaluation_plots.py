"""Pictures of how good predictors are, as PNG files.

Without matplotlib the command fails at its start. The same answers give the same
bytes; see `balanceroute.proxy.lab.pictures`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors import scores
from balanceroute.predictors.evaluation import Judgement, stage_two_errors
from balanceroute.predictors.questions import Rows
from balanceroute.proxy.lab.pictures import SOFT, empty_figure, wrapped, write_pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 7.0


class _Look(NamedTuple):
    """How the line of a predictor looks."""

    colour: str
    marker: str
    dashes: str


# Each tells apart from the others with every common colour blindness (Okabe and Ito), and marks and
# dashes do without colour. The baselines come first and are grey.
_BASELINES = (_Look("#b4b9c0", "s", ":"), _Look("#858b94", "o", "--"))
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
    judgements: Mapping[str, Judgement],
    directory: Path,
    *,
    title: str,
    baselines: int = 0,
) -> list[Path]:
    """Write `reliability.png`, `roc.png` and `mae_by_age.png`.

    Args:
        rows: What was asked.
        judgements: Of each predictor, by name, in the order of the legend.
        directory: Where to write; it must exist.
        title: The requests, for the top of every picture.
        baselines: How many of the predictors, from the first on, are drawn in grey.

    Returns:
        The files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    looks = (*_BASELINES[len(_BASELINES) - min(baselines, len(_BASELINES)) :], *_MODELS)
    lines = {name: looks[place % len(looks)] for place, name in enumerate(judgements)}
    draws: dict[str, Callable[[], Figure]] = {
        "reliability": lambda: _draw_reliability(rows, judgements, lines, title),
        "roc": lambda: _draw_roc(rows, judgements, lines, title),
        "mae_by_age": lambda: _draw_mae(rows, judgements, lines, title),
    }
    return write_pictures(draws, directory, _STYLE)


def _draw_reliability(
    rows: Rows,
    judgements: Mapping[str, Judgement],
    lines: Mapping[str, _Look],
    title: str,
) -> "Figure":
    headline = f"Predicted to end within {rows.horizon_steps} steps, and did"
    figure = _figure(5.9 + _LINE_INCHES * len(judgements), headline, title)
    chart, counts = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    chart.plot([0, 1], [0, 1], color=SOFT, lw=0.8, label="as predicted")
    edges = np.linspace(0.0, 1.0, _BINS + 1)
    for name, judgement in judgements.items():
        diagram = scores.reliability(judgement.answers.p_finish, rows.finishes, bins=_BINS)
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
    judgements: Mapping[str, Judgement],
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
        false_rate, true_rate = scores.roc_curve(judgement.answers.p_finish, rows.finishes)
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
    judgements: Mapping[str, Judgement],
    lines: Mapping[str, _Look],
    title: str,
) -> "Figure":
    headline = f"Error of the predicted end, of requests that end within {rows.horizon_steps} steps"
    figure = _figure(3.8 + _LINE_INCHES * len(judgements), headline, title)
    chart = figure.subplots()
    ages = rows.age[rows.finishes]
    for name, judgement in judgements.items():
        errors = stage_two_errors(rows, judgement.answers)[rows.finishes]
        means, _ = scores.mean_by_band(errors, ages, _BANDS)
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
    """Return an empty figure under a headline and the requests."""
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
