"""The picture of an audit: the ranks' loads over time, and what policies would recover."""

from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.pictures import empty_figure, write_pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from balanceroute.proxy.audit.observation import Observation
    from balanceroute.proxy.audit.replica import Recovery
    from balanceroute.proxy.audit.report import Audit

_WIDTH_INCHES = 9.0
_LOAD, _MOST, _OURS = "#8aa4c8", "#d55e00", "#0067a5"


def write_plots(audit: "Audit", directory: Path) -> list[Path]:
    """Write `audit.png`; return the files.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: A file cannot be written.
    """
    return write_pictures({"audit": lambda: _draw(audit)}, directory)


def _draw(audit: "Audit") -> "Figure":
    seen = audit.seen
    told = f"{seen.prefillers} prefillers, {len(seen.ranks)} ranks of {seen.batch} slots"
    figure = empty_figure(_WIDTH_INCHES, 6.4, f"Bound by: {audit.verdict.bound.value}", [told])
    upper, lower = figure.subplots(2, 1)
    _draw_loads(upper, seen)
    if audit.recovery is None:
        lower.set_axis_off()
        lower.text(0.0, 0.9, f"Not predicted: {audit.unknown}", wrap=True)
    else:
        _draw_recovery(lower, audit.recovery)
    return figure


def _draw_loads(panel: "Axes", seen: "Observation") -> None:
    seconds = [seen.seconds * i / (len(seen.loads) - 1) for i in range(len(seen.loads))]
    panel.plot(seconds, seen.loads, color=_LOAD, linewidth=0.6)
    panel.plot(seconds, seen.loads.max(axis=1), color=_MOST, linewidth=1.2)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("seconds")
    panel.set_ylabel("KV tokens")
    panel.set_title(
        f"Loads of {len(seen.ranks)} ranks and their maximum: {100 * seen.idle:.1f} % idle",
        loc="left",
    )


def _draw_recovery(panel: "Axes", recovery: "Recovery") -> None:
    found = sorted(recovery.predictions, key=lambda one: one.gain)
    panel.barh(
        [one.policy for one in found],
        [100 * one.gain for one in found],
        xerr=[100 * one.error for one in found],
        color=[_OURS if one.policy.startswith("br-") else _LOAD for one in found],
        ecolor=_MOST,
    )
    panel.set_xlabel("% more output tokens per second")
    panel.set_title("What policies would make of it (simulated)", loc="left")
