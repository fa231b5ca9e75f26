"""Steps inferred from streams: right in lock step, bounded when not, and proof against nonsense."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.live.scheduling.progress import (
    Advance,
    PulledCounts,
    PumpedCounts,
    StepClock,
)

TOLERANCE = 4


@dataclass
class Answer:
    """A started request. `mirror`: the rounds that the scheduler counts for it."""

    rounds: int | None = 0
    offset: int = 0
    mirror: int = 0
    number: int = 0
    slot: int = -1
    shape: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(sequences=2))

    @property
    def streamed(self) -> bool:
        return self.rounds is not None


class Fleet:
    """Answers, and a mirror of them that is brought forward as the driver does it.

    Args:
        kind: Whether the answers, of two sequences each, are asked how far they are ("pulled"), or the pump
            tells of every other one of those that are streamed ("pumped").
    """

    def __init__(self, kind: str) -> None:
        self.clock = StepClock()
        self.answers: dict[RequestId, Answer] = {}
        self.now_s = 0.0
        self._started = 0
        self._tokens = np.zeros(1_024, np.uint32)
        self._slots = list(range(1_024))
        self._counts: PulledCounts[Any] = PulledCounts()
        if kind == "pumped":
            self._counts = PumpedCounts(self._tokens)

    def start(self, rounds: int | None = 0) -> Answer:
        self._started += 1
        answer = Answer(rounds, number=self._started)
        self.answers[RequestId(self._started)] = answer
        self._push(answer)
        self._counts.start(answer, self.clock.steps)
        self._lend(answer)
        return answer

    def _lend(self, answer: Answer) -> None:
        """Have the pump move every other stream."""
        if isinstance(self._counts, PumpedCounts) and answer.streamed and answer.number % 2:
            answer.slot = self._slots.pop()
            self._push(answer)
            self._counts.lent(RequestId(answer.number), answer.slot)

    def _return(self, answer: Answer) -> None:
        if answer.slot >= 0:
            assert isinstance(self._counts, PumpedCounts)
            self._counts.returned(answer.slot)
            self._tokens[answer.slot] = 4_000_000_000  # Another stream's.
            self._slots.append(answer.slot)
            answer.slot = -1

    def leave(self, answer: Answer) -> None:
        self._return(answer)
        self._counts.stop(answer)
        self.answers = {number: one for number, one in self.answers.items() if one is not answer}

    def restart(self, answer: Answer) -> None:
        self._return(answer)
        self._counts.stop(answer)
        assert answer.rounds is not None
        answer.rounds = answer.mirror = 0
        self._counts.start(answer, self.clock.steps)
        self._lend(answer)

    def advance(self, after_s: float = 0.02) -> "Advance[Answer]":
        self.now_s += after_s
        for answer in self.answers.values():
            self._push(answer)
        advance = self.clock.advance(self._counts, self.now_s)
        for answer in self.answers.values():
            answer.mirror += advance.steps
        for request, rounds in advance.corrections:
            assert isinstance(request, Answer)
            request.mirror += rounds
        return advance

    def _push(self, answer: Answer) -> None:
        if answer.rounds is not None and answer.slot >= 0:
            self._tokens[answer.slot] = 2 * answer.rounds + 1  # Of two sequences.

    def emit(self, rounds: int = 1) -> None:
        for answer in self.answers.values():
            if answer.rounds is not None:
                answer.rounds += rounds

    def check(self) -> None:
        """Every stream is followed to within the tolerance."""
        for answer in self.answers.values():
            if answer.rounds is not None:
                assert abs(answer.mirror - answer.rounds) <= TOLERANCE


@pytest.fixture(params=["pulled", "pumped"])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    return Fleet(request.param)


def test_a_step_is_timed_unless_the_fleet_paused(fleet: Fleet) -> None:
    fleet.start()

    def step_s(steps: int, after_s: float) -> float | None:
        fleet.emit(steps)
        return fleet.advance(after_s).step_s

    # Nothing is known of the first, and the second has no mean to compare it with.
    assert [step_s(1, 0.02), step_s(1, 0.02)] == [None, None]
    assert step_s(1, 0.03) == pytest.approx(0.03)
    assert step_s(4, 0.2) == pytest.approx(0.05)
    assert step_s(1, 0.5) is None
    assert step_s(0, 0.02) is None


def test_streams_in_lock_step_move_the_clock_and_need_no_correction(fleet: Fleet) -> None:
    for _ in range(5):
        fleet.start()
    for _ in range(100):
        fleet.emit()
        advance = fleet.advance()
        assert (advance.steps, advance.corrections) == (1, [])
        assert all(answer.mirror == answer.rounds for answer in fleet.answers.values())
    assert fleet.clock.steps == 100
    assert fleet.clock.step_s == pytest.approx(0.02)


def test_several_steps_between_two_looks_all_count(fleet: Fleet) -> None:
    fleet.start()
    fleet.advance()
    fleet.emit(7)
    assert fleet.advance(0.14).steps == 7
    fleet.emit(7)
    fleet.advance(0.14)
    assert fleet.clock.step_s == pytest.approx(0.02)


def test_a_look_without_progress_moves_nothing(fleet: Fleet) -> None:
    fleet.start()
    fleet.emit()
    fleet.advance()
    assert fleet.advance() == Advance(0, None, [])


def test_a_request_that_starts_later_is_counted_from_its_start(fleet: Fleet) -> None:
    fleet.start()
    fleet.emit(50)
    fleet.advance()
    late = fleet.start(rounds=1)
    for _ in range(20):
        fleet.emit()
        fleet.advance()
        fleet.check()
    assert late.rounds == 21


def test_a_laggard_is_corrected_down_and_the_others_are_left_alone(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.start()
    laggard = fleet.start()
    for _ in range(40):
        fleet.emit()
        laggard.rounds = 0
        advance = fleet.advance()
        assert all(request is laggard and off == -5 for request, off in advance.corrections)
        fleet.check()
    assert fleet.clock.steps == 40
    assert laggard.mirror <= TOLERANCE


def test_a_runaway_is_corrected_up(fleet: Fleet) -> None:
    for _ in range(4):
        fleet.start()
    runaway = next(iter(fleet.answers.values()))
    for _ in range(30):
        fleet.emit()
        assert runaway.rounds is not None
        runaway.rounds += 2
        advance = fleet.advance()
        assert all(request is runaway and off > 0 for request, off in advance.corrections)
        fleet.check()
    assert fleet.clock.steps == 30


def test_a_rank_that_is_half_as_fast_is_followed(fleet: Fleet) -> None:
    for _ in range(6):
        fleet.start()
    for step in range(60):
        for place, answer in enumerate(fleet.answers.values()):
            assert answer.rounds is not None
            answer.rounds += 1 if place >= 3 or step % 2 else 0
        fleet.advance()
        fleet.check()


def test_the_fast_half_may_leave_at_any_time(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.start()
    for step in range(60):
        for place, answer in enumerate(fleet.answers.values()):
            assert answer.rounds is not None
            answer.rounds += 1 if place or step % 2 else 0
        fleet.advance()
    fleet.leave(next(reversed(fleet.answers.values())))
    for _ in range(30):
        fleet.emit()
        fleet.advance()
        fleet.check()


@pytest.mark.parametrize("kind", ["pulled", "pumped"])
@given(
    history=st.lists(
        st.tuples(
            st.lists(st.integers(0, 12), min_size=6, max_size=6),
            st.sampled_from(["start", "leave", "restart", ""]),
            st.floats(0, 5),
        ),
        max_size=30,
    )
)
def test_whatever_streams_do_the_mirror_stays_within_the_tolerance(
    kind: str, history: list[tuple[list[int], str, float]]
) -> None:
    fleet = Fleet(kind)
    for emitted, change, after_s in history:
        if change == "start" and len(fleet.answers) < 6:
            fleet.start()
        elif change == "leave" and fleet.answers:
            fleet.leave(next(iter(fleet.answers.values())))
        elif change == "restart" and fleet.answers:
            fleet.restart(next(reversed(fleet.answers.values())))
        for answer, rounds in zip(fleet.answers.values(), emitted, strict=False):
            assert answer.rounds is not None
            answer.rounds += rounds
        assert fleet.advance(after_s).steps >= 0
        fleet.check()


def test_answers_without_a_stream_move_with_those_that_have_one(fleet: Fleet) -> None:
    fleet.start()
    silent = fleet.start(None)
    for _ in range(10):
        fleet.emit()
        fleet.advance()
    assert silent.mirror == 10


def test_answers_without_a_stream_move_by_the_time_a_step_took(fleet: Fleet) -> None:
    stream = fleet.start()
    for _ in range(10):
        fleet.emit()
        fleet.advance()
    fleet.leave(stream)
    silent = fleet.start(None)
    total = sum(fleet.advance(0.25).steps for _ in range(8))
    assert total in (99, 100)  # Two seconds of steps of 20 ms.
    assert silent.mirror == total


def test_without_any_measurement_nothing_is_guessed(fleet: Fleet) -> None:
    fleet.start(None)
    assert [fleet.advance(1.0).steps for _ in range(3)] == [0, 0, 0]


def test_a_whole_answer_tells_the_step_time_if_nothing_else_does(fleet: Fleet) -> None:
    fleet.start(None)
    fleet.clock.observe_answer(0.05)
    fleet.advance()
    assert fleet.advance(1.0).steps in (19, 20)


def test_a_whole_answer_tells_nothing_while_streams_do(fleet: Fleet) -> None:
    fleet.start()
    for _ in range(10):
        fleet.emit()
        fleet.advance()
    fleet.clock.observe_answer(9.0)
    assert fleet.clock.step_s == pytest.approx(0.02)


def test_an_answer_that_took_no_time_tells_nothing() -> None:
    clock = StepClock()
    clock.observe_answer(0.0)
    clock.observe_answer(-1.0)
    assert clock.step_s == 0.0


def test_an_idle_fleet_is_not_a_slow_one(fleet: Fleet) -> None:
    stream = fleet.start()
    for _ in range(10):
        fleet.emit()
        fleet.advance()
    fleet.leave(stream)
    fleet.advance(3_600.0)
    fleet.start()
    for _ in range(3):
        fleet.emit()
        fleet.advance()
    assert fleet.clock.step_s == pytest.approx(0.02)


def test_a_pause_of_all_streams_hardly_counts(fleet: Fleet) -> None:
    fleet.start()
    for _ in range(20):
        fleet.emit()
        fleet.advance()
    fleet.emit()
    fleet.advance(60.0)
    assert fleet.clock.step_s < 0.03


def test_a_first_measurement_that_was_far_too_short_is_outgrown(fleet: Fleet) -> None:
    fleet.start()
    fleet.emit()
    fleet.advance()
    fleet.emit(100)  # A burst that was held up somewhere.
    fleet.advance(0.000_1)
    for _ in range(60):
        fleet.emit()
        fleet.advance()
    assert fleet.clock.step_s == pytest.approx(0.02, rel=0.1)


def test_steps_that_are_seen_at_one_instant_count_as_any_others(fleet: Fleet) -> None:
    fleet.start()
    fleet.advance()
    for _ in range(20):
        fleet.emit()
        fleet.advance(0.0)
        fleet.emit()
        fleet.advance(0.04)
    assert fleet.clock.step_s == pytest.approx(0.02, rel=0.15)


def test_an_answer_that_lies_about_its_length_does_not_make_the_clock_race(fleet: Fleet) -> None:
    fleet.start(None)
    fleet.clock.observe_answer(1e-12)
    fleet.advance()
    assert fleet.advance(0.05).steps in (499, 500)


def test_time_spent_suspended_is_no_progress(fleet: Fleet) -> None:
    fleet.start(None)
    fleet.clock.observe_answer(0.02)
    fleet.advance()
    assert fleet.advance(86_400.0).steps == 0
    assert fleet.advance(0.25).steps in (12, 13)


def test_a_round_of_several_sequences_is_one_step(fleet: Fleet) -> None:
    # Two sequences emit in turn; the round is over when both have.
    answer = fleet.start()
    for tokens in range(1, 41):
        answer.rounds = tokens // 2
        fleet.advance(0.01)
        fleet.check()
    assert fleet.clock.steps == 20
    assert fleet.clock.step_s == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_same_whether_streams_are_asked_or_the_pump_tells(seed: int) -> None:
    rng = random.Random(seed)
    fleets = [Fleet("pulled"), Fleet("pumped")]
    for rounds in [rng.choice([None, 0, 3]) for _ in range(1_500)]:
        for fleet in fleets:
            fleet.start(rounds)
    for _ in range(60):
        emitted = [rng.choices([0, 1, 2, 9], [1, 20, 1, 0.1])[0] for _ in fleets[0].answers]
        changed, after_s = rng.randrange(len(fleets[0].answers)), rng.uniform(0, 0.1)
        looks = []
        for fleet in fleets:
            streams = [one for one in fleet.answers.values() if one.rounds is not None]
            for answer, rounds in zip(streams, emitted, strict=False):
                assert answer.rounds is not None
                answer.rounds += rounds
            match changed % 3:
                case 0:
                    fleet.leave(list(fleet.answers.values())[changed])
                case 1:
                    fleet.restart(streams[changed % len(streams)])
                case _:
                    fleet.start(changed % 2)
            look = fleet.advance(after_s)
            off = sorted((answer.number, by) for answer, by in look.corrections)
            looks.append((look.steps, look.step_s, off, fleet.clock.step_s))
        assert looks[0] == looks[1]
    assert fleets[0].clock.steps > 40


class Whole(Answer):
    """An answer that is not streamed, and says so once."""

    asked = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "rounds":
            self.asked += 1
            return None
        return super().__getattribute__(name)


def test_only_streams_are_asked_how_far_they_are() -> None:
    counts, whole, stream = PulledCounts[Answer](), Whole(), Answer()
    counts.start(whole, 0)
    assert counts.passed(0) is None
    assert counts.silent
    counts.start(stream, 0)
    stream.rounds = 3
    assert counts.passed(0) == 3
    assert whole.asked == 1
    counts.stop(whole)
    counts.stop(stream)
    assert counts.passed(0) is None
    assert not counts.silent
