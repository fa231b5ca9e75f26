"""Pictures of what tenants and classes got over time, as PNG files."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.pictures import (
    SOFT,
    empty_figure,
    require_matplotlib,
    wrapped,
    write_pictures,
)
from balanceroute.proxy.sim.experiment import PolicyResult
from balanceroute.proxy.sim.service_log import ServiceLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_WINDOWS = 60
# With fewer first tokens in a window a percentile means nothing.
_LEAST_SAMPLES = 10
_TITLE_COLUMNS = 110


def write_service_plots(
    results: Sequence[PolicyResult], directory: Path, *, title: str
) -> list[Path]:
    """Write `service_POLICY.png` for each policy: its first segment, from start to end.

    It shows the shares of the KV-token-seconds, the p99 of the time to first token and, with a limit
    on requests in flight, that limit.

    Args:
        results: Those without figures of tenants and classes are left out.
        directory: Where to write; it must exist.
        title: The workload, for the top of every picture.

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
    edges_s = np.linspace(0.0, service.samples[-1].time_ns / 1e9, _WINDOWS + 1)
    middles_s = (edges_s[:-1] + edges_s[1:]) / 2
    shares = 100 * kv_shares(service, edges_s)
    labels = [f"{one.tenant or '-'}, class {one.level}" for one in service.groups]
    charts[0].stackplot(middles_s, shares, labels=labels, step="mid")
    charts[0].set_ylabel("share of KV-token-s, %")
    for group in range(len(labels)):
        charts[1].step(middles_s, p99_s(service, group, edges_s), where="mid")
    charts[1].set_ylabel("p99 TTFT, s")
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


def kv_shares(service: ServiceLog, edges_s: "NDArray[np.float64]") -> "NDArray[np.float64]":
    """Return the groups' shares of the KV-token-seconds of each window, float64[groups, windows]."""
    times_s = [sample.time_ns / 1e9 for sample in service.samples]
    sums = np.array([sample.kv_token_ns for sample in service.samples])
    held = np.array([np.diff(np.interp(edges_s, times_s, column)) for column in sums.T])
    return np.asarray(held / np.maximum(held.sum(axis=0), 1.0))


def p99_s(service: ServiceLog, group: int, edges_s: "NDArray[np.float64]") -> list[float]:
    """Return the p99 time to first token in each window, in seconds; NaN where there are few."""
    came_s, ttft_s = service.first_tokens(group)
    windows = np.searchsorted(edges_s, came_s, side="right") - 1
    found = [ttft_s[windows == window] for window in range(len(edges_s) - 1)]
    return [
        float(np.percentile(ttft, 99)) if len(ttft) >= _LEAST_SAMPLES else np.nan for ttft in found
    ]
