"""The subset solvers against full enumeration, and the two-probe rule against every subset."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.proxy.core import subset as subset_module
from balanceroute.proxy.core.subset import (
    EMPTY,
    FCurve,
    Neighbours,
    Solver,
    Subset,
    best_subset,
    discounts,
    enumerate_subsets,
    f_score,
    meet_in_the_middle,
    neighbours,
    reachable_bitset,
    third_of_two,
)

SOLVERS: list[Solver] = [enumerate_subsets, meet_in_the_middle, reachable_bitset, neighbours]
# Not next to 0, where products lose their precision to underflow.
COEFFICIENTS = st.just(0.0) | st.floats(1e-3, 64.0)


def every_subset(sizes: Sequence[int], max_items: int, max_total: int | None) -> Iterator[Subset]:
    """Yield the allowed subsets, fewest items first, then lexicographically."""
    yield EMPTY
    for num_items in range(1, min(max_items, len(sizes)) + 1):
        for indices in combinations(range(len(sizes)), num_items):
            total = sum(sizes[index] for index in indices)
            if max_total is None or total <= max_total:
                yield Subset(total, indices)


def brute_force(
    sizes: Sequence[int], max_items: int, peak: float, max_total: int | None
) -> Neighbours:
    subsets = list(every_subset(sizes, max_items, max_total))
    # max and min return the first of equals, which is the preferred one.
    below = max((s for s in subsets if s.total <= peak), key=lambda s: s.total)
    above = min((s for s in subsets if s.total > peak), key=lambda s: s.total, default=None)
    return Neighbours(below, above)


@dataclass(frozen=True)
class Instance:
    """Arguments of a solver."""

    sizes: list[int]
    max_items: int
    peak: float
    max_total: int | None

    def solve(self, solver: Solver) -> Neighbours:
        return solver(self.sizes, self.max_items, self.peak, self.max_total)


@st.composite
def instances(
    draw: st.DrawFn, largest: tuple[int, ...] = (3, 40, 5_000, 1_000_000), max_num: int = 8
) -> Instance:
    """Draw sizes from many duplicates to few, and bounds on, next to and off the totals."""
    size = st.integers(1, draw(st.sampled_from(largest)))
    sizes = draw(st.lists(size, max_size=max_num))
    total = st.integers(0, sum(sizes) + 1)
    return Instance(
        sizes,
        draw(st.integers(0, max_num + 1)),
        draw(total.map(float) | total.map(lambda tokens: tokens + 0.5) | st.just(inf)),
        draw(st.none() | total),
    )


@pytest.mark.parametrize("solver", SOLVERS)
@given(instance=instances())
def test_solvers_find_what_full_enumeration_finds(solver: Solver, instance: Instance) -> None:
    assert instance.solve(solver) == instance.solve(brute_force)


@given(instance=instances(largest=(4, 300, 3_000), max_num=18))
def test_solvers_agree_on_more_candidates(instance: Instance) -> None:
    first, *others = [instance.solve(solver) for solver in SOLVERS]
    assert all(other == first for other in others)


@given(instance=instances(largest=(3, 40, 100_000), max_num=14))
def test_the_third_item_of_every_two_gives_what_full_enumeration_finds(instance: Instance) -> None:
    for slots in range(4):
        three = Instance(instance.sizes, slots, instance.peak, instance.max_total)
        assert three.solve(third_of_two) == three.solve(brute_force)


@given(instance=instances(largest=(30, 100_000), max_num=12))
def test_one_slot_takes_one_item(instance: Instance) -> None:
    one = Instance(instance.sizes, 1, instance.peak, instance.max_total)
    assert one.solve(neighbours) == one.solve(brute_force)


EDGES = {
    "no slot": (Instance([5, 3], 0, 4.0, None), Neighbours(EMPTY, None)),
    "no candidate": (Instance([], 4, 4.0, None), Neighbours(EMPTY, None)),
    "no candidate, no end": (Instance([], 4, inf, 7), Neighbours(EMPTY, None)),
    "peak 0": (Instance([5, 3, 4], 2, 0.0, None), Neighbours(EMPTY, Subset(3, (1,)))),
    "no end": (Instance([5, 3, 4], 2, inf, None), Neighbours(Subset(9, (0, 2)), None)),
    "no end, limited": (Instance([5, 3, 4], 2, inf, 8), Neighbours(Subset(8, (0, 1)), None)),
    "all too large": (Instance([5, 3, 4], 2, 2.5, None), Neighbours(EMPTY, Subset(3, (1,)))),
    "one less": (Instance([5, 4], 1, 2.0, None), Neighbours(EMPTY, Subset(4, (1,)))),
    "at the limit": (Instance([5, 4], 1, 2.0, 4), Neighbours(EMPTY, Subset(4, (1,)))),
    "nothing allowed": (Instance([5, 3, 4], 2, 9.0, 2), Neighbours(EMPTY, None)),
    "limit below 0": (Instance([5, 3, 4], 2, 9.0, -2), Neighbours(EMPTY, None)),
    "limit at the peak": (Instance([5, 3, 4], 2, 7.0, 7), Neighbours(Subset(7, (1, 2)), None)),
    "just below": (
        Instance([5, 3, 4], 2, 6.99, None),
        Neighbours(Subset(5, (0,)), Subset(7, (1, 2))),
    ),
    "equals": (
        Instance([4, 4, 4, 4], 3, 9.0, None),
        Neighbours(Subset(8, (0, 1)), Subset(12, (0, 1, 2))),
    ),
    "fewer items first": (
        Instance([2, 3, 5, 7, 12], 3, 12.0, None),
        Neighbours(Subset(12, (4,)), Subset(14, (0, 4))),
    ),
    "older items first": (
        Instance([1, 6, 2, 5, 3, 4], 2, 7.0, None),
        Neighbours(Subset(7, (0, 1)), Subset(8, (1, 2))),
    ),
    "a million tokens each": (
        Instance([1_000_000, 999_999, 999_998, 1_000_000], 3, 2_999_996.0, None),
        Neighbours(Subset(2_000_000, (0, 3)), Subset(2_999_997, (0, 1, 2))),
    ),
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("edge", EDGES)
def test_edges(solver: Solver, edge: str) -> None:
    instance, expected = EDGES[edge]
    found = instance.solve(solver)
    assert found == expected
    # Not numpy's integers: what leaves here is logged and compared.
    for subset in found:
        if subset is not None:
            assert {type(value) for value in (subset.total, *subset.indices)} == {int}


@pytest.mark.parametrize(
    ("sizes", "max_items", "peak", "solver"),
    [
        ([9_000, 20_000, 31_000, 8_000], 3, 40_000.0, enumerate_subsets),
        (list(range(20_000, 60_000, 2_000)), 20, 300_000.0, meet_in_the_middle),
        (list(range(1_000, 65_000, 1_000)), 4, 60_000.0, reachable_bitset),
        (list(range(1, 81)), 2, 90.0, reachable_bitset),
    ],
)
def test_each_solver_has_inputs_that_it_is_chosen_for(
    sizes: list[int],
    max_items: int,
    peak: float,
    solver: Solver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []

    def spy(real: Solver) -> Solver:
        def call(
            sizes: Sequence[int], max_items: int, peak: float, max_total: int | None
        ) -> Neighbours:
            called.append(real.__name__)
            return real(sizes, max_items, peak, max_total)

        return call

    for real in SOLVERS[:3]:
        monkeypatch.setattr(subset_module, real.__name__, spy(real))
    found = neighbours(sizes, max_items, peak, None)
    assert called == [solver.__name__]
    assert found == reachable_bitset(sizes, max_items, peak, None)


@dataclass(frozen=True)
class Score:
    """F of one rank."""

    margins: list[int]
    gamma: float
    alpha: float
    beta: float

    @property
    def peak(self) -> float:
        limits = np.array(self.margins, np.float64)
        return FCurve(limits, self.beta * self._weights, reward=self._reward).peak

    def of(self, totals: Sequence[int]) -> list[float]:
        limits = np.array(self.margins, np.float64)
        scores: list[float] = f_score(
            totals, limits, self.beta * self._weights, reward=self._reward
        ).tolist()
        return scores

    def __call__(self, total: int) -> float:
        return self.of([total])[0]

    @property
    def _weights(self) -> NDArray[np.float64]:
        return discounts(len(self.margins) - 1, self.gamma)

    @property
    def _reward(self) -> float:
        return self.alpha * float(self._weights.sum())


def margins_near(sizes: Sequence[int]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, sum(sizes) + 1), min_size=1, max_size=21)


@given(
    instance=instances(largest=(9, 120_000)),
    data=st.data(),
    gamma=st.floats(0.0, 1.0),
    alpha=COEFFICIENTS,
    beta=COEFFICIENTS,
)
def test_two_probes_find_the_best_of_all_subsets(
    instance: Instance, data: st.DataObject, gamma: float, alpha: float, beta: float
) -> None:
    score = Score(data.draw(margins_near(instance.sizes)), gamma, alpha, beta)
    best = best_subset(
        instance.sizes, instance.max_items, score.peak, score, max_total=instance.max_total
    )
    allowed = list(every_subset(instance.sizes, instance.max_items, instance.max_total))
    assert best in allowed
    scores = score.of([subset.total for subset in allowed])
    scale = (alpha + beta) * len(score.margins) * (sum(instance.sizes) + 1)
    assert scores[allowed.index(best)] >= max(scores) - 1e-12 * scale


@given(
    instance=instances(largest=(9, 120_000)),
    data=st.data(),
    alpha=st.integers(0, 64),
    beta=st.integers(0, 64),
)
def test_the_best_subset_is_the_largest_then_smallest_then_oldest_of_the_best(
    instance: Instance, data: st.DataObject, alpha: int, beta: int
) -> None:
    # With discount 1 all is whole numbers: no rounding hides a wrong tie.
    score = Score(data.draw(margins_near(instance.sizes)), 1.0, alpha, beta)
    allowed = list(every_subset(instance.sizes, instance.max_items, instance.max_total))
    scores = score.of([subset.total for subset in allowed])
    expected = EMPTY
    if max(scores) > 0.0:
        ties = [s for s, value in zip(allowed, scores, strict=True) if value == max(scores)]
        expected = max(ties, key=lambda subset: subset.total)
    best = best_subset(
        instance.sizes, instance.max_items, score.peak, score, max_total=instance.max_total
    )
    assert best == expected


def br0(margin: int, ranks: int) -> Score:
    return Score([margin], 1.0, 1.0, float(ranks))


@pytest.mark.parametrize(
    ("sizes", "score", "best"),
    [
        # Two ranks: 10 tokens beyond the margin cost less than leaving 90 open.
        ([100, 30], br0(90, 2), Subset(100, (0,))),
        # Eight ranks: 5 beyond cost more than the 10 left open, though 95 is nearer to 90.
        ([95, 80], br0(90, 8), Subset(80, (1,))),
        # A tie (80 each) goes to the larger total.
        ([100, 80], br0(90, 2), Subset(100, (0,))),
        # A tie with admitting nothing goes to nothing, as does what scores below 0.
        ([180], br0(90, 2), EMPTY),
        ([181, 200], br0(90, 2), EMPTY),
        ([7], br0(0, 8), EMPTY),
    ],
)
def test_best_subset_of_known_inputs(sizes: list[int], score: Score, best: Subset) -> None:
    for slots in (1, 2):
        assert best_subset(sizes, slots, score.peak, score) == best


def test_neither_probe_alone_is_enough() -> None:
    # Negative control of the two-probe property: each probe is the only right one somewhere.
    for sizes, score, side in (([100, 30], br0(90, 2), 1), ([95, 80], br0(90, 8), 0)):
        probes = neighbours(sizes, 1, score.peak, None)
        assert all(probe is not None for probe in probes)
        assert best_subset(sizes, 1, score.peak, score) == probes[side]


def test_the_kink_of_the_present_step_alone_misleads_over_a_horizon() -> None:
    # Negative control: probing only around the first margin (BR-0's) is not exact for BR-H.
    score = Score([10, 50, 50], 1.0, 1.0, 2.0)
    sizes = [10, 12, 45]
    assert best_subset(sizes, 1, score.peak, score).total == 45
    at_first_margin = neighbours(sizes, 1, 10.0, None)
    assert [subset.total for subset in at_first_margin if subset is not None] == [10, 12]
    assert score(45) > max(score(10), score(12))


@given(instance=instances(), score_of=st.sampled_from([lambda _: 1.0, lambda _: -1.0]))
def test_the_score_is_asked_for_at_most_two_nonempty_totals(
    instance: Instance, score_of: Callable[[int], float]
) -> None:
    asked: list[int] = []

    def score(total: int) -> float:
        asked.append(total)
        return score_of(total)

    best_subset(
        instance.sizes, instance.max_items, instance.peak, score, max_total=instance.max_total
    )
    assert len(asked) <= 2
    assert all(total > 0 for total in asked)


@given(instance=instances(), data=st.data())
def test_totals_do_not_depend_on_the_order_of_candidates(
    instance: Instance, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(instance.sizes))
    first = instance.solve(neighbours)
    second = neighbours(shuffled, instance.max_items, instance.peak, instance.max_total)
    assert first.below.total == second.below.total
    assert (first.above and first.above.total) == (second.above and second.above.total)
