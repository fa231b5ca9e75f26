"""Steps inferred from streams: right in lock step, bounded when not, and proof against nonsense."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.live.scheduling.step_clock import Advance, StepClock

TOLERANCE = 4


@dataclass
class Answer:
    """A started request. `mirror`: the rounds that the scheduler counts for it."""

    rounds: int | None = 0
    offset: int = 0
    mirror: int = 0


class Fleet:
    """Answers, and a mirror of them that is brought forward as the driver does it."""

    def __init__(self) -> None:
        self.clock = StepClock()
        self.answers: list[Answer] = []
        self.now_s = 0.0

    def start(self, rounds: int | None = 0) -> Answer:
        answer = Answer(rounds)
        self.answers.append(answer)
        self.clock.start(answer)
        return answer

    def advance(self, after_s: float = 0.02) -> "Advance[Answer]":
        self.now_s += after_s
        advance = self.clock.advance(self.answers, self.now_s)
        for answer in self.answers:
            answer.mirror += advance.steps
        for request, rounds in advance.corrections:
            assert isinstance(request, Answer)
            request.mirror += rounds
        return advance

    def emit(self, rounds: int = 1) -> None:
        for answer in self.answers:
            if answer.rounds is not None:
                answer.rounds += rounds

    def check(self) -> None:
        """Every stream is followed to within the tolerance."""
        for answer in self.answers:
            if answer.rounds is not None:
                assert abs(answer.mirror - answer.rounds) <= TOLERANCE


def test_a_step_is_timed_unless_the_fleet_paused() -> None:
    fleet = Fleet()
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


def test_streams_in_lock_step_move_the_clock_and_need_no_correction() -> None:
    fleet = Fleet()
    for _ in range(5):
        fleet.start()
    for _ in range(100):
        fleet.emit()
        advance = fleet.advance()
        assert (advance.steps, advance.corrections) == (1, [])
        assert all(answer.mirror == answer.rounds for answer in fleet.answers)
    assert fleet.clock.steps == 100
    assert fleet.clock.step_s == pytest.approx(0.02)


def test_several_steps_between_two_looks_all_count() -> None:
    fleet = Fleet()
    fleet.start()
    fleet.advance()
    fleet.emit(7)
    assert fleet.advance(0.14).steps == 7
    fleet.emit(7)
    fleet.advance(0.14)
    assert fleet.clock.step_s == pytest.approx(0.02)


def test_a_look_without_progress_moves_nothing() -> None:
    fleet = Fleet()
    fleet.start()
    fleet.emit()
    fleet.advance()
    assert fleet.advance() == Advance(0, None, [])


def test_a_request_that_starts_later_is_counted_from_its_start() -> None:
    fleet = Fleet()
    fleet.start()
    fleet.emit(50)
    fleet.advance()
    late = fleet.start(rounds=1)
    for _ in range(20):
        fleet.emit()
        fleet.advance()
        fleet.check()
    assert late.rounds == 21


def test_a_laggard_is_corrected_down_and_the_others_are_left_alone() -> None:
    fleet = Fleet()
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


def test_a_runaway_is_corrected_up() -> None:
    fleet = Fleet()
    for _ in range(4):
        fleet.start()
    runaway = fleet.answers[0]
    for _ in range(30):
        fleet.emit()
        assert runaway.rounds is not None
        runaway.rounds += 2
        advance = fleet.advance()
        assert all(request is runaway and off > 0 for request, off in advance.corrections)
        fleet.check()
    assert fleet.clock.steps == 30


def test_a_rank_that_is_half_as_fast_is_followed() -> None:
    fleet = Fleet()
    for _ in range(6):
        fleet.start()
    for step in range(60):
        for place, answer in enumerate(fleet.answers):
            assert answer.rounds is not None
            answer.rounds += 1 if place >= 3 or step % 2 else 0
        fleet.advance()
        fleet.check()


def test_the_fast_half_may_leave_at_any_time() -> None:
    fleet = Fleet()
    for _ in range(2):
        fleet.start()
    for step in range(60):
        for place, answer in enumerate(fleet.answers):
            assert answer.rounds is not None
            answer.rounds += 1 if place or step % 2 else 0
        fleet.advance()
    fleet.answers.pop()
    for _ in range(30):
        fleet.emit()
        fleet.advance()
        fleet.check()


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 12), min_size=6, max_size=6),
            st.sampled_from(["start", "leave", "restart", ""]),
            st.floats(0, 5),
        ),
        max_size=30,
    )
)
def test_whatever_streams_do_the_mirror_stays_within_the_tolerance(
    history: list[tuple[list[int], str, float]],
) -> None:
    fleet = Fleet()
    for emitted, change, after_s in history:
        if change == "start" and len(fleet.answers) < 6:
            fleet.start()
        elif change == "leave" and fleet.answers:
            fleet.answers.pop(0)
        elif change == "restart" and fleet.answers:
            answer = fleet.answers[-1]
            answer.rounds = answer.mirror = 0
            fleet.clock.start(answer)
        for answer, rounds in zip(fleet.answers, emitted, strict=False):
            assert answer.rounds is not None
            answer.rounds += rounds
        assert fleet.advance(after_s).steps >= 0
        fleet.check()


def test_answers_without_a_stream_move_with_those_that_have_one() -> None:
    fleet = Fleet()
    fleet.start()
    silent = fleet.start(None)
    for _ in range(10):
        fleet.emit()
        fleet.advance()
    assert silent.mirror == 10


def test_answers_without_a_stream_move_by_the_time_a_step_took() -> None:
    fleet = Fleet()
    stream = fleet.start()
    for _ in range(10):
        fleet.emit()
        fleet.advance()
    fleet.answers.remove(stream)
    silent = fleet.start(None)
    total = sum(fleet.advance(0.25).steps for _ in range(8))
    assert total in (99, 100)  # Two seconds of steps of 20 ms.
    assert silent.mirror == total


def test_without_any_measurement_nothing_is_guessed() -> None:
    fleet = Fleet()
    fleet.start(None)
    assert [fleet.advance(1.0).steps for _ in range(3)] == [0, 0, 0]


def test_a_whole_answer_tells_the_step_time_if_nothing_else_does() -> None:
    fleet = Fleet()
    fleet.start(None)
    fleet.clock.observe_answer(0.05)
    fleet.advance()
    assert fleet.advance(1.0).steps in (19, 20)


def test_a_whole_answer_tells_nothing_while_streams_do() -> None:
    fleet = Fleet()
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


def test_an_idle_fleet_is_not_a_slow_one() -> None:
    fleet = Fleet()
    stream = fleet.start()
    for _ in range(10):
        fleet.emit()
        fleet.advance()
    fleet.answers.clear()
    fleet.advance(3_600.0)
    fleet.answers.append(stream)
    fleet.clock.start(stream)
    stream.rounds = 0
    for _ in range(3):
        fleet.emit()
        fleet.advance()
    assert fleet.clock.step_s == pytest.approx(0.02)


def test_a_pause_of_all_streams_hardly_counts() -> None:
    fleet = Fleet()
    fleet.start()
    for _ in range(20):
        fleet.emit()
        fleet.advance()
    fleet.emit()
    fleet.advance(60.0)
    assert fleet.clock.step_s < 0.03


def test_a_first_measurement_that_was_far_too_short_is_outgrown() -> None:
    fleet = Fleet()
    fleet.start()
    fleet.emit()
    fleet.advance()
    fleet.emit(100)  # A burst that was held up somewhere.
    fleet.advance(0.000_1)
    for _ in range(60):
        fleet.emit()
        fleet.advance()
    assert fleet.clock.step_s == pytest.approx(0.02, rel=0.1)


def test_steps_that_are_seen_at_one_instant_count_as_any_others() -> None:
    fleet = Fleet()
    fleet.start()
    fleet.advance()
    for _ in range(20):
        fleet.emit()
        fleet.advance(0.0)
        fleet.emit()
        fleet.advance(0.04)
    assert fleet.clock.step_s == pytest.approx(0.02, rel=0.15)


def test_an_answer_that_lies_about_its_length_does_not_make_the_clock_race() -> None:
    fleet = Fleet()
    fleet.start(None)
    fleet.clock.observe_answer(1e-12)
    fleet.advance()
    assert fleet.advance(0.05).steps in (499, 500)


def test_time_spent_suspended_is_no_progress() -> None:
    fleet = Fleet()
    fleet.start(None)
    fleet.clock.observe_answer(0.02)
    fleet.advance()
    assert fleet.advance(86_400.0).steps == 0
    assert fleet.advance(0.25).steps in (12, 13)


def test_a_round_of_several_sequences_is_one_step() -> None:
    # Two sequences emit in turn; the round is over when both have.
    fleet = Fleet()
    answer = fleet.start()
    for tokens in range(1, 41):
        answer.rounds = tokens // 2
        fleet.advance(0.01)
        fleet.check()
    assert fleet.clock.steps == 20
    assert fleet.clock.step_s == pytest.approx(0.02, rel=0.05)
