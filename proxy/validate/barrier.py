"""Decode ranks in lock step: the same step on all of them, and the time that they waited."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.validate.fit import Fit
from balanceroute.proxy.validate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Aligned:
    """The steps that every rank of a barrier recorded, in order.

    Attributes:
        loads: int64[steps, ranks], KV tokens.
        step_ns: float64[steps], the ranks' median time of the step.
        prefill_tokens: int64[steps], of all ranks.
        dummy: bool[steps, ranks].
        spread_ns: int64[steps], between the first and the last rank's end.
    """

    loads: NDArray[np.int64]
    step_ns: NDArray[np.float64]
    prefill_tokens: NDArray[np.int64]
    dummy: NDArray[np.bool_]
    spread_ns: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Idle:
    """The cost of a barrier.

    Attributes:
        ranks: Of the barrier.
        steps: Aligned steps at which some rank had a load.
        tokens: Idle fraction by loads: sum of max L - L_g over sum of max L, over steps and ranks.
        time: Share of the ranks' wall time in which they waited: b (max L - L_g) of each step over its
            time. None without a fit, or if b is not positive.
        dummy: Share of the ranks' wall time in steps without a request of their own.
        spread_ms_p50: Median time between the first and the last rank's end of a step. Large if the
            ranks' clocks differ, or the steps are not the same ones.
    """

    ranks: int
    steps: int
    tokens: float
    time: float | None
    dummy: float
    spread_ms_p50: float


def align(timelines: Sequence[Timeline]) -> Aligned:
    """Return the steps that are on every timeline, by their places in the barrier."""
    places = reduce(np.intersect1d, (timeline.place[timeline.place >= 0] for timeline in timelines))
    rows: list[Timeline] = []
    for timeline in timelines:
        # Of two steps in one place, which no engine writes, the first is taken.
        known, first = np.unique(timeline.place, return_index=True)
        rows.append(timeline.cut(_mask(first[np.isin(known, places)], len(timeline.place))))
    # By place, which is the order of time within one process.
    orders = [np.argsort(row.place) for row in rows]

    def column(name: str) -> "NDArray[np.int64]":
        found = [getattr(row, name)[order] for row, order in zip(rows, orders, strict=True)]
        return np.stack(found, axis=1)

    ends = column("end_ns")
    return Aligned(
        loads=column("kv_tokens"),
        step_ns=np.median(column("cycle_ns"), axis=1),
        prefill_tokens=column("prefill_tokens").sum(axis=1),
        dummy=column("dummy").astype(np.bool_),
        spread_ns=np.ptp(ends, axis=1),
    )


def idle(aligned: Aligned, fit: Fit | None) -> Idle | None:
    """Return the cost of the barrier without prefill steps; None if no rank had a load."""
    chosen = (aligned.loads.max(axis=1) > 0) & (aligned.prefill_tokens == 0)
    if not chosen.any():
        return None
    loads, step_ns = aligned.loads[chosen], aligned.step_ns[chosen]
    ranks = loads.shape[1]
    envelope = loads.max(axis=1)
    missing = ranks * envelope - loads.sum(axis=1)
    wall_ns = ranks * float(step_ns.sum())
    lost = None
    if fit is not None and fit.us_per_token > 0:
        lost = float(missing.sum()) * fit.us_per_token * 1e3 / wall_ns
    return Idle(
        ranks=ranks,
        steps=len(loads),
        tokens=float(missing.sum() / (ranks * envelope.sum())),
        time=lost,
        dummy=float((aligned.dummy[chosen] * step_ns[:, None]).sum() / wall_ns),
        spread_ms_p50=float(np.median(aligned.spread_ns[chosen])) / 1e6,
    )


def _mask(places: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
    mask = np.zeros(length, np.bool_)
    mask[places] = True
    return mask
