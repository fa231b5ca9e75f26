"""Pictures of an experiment, as PNG files.

The same results give the same bytes; see `balanceroute.proxy.lab.pictures`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import floor, hypot, log10
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from balanceroute.proxy.lab.pictures import (
    INK,
    SOFT,
    empty_figure,
    require_matplotlib,
    wrapped,
    write_pictures,
)
from balanceroute.proxy.lab.sim.experiment import PolicyResult
from balanceroute.proxy.lab.sim.recorder import ServiceLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray


WIDTH_INCHES = 10.0

# Blue and orange can be distinguished with every common colour blindness, and in print.
_ACCENT = "#0067a5"
_BASELINE = "#858b94"
_IDLE = "#f6cf9b"
_RANK_FIRST, _RANK_LAST = (0.62, 0.79, 0.91), (0.05, 0.28, 0.53)

_STYLE = {"xtick.minor.pad": 5.0}  # In line with the labels of the longer, major ticks.
_FAINT = 0.45  # Opacity of predictions.
# Waits whose largest is this many times the smallest need a log scale.
_WIDE_SPREAD = 20.0
# Where a point's label may stand, nearest first: points away from it, and directions.
_RINGS = (8, 18, 30, 44, 60, 78, 98)
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
_FAR = 20  # From here on a line leads to the point.


class _Box(NamedTuple):
    """A rectangle on the canvas, in pixels."""

    left: float
    bottom: float
    right: float
    top: float


def write_plots(results: Sequence[PolicyResult], directory: Path, *, title: str) -> list[Path]:
    """Write `rank_loads.png`, `imbalance_throughput.png` and `throughput_wait.png`; return the files.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    assert results
    draws = {
        "rank_loads": lambda: _draw_rank_loads(results, title),
        "imbalance_throughput": lambda: _draw_imbalance_throughput(results, title),
        "throughput_wait": lambda: _draw_throughput_wait(results, title),
    }
    return _write(draws, directory)


