"""The result of an audit, for people and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from balanceroute.proxy.capacity import MEANINGS, BoundVerdict
from balanceroute.proxy.lab.audit.observation import Observation
from balanceroute.proxy.lab.audit.replica import AuditRecovery
from balanceroute.proxy.lab.pictures import empty_figure, write_pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Energy lost at the barrier, by a model of two levels.
#
# A rank draws P while it computes and s P while it waits at the barrier. It waits for the share w
# = idle x (1 - a / T) of a step of T = a + b max L: the time a is the same on all ranks. Of the
# energy that all ranks draw, (s w) / (1 - (1 - s) w) goes into waiting. s is between two
# measurements: an accelerator that polls while it waits draws what it draws in a kernel (s = 1),
# and one that waits as if it had next to nothing to do draws 137 of 300 W (H200,
# https://arxiv.org/abs/2605.11999).

IDLE_SHARES = (137 / 300, 1.0)
"""s, from the least to the most."""


def lost_shares(idle: float, *, base_ms: float, step_ms: float) -> tuple[float, float]:
    """Return the share of the energy that goes into waiting, for each of `IDLE_SHARES`."""
    waiting = idle * (1.0 - base_ms / step_ms)
    low, high = (share * waiting / (1.0 - (1.0 - share) * waiting) for share in IDLE_SHARES)
    return low, high


@dataclass(frozen=True, slots=True)
class Audit:
    seen: Observation
    verdict: BoundVerdict
    # The gains of policies; None if they could not be simulated.
    recovery: AuditRecovery | None
    unknown: str = ""  # Why not; empty if it was.

    @property
    def energy_lost(self) -> tuple[float, float] | None:
        """Share of the energy that goes into waiting, from the least to the most; see `energy`."""
        fit = self.seen.fit
        if fit is None:
            return None
        step_ms = fit.base_ms + fit.us_per_token / 1e3 * float(self.seen.loads.max(axis=1).mean())
        return lost_shares(self.seen.idle, base_ms=fit.base_ms, step_ms=step_ms)


def lines(audit: Audit) -> Iterator[str]:
    seen = audit.seen
    yield (
        f"{len(seen.ranks)} ranks of {seen.batch} slots, {seen.prefillers} prefillers, "
        f"{len(seen.loads)} looks in {seen.seconds:.0f} s"
    )
    yield f"idle at the barrier      {100 * seen.idle:.1f} % of rank time"
    yield f"imbalance                {seen.imbalance_tokens:,.0f} KV tokens"
    yield f"output                   {seen.output_tokens_per_s:,.0f} tokens/s"
    yield f"slots in use             {100 * seen.slots_share:.0f} %"
    if seen.fit is None:
        yield "step time                unknown: loads did not vary enough"
    else:
        yield (
            f"step time                {seen.fit.base_ms:.3g} ms + {seen.fit.us_per_token:.3g} us x "
            f"max KV tokens (R2 {seen.fit.r2:.2f})"
        )
    if audit.energy_lost is not None:
        low, high = audit.energy_lost
        yield (
            f"energy spent on waiting  {100 * low:.1f} to {100 * high:.1f} % (model: a waiting rank "
            "draws 137/300 to all of its power)"
        )
    yield f"bound by                 {MEANINGS[audit.verdict.bound]}"
    wanted = audit.verdict.prefillers_per_rank
    if wanted is not None and seen.prefillers:
        yield (
            f"prefillers per rank      {seen.prefillers / len(seen.ranks):.2f} now, {wanted:.2f} "
            "would keep both roles equally busy"
        )
    if audit.recovery is None:
        yield f"what policies recover    unknown: {audit.unknown}"
        return
    yield (
        f"simulated with {audit.recovery.in_flight} requests in flight; this router behaves most like "
        f"{audit.recovery.baseline}:"
    )
    for one in sorted(audit.recovery.predictions, key=lambda one: one.gain):
        yield (
            f"  {one.policy:<14} idle {100 * one.idle:5.1f} %   {one.output_tokens_per_s:9,.0f} "
            f"tokens/s   {100 * one.gain:+6.1f} % +- {100 * one.error:.1f}"
        )
    if not seen.saturated:
        yield (
            "  of clients who wait for an answer before they send more: ranks have free slots, so where "
            "arrivals do not depend on answers, steps are shorter and the output stays"
        )


def as_json(audit: Audit) -> dict[str, object]:
    seen = audit.seen
    return {
        "ranks": list(seen.ranks),
        "prefillers": seen.prefillers,
        "seconds": seen.seconds,
        "looks": len(seen.loads),
        "batch": seen.batch,
        "idle_fraction": seen.idle,
        "imbalance_tokens": seen.imbalance_tokens,
        "mean_kv_tokens": dict(zip(seen.ranks, seen.loads.mean(axis=0).tolist(), strict=True)),
        "output_tokens_per_s": seen.output_tokens_per_s,
        "slots_share": seen.slots_share,
        "saturated": seen.saturated,
        "fit": None if seen.fit is None else asdict(seen.fit),
        "energy_lost": audit.energy_lost,
        "bound": audit.verdict.bound.value,
        "prefillers_per_rank": audit.verdict.prefillers_per_rank,
        "recovery": None if audit.recovery is None else asdict(audit.recovery),
        "unknown": audit.unknown,
    }


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
    fleet = f"{seen.prefillers} prefillers, {len(seen.ranks)} ranks of {seen.batch} slots"
    figure = empty_figure(_WIDTH_INCHES, 6.4, f"Bound by: {audit.verdict.bound.value}", [fleet])
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


def _draw_recovery(panel: "Axes", recovery: "AuditRecovery") -> None:
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
