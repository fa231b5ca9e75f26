"""The subset solvers against full enumeration, and the two-probe rule against every subset."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

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
    excess,
    f_score,
    idle_tokens,
    imbalance_tokens,
    lasting_discount,
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


# The F-score against brute force, hand-computed rows and the laws it must obey.


TOKENS = st.integers(0, 200_000)
LOADS = st.lists(TOKENS, min_size=1, max_size=12)
MARGINS = st.lists(TOKENS | st.integers(0, 5), min_size=1, max_size=21)
# Not next to 0, where products lose their precision to underflow.
DISCOUNTS = st.floats(0.0, 1.0)


def score_of(
    totals: ArrayLike,
    margins: NDArray[np.float64],
    weights: NDArray[np.float64],
    *,
    alpha: float,
    beta: float,
) -> NDArray[np.float64]:
    """F as the paper writes it: a reward and a penalty per weighted step."""
    return f_score(totals, margins, beta * weights, reward=alpha * float(weights.sum()))


def peak_of(
    margins: NDArray[np.float64], weights: NDArray[np.float64], *, alpha: float, beta: float
) -> float:
    return FCurve(margins, beta * weights, reward=alpha * float(weights.sum())).peak


def margin(loads: Sequence[int], rank: int) -> int:
    return max(loads) - loads[rank]


def br0_score(total: int, loads: Sequence[int], rank: int) -> float:
    """F with horizon 0, reward 1 and one penalty per rank: BR-0."""
    margins = np.array([margin(loads, rank)], np.float64)
    return float(score_of([total], margins, np.ones(1), alpha=1.0, beta=len(loads))[0])


def exact_score(
    total: Fraction, margins: Sequence[int], weights: NDArray[np.float64], alpha: float, beta: float
) -> Fraction:
    """F by its definition, in rational numbers."""
    score = Fraction(0)
    for limit, weight in zip(margins, weights, strict=True):
        overflow = max(total - limit, Fraction(0))
        score += Fraction(float(weight)) * (Fraction(alpha) * total - Fraction(beta) * overflow)
    return score


@pytest.mark.parametrize(
    ("loads", "imbalance", "idle"),
    [
        ([7], 0, 0),
        ([5, 5, 5], 0, 0),
        ([100, 40, 70], 60, 90),
        ([0, 0, 0, 8], 8, 24),
    ],
)
def test_imbalance_and_idle_of_known_loads(loads: list[int], imbalance: int, idle: int) -> None:
    for form in (loads, np.array(loads)):
        assert imbalance_tokens(form) == imbalance
        assert idle_tokens(form) == idle
    assert type(imbalance_tokens(np.array(loads))) is int
    assert type(idle_tokens(np.array(loads))) is int


@pytest.mark.parametrize(
    ("horizon_steps", "gamma", "weights"),
    [
        (0, 0.9, [1.0]),
        (3, 0.5, [1.0, 0.5, 0.25, 0.125]),
        (2, 1.0, [1.0, 1.0, 1.0]),
        (2, 0.0, [1.0, 0.0, 0.0]),
    ],
)
def test_discounts_are_powers(horizon_steps: int, gamma: float, weights: list[float]) -> None:
    assert discounts(horizon_steps, gamma).tolist() == weights


@pytest.mark.parametrize(("horizon_steps", "gamma"), [(-1, 0.9), (3, -0.1), (3, 1.1)])
def test_discounts_refuse_what_is_none(horizon_steps: int, gamma: float) -> None:
    with pytest.raises(AssertionError):
        discounts(horizon_steps, gamma)


@pytest.mark.parametrize(
    ("gamma", "departures", "lasting"),
    [
        (0.8, 0.0, 0.8),
        (0.8, 0.047, 0.8),  # Mooncake, batches of 16.
        (0.8, 0.076, 0.8),  # Azure conversation, batches of 16.
        (0.8, 0.57, 0.32),  # Azure code, batches of 16.
        (0.8, 4.6, 0.0),  # Azure code, batches of 128.
        (0.2, 0.57, 0.2),
        (1.0, 0.1, 0.82),
    ],
)
def test_the_lasting_discount_of_known_rates(
    gamma: float, departures: float, lasting: float
) -> None:
    assert lasting_discount(gamma, departures) == lasting


@given(gamma=st.floats(0.0, 1.0), rates=st.tuples(st.floats(0.0, 10.0), st.floats(0.0, 10.0)))
def test_the_lasting_discount_falls_with_the_turnover(
    gamma: float, rates: tuple[float, float]
) -> None:
    slow, fast = sorted(rates)
    assert 0.0 <= lasting_discount(gamma, fast) <= lasting_discount(gamma, slow) <= gamma


@pytest.mark.parametrize(
    ("total", "score"),
    # Rank 1 of loads (100, 40, 70): margin 60, then each token costs 3 - 1.
    [(0, 0), (30, 30), (60, 60), (61, 58), (90, 0), (100, -20)],
)
def test_br0_score_of_known_totals(total: int, score: int) -> None:
    assert br0_score(total, (100, 40, 70), 1) == score


@pytest.mark.parametrize(
    ("total", "score"),
    # Reward 2 x 1.75 a token; overflows of 8: (0, 4, 8), of 20: (10, 16, 20).
    [
        (0, 0.0),
        (3, 10.5 - 3 * 0.25 * 3),
        (8, 28.0 - 3 * (0.5 * 4 + 0.25 * 8)),
        (20, 70.0 - 3 * (10 + 0.5 * 16 + 0.25 * 20)),
    ],
)
def test_horizon_score_of_known_totals(total: int, score: float) -> None:
    margins = np.array([10.0, 4.0, 0.0])
    scores = score_of([total], margins, discounts(2, 0.5), alpha=2.0, beta=3.0)
    assert scores.tolist() == [score]


@given(loads=LOADS, data=st.data(), sizes=st.lists(st.integers(1, 100_000), max_size=6))
def test_br0_score_is_the_fall_of_total_imbalance(
    loads: list[int], data: st.DataObject, sizes: list[int]
) -> None:
    rank = data.draw(st.integers(0, len(loads) - 1))
    after = loads.copy()
    after[rank] += sum(sizes)
    assert br0_score(sum(sizes), loads, rank) == idle_tokens(loads) - idle_tokens(after)


@given(loads=LOADS, data=st.data())
def test_br0_slope_is_one_and_then_one_less_the_ranks(
    loads: list[int], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(loads) - 1))
    kink = margin(loads, rank)
    safe = data.draw(st.integers(0, kink))
    overflow = data.draw(TOKENS)
    assert br0_score(safe, loads, rank) == safe
    assert br0_score(kink + overflow, loads, rank) == kink + (1 - len(loads)) * overflow


@given(loads=LOADS, shift=TOKENS, total=TOKENS, data=st.data())
def test_adding_the_same_load_to_every_rank_changes_nothing(
    loads: list[int], shift: int, total: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, len(loads) - 1))
    shifted = [load + shift for load in loads]
    assert imbalance_tokens(shifted) == imbalance_tokens(loads)
    assert idle_tokens(shifted) == idle_tokens(loads)
    assert br0_score(total, shifted, rank) == br0_score(total, loads, rank)


@given(
    margins=MARGINS,
    gamma=DISCOUNTS,
    alpha=COEFFICIENTS,
    beta=COEFFICIENTS,
    totals=st.lists(st.integers(0, 400_000), max_size=8),
)
def test_score_is_its_definition(
    margins: list[int], gamma: float, alpha: float, beta: float, totals: list[int]
) -> None:
    weights = discounts(len(margins) - 1, gamma)
    limits = np.array(margins, np.float64)
    expected = [
        float(exact_score(Fraction(total), margins, weights, alpha, beta)) for total in totals
    ]
    scale = (alpha + beta) * len(margins) * 400_000
    for form in (np.array(totals, np.int64), np.array(totals, np.float64)):
        scores = score_of(form, limits, weights, alpha=alpha, beta=beta)
        assert scores.dtype == np.float64
        assert scores.shape == (len(totals),)
        np.testing.assert_allclose(scores, expected, rtol=0.0, atol=1e-13 * scale)
    curve = FCurve(limits, beta * weights, reward=alpha * float(weights.sum()))
    one_by_one = [curve.score(total) for total in totals]
    np.testing.assert_allclose(one_by_one, expected, rtol=0.0, atol=1e-13 * scale)


@given(
    rows=st.lists(st.tuples(TOKENS, TOKENS, TOKENS), min_size=1, max_size=4),
    weights=st.tuples(*[st.integers(0, 64)] * 3),
    totals=st.lists(TOKENS, max_size=8).map(sorted),
)
def test_the_excess_over_some_rows_is_its_definition(
    rows: list[tuple[int, int, int]], weights: tuple[int, int, int], totals: list[int]
) -> None:
    found = excess(
        np.array(totals, np.float64), np.array(rows, np.float64), np.array(weights, np.float64)
    )
    # Whole numbers, so that there is no rounding.
    assert found.tolist() == [
        [
            sum(weight * max(total - kink, 0) for kink, weight in zip(row, weights, strict=True))
            for total in totals
        ]
        for row in rows
    ]


@given(total=TOKENS, kink=TOKENS, alpha=st.integers(0, 64), beta=st.integers(0, 64))
def test_a_horizon_of_equal_steps_scores_like_one_step(
    total: int, kink: int, alpha: int, beta: int
) -> None:
    one = score_of([total], np.array([float(kink)]), np.ones(1), alpha=alpha, beta=beta)
    two = score_of([total], np.full(2, float(kink)), np.full(2, 0.5), alpha=alpha, beta=beta)
    assert one == two


@given(
    margins=MARGINS, alpha=st.integers(0, 64), beta=st.integers(0, 64), start=TOKENS, step=TOKENS
)
def test_score_is_concave(margins: list[int], alpha: int, beta: int, start: int, step: int) -> None:
    # Whole numbers throughout, so that no rounding blurs the comparison.
    totals = np.array([start, start + step, start + 2 * step])
    weights = discounts(len(margins) - 1, 1.0)
    low, middle, high = score_of(
        totals, np.array(margins, np.float64), weights, alpha=alpha, beta=beta
    )
    assert low + high <= 2 * middle


@pytest.mark.parametrize(
    ("margins", "alpha", "beta", "peak"),
    [
        ([60.0], 1.0, 3.0, 60.0),
        ([0.0], 1.0, 3.0, 0.0),
        ([60.0], 1.0, 1.0, np.inf),  # A plateau without end.
        ([60.0], 2.0, 1.0, np.inf),
        ([30.0, 10.0, 20.0], 1.0, 2.0, 20.0),  # Slopes 3, 1, -1, -3.
        ([30.0, 10.0, 20.0], 1.0, 3.0, 20.0),  # Slopes 3, 0, ...: the plateau from 10 to 20.
        ([30.0, 10.0, 20.0], 1.0, 3.5, 10.0),
        ([30.0, 10.0, 20.0], 1.0, 1.25, 30.0),
        ([30.0, 10.0, 20.0], 1.0, 1.0, np.inf),
        ([30.0, 10.0, 20.0], 0.0, 1.0, 10.0),
        ([5.0, 5.0, 5.0], 1.0, 8.0, 5.0),
    ],
)
def test_peak_of_known_margins(
    margins: list[float], alpha: float, beta: float, peak: float
) -> None:
    weights = np.ones(len(margins))
    assert peak_of(np.array(margins), weights, alpha=alpha, beta=beta) == peak


def test_peak_follows_the_weights() -> None:
    margins = np.array([10.0, 20.0, 30.0])
    heavy_first, heavy_last = np.array([1.0, 0.1, 0.1]), np.array([0.1, 0.1, 1.0])
    assert peak_of(margins, heavy_first, alpha=1.0, beta=2.0) == 10.0
    assert peak_of(margins, heavy_last, alpha=1.0, beta=2.0) == 30.0
    # A step without weight has no say.
    assert peak_of(margins, np.array([0.0, 1.0, 0.0]), alpha=1.0, beta=2.0) == 20.0


@given(
    margins=MARGINS,
    alpha=st.integers(0, 64),
    beta=st.integers(0, 64),
    others=st.lists(st.integers(0, 400_000), max_size=8),
)
def test_nothing_scores_above_the_peak_and_nothing_larger_as_high(
    margins: list[int], alpha: int, beta: int, others: list[int]
) -> None:
    # With discount 1 all is whole numbers, so that plateaus are exact.
    weights = discounts(len(margins) - 1, 1.0)
    limits = np.array(margins, np.float64)
    peak = peak_of(limits, weights, alpha=alpha, beta=beta)
    far = 1_000_000.0
    if np.isinf(peak):
        at_far, beyond = score_of([far, far + 1], limits, weights, alpha=alpha, beta=beta)
        assert beyond >= at_far
        peak = far
    else:
        at_peak, beyond = score_of([peak, peak + 1], limits, weights, alpha=alpha, beta=beta)
        assert beyond < at_peak
    scores = score_of([peak, 0, *margins, *others], limits, weights, alpha=alpha, beta=beta)
    assert scores[0] == scores.max()


@given(margins=MARGINS, gamma=DISCOUNTS, alpha=COEFFICIENTS, beta=COEFFICIENTS, other=TOKENS)
def test_peak_is_a_maximiser_under_any_discount(
    margins: list[int], gamma: float, alpha: float, beta: float, other: int
) -> None:
    weights = discounts(len(margins) - 1, gamma)
    peak = peak_of(np.array(margins, np.float64), weights, alpha=alpha, beta=beta)
    at_peak = Fraction(min(peak, 1_000_000.0))
    best = exact_score(at_peak, margins, weights, alpha, beta)
    for total in (0, other, *margins):
        score = exact_score(Fraction(total), margins, weights, alpha, beta)
        # The peak is found in floats, so a slope of about 0 may be taken for its neighbour.
        assert float(score - best) <= 1e-13 * (alpha + beta) * len(margins) * 1_000_000


@given(margins=MARGINS, gamma=DISCOUNTS, coefficient=COEFFICIENTS)
def test_a_penalty_equal_to_the_reward_has_no_peak(
    margins: list[int], gamma: float, coefficient: float
) -> None:
    weights = discounts(len(margins) - 1, gamma)
    limits = np.array(margins, np.float64)
    assert peak_of(limits, weights, alpha=coefficient, beta=coefficient) == np.inf
