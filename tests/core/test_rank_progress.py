"""Which ranks make no tokens while others do."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RankId
from balanceroute.proxy.core.steps import FLOOR_S, STEPS, UNKNOWN_S, RankProgress, Sighting

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
        return self.watch.standing_still(self.now_s, nothing)

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
    assert fleet.watch.standing_still(fleet.now_s, nothing) == [R1]


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
    assert fleet.watch.standing_still(fleet.now_s + 10.0, nothing) == []


def test_a_rank_may_take_longer_for_what_it_computes() -> None:
    fleet = warm(0.05, 0.05)
    fleet.gaps_s[R1] = None
    while fleet.watch.silent_s(R1) < FLOOR_S + 3.0 - LOOK_S:
        fleet.look()
        assert not fleet.watch.standing_still(fleet.now_s, lambda _: 3.0)
    fleet.look()
    assert fleet.watch.standing_still(fleet.now_s, lambda _: 3.0) == [R1]


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
    assert fleet.watch.standing_still(fleet.now_s, nothing) == [which]
