"""F of one round: its definition, with a target and without, and that it stays concave."""

from functools import partial
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.proxy.core.projection import Balance, Weights
from balanceroute.proxy.core.subset import best_subset, discounts, f_score

LOADS = st.lists(st.integers(0, 2_000), min_size=1, max_size=6)
HORIZON = 3


def ahead_of(loads: list[int]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return loads that fall at different speeds."""
    steps = np.arange(HORIZON + 1)
    return np.array(
        [[max(0, load - (7 + rank) * h) for h in steps] for rank, load in enumerate(loads)],
        np.float64,
    )


def present(loads: list[int], target: int | None = None) -> Balance:
    """Return the balance of the present step, as BR-0 sees it."""
    weights = Weights(np.ones(1), alpha=1.0, beta=float(len(loads)))
    aim = None if target is None else partial(np.array, [float(target)])
    return Balance(np.array(loads, np.float64)[:, None], weights, np.ones(1), aim)


@given(loads=LOADS, total=st.integers(0, 4_000), target=st.integers(0, 3_000))
def test_f_is_the_way_to_the_target_less_what_the_others_wait(
    loads: list[int], total: int, target: int
) -> None:
    ranks, envelope = len(loads), max(loads)
    balance = present(loads, target)
    for rank, load in enumerate(loads):
        aim = min(max(target, load), envelope)
        nearer = abs(aim - load) - abs(aim - load - total)
        waiting = (ranks - 2) * max(0, total - (envelope - load))
        # With one rank nobody waits, and there is nothing to aim at.
        expected = nearer - waiting if ranks > 1 else 0
        assert balance.score(rank, total) == expected


@given(loads=LOADS, totals=st.lists(st.integers(0, 4_000), max_size=9), gamma=st.floats(0.0, 1.0))
def test_without_a_target_f_is_the_papers(
    loads: list[int], totals: list[int], gamma: float
) -> None:
    ahead = ahead_of(loads)
    steps = discounts(HORIZON, gamma)
    balance = Balance(ahead.copy(), Weights(steps, 2.0, 48.0), np.ones(HORIZON + 1))
    for rank in range(len(loads)):
        margins = ahead.max(axis=0) - ahead[rank]
        paper = f_score(totals, margins, 48.0 * steps, reward=2.0 * float(steps.sum()))
        sizes = np.array(totals, np.float64)
        assert balance.scores(rank, sizes).tolist() == paper.tolist()
        assert balance.scores_to_envelope(rank, sizes).tolist() == paper.tolist()


@given(
    ranks=st.lists(st.tuples(st.integers(0, 2_000), st.sampled_from([0.5, 1.0, 1.5])), min_size=1),
    total=st.integers(1, 4_000),
)
def test_with_speeds_f_is_what_the_barrier_costs_in_time(
    ranks: list[tuple[int, float]], total: int
) -> None:
    loads = np.array([load for load, _ in ranks], np.float64)
    speeds = np.array([speed for _, speed in ranks])
    weights = Weights(np.ones(1), alpha=1.0, beta=float(len(ranks)))
    balance = Balance(loads[:, None].copy(), weights, np.ones(1), speeds=speeds)

    def idle(loads: NDArray[np.float64]) -> float:
        times = loads / speeds
        return float(len(times) * times.max() - times.sum())

    slower = []
    for rank in range(len(ranks)):
        more = loads.copy()
        more[rank] += total
        saved = idle(loads) - idle(more)
        assert balance.score(rank, total) / speeds[rank] == pytest.approx(saved, abs=1e-6)
        slower.append((more / speeds).max())
    best = balance.best_rank(total, np.ones(len(ranks), np.bool_))
    assert slower[best] == pytest.approx(min(slower))
    # An admission moves the margins as if the balance were made anew.
    balance.admit(best, np.array([float(total)]))
    loads[best] += total
    again = Balance(loads[:, None], weights, np.ones(1), speeds=speeds)
    assert balance.safe_margins == pytest.approx(again.safe_margins, abs=1e-6)


@given(
    loads=st.lists(st.integers(0, 2_000), min_size=1, max_size=40),
    totals=st.lists(st.integers(1, 1_500), min_size=1, max_size=8),
    closed=st.sets(st.integers(0, 39)),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_best_rank_overflows_least_and_of_those_has_most_room(
    loads: list[int], totals: list[int], closed: set[int], gamma: float
) -> None:
    is_open = np.array([rank not in closed for rank in range(len(loads))])
    if not is_open.any():
        return
    steps, persistence = discounts(HORIZON, gamma), np.array([1.0, 0.75, 0.5, 0.25])
    ahead = ahead_of(loads)
    balance = Balance(ahead.copy(), Weights(steps, 1.0, 8.0), persistence)
    for total in totals:
        rank = balance.best_rank(total, is_open)
        margins = (ahead.max(axis=0) - ahead) / persistence
        overflow = (np.maximum(total - margins, 0.0) * steps * persistence).sum(axis=1)
        room = (margins * steps * persistence).sum(axis=1)
        assert is_open[rank]
        assert overflow[rank] == pytest.approx(overflow[is_open].min(), abs=1e-6)
        alike = is_open & (overflow <= overflow[rank])
        assert room[rank] == pytest.approx(room[alike].max(), abs=1e-6)
        # The next one sees the admission.
        balance.admit(rank, total * persistence)
        ahead[rank] += total * persistence


def test_the_target_of_a_fast_rank_is_higher() -> None:
    weights = Weights(np.ones(1), alpha=1.0, beta=2.0)
    speeds, target = np.array([1.5, 0.5]), np.array([100.0])
    balance = Balance(np.array([[0.0], [400.0]]), weights, np.ones(1), lambda: target, speeds)
    assert balance.peak(0) == 150.0


@given(
    loads=LOADS,
    target=st.integers(0, 3_000),
    beta=st.integers(1, 64),
    start=st.integers(0, 3_000),
    step=st.integers(1, 1_000),
)
def test_f_with_a_target_is_concave(
    loads: list[int], target: int, beta: int, start: int, step: int
) -> None:
    ahead = ahead_of(loads)
    weights = Weights(np.ones(HORIZON + 1), 1.0, float(beta))
    balance = Balance(
        ahead, weights, np.ones(HORIZON + 1), partial(np.full, HORIZON + 1, float(target))
    )
    totals = np.array([start, start + step, start + 2 * step], np.float64)
    for rank in range(len(loads)):
        low, middle, high = balance.scores(rank, totals)
        assert low + high <= 2 * middle


@given(
    loads=LOADS,
    target=st.integers(0, 3_000),
    sizes=st.lists(st.integers(1, 1_500), min_size=1, max_size=7),
    slots=st.integers(1, 7),
)
def test_the_solvers_find_the_best_subset_for_a_target(
    loads: list[int], target: int, sizes: list[int], slots: int
) -> None:
    balance = Balance(
        ahead_of(loads),
        Weights(np.ones(HORIZON + 1), 1.0, float(len(loads))),
        np.ones(HORIZON + 1),
        partial(np.full, HORIZON + 1, float(target)),
    )
    for rank in range(len(loads)):
        found = best_subset(sizes, slots, balance.peak(rank), partial(balance.score, rank))
        totals = [
            sum(chosen)
            for count in range(1, min(slots, len(sizes)) + 1)
            for chosen in combinations(sizes, count)
        ]
        best = max(0.0, *(balance.score(rank, total) for total in totals))
        assert balance.score(rank, found.total) == best


def test_the_peak_is_at_the_target() -> None:
    balance = present([1000, 400, 700], target=720)
    assert [balance.peak(rank) for rank in range(3)] == [0.0, 320.0, 20.0]
    # Without one it is at the envelope.
    assert [present([1000, 400, 700]).peak(rank) for rank in range(3)] == [0.0, 600.0, 300.0]


@given(
    loads=LOADS,
    target=st.integers(0, 3_000),
    totals=st.lists(st.integers(0, 4_000), min_size=1, max_size=9),
    gamma=st.floats(0.0, 1.0),
)
def test_the_outlook_has_the_same_scores(
    loads: list[int], target: int, totals: list[int], gamma: float
) -> None:
    weights = Weights(discounts(HORIZON, gamma), 1.0, float(len(loads)))
    persistence = np.array([1.0, 0.75, 0.5, 0.25])
    aim = np.full(HORIZON + 1, float(target))
    balance = Balance(ahead_of(loads), weights, persistence, lambda: aim)
    sizes = np.array(sorted(totals), np.float64)
    outlooks = balance.outlooks([*range(len(loads))], sizes)
    for rank, outlook in enumerate(outlooks):
        np.testing.assert_allclose(outlook.to_target, balance.scores(rank, sizes), atol=1e-6)
        expected = balance.scores_to_envelope(rank, sizes)
        np.testing.assert_allclose(outlook.to_envelope, expected, atol=1e-6)


@pytest.mark.parametrize(("total", "beyond"), [(500, 0.0), (600, 0.0), (700, 100.0)])
def test_overflow_is_what_is_beyond_the_envelope(total: int, beyond: float) -> None:
    balance = present([1000, 400, 700], target=720)
    (outlook,) = balance.outlooks([1], np.array([float(total)]))
    assert outlook.overflow.tolist() == [beyond]


def test_the_target_is_that_of_the_loads_before_any_admission() -> None:
    ahead, made = np.array([[100.0], [40.0]]), []

    def target() -> NDArray[np.float64]:
        made.append(ahead.tolist())
        return np.asarray(ahead.mean(axis=0))

    balance = Balance(ahead, Weights(np.ones(1), 1.0, 2.0), np.ones(1), target)
    assert balance.best_rank(10, np.ones(2, np.bool_)) == 1
    assert not made  # Where one request is placed, nobody asks.
    balance.admit(1, np.array([10.0]))
    assert balance.peak(1) == 20.0
    assert made == [[[100.0], [40.0]]]
