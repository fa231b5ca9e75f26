"""Which candidate each rule takes."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
from tests.core.driver import Driver

from balanceroute.proxy.core.events import (
    Action,
    EngineLoad,
    PrefillDone,
    PrefillerId,
    PrefillerScraped,
    PrefillLost,
    RequestArrived,
    RequestCancelled,
    RequestId,
    StartPrefill,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.prefill import (
    PREFILL_CHOICES,
    USING_BLOCKS,
    FewestTokens,
    PrefillChoice,
    Prefillers,
    PrefillInputs,
    PrefillRequest,
    ScoreSettings,
)
from balanceroute.proxy.core.prefill.choices import (
    SCORES,
    PrefixAware,
    Scored,
    adaptive,
    adaptive_cache,
    adaptive_waiting,
    minmax,
    precise_cache,
    precise_running,
)

P = [PrefillerId(number) for number in range(4)]
LONG = tuple(range(100, 120))


def made(name: str) -> PrefillChoice:
    return PREFILL_CHOICES[name](PrefillInputs(random.Random(0), index_blocks=1_000))


def fleet(*prefills: int) -> Prefillers:
    """Return prefillers with so many prefills of one token each."""
    prefillers = Prefillers(len(prefills), choice=FewestTokens())
    for prefiller, running in zip(P, prefills, strict=False):
        for _ in range(running):
            prefillers.begin_prefill(prefiller, 1)
    return prefillers


class Asked:
    """Asks one choice about request after request."""

    def __init__(self, name: str) -> None:
        self.choice = made(name)
        self.requests = 0

    def __call__(
        self,
        prefillers: Prefillers,
        blocks: tuple[int, ...] = (),
        among: list[PrefillerId] = P,
        session: int = 0,
    ) -> int:
        self.requests += 1
        tokens = max(1, 16 * len(blocks))
        ticket = Ticket(tokens, blocks=blocks, block_tokens=16.0, session=session)
        request = PrefillRequest(RequestId(self.requests), ticket, tokens, 0)
        return self.choice.choose(request, among, prefillers)


@pytest.mark.parametrize("name", PREFILL_CHOICES)
def test_every_choice_takes_a_candidate_and_the_same_one_each_time(name: str) -> None:
    def run() -> list[int]:
        ask = Asked(name)
        return [ask(fleet(3, 0, 2, 2), LONG[: number % 7], P[1:]) for number in range(40)]

    assert set(run()) <= set(P[1:])
    assert run() == run()


def test_least_conn_counts_prefills_and_direct_sequences() -> None:
    prefillers = fleet(2, 1, 1, 2)
    prefillers.begin_direct(P[1], 1, 3)
    assert Asked("least-conn")(prefillers) == 2
    ask = Asked("least-conn")
    assert [ask(fleet(1, 1, 1, 0), among=P[:3]) for _ in range(4)] == [0, 1, 2, 0]


def test_round_robin_skips_those_without_room() -> None:
    ask = Asked("round-robin")
    assert [ask(fleet(0, 0, 0, 0), among=[P[0], P[1], P[3]]) for _ in range(4)] == [0, 1, 3, 0]
    assert ask(fleet(0, 0, 0, 0), among=[P[2], P[3]]) == 2


def test_random_is_even() -> None:
    ask = Asked("random")
    counts = Counter(ask(fleet(9, 0, 0, 0)) for _ in range(4_000))
    assert all(900 < counts[prefiller] < 1_100 for prefiller in P)


def test_power_of_two_never_takes_the_busiest() -> None:
    ask = Asked("power-of-two")
    counts = Counter(ask(fleet(3, 2, 1, 0)) for _ in range(1_200))
    assert counts[P[0]] == 0
    # Of the six pairs three hold the idle one.
    assert 550 < counts[P[3]] < 650
    assert Asked("power-of-two")(fleet(5, 0, 0, 0), among=P[:1]) == 0


def test_a_conversation_sticks_whatever_the_load() -> None:
    ask = Asked("sticky")
    homes = {start: ask(fleet(0, 0, 0, 0), (7, start)) for start in range(400)}
    assert homes == {start: ask(fleet(9, 9, 0, 0), (7, start, 5)) for start in range(400)}
    assert all(70 < count < 130 for count in Counter(homes.values()).values())
    assert len({ask(fleet(0, 0, 0, 0), (7, start), session=5) for start in range(99)}) == 1
    # Without its prefiller only its own conversations move.
    moved = {start: ask(fleet(0, 0, 0, 0), (7, start), P[:3]) for start in range(400)}
    assert {start for start in homes if moved[start] != homes[start]} == {
        start for start, home in homes.items() if home == P[3]
    }


def test_cache_aware_takes_the_longest_prefix_unless_loads_differ_a_lot() -> None:
    ask = Asked("cache-aware")
    assert ask(fleet(1, 1, 0, 1), LONG[:10]) == 2
    assert ask(fleet(0, 0, 64, 0), LONG) == 2
    assert ask(fleet(0, 1, 65, 1), LONG) == 0
    # A short match counts for nothing.
    assert ask(fleet(1, 1, 1, 0), (*LONG[:3], *range(7))) == 3


def test_lmetric_multiplies_uncached_tokens_and_requests() -> None:
    ask = Asked("lmetric")
    assert ask(fleet(1, 0, 1, 1), LONG[:10]) == 1
    # 10 uncached blocks x 2 requests against 20 x 1, then 10 x 3.
    assert ask(fleet(0, 0, 0, 0), LONG) == 1
    ask = Asked("lmetric")
    ask(fleet(1, 0, 1, 1), LONG[:11])
    assert ask(fleet(0, 1, 0, 0), LONG) == 1
    assert ask(fleet(0, 2, 0, 0), (*LONG[:11], *range(9))) == 0


def test_only_the_choices_that_use_blocks_do() -> None:
    for name in PREFILL_CHOICES:
        with_blocks, without = Asked(name), Asked(name)
        prompts = [tuple(range(number % 5, 20)) for number in range(30)]
        chosen = [with_blocks(fleet(0, 0, 0, 0), blocks) for blocks in prompts]
        blind = [without(fleet(0, 0, 0, 0)) for _ in prompts]
        assert (chosen != blind) == (name in USING_BLOCKS), name


# Prefix-aware choice: affinity as far as it pays, and an index that engines correct.


BLOCK = 100
NS_PER_TOKEN = 1_000


class Site:
    """Two prefillers and what they are sent; each prefill takes its time by hand."""

    def __init__(self, prefillers: int = 2) -> None:
        make = partial(PREFILL_CHOICES["prefix-aware"], PrefillInputs(random.Random(0), 4_000))
        self.driver = Driver(prefillers=prefillers, prefill_choice=make)
        self.sent = 0

    @property
    def choice(self) -> PrefixAware:
        choice = self.driver.scheduler.prefillers._choice
        assert isinstance(choice, PrefixAware)
        return choice

    def arrive(self, *blocks: int) -> tuple[RequestId, PrefillerId]:
        """Return a request and where it goes."""
        request = RequestId(self.sent)
        self.sent += 1
        tokens = BLOCK * len(blocks) + 1
        ticket = Ticket(tokens, blocks=blocks, block_tokens=BLOCK)
        (action,) = self.driver(RequestArrived(request, ticket))
        assert isinstance(action, StartPrefill)
        return request, action.prefiller

    def done(self, request: RequestId, tokens: int, cached: int | None = None) -> list[Action]:
        self.driver.now_ns += NS_PER_TOKEN * (tokens - (cached or 0))
        return self.driver(
            PrefillDone(request, tokens, cached_tokens=cached), RequestCancelled(request)
        )

    def warm_up(self) -> None:
        """Let every prefiller be measured, with prompts that share nothing."""
        for number in range(40):
            request, _ = self.arrive(*range(1_000 + 50 * number, 1_010 + 50 * number))
            self.done(request, 1_001)


def test_a_conversation_returns_to_its_prefiller() -> None:
    site = Site()
    site.warm_up()
    request, home = site.arrive(*range(10))
    site.done(request, 1_001)
    for length in range(11, 20):
        request, prefiller = site.arrive(*range(length))
        assert prefiller == home
        site.done(request, 100 * length + 1, 100 * length - 100)


def test_a_prefiller_that_is_far_behind_loses_it() -> None:
    site = Site()
    site.warm_up()
    request, home = site.arrive(*range(10))
    site.done(request, 1_001)
    places = [site.arrive(*range(10), 5_000 + number) for number in range(60)]
    # Short prefills queue there, until their queue costs more than the prefix.
    assert places[0][1] == home
    assert {prefiller for _, prefiller in places} == {0, 1}


def test_without_prefixes_the_least_work_takes_it() -> None:
    site = Site(prefillers=3)
    site.warm_up()
    long_one, first = site.arrive(*range(100, 190))
    _, second = site.arrive(*range(200, 203))
    _, third = site.arrive(*range(300, 303))
    _, fourth = site.arrive(*range(400, 403))
    assert {first, second, third} == {0, 1, 2}
    assert fourth in {second, third}
    site.driver(PrefillLost(long_one))


def test_what_engines_dropped_is_forgotten() -> None:
    site = Site()
    site.warm_up()
    memory = site.choice.memory
    request, home = site.arrive(*range(10))
    site.done(request, 1_001, 0)
    index = memory._indices[home]
    # So many further prompts that the first is in an earlier table.
    while index.leading([])[1] == index.newest and index.newest < 3:
        request, _ = site.arrive(*range(10_000 + 50 * site.sent, 10_010 + 50 * site.sent))
        site.done(request, 1_001, 0)
        if index.newest >= 3:
            break
    request, prefiller = site.arrive(*range(10))
    assert prefiller == home
    site.done(request, 1_001, 0)
    tables = len(index._tables)
    assert tables < 3


def test_a_restarted_engine_is_noticed_at_the_second_miss() -> None:
    site = Site()
    site.warm_up()
    request, home = site.arrive(*range(10))
    site.done(request, 1_001, 0)
    index = site.choice.memory._indices[home]
    for number in (1, 2):
        assert index._tables
        request, prefiller = site.arrive(*range(10), 20 + number)
        assert prefiller == home
        site.done(request, 1_101, 0)
    assert not index._tables


def test_nothing_is_kept_of_requests_that_ended() -> None:
    site = Site()
    requests = [site.arrive(*range(number, number + 5))[0] for number in range(20)]
    for request in requests[:10]:
        site.done(request, 501)
    site.driver(*(RequestCancelled(request) for request in requests[10:]))
    assert not site.choice.memory._running
    assert not site.choice._work._places
    assert all(not queue.jobs for queue in site.choice._work._queues.values())


# TBLB's scores as its code computes them, and what is added around them.


SCORED = [PrefillerId(number) for number in range(3)]
USUAL = ScoreSettings()
s1_enhanced, s2_enhanced, s2_dynamic_waiting = (make(USUAL) for make in SCORES.values())


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


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("s1-enhanced", ScoreSettings(s1_weights=(1.0, 0.0)), (1.0, 0.0)),
        ("s1-enhanced", ScoreSettings(s1_weights=(0.0, 1.0)), (0.0, 0.8)),
        ("s1-enhanced", ScoreSettings(s1_weights=(0.5, 0.25)), (0.5, 0.2)),
        ("s2-enhanced", ScoreSettings(s2_weights=(0.0, 0.0, 1.0)), (0.85, 0.05)),
        ("s2-enhanced", ScoreSettings(s2_weights=(0.2, 0.0, 0.4)), (0.54, 0.02)),
    ],
)
def test_a_score_is_the_sum_of_what_is_weighed(
    name: str, settings: ScoreSettings, expected: tuple[float, float]
) -> None:
    # The first has few waiting and running requests, the second little in its cache.
    assert SCORES[name](settings)(loads((0, 1, 0.4), (9, 8, 0.2))) == near(*expected)


@pytest.mark.parametrize("place", range(3))
def test_each_weight_of_the_dynamic_score_moves_it(place: int) -> None:
    def first(weight: float) -> float:
        weights = tuple(weight if one == place else 0.2 for one in range(3))
        two = loads((0, 1, 0.1), (20, 9, 0.9))
        return SCORES["s2-dynamic-waiting"](ScoreSettings(s2_dynamic_weights=weights))(two)[0]

    assert first(0.0) < first(0.2) < first(0.4)


@pytest.mark.parametrize(("weights", "chosen"), [((1.0, 0.0), 0), ((0.0, 1.0), 1)])
def test_the_weights_decide_who_is_chosen(weights: tuple[float, float], chosen: int) -> None:
    site = ScoredSite("s1-enhanced", ScoreSettings(s1_weights=weights))
    site.scrape((0, 1, 0.4), (9, 8, 0.2))
    assert site.counts(100) == {chosen: 100}


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


class ScoredSite:
    """One choice among two prefillers, and what they are scraped and sent."""

    def __init__(self, name: str, settings: ScoreSettings = USUAL) -> None:
        self.choice = Scored(name, PrefillInputs(random.Random(0), scores=settings))
        self.view = Prefillers(3, choice=FewestTokens())
        self.asked = 0

    def scrape(self, *members: tuple[float, float, float]) -> None:
        for prefiller, load in zip(SCORED, loads(*members), strict=False):
            self.choice.observer(PrefillerScraped(prefiller, load), [], 0)

    def choose(self, candidates: Sequence[PrefillerId] = SCORED[:2], *, start: bool = False) -> int:
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
    site = ScoredSite("s1-enhanced")
    site.scrape((0, 0, 0.20), (0, 0, 0.21))
    assert site.counts()[0] == pytest.approx(0.89 * 2_000, abs=50)


def test_before_the_first_scrape_all_are_alike_and_then_the_unknown_is_rare() -> None:
    site = ScoredSite("s1-enhanced")
    assert site.counts()[0] == pytest.approx(1_000, abs=80)
    site.scrape((0, 0, 0.5))
    assert site.counts()[1] < 30


def test_an_excluded_member_gets_nothing_until_the_next_scrape() -> None:
    site = ScoredSite("s2-enhanced")
    site.scrape((0, 5, 0.2), (9, 5, 0.3))
    assert site.counts(100) == {0: 100}
    site.scrape((9, 5, 0.3), (0, 5, 0.2))
    assert site.counts(100) == {1: 100}


def test_what_was_sent_since_the_scrape_waits_there() -> None:
    site = ScoredSite("s2-enhanced")
    site.scrape((0, 5, 0.3), (4, 5, 0.2))
    assert site.choice._load(SCORED[0]).waiting == 0
    for _ in range(6):
        site.choose(SCORED[:1], start=True)
    assert site.choice._load(SCORED[0]) == EngineLoad(6, 5, 0.3)
    assert site.counts(50) == {1: 50}
    for number in range(6):
        site.choice.observer(PrefillDone(RequestId(number), 10), [], 0)
    assert site.choice._load(SCORED[0]).waiting == 0
    assert not site.choice._places


def test_what_ended_since_the_scrape_runs_no_longer() -> None:
    site = ScoredSite("s1-enhanced")
    site.choose(SCORED[:1], start=True)
    site.choose(SCORED[:1], start=True)
    site.scrape((1, 1, 0.3))
    for number in range(2):
        site.choice.observer(PrefillDone(RequestId(number), 10), [], 0)
    assert site.choice._load(SCORED[0]) == EngineLoad(0, 0, 0.3)


@pytest.mark.parametrize(
    "limits", [ScoreSettings(prefill_waiting_limit=8), ScoreSettings(prefill_running_limit=4)]
)
def test_a_member_over_a_limit_is_not_scored(limits: ScoreSettings) -> None:
    site = ScoredSite("s1-enhanced", limits)
    site.scrape((9, 5, 0.1), (8, 4, 0.9))
    assert site.counts(50) == {1: 50}
    # With all over it, the one with the fewest requests.
    site.scrape((9, 5, 0.1), (9, 5, 0.9))
    site.view.begin_prefill(SCORED[1], 10)
    assert site.counts(50) == {0: 50}


def test_no_member_gets_more_than_its_share_between_two_scrapes() -> None:
    site = ScoredSite("s1-enhanced", ScoreSettings(prefill_share_limit=0.6))
    site.scrape((0, 0, 0.20), (0, 0, 0.21))
    assert 0.5 < site.counts(200)[0] / 200 <= 0.61
    site.scrape((0, 0, 0.20), (0, 0, 0.21))
    assert site.choice._given == {0: 0, 1: 0}