def write_prediction_plots(
    live: Sequence[PolicyResult], simulated: Sequence[PolicyResult], directory: Path, *, title: str
) -> list[Path]:
    """Write `live_rank_loads.png` and `live_simulated.png`: measurements and predictions.

    Of `live` only the imbalance, the idle fraction and the output rate are used. A live run is a single run, so
    the `stderr` of `simulated` is the standard deviation of single runs.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    assert live
    draws = {
        "live_rank_loads": lambda: _draw_rank_loads(live, title),
        "live_simulated": lambda: _draw_prediction(live, simulated, title),
    }
    return _write(draws, directory)


def _write(draws: "Mapping[str, Callable[[], Figure]]", directory: Path) -> list[Path]:
    require_matplotlib()
    return write_pictures(draws, directory, _STYLE)


def _draw_rank_loads(results: Sequence[PolicyResult], title: str) -> "Figure":
    """Draw the load of every rank, a panel per policy. Paper: Figure 3."""
    columns = _columns(len(results))
    rows = -(-len(results) // columns)
    steps = max(len(result.picture) for result in results)
    headline = f"KV tokens of each decode rank over {steps} steps"
    note = "Imbalance and idle: means of the whole steady state."
    figure = _figure(1.0 + (2.6 if rows == 1 else 2.3 * rows), headline, title, note)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    highest = max(max(step) for result in results for step in result.picture)
    for panel, result in zip(panels, results, strict=False):
        _draw_loads(panel, result.picture)
        _name_panel(panel, result, columns)
    for panel in panels[len(results) :]:
        panel.set_visible(False)
    # The shared axis would leave the ticks bare above an unused place.
    for panel in panels[max(0, len(results) - columns) : len(results)]:
        panel.tick_params(labelbottom=True)
    for panel in panels[(rows - 1) * columns : len(results)]:
        panel.set_xlabel("decode step")
    for panel in panels[: len(results) : columns]:
        panel.set_ylabel("KV tokens (thousands)")
    # From zero, so that the orange share of the area under the envelope is the idle fraction.
    panels[0].set(xlim=(0, max(1, steps - 1)), ylim=(0, max(1e-3, 1.04 * highest / 1e3)))
    panels[0].locator_params(axis="x", nbins=5 if columns <= 3 else 3, integer=True)
    handles, labels = panels[0].get_legend_handles_labels()
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize="small"
    )
    for line in legend.get_lines():
        line.set(alpha=1.0, linewidth=1.1)
    return figure


def _draw_loads(panel: "Axes", picture: Sequence[Sequence[int]]) -> None:
    loads = np.array(picture) / 1e3  # float64[steps, ranks], thousands of KV tokens.
    ranks = loads.shape[1]
    steps = np.arange(len(loads))
    envelope, mean = loads.max(axis=1), loads.mean(axis=1)
    idle = "envelope − mean: idle at the barrier"
    panel.fill_between(steps, mean, envelope, color=_IDLE, linewidth=0, label=idle)
    # Many ranks cover each other: thin and translucent, they show where most of them are.
    width = float(np.clip(2.4 / ranks**0.5, 0.25, 0.9))
    alpha = min(1.0, 4.5 / ranks**0.5)
    first, last = np.array(_RANK_FIRST), np.array(_RANK_LAST)
    for rank in range(ranks):
        colour = tuple(first + (last - first) * (rank / max(1, ranks - 1)))
        (line,) = panel.plot(steps, loads[:, rank], color=colour, lw=width, alpha=alpha)
        if rank == ranks // 2:
            line.set_label(f"ranks, 0 (light) to {ranks - 1} (dark)" if rank else "the rank")
    panel.plot(steps, mean, color=INK, lw=1.0, ls=(0, (4, 2)), label="mean")
    panel.plot(steps, envelope, color=INK, lw=1.1, label="envelope: the heaviest rank")


def _name_panel(panel: "Axes", result: PolicyResult, columns: int) -> None:
    imbalance = f"imbalance {_short_number(result.mean['mean_imbalance_tokens'])} tokens"
    idle = f"idle {_two_digits(100 * result.mean['idle_fraction'])} %"
    lines = [f"{imbalance}, {idle}"] if columns <= 3 else [imbalance, idle]
    name = _shorten(result.policy, 80 // columns)
    for text, points, weight, colour, size in (
        ("\n".join(lines), 5, "normal", SOFT, 8.5),
        (name, 7 + 12 * len(lines), "bold", _text_colour(result.policy), 10.5),
    ):
        panel.annotate(
            text,
            (0, 1),
            xytext=(0, points),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=size,
            fontweight=weight,
            color=colour,
        )


def _draw_imbalance_throughput(results: Sequence[PolicyResult], title: str) -> "Figure":
    """Draw two bar charts of the policies, side by side."""
    headline = "Imbalance and throughput by policy" + _error_note(
        results, "mean_imbalance_tokens", "output_tokens_per_s"
    )
    figure = _figure(1.5 + 0.36 * len(results), headline, title)
    charts = figure.subplots(1, 2, sharey=True)
    for chart, metric, label in (
        (charts[0], "mean_imbalance_tokens", "mean imbalance, tokens (lower is better)"),
        (charts[1], "output_tokens_per_s", "output tokens/s (higher is better)"),
    ):
        chart.set_xlim(0, 1.2 * _draw_bars(chart, results, metric) or 1.0)
        _strip(chart, label)
    _name_rows(charts[0], results)
    return figure


def _draw_prediction(
    live: Sequence[PolicyResult], simulated: Sequence[PolicyResult], title: str
) -> "Figure":
    """Draw two bar charts with measurements above predictions."""
    from matplotlib.patches import Patch  # noqa: PLC0415  # An extra.

    note = "Whiskers: standard deviation of the simulated runs."
    figure = _figure(1.2 + 0.7 * len(live), "Live and simulated", title, note)
    charts = figure.subplots(1, 2, sharey=True)
    for chart, metric, scale, digits, label in (
        (charts[0], "idle_fraction", 100.0, 1, "idle at the barrier, % (lower is better)"),
        (charts[1], "output_tokens_per_s", 1.0, 0, "output tokens/s (higher is better)"),
    ):
        reach = max(
            _draw_bars(
                chart,
                results,
                metric,
                scale=scale,
                digits=digits,
                height=0.34,
                shift=shift,
                alpha=alpha,
            )
            for results, shift, alpha in ((live, -0.18, 1.0), (simulated, 0.18, _FAINT))
        )
        chart.set_xlim(0, 1.2 * reach or 1.0)
        _strip(chart, label)
    _name_rows(charts[0], live)
    handles = [
        Patch(color=INK, alpha=alpha, label=label)
        for label, alpha in (("live", 1.0), ("simulated", _FAINT))
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize="small"
    )
    return figure


def _draw_bars(
    chart: "Axes",
    results: Sequence[PolicyResult],
    metric: str,
    *,
    scale: float = 1.0,
    digits: int = 0,
    height: float = 0.66,
    shift: float = 0.0,
    alpha: float = 1.0,
) -> float:
    """Draw a bar per policy, at its place in the list plus `shift`; return how far they reach."""
    rows = [place + shift for place in range(len(results))]
    means = [scale * result.mean[metric] for result in results]
    errors = [scale * result.stderr[metric] for result in results]
    colours = [_colour(result.policy) for result in results]
    chart.barh(rows, means, height=height, color=colours, alpha=alpha)
    for row, mean, error in zip(rows, means, errors, strict=True):
        if error:
            chart.errorbar(mean, row, xerr=error, color=INK, lw=1.1, capsize=2.5)
        chart.annotate(
            f"{mean:,.{digits}f}",
            (mean + error, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
        )
    return max(mean + error for mean, error in zip(means, errors, strict=True))


def _strip(chart: "Axes", label: str) -> None:
    """Remove the parts of a bar chart that its labels repeat."""
    chart.xaxis.set_visible(False)
    chart.spines["bottom"].set_visible(False)
    chart.tick_params(axis="y", length=0)
    chart.set_title(label, loc="left", fontsize="medium", color=SOFT)


def _name_rows(chart: "Axes", results: Sequence[PolicyResult]) -> None:
    names = [_shorten(result.policy, 28) for result in results]
    chart.set_yticks(range(len(results)), names, color=INK)
    chart.invert_yaxis()


def _draw_throughput_wait(results: Sequence[PolicyResult], title: str) -> "Figure":
    """Draw the throughput over the waiting time, a point per policy."""
    headline = "Throughput against the wait for a decode slot" + _error_note(
        results, "output_tokens_per_s", "pool_wait_s_p99"
    )
    figure = _figure(5.6, headline, title)
    chart = figure.subplots()
    waits = np.array([result.mean["pool_wait_s_p99"] for result in results])
    outputs = np.array([result.mean["output_tokens_per_s"] for result in results])
    wait_errors = np.array([result.stderr["pool_wait_s_p99"] for result in results])
    output_errors = np.array([result.stderr["output_tokens_per_s"] for result in results])
    _scale_waits(chart, waits, wait_errors)
    low, high = (outputs - output_errors).min(), (outputs + output_errors).max()
    margin = max(0.12 * (high - low), 0.02 * high, 1e-3)
    chart.set_ylim(low - margin, high + margin)
    for result, *point in zip(results, waits, outputs, wait_errors, output_errors, strict=True):
        x, y, x_error, y_error = point
        chart.errorbar(
            x,
            y,
            xerr=x_error or None,
            yerr=y_error or None,
            marker="D" if _is_ours(result.policy) else "o",
            markersize=6.5,
            color=_colour(result.policy),
            lw=1.0,
            capsize=2.0,
        )
    chart.set_ylabel("output tokens/s")
    chart.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    chart.grid(color="#e6e8eb", lw=0.7)
    chart.set_axisbelow(True)
    chart.set_title("↖ better: up and left", loc="left", fontsize="medium", color=_ACCENT)
    spans = list(zip(waits, outputs, wait_errors, output_errors, strict=True))
    _label_points(chart, [result.policy for result in results], spans)
    return figure


def _scale_waits(
    chart: "Axes", waits: "np.typing.NDArray[np.float64]", errors: "np.typing.NDArray[np.float64]"
) -> None:
    """Set the wait axis: linear, or logarithmic where the waits are far apart."""
    low, high = (waits - errors).min(), (waits + errors).max()
    positive = waits[waits > 0]
    label = "pool wait p99 (s)"
    if positive.size and waits.max() > _WIDE_SPREAD * positive.min():
        label = "pool wait p99 (s, log scale)"
        if positive.size == waits.size:
            chart.set_xscale("log")
            chart.set_xlim(positive.min() / 1.8, high * 1.8)
        else:
            # A policy that never waits has a place too, left of the decades.
            chart.set_xscale("symlog", linthresh=positive.min(), subs=range(2, 10))
            chart.set_xlim(-positive.min() / 2, high * 1.8)
        chart.xaxis.set_minor_formatter(
            lambda value, _: f"{value:,.6g}" if f"{value:e}"[0] in "25" else ""
        )
    else:
        margin = max(0.12 * (high - low), 0.1 * high, 1e-3)
        chart.set_xlim(max(low - margin, -0.03 * high - 1e-3), high + margin)
    chart.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    chart.set_xlabel(label)


def _label_points(
    chart: "Axes", names: Sequence[str], spans: Sequence[tuple[float, float, float, float]]
) -> None:
    """Name the points, of x, y and the errors of both, each label in the nearest place that is free.

    The limits of the chart are final; the layout is frozen here.
    """
    figure = chart.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    pixels = figure.dpi / 72
    inside = _Box(*chart.get_window_extent().extents)
    taken = [box for span in spans for box in _ink(chart, span, pixels)]
    for name, (x, y, _, _) in zip(names, spans, strict=True):
        label = chart.annotate(
            _shorten(name, 28),
            (x, y),
            xytext=(0, 0),
            textcoords="offset points",
            color=_text_colour(name),
            fontweight="bold" if _is_ours(name) else "normal",
            va="bottom",
        )
        extent = label.get_window_extent()
        centre_x, centre_y = chart.transData.transform((x, y))
        places = list(_places(centre_x, centre_y, extent.width, extent.height, pixels))
        box = next((place for place in places if _is_free(place, taken, inside)), places[0])
        taken.append(box)
        label.set_position(((box.left - centre_x) / pixels, (box.bottom - centre_y) / pixels))
        across = (min(max(centre_x, box.left), box.right) - centre_x) / pixels
        up = (min(max(centre_y, box.bottom), box.top) - centre_y) / pixels
        if hypot(across, up) > _FAR:
            line = {"arrowstyle": "-", "lw": 0.6, "color": _BASELINE, "shrinkA": 0, "shrinkB": 5}
            chart.annotate(
                "", (x, y), xytext=(across, up), textcoords="offset points", arrowprops=line
            )


def _ink(chart: "Axes", span: tuple[float, float, float, float], pixels: float) -> Iterator[_Box]:
    """Return the area of a point: its marker and its two whiskers."""
    x, y, x_error, y_error = span
    left, bottom = chart.transData.transform((x - x_error, y - y_error))
    right, top = chart.transData.transform((x + x_error, y + y_error))
    centre_x, centre_y = chart.transData.transform((x, y))
    thick, marker = 2 * pixels, 5 * pixels
    yield _Box(left, centre_y - thick, right, centre_y + thick)
    yield _Box(centre_x - thick, bottom, centre_x + thick, top)
    yield _Box(centre_x - marker, centre_y - marker, centre_x + marker, centre_y + marker)


def _places(x: float, y: float, width: float, height: float, pixels: float) -> Iterator[_Box]:
    """Return the places for a label of a point, nearest first."""
    for ring in _RINGS:
        for across, up in _DIRECTIONS:
            # At an angle the corner of the label is nearest to the point.
            distance = ring * pixels * (0.6 if across and up else 1.0)
            left = x + across * distance + (across - 1) / 2 * width
            bottom = y + up * distance + (up - 1) / 2 * height
            yield _Box(left, bottom, left + width, bottom + height)


def _is_free(box: _Box, taken: Sequence[_Box], inside: _Box) -> bool:
    if box.left < inside.left or box.right > inside.right:
        return False
    if box.bottom < inside.bottom or box.top > inside.top:
        return False
    return not any(
        box.left < other.right
        and other.left < box.right
        and box.bottom < other.top
        and other.bottom < box.top
        for other in taken
    )


def _figure(height_inches: float, headline: str, title: str, note: str = "") -> "Figure":
    lines = wrapped(title, 115)
    if note:
        lines.append(note)
    return empty_figure(WIDTH_INCHES, height_inches, headline, lines)


def _columns(panels: int) -> int:
    """Return the number of panels in a row, so that rows are few and full."""
    return panels if panels <= 5 else 3 if panels in {6, 9} else 4


def _error_note(results: Sequence[PolicyResult], *metrics: str) -> str:
    any_error = any(result.stderr[metric] for result in results for metric in metrics)
    return " (whiskers: standard error)" if any_error else ""


def _is_ours(policy: str) -> bool:
    return policy.lower().startswith("br-")


def _colour(policy: str) -> str:
    return _ACCENT if _is_ours(policy) else _BASELINE


def _text_colour(policy: str) -> str:
    return _ACCENT if _is_ours(policy) else SOFT


def _shorten(name: str, limit: int) -> str:
    name = " ".join(name.split())
    if len(name) <= limit:
        return name
    # Long names tend to differ at the end.
    head = limit // 2
    return f"{name[:head]}…{name[head + 1 - limit :]}"


def _two_digits(value: float) -> str:
    """Return a number with two significant digits, or all before the point."""
    digits = 0 if value <= 0 else min(2, max(0, 1 - floor(log10(value))))
    return f"{value:.{digits}f}"


def _short_number(value: float) -> str:
    return f"{value:.0f}" if value < 1e3 else f"{_two_digits(value / 1e3)}k"


# Pictures of the service of tenants and classes over time, as PNG files.

_FEWEST_WINDOWS, _MOST_WINDOWS = 6, 60
# With fewer first tokens in a window a percentile means nothing.
_LEAST_SAMPLES = 10
_TITLE_COLUMNS = 110


def write_service_plots(
    results: Sequence[PolicyResult], directory: Path, *, title: str
) -> list[Path]:
    """Write `service_POLICY.png` for each policy: its first segment, from start to end.

    It shows the shares of the KV-token-seconds, the p99 of the time to first token and, with a limit on
    requests in flight, that limit. Results without figures of tenants and classes are left out.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    require_matplotlib()
    draws: dict[str, Callable[[], Figure]] = {
        f"service_{result.policy}": partial(_draw, result.policy, result.service, title)
        for result in results
        if result.service is not None and result.service.samples
    }
    return write_pictures(draws, directory)


