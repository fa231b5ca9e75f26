"""Which ranks make no tokens while others do."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.extended import usually

from balanceroute.proxy.core.events import RankId
from balanceroute.proxy.core.steps import (
    FLOOR_S,
    STEPS,
    UNKNOWN_S,
    LearnedSpeeds,
    RankProgress,
    Sighting,
    StepModel,
)

LOOK_S = 0.25
WARM_LOOKS = 40
R0, R1, R2 = map(RankId, range(3))


def nothing(_: RankId) -> float:
    return 0.0


@dataclass
class Fleet:
    """Ranks that make a token every so often, and somebody who looks at their streams.

    Attributes:
        gaps_s: Between two tokens of a rank's streams; None for none at all.
        unread: Ranks whose streams nobody reads, or that say nothing of steps.
    """

    gaps_s: dict[RankId, float | None]
    watch: RankProgress = field(default_factory=RankProgress)
    unread: set[RankId] = field(default_factory=set)
    now_s: float = 0.0
    told_s: dict[RankId, float] = field(default_factory=dict)

    def look(self, elapsed_s: float = LOOK_S) -> list[RankId]:
        """Let a quarter of a second pass, look, and return who stands still."""
        self.now_s += LOOK_S
        seen = []
        for rank, gap_s in self.gaps_s.items():
            before = self.told_s.get(rank, 0.0)
            last = before if gap_s is None else self.now_s // gap_s * gap_s
            moved = last > before
            if moved:
                self.told_s[rank] = last
            still = 0 if moved or rank in self.unread else 1
            seen.append(Sighting(rank, moved, still, last - before if moved and before else 0.0))
        self.watch.look(self.now_s, elapsed_s, seen)
        return self.watch.stalled(self.now_s, nothing)

    def looks(self, count: int) -> list[RankId]:
        """Look so often; return who ever stood still."""
        return [rank for _ in range(count) for rank in self.look()]

    def until_still(self, limit_s: float = 60.0) -> float:
        """Return after how long somebody stands still."""
        begin_s = self.now_s
        while not self.look():
            assert self.now_s - begin_s < limit_s, "nobody stands still"
        return self.now_s - begin_s


def warm(*gaps_s: float) -> Fleet:
    fleet = Fleet({RankId(rank): gap_s for rank, gap_s in enumerate(gaps_s)})
    assert fleet.looks(max(WARM_LOOKS, int(16 * max(gaps_s) / LOOK_S))) == []
    return fleet


@pytest.mark.parametrize("step_s", [0.01, 0.05, 0.2, 0.6])
def test_a_rank_that_stops_is_found_within_three_seconds(step_s: float) -> None:
    fleet = warm(step_s, step_s, step_s)
    fleet.gaps_s[R1] = None
    assert fleet.until_still() <= 3.0
    assert fleet.watch.stalled(fleet.now_s, nothing) == [R1]


@pytest.mark.parametrize("step_s", [1.0, 2.0, 5.0])
def test_a_slow_rank_has_some_of_its_own_steps(step_s: float) -> None:
    fleet = warm(0.05, step_s)
    fleet.gaps_s[R1] = None
    assert STEPS * step_s <= fleet.until_still() <= 3.0 + 5 * step_s


def test_a_single_slow_or_bursty_rank_beside_fast_ones_does_not_stand_still() -> None:
    for gap_s in (0.5, 1.0, 1.9, 3.0, 10.0):
        assert warm(0.05, gap_s, 0.05).looks(400) == []


def test_who_speaks_seldom_proves_nothing_of_the_last_two_seconds() -> None:
    """All stop together, and what a slow wire still brings of one is no step of it."""
    fleet = warm(0.05, 3.0)
    begin_s, late_s = fleet.now_s, fleet.now_s + 2.5
    fleet.gaps_s[R0] = None
    while fleet.now_s < begin_s + 9.0:
        if fleet.now_s >= late_s:
            fleet.gaps_s[R1] = None
        assert fleet.look() == []
    # By itself the slow one is proof after some of its gaps.
    fleet = warm(0.05, 3.0)
    fleet.gaps_s[R0] = None
    assert STEPS * 3.0 <= fleet.until_still() <= 3.0 + 5 * 3.0


def test_nobody_stands_still_while_nobody_steps() -> None:
    fleet = warm(0.05, 0.05, 0.05)
    fleet.gaps_s = dict.fromkeys(fleet.gaps_s)
    assert fleet.looks(200) == []
    assert fleet.watch.standstill(fleet.now_s, nothing) == 3
    fleet.gaps_s[R0] = 0.05
    fleet.look()
    assert fleet.watch.standstill(fleet.now_s, nothing) == 0


def test_a_standstill_takes_as_long_as_the_slowest_may() -> None:
    fleet = warm(0.05, 1.0)
    fleet.gaps_s = dict.fromkeys(fleet.gaps_s)
    begin_s = fleet.now_s
    while not fleet.watch.standstill(fleet.now_s, nothing):
        fleet.look()
        assert fleet.now_s - begin_s < 30.0
    assert fleet.now_s - begin_s >= STEPS * 1.0


def test_one_that_stops_is_no_standstill() -> None:
    fleet = warm(0.05, 0.05)
    fleet.gaps_s[R1] = None
    for _ in range(100):
        fleet.look()
        assert fleet.watch.standstill(fleet.now_s, nothing) == 0


def test_a_rank_without_a_known_pace_is_not_judged() -> None:
    fleet = Fleet({R0: 0.05, R1: 0.05})
    assert fleet.looks(3) == []
    fleet.gaps_s[R1] = None
    assert fleet.looks(200) == []
    assert fleet.watch.limit_s(R1, fleet.now_s) is None


def test_streams_that_nobody_reads_say_nothing() -> None:
    fleet = warm(0.05, 0.05)
    fleet.gaps_s[R1] = None
    fleet.unread.add(R1)
    assert fleet.looks(200) == []
    # Those that are read again begin anew: what was not read is no silence.
    fleet.unread.clear()
    assert fleet.until_still() >= FLOOR_S


def test_time_in_which_the_observer_stood_still_does_not_count() -> None:
    fleet = warm(0.05, 0.05)
    fleet.gaps_s[R1] = None
    for _ in range(200):
        assert fleet.look(elapsed_s=0.0) == []


def test_nobody_is_judged_by_what_was_seen_long_ago() -> None:
    fleet = warm(0.05, 0.05)
    fleet.gaps_s[R1] = None
    fleet.until_still()
    assert fleet.watch.stalled(fleet.now_s + 10.0, nothing) == []


def test_a_rank_may_take_longer_for_what_it_computes() -> None:
    fleet = warm(0.05, 0.05)
    fleet.gaps_s[R1] = None
    while fleet.watch.silent_s(R1) < FLOOR_S + 3.0 - LOOK_S:
        fleet.look()
        assert not fleet.watch.stalled(fleet.now_s, lambda _: 3.0)
    fleet.look()
    assert fleet.watch.stalled(fleet.now_s, lambda _: 3.0) == [R1]


def test_an_excuse_begins_anew_for_all_and_a_return_for_one() -> None:
    fleet = warm(0.05, 0.05)
    fleet.gaps_s[R1] = None
    fleet.until_still()
    fleet.watch.excuse()
    assert fleet.until_still() >= FLOOR_S
    fleet.watch.begin_anew(R1)
    assert fleet.looks(100) == []


def test_first_tokens_are_waited_for_as_the_ranks_pace_is_known() -> None:
    fleet = warm(0.05, 1.5)
    assert fleet.watch.first_limit_s(RankId(0)) == FLOOR_S
    assert fleet.watch.first_limit_s(R1) == pytest.approx(STEPS * 1.5, rel=0.2)
    assert fleet.watch.first_limit_s(RankId(7)) == UNKNOWN_S


def test_a_single_long_gap_is_forgotten() -> None:
    fleet = warm(0.05, 0.05)
    fleet.watch.look(fleet.now_s, 0.0, [Sighting(R1, True, 0, 8.0)])
    limit_s = fleet.watch.limit_s(R1, fleet.now_s)
    assert limit_s == STEPS * 8.0
    fleet.looks(300)
    assert fleet.watch.limit_s(R1, fleet.now_s) == FLOOR_S


STEP = st.sampled_from([0.02, 0.1, 0.5, 1.3, 4.0])


@settings(deadline=None, max_examples=150)
@given(
    st.lists(STEP, min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(4, 30)), max_size=12),
)
def test_short_pauses_of_ranks_at_any_pace_are_forgiven(
    gaps: list[float], pauses: list[tuple[int, int, int]]
) -> None:
    """Whoever pauses for less than the floor, or all at the same time, does not stand still."""
    fleet = warm(*gaps)
    usual = dict(fleet.gaps_s)
    for which, looks, between in pauses:
        # A pause comes on top of the gap in which it begins.
        rank = RankId(which)
        fleet.gaps_s = dict.fromkeys(usual) if which >= len(gaps) else {**usual, rank: None}
        longest = int((FLOOR_S - max(gaps)) / LOOK_S) if which < len(gaps) else looks
        assert fleet.looks(max(0, min(looks, longest))) == []
        fleet.gaps_s = dict(usual)
        assert fleet.looks(between) == []


@settings(deadline=None, max_examples=150)
@given(st.lists(STEP, min_size=2, max_size=4), st.data())
def test_whoever_stops_for_good_is_found_within_the_bound(
    gaps: list[float], data: st.DataObject
) -> None:
    fleet = warm(*gaps)
    which = RankId(data.draw(st.integers(0, len(gaps) - 1)))
    fleet.looks(data.draw(st.integers(0, 20)))
    fleet.gaps_s[which] = None
    others = [gap_s for rank, gap_s in enumerate(gaps) if rank != which]
    assert fleet.until_still() <= 3.0 + 6 * max(gaps[which], min(others))
    assert fleet.watch.stalled(fleet.now_s, nothing) == [which]


# How fast ranks are, learned from the times of steps that a fleet takes together.


BASE_NS, TOKEN_NS = 30e6, 200.0
SLOTS, MEAN_TOKENS = 16, 13_000.0


class SpeedFleet:
    """Ranks with full batches, which give a free slot to the size that brings them next to even."""

    def __init__(self, slowness: list[float], learned: LearnedSpeeds, seed: int = 0) -> None:
        self.slowness = np.array(slowness)
        self.learned = learned
        self.rng = np.random.default_rng(seed)
        self.held = self.rng.exponential(MEAN_TOKENS, (len(slowness), SLOTS))
        self.error = 0.0  # Of a step's time, relative; it drifts.

    @property
    def loads(self) -> NDArray[np.int64]:
        return np.asarray(self.held.sum(axis=1), np.int64)

    def run(self, steps: int, *, noise: float = 0.0, drift: float = 0.0) -> None:
        for _ in range(steps):
            self.held += 1.0
            for rank, slot in np.argwhere(self.rng.random(self.held.shape) < 1 / 300):
                speeds = self.learned.speeds
                self.held[rank, slot] = 0.0
                levels = self.loads if speeds is None else self.loads / speeds
                missing = (
                    levels.max() * (1.0 if speeds is None else speeds[rank]) - self.loads[rank]
                )
                sizes = self.rng.exponential(MEAN_TOKENS, 32)
                self.held[rank, slot] = sizes[np.abs(sizes - missing).argmin()]
            self.error = 0.98 * self.error + 0.2 * drift * self.rng.normal()
            step_ns = BASE_NS + TOKEN_NS * (self.slowness * self.loads).max()
            factor = np.exp(noise * self.rng.normal() + self.error)
            self.learned.observe(self.loads, float(step_ns * factor))


@pytest.mark.parametrize(
    "slowness", [[1.0, 1.5] * 4, [1.0] * 7 + [1.4], [0.6] + [1.0] * 7, [1.0, 1.5]]
)
def test_ranks_that_differ_get_what_they_can_read(slowness: list[float]) -> None:
    learned = LearnedSpeeds(len(slowness))
    SpeedFleet(slowness, learned).run(4_000)
    assert learned.speeds is not None
    expected = 1.0 / np.array(slowness)
    assert learned.speeds == pytest.approx(expected / expected.mean(), rel=0.16)
    assert learned.speeds.mean() == pytest.approx(1.0)


@pytest.mark.parametrize(("noise", "drift"), [(0.0, 0.0), (0.01, 0.0), (0.05, 0.0), (0.01, 0.03)])
@pytest.mark.parametrize("seed", usually({0}, range(3)))
def test_equal_ranks_stay_equal_whatever_the_errors(noise: float, drift: float, seed: int) -> None:
    learned = LearnedSpeeds(8)
    SpeedFleet([1.0] * 8, learned, seed).run(4_000, noise=noise, drift=drift)
    assert learned.speeds is None


def test_noise_delays_what_is_learned_and_does_not_turn_it_around() -> None:
    learned = LearnedSpeeds(8)
    SpeedFleet([1.0, 1.5] * 4, learned).run(8_000, noise=0.01)
    assert learned.speeds is not None
    assert learned.speeds[::2].min() > learned.speeds[1::2].max()


def test_steps_that_a_request_fell_behind_are_passed_over() -> None:
    """A rank of three that pauses half of its requests at times, as its engine may."""
    speeds: list[bool] = []
    for told in (True, False):
        rng, learned = np.random.default_rng(1), LearnedSpeeds(3)
        for step in range(4_000):
            loads = rng.integers(90_000, 110_000, 3)
            read, pauses = loads.copy(), step % 40 < 12
            if pauses:
                read[1] //= 2
            learned.observe(loads, BASE_NS + TOKEN_NS * float(read.max()))
            if pauses and told and step % 5 == 4:
                learned.fell_behind()
        speeds.append(learned.speeds is None)
    assert speeds == [True, False]


def test_an_idle_fleet_teaches_nothing() -> None:
    learned = LearnedSpeeds(3)
    for _ in range(1_000):
        learned.observe(np.zeros(3, np.int64), BASE_NS)
    assert learned.speeds is None


# The fitted cost of a token is exact for a line, and unknown where the steps do not tell.


def test_a_line_is_found_exactly() -> None:
    model, rng = StepModel(), random.Random(0)
    for _ in range(200):
        envelope = rng.randrange(150_000, 250_000)
        model.observe(envelope, 30e6 + 200.0 * envelope)
    assert model.ns_per_token == pytest.approx(200.0)


def test_noise_averages_out_and_old_steps_fade() -> None:
    model, rng = StepModel(), random.Random(1)
    for slope in (500.0, 200.0):
        for _ in range(8_000):
            envelope = rng.randrange(150_000, 250_000)
            # As far off as a driver that sees each step one tenth early or late.
            model.observe(envelope, (30e6 + slope * envelope) * rng.uniform(0.9, 1.1))
        assert model.ns_per_token == pytest.approx(slope, rel=0.25)


@pytest.mark.parametrize("steps", [0, 1, 16, 63])
def test_a_few_steps_tell_nothing(steps: int) -> None:
    model = StepModel()
    for step in range(steps):
        model.observe(1_000 * step, 1e6 + 200_000.0 * step)
    assert model.ns_per_token is None


def test_equal_envelopes_tell_nothing() -> None:
    model = StepModel()
    for step in range(500):
        model.observe(1_000, 1e6 + step)
    assert model.ns_per_token is None


def test_steps_that_do_not_depend_on_the_load_tell_nothing() -> None:
    known, rng = 0, random.Random(2)
    for _ in range(50):
        model = StepModel()
        for _ in range(600):
            model.observe(rng.randrange(100_000), rng.uniform(1e6, 9e6))
        known += model.ns_per_token is not None
    # By chance one in 40 exceeds two standard errors.
    assert known <= 5


def test_a_step_that_is_faster_with_more_tokens_is_not_believed() -> None:
    model = StepModel()
    for step in range(500):
        model.observe(1_000 * step, 1e9 - 200_000.0 * step)
    assert model.ns_per_token is None
