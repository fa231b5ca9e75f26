"""How good probabilities and estimates are, in numpy alone.

A score that its rows leave undefined is NaN: the AUC without both outcomes, a mean of nothing.
"""

from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Reliability:
    """A reliability diagram: the predicted probability against how often it came true."""

    # float64[bins], mean prediction of each bin; NaN where it is empty.
    predicted: NDArray[np.float64]
    observed: NDArray[np.float64]  # float64[bins], how often it came true; NaN where it is empty.
    rows: NDArray[np.int64]  # int64[bins].


def roc_auc(predicted: NDArray[np.float64], happened: NDArray[np.bool_]) -> float:
    """Return the chance that a row that came true was rated above one that did not.

    A tie counts one half. O(n log n).
    """
    _, came_true, did_not = _by_level(predicted, happened)
    pairs = float(came_true.sum()) * float(did_not.sum())
    if pairs == 0:
        return nan
    below = did_not.cumsum() - did_not / 2
    return float(came_true @ below) / pairs


def roc_curve(
    predicted: NDArray[np.float64], happened: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the rates of false and of true alarms as the threshold falls, from (0, 0) to (1, 1).

    One point for every level that was predicted, ties together: the area under the straight lines
    between them is `roc_auc`. Both outcomes must occur.
    """
    _, came_true, did_not = _by_level(predicted, happened)
    assert came_true.any(), "nothing came true"
    assert did_not.any(), "everything came true"
    rates = [
        np.concatenate([[0.0], counts[::-1].cumsum() / counts.sum()])
        for counts in (did_not, came_true)
    ]
    return rates[0], rates[1]


def _by_level(
    predicted: NDArray[np.float64], happened: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct predictions, rising, and how many rows of each came true and did not."""
    levels, level = np.unique(predicted, return_inverse=True)
    came_true = np.bincount(level[happened], minlength=len(levels))
    return levels, came_true, np.bincount(level, minlength=len(levels)) - came_true


def brier(predicted: NDArray[np.float64], happened: NDArray[np.bool_]) -> float:
    """Return the mean squared distance of the predictions from the outcomes, 0 or 1."""
    return mean_where((predicted - happened) ** 2)


def reliability(
    predicted: NDArray[np.float64], happened: NDArray[np.bool_], *, bins: int = 10
) -> Reliability:
    """Return a reliability diagram with bins of equal width; the last one has both its ends."""
    inner = np.linspace(0.0, 1.0, bins + 1)[1:-1]
    place = np.searchsorted(inner, predicted, side="right")
    rows = np.bincount(place, minlength=bins)
    means = [
        _divided(np.bincount(place, values, minlength=bins), rows)
        for values in (predicted, happened)
    ]
    return Reliability(means[0], means[1], rows)


def expected_calibration_error(diagram: Reliability) -> float:
    """Return the mean distance between prediction and outcome over the bins, weighted by rows."""
    total = diagram.rows.sum()
    if not total:
        return nan
    filled = diagram.rows > 0
    gaps = np.abs(diagram.predicted - diagram.observed)[filled]
    return float(gaps @ diagram.rows[filled] / total)


def mean_where(values: NDArray[np.float64], where: NDArray[np.bool_] | None = None) -> float:
    """Return the mean of the values, of those that `where` selects if given."""
    chosen = values if where is None else values[where]
    return float(chosen.mean()) if chosen.size else nan


def mean_by_band(
    values: NDArray[np.float64], at: NDArray[np.int64], edges: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the mean of the values in each band of `at`, NaN if it is empty, and its rows.

    Args:
        values: float64[n].
        at: int64[n], none below the first edge.
        edges: int64[bands], rising: where each band begins; the last has no end.
    """
    assert not at.size or at.min() >= edges[0], "a value before the first band"
    band = np.searchsorted(edges, at, side="right") - 1
    rows = np.bincount(band, minlength=len(edges))
    return _divided(np.bincount(band, values, minlength=len(edges)), rows), rows


def _divided(sums: NDArray[np.number], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    means = np.full(len(rows), nan)
    np.divide(sums, rows, out=means, where=rows > 0)
    return means