def _draw(policy: str, service: ServiceLog, title: str) -> "Figure":
    limits = np.array(service.limits, np.float64).reshape(-1, 2)
    rows = 3 if len(limits) else 2
    headline = f"What tenants and classes got over time: {policy}"
    figure = empty_figure(9.0, 0.4 + 2.1 * rows, headline, wrapped(title, _TITLE_COLUMNS))
    charts: list[Axes] = list(figure.subplots(rows, sharex=True))
    edges_s = np.linspace(0.0, service.samples[-1].time_ns / 1e9, windows(service) + 1)
    middles_s = (edges_s[:-1] + edges_s[1:]) / 2
    shares = 100 * kv_shares(service, edges_s)
    labels = [f"{one.tenant or '-'}, class {one.level}" for one in service.groups]
    charts[0].stackplot(middles_s, shares, labels=labels, step="mid")
    charts[0].set_ylabel("share of KV-token-s, %")
    for group in range(len(labels)):
        charts[1].step(middles_s, p99_s(service, group, edges_s), where="mid")
    charts[1].set_ylabel(f"p99 TTFT of {_LEAST_SAMPLES}\nor more, s")
    if len(limits):
        times_s = np.append(limits[:, 0] / 1e9, edges_s[-1])
        charts[2].step(times_s, np.append(limits[:, 1], limits[-1, 1]), where="post", color=SOFT)
        charts[2].set_ylabel("most requests in flight")
    for chart in charts:
        chart.set_xlim(0.0, edges_s[-1])
        chart.set_ylim(bottom=0.0)
    charts[0].set_ylim(0.0, 100.0)
    charts[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    charts[-1].set_xlabel("seconds")
    return figure


def windows(service: ServiceLog) -> int:
    """Return into how many windows the time is divided: so few that most have enough first tokens of each group."""
    groups = range(len(service.groups))
    tokens = sum(len(service.first_tokens(group)[0]) for group in groups)
    return max(_FEWEST_WINDOWS, min(_MOST_WINDOWS, tokens // (2 * _LEAST_SAMPLES * len(groups))))


def kv_shares(service: ServiceLog, edges_s: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Return the groups' shares of the KV-token-seconds of each window, float64[groups, windows]."""
    times_s = [sample.time_ns / 1e9 for sample in service.samples]
    sums = np.array([sample.kv_token_ns for sample in service.samples])
    held = np.array([np.diff(np.interp(edges_s, times_s, column)) for column in sums.T])
    return np.asarray(held / np.maximum(held.sum(axis=0), 1.0))


def p99_s(service: ServiceLog, group: int, edges_s: "NDArray[np.float64]") -> list[float]:
    """Return the p99 time to first token in each window, in seconds; NaN where there are few."""
    came_s, ttft_s = service.first_tokens(group)
    places = np.searchsorted(edges_s, came_s, side="right") - 1
    found = [ttft_s[places == window] for window in range(len(edges_s) - 1)]
    return [
        float(np.percentile(ttft, 99)) if len(ttft) >= _LEAST_SAMPLES else np.nan for ttft in found
    ]
