"""TBLB's scores as its code computes them, and what is added around them."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from balanceroute.proxy.core.events import (
    EngineLoad,
    PrefillDone,
    PrefillerId,
    PrefillerScraped,
    RequestId,
    StartPrefill,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.prefill import (
    FewestTokens,
    Prefillers,
    PrefillInputs,
    PrefillRequest,
    ScoreLimits,
)
from balanceroute.proxy.core.prefill.choices import (
    Scored,
    Scores,
    adaptive,
    adaptive_cache,
    adaptive_waiting,
    minmax,
    precise_cache,
    precise_running,
    s1_enhanced,
    s2_dynamic_waiting,
    s2_enhanced,
)

P = [PrefillerId(number) for number in range(3)]


def near(*values: float) -> object:
    return pytest.approx(values, abs=5e-4)


def loads(*members: tuple[float, float, float]) -> list[EngineLoad]:
    return [EngineLoad(*member) for member in members]


# The formulas.


def test_minmax() -> None:
    assert minmax([3, 1, 2]) == [1.0, 0.0, 0.5]
    assert minmax([4, 4]) == [0.0, 0.0]
    assert minmax([4]) == [0.0]


def test_precise_cache() -> None:
    assert precise_cache([0.1, 0.2, 0.4]) == near(0.2, 0.6, 1.0)
    assert precise_cache([0.3]) == precise_cache([0.3, 0.3])[:1] == [0.5]
    # With an idle member, by the deviation.
    assert precise_cache([0.0, 0.4]) == near(0.4713, 0.7286)


def test_precise_running() -> None:
    assert precise_running([0, 1, 3]) == near(0.15, 0.55, 0.95)
    assert precise_running([7, 7]) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0.95, 1.05], 0.4, 0.6),
        ([0.8, 1.2], 0.25, 0.75),
        ([0.5, 1.5], 0.15, 0.85),
        ([0.1, 1.9], 0.1, 0.9),
    ],
)
def test_adaptive_widens_with_the_variation(
    values: Sequence[float], low: float, high: float
) -> None:
    better, worse = adaptive(values)
    assert low < better < (low + high) / 2 < worse < high
    assert adaptive(values) == sorted(adaptive(values))


def test_adaptive_of_equal_or_single_values_is_the_middle() -> None:
    assert adaptive([2.0]) == [0.5]
    assert adaptive([2.0, 2.0]) == [0.5, 0.5]
    assert adaptive([0.0, 0.0]) == [0.5, 0.5]


def test_waiting_is_taken_by_its_logarithm_where_it_differs_by_a_factor_of_ten() -> None:
    assert adaptive_waiting([1, 20, 400]) != adaptive([1, 20, 400])
    assert adaptive_waiting([10, 20, 40]) == adaptive([10, 20, 40])


def test_the_cache_is_more_sensitive() -> None:
    assert adaptive_cache([0.9, 1.1]) == near(0.3642, 0.6358)
    assert adaptive([0.9, 1.1]) == near(0.3096, 0.6904)


# What the documents say otherwise.


def test_with_two_members_any_difference_of_the_cache_counts_as_the_largest() -> None:
    close = s1_enhanced(loads((0, 0, 0.20), (0, 0, 0.21)))
    assert close == near(0.82, 0.10)
    assert s1_enhanced(loads((0, 0, 0.20), (0, 0, 0.80))) == pytest.approx(close)
    assert close[0] / sum(close) == pytest.approx(0.89, abs=0.005)


def test_an_idle_member_scores_less_than_a_nearly_idle_one() -> None:
    scores = s1_enhanced(loads((0, 0, 0.0), (0, 0, 0.8)))
    assert scores == near(0.576, 0.344)
    assert scores[0] / sum(scores) == pytest.approx(0.63, abs=0.005)


def test_a_member_that_is_worse_in_both_is_excluded() -> None:
    assert s2_enhanced(loads((0, 5, 0.2), (9, 5, 0.3)))[1] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("waiting", "expected"), [(0, (0.743, 0.257)), (15, (0.722, 0.278)), (60, (0.700, 0.300))]
)
def test_the_dynamic_score_of_two_members_is_nearly_constant(
    waiting: int, expected: tuple[float, float]
) -> None:
    worse_by_any_factor = [
        s2_dynamic_waiting(loads((0, 4, 0.3), (waiting, running, usage)))
        for running, usage in ((8, 0.6), (12, 0.9))
    ]
    assert worse_by_any_factor == [near(*expected)] * 2


# The choice.


NO_LIMITS = ScoreLimits()


class Site:
    """One choice among two prefillers, and what they are scraped and sent."""

    def __init__(self, scores: Scores, limits: ScoreLimits = NO_LIMITS) -> None:
        self.choice = Scored(scores, PrefillInputs(random.Random(0), limits=limits))
        self.view = Prefillers(3, choice=FewestTokens())
        self.asked = 0

    def scrape(self, *members: tuple[float, float, float]) -> None:
        for prefiller, load in zip(P, loads(*members), strict=False):
            self.choice.observer(PrefillerScraped(prefiller, load), [], 0)

    def choose(self, candidates: Sequence[PrefillerId] = P[:2], *, start: bool = False) -> int:
        request = PrefillRequest(RequestId(self.asked), Ticket(10), 10, 0)
        chosen = self.choice.choose(request, candidates, self.view)
        if start:
            action = StartPrefill(request.request, chosen, 10)
            self.choice.observer(Tick(), [action], 0)
        self.asked += 1
        return chosen

    def counts(self, times: int = 2_000) -> Counter[int]:
        return Counter(self.choose() for _ in range(times))


def test_members_are_drawn_by_their_share_of_the_score() -> None:
    site = Site(s1_enhanced)
    site.scrape((0, 0, 0.20), (0, 0, 0.21))
    assert site.counts()[0] == pytest.approx(0.89 * 2_000, abs=50)


def test_before_the_first_scrape_all_are_alike_and_then_the_unknown_is_rare() -> None:
    site = Site(s1_enhanced)
    assert site.counts()[0] == pytest.approx(1_000, abs=80)
    site.scrape((0, 0, 0.5))
    assert site.counts()[1] < 30


def test_an_excluded_member_gets_nothing_until_the_next_scrape() -> None:
    site = Site(s2_enhanced)
    site.scrape((0, 5, 0.2), (9, 5, 0.3))
    assert site.counts(100) == {0: 100}
    site.scrape((9, 5, 0.3), (0, 5, 0.2))
    assert site.counts(100) == {1: 100}


def test_what_was_sent_since_the_scrape_waits_there() -> None:
    site = Site(s2_enhanced)
    site.scrape((0, 5, 0.3), (4, 5, 0.2))
    assert site.choice._load(P[0]).waiting == 0
    for _ in range(6):
        site.choose(P[:1], start=True)
    assert site.choice._load(P[0]) == EngineLoad(6, 5, 0.3)
    assert site.counts(50) == {1: 50}
    for number in range(6):
        site.choice.observer(PrefillDone(RequestId(number), 10), [], 0)
    assert site.choice._load(P[0]).waiting == 0
    assert not site.choice._places


def test_what_ended_since_the_scrape_runs_no_longer() -> None:
    site = Site(s1_enhanced)
    site.choose(P[:1], start=True)
    site.choose(P[:1], start=True)
    site.scrape((1, 1, 0.3))
    for number in range(2):
        site.choice.observer(PrefillDone(RequestId(number), 10), [], 0)
    assert site.choice._load(P[0]) == EngineLoad(0, 0, 0.3)


@pytest.mark.parametrize(
    "limits", [ScoreLimits(prefill_waiting_limit=8), ScoreLimits(prefill_running_limit=4)]
)
def test_a_member_over_a_limit_is_not_scored(limits: ScoreLimits) -> None:
    site = Site(s1_enhanced, limits)
    site.scrape((9, 5, 0.1), (8, 4, 0.9))
    assert site.counts(50) == {1: 50}
    # With all over it, the one with the fewest requests.
    site.scrape((9, 5, 0.1), (9, 5, 0.9))
    site.view.begin_prefill(P[1], 10)
    assert site.counts(50) == {0: 50}


def test_no_member_gets_more_than_its_share_between_two_scrapes() -> None:
    site = Site(s1_enhanced, ScoreLimits(prefill_share_limit=0.6))
    site.scrape((0, 0, 0.20), (0, 0, 0.21))
    assert 0.5 < site.counts(200)[0] / 200 <= 0.61
    site.scrape((0, 0, 0.20), (0, 0, 0.21))
    assert site.choice._given == {0: 0, 1: 0}
