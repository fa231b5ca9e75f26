"""Scores against their definitions, counted pair by pair and row by row."""

from math import isnan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import evaluation

# Few levels, so that ties are common.
levels = st.sampled_from([0.0, 0.05, 0.1, 0.3, 0.30000000000000004, 0.5, 0.7, 0.999, 1.0])
tables = st.lists(st.tuples(levels, st.booleans()), min_size=1, max_size=40)
Table = list[tuple[float, bool]]


def columns(table: Table) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    return np.array([p for p, _ in table]), np.array([y for _, y in table], np.bool_)


@given(tables)
def test_the_auc_counts_the_pairs_in_the_right_order(table: Table) -> None:
    came_true = [p for p, y in table if y]
    did_not = [p for p, y in table if not y]
    won = [float(p > q) + 0.5 * float(p == q) for p in came_true for q in did_not]
    auc = evaluation.roc_auc(*columns(table))
    assert auc == pytest.approx(sum(won) / len(won)) if won else isnan(auc)


def test_the_auc_of_the_same_answer_to_all_is_one_half() -> None:
    assert evaluation.roc_auc(np.full(5, 0.2), np.array([True, False, True, True, False])) == 0.5


@given(tables)
def test_the_area_under_the_curve_is_the_auc(table: Table) -> None:
    predicted, happened = columns(table)
    if happened.all() or not happened.any():
        return
    false_rate, true_rate = evaluation.roc_curve(predicted, happened)
    assert (false_rate[0], true_rate[0]) == (0.0, 0.0)
    assert (false_rate[-1], true_rate[-1]) == (1.0, 1.0)
    assert len(false_rate) == len(set(predicted.tolist())) + 1
    area = (np.diff(false_rate) * (true_rate[1:] + true_rate[:-1]) / 2).sum()
    assert area == pytest.approx(evaluation.roc_auc(predicted, happened))


@given(tables)
def test_a_point_of_the_curve_is_a_threshold(table: Table) -> None:
    predicted, happened = columns(table)
    if happened.all() or not happened.any():
        return
    points = list(zip(*evaluation.roc_curve(predicted, happened), strict=True))
    for threshold, point in zip(sorted(set(predicted), reverse=True), points[1:], strict=True):
        alarm = predicted >= threshold
        assert point == pytest.approx((alarm[~happened].mean(), alarm[happened].mean()))


@given(tables)
def test_the_brier_score_is_the_mean_squared_error(table: Table) -> None:
    expected = sum((p - y) ** 2 for p, y in table) / len(table)
    assert evaluation.brier(*columns(table)) == pytest.approx(expected)


@given(tables, st.integers(1, 12))
def test_a_bin_holds_the_rows_between_its_edges(table: Table, bins: int) -> None:
    diagram = evaluation.reliability(*columns(table), bins=bins)
    edges = np.linspace(0.0, 1.0, bins + 1).tolist()
    gaps = 0.0
    for number in range(bins):
        last = number == bins - 1
        rows = [
            (p, y)
            for p, y in table
            if edges[number] <= p and (p < edges[number + 1] or (last and p == 1.0))
        ]
        assert diagram.rows[number] == len(rows)
        if not rows:
            assert isnan(diagram.predicted[number])
            assert isnan(diagram.observed[number])
            continue
        predicted = sum(p for p, _ in rows) / len(rows)
        observed = sum(y for _, y in rows) / len(rows)
        assert diagram.predicted[number] == pytest.approx(predicted)
        assert diagram.observed[number] == pytest.approx(observed)
        gaps += len(rows) * abs(predicted - observed)
    assert diagram.rows.sum() == len(table)
    assert evaluation.expected_calibration_error(diagram) == pytest.approx(gaps / len(table))


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), max_size=30),
    st.sets(st.integers(1, 50), max_size=5),
)
def test_a_band_has_the_mean_of_its_values(
    table: list[tuple[float, int]], begins: set[int]
) -> None:
    edges = [0, *sorted(begins)]
    values, at = np.array([v for v, _ in table]), np.array([a for _, a in table], np.int64)
    means, rows = evaluation.mean_by_band(values, at, np.array(edges))
    assert len(means) == len(rows) == len(edges)
    for number, begin in enumerate(edges):
        end = edges[number + 1] if number + 1 < len(edges) else 10**9
        inside = [v for v, a in table if begin <= a < end]
        assert rows[number] == len(inside)
        assert (
            means[number] == pytest.approx(sum(inside) / len(inside))
            if inside
            else isnan(means[number])
        )


def test_the_mean_of_chosen_values() -> None:
    values = np.array([1.0, 5.0, 9.0])
    assert evaluation.mean_where(values) == 5.0
    assert evaluation.mean_where(values, np.array([True, False, False])) == 1.0


def test_scores_of_nothing_are_undefined() -> None:
    nothing, never = np.empty(0), np.empty(0, np.bool_)
    assert isnan(evaluation.roc_auc(nothing, never))
    assert isnan(evaluation.brier(nothing, never))
    assert isnan(evaluation.expected_calibration_error(evaluation.reliability(nothing, never)))
    assert isnan(evaluation.mean_where(np.ones(2), np.zeros(2, np.bool_)))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.integers(1, 4))
def test_the_error_of_a_mean_is_that_of_the_means_of_equal_blocks(
    means: list[float], rows_each: int
) -> None:
    values = np.repeat(means, rows_each)
    block = np.repeat(np.arange(len(means)), rows_each)
    error = evaluation.jackknife_error(lambda mask: evaluation.mean_where(values, mask), block)
    expected = float(np.std(means, ddof=1)) / sqrt(len(means))
    assert error == pytest.approx(expected, abs=1e-9)


def test_the_error_is_undefined_with_one_block_or_where_the_statistic_is() -> None:
    values, happened = np.array([0.1, 0.9, 0.4]), np.array([False, True, False])
    assert isnan(
        evaluation.jackknife_error(
            lambda mask: evaluation.mean_where(values, mask), np.zeros(3, np.int64)
        )
    )

    def auc(mask: NDArray[np.bool_]) -> float:
        return evaluation.roc_auc(values[mask], happened[mask])

    assert isnan(evaluation.jackknife_error(auc, np.arange(3)))


def test_the_error_tells_how_far_samples_spread() -> None:
    # 200 samples of an AUC of correlated rows, ten rows a block: their spread is the error.
    rng = np.random.default_rng(3)
    found, errors = [], []
    for _ in range(200):
        block = np.repeat(np.arange(30), 10)
        happened = rng.random(300) < 0.4
        common = rng.normal(size=30)[block]
        predicted = happened + common + rng.normal(size=300)

        def auc(
            mask: NDArray[np.bool_],
            predicted: NDArray[np.float64] = predicted,
            happened: NDArray[np.bool_] = happened,
        ) -> float:
            return evaluation.roc_auc(predicted[mask], happened[mask])

        found.append(auc(np.ones(300, np.bool_)))
        errors.append(evaluation.jackknife_error(auc, block))
    assert np.mean(errors) == pytest.approx(np.std(found, ddof=1), rel=0.15)
