"""Pictures of a validation, as PNG files.

The caller checks first whether matplotlib is installed. The same files give the same bytes; see
`balanceroute.proxy.lab.pictures`.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.lab.pictures import INK, SOFT, empty_figure, wrapped, write_pictures
from balanceroute.proxy.lab.validate.validation import RankResult, Validation

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 9.0
_SIDE_INCHES = 0.04167  # matplotlib's own default.
# More panels, or points, would show nothing more.
_MOST_PANELS = 8
_MOST_POINTS = 20_000

_TRUTH = INK
_MIRROR = "#d55e00"
_FIT = "#0067a5"


def write_plots(validation: Validation, directory: Path, *, title: str) -> list[Path]:
    """Write `mirror.png`, `mirror_error.png` and `step_time.png`; return the files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    draws: dict[str, Callable[[], Figure]] = {
        "mirror": lambda: _draw_mirror(validation, title),
        "mirror_error": lambda: _draw_errors(validation, title),
        "step_time": lambda: _draw_step_time(validation, title),
    }
    return write_pictures(draws, directory)


def _draw_mirror(validation: Validation, title: str) -> "Figure":
    """Draw the load of each rank over time, the engine's and the proxy's."""
    ranks = validation.ranks[:_MOST_PANELS]
    figure = _figure(1.0 + 1.5 * len(ranks), "KV tokens per rank: engine and proxy", title)
    panels = figure.subplots(len(ranks), 1, sharex=True, squeeze=False)[:, 0]
    begin_ns = min(int(rank.samples.times_ns[0]) for rank in ranks)
    for panel, rank in zip(panels, ranks, strict=True):
        _draw_loads(panel, rank, begin_ns)
    panels[-1].set_xlabel("seconds since the first sample")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def _draw_loads(panel: "Axes", rank: RankResult, begin_ns: int) -> None:
    times_ns = rank.samples.times_ns
    # The engine's load between the proxy's samples too.
    fine_ns = np.linspace(times_ns[0], times_ns[-1], min(_MOST_POINTS, 10 * len(times_ns)))
    truth = rank.timeline.loads_at(fine_ns.astype(np.int64))
    panel.plot((fine_ns - begin_ns) / 1e9, truth / 1e3, color=_TRUTH, lw=0.9, label="engine")
    panel.plot(
        (times_ns - begin_ns) / 1e9,
        rank.samples.started_tokens / 1e3,
        color=_MIRROR,
        lw=0.8,
        label="proxy, started requests",
    )
    panel.set_title(rank.name, loc="left", fontsize="small", color=SOFT)
    panel.set_ylabel("thousands")
    panel.set_ylim(bottom=0)


def _draw_errors(validation: Validation, title: str) -> "Figure":
    """Draw the distribution of the errors of the started requests' load."""
    figure = _figure(3.6, "Error of the proxy's load, as a share of the engine's", title)
    chart = figure.subplots()
    for rank in validation.ranks:
        truth = rank.timeline.loads_at(rank.samples.times_ns)
        counts = truth > 0
        if counts.any():
            off = np.abs(rank.samples.started_tokens[counts] - truth[counts]) / truth[counts]
            shares = np.arange(1, len(off) + 1) / len(off)
            chart.step(100 * np.sort(off), 100 * shares, where="post", lw=1.0, label=rank.name)
    chart.set(xscale="symlog", xlabel="at most so many % off", ylabel="% of samples", ylim=(0, 101))
    chart.set_xlim(left=0)
    chart.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    if chart.get_legend_handles_labels()[0] and len(validation.ranks) <= _MOST_PANELS:
        chart.legend(frameon=False, fontsize="small", loc="lower right")
    return figure


def _draw_step_time(validation: Validation, title: str) -> "Figure":
    """Draw the time of the steps over the load of the heaviest rank, and the line through them."""
    figure = _figure(3.6, "Time of the steps without prefill", title)
    chart = figure.subplots()
    loads = np.concatenate([unit.max_loads for unit in validation.units])
    times_ms = np.concatenate([unit.step_ns for unit in validation.units]) / 1e6
    if len(loads):
        every = -(-len(loads) // _MOST_POINTS)
        chart.plot(loads[::every] / 1e3, times_ms[::every], ".", color=SOFT, ms=2.0, alpha=0.4)
        chart.set_ylim(0, 1.3 * float(np.percentile(times_ms, 99)) or 1.0)
    fit = validation.fit
    if fit is not None:
        ends = np.array([loads.min(), loads.max()])
        label = f"{fit.base_ms:.3g} ms + {fit.us_per_token:.3g} µs a token, R² {fit.r2:.2f}"
        line = fit.base_ms + fit.us_per_token / 1e3 * ends
        chart.plot(ends / 1e3, line, color=_FIT, lw=1.6, label=label)
        chart.legend(frameon=False, loc="upper left")
    chart.set_xlabel("KV tokens of the heaviest rank (thousands)")
    chart.set_ylabel("ms")
    return figure


def _figure(height_inches: float, headline: str, title: str) -> "Figure":
    return empty_figure(
        WIDTH_INCHES, height_inches, headline, wrapped(title, 105), side_inches=_SIDE_INCHES
    )
