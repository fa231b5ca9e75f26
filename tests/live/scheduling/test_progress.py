"""How far the requests in decode are: the mirror of their loads, its step clock, and the time lost at the barrier."""

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.driver import Driver

from balanceroute.proxy.core.events import (
    Action,
    DecodeLost,
    DecodeStarted,
    Event,
    PrefillLost,
    RankId,
    RequestArrived,
    RequestId,
    RequestRecomputed,
    StepCompleted,
    Tick,
    Ticket,
    TokensEmitted,
)
from balanceroute.proxy.live.scheduling.progress import (
    BUCKET_S,
    BUCKETS,
    Advance,
    BarrierIdle,
    Progress,
    PulledCounts,
    PumpedCounts,
    StepClock,
)
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.proxy.live.request.session import Session


# What the scheduler's mirror is told of the requests in decode, and when.


A, B = RequestId(0), RequestId(1)
RANKS = [RankId(0), RankId(1)]


@dataclass
class Request:
    """What of a session this needs."""

    number: RequestId
    stream: bool = True
    sequences: int = 1
    emitted_tokens: int = 0
    offset: int = 0
    prefilled_again: int = 0
    record: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            admitted_ns=100 * 10**9, outcome=None, output_tokens=0, choices=1, ended_ns=0
        )
    )

    @property
    def shape(self) -> SimpleNamespace:
        return SimpleNamespace(stream=self.stream, sequences=self.sequences)

    @property
    def rounds(self) -> int | None:
        return self.emitted_tokens // self.sequences if self.stream else None

    def prefill_again(self) -> None:
        self.prefilled_again += 1


class Site:
    """Two ranks, each with one request of 10 tokens."""

    def __init__(self, *, stream: bool = True) -> None:
        self.now_s = 100.0
        self.heard: list[tuple[Event, int]] = []
        self.scheduler = Driver(ranks=2).scheduler
        for number in (A, B):
            self.tell(RequestArrived(number, Ticket(10, prefill=False)))
        self.tell(Tick())
        handle = self.scheduler.handle

        def note(event: Event, *, now_ns: int) -> "Sequence[Action]":
            self.heard.append((event, now_ns))
            return handle(event, now_ns=now_ns)

        self.scheduler.handle = note  # type: ignore[method-assign, assignment]
        self.progress = Progress(self.scheduler, self.tell, lambda: self.now_s)
        self.requests = [Request(A, stream), Request(B, stream)]

    def tell(self, event: Event) -> None:
        self.scheduler.handle(event, now_ns=round(self.now_s * 1e9))

    def session(self, number: RequestId) -> "Session":
        return cast("Session", self.requests[number])

    def begin(self, number: RequestId) -> None:
        """Have a stream begin, as the session does."""
        self.progress.began(self.session(number))
        self.tell(DecodeStarted(number))

    def follow(self) -> list[Event]:
        self.heard.clear()
        self.progress.follow(RANKS)
        assert all(now_ns == round(self.now_s * 1e9) for _, now_ns in self.heard)
        return [event for event, _ in self.heard]


def test_streams_move_the_mirror_on_and_one_that_deviates_is_corrected() -> None:
    site = Site()
    for number in (A, B):
        site.begin(number)
    assert site.follow() == []
    site.now_s += 1.0
    site.requests[A].emitted_tokens, site.requests[B].emitted_tokens = 10, 16
    assert site.follow() == [StepCompleted()] * 16 + [TokensEmitted(A, -6)]
    assert [site.scheduler.emitted(number) for number in (A, B)] == [10, 16]
    assert [site.progress.age(number) for number in (A, B)] == [10, 16]


def test_a_correction_is_of_all_sequences() -> None:
    site = Site()
    for number in (A, B):
        site.begin(number)
    site.requests[A].sequences = 2
    site.requests[A].emitted_tokens, site.requests[B].emitted_tokens = 32, 10
    assert site.follow()[-1] == TokensEmitted(B, -6)
    site.requests[A].emitted_tokens, site.requests[B].emitted_tokens = 32, 20
    assert site.follow()[-1] == TokensEmitted(A, -20)


def test_the_time_lost_at_the_barrier_is_summed_over_the_steps() -> None:
    site = Site()
    site.begin(A)
    site.requests[A].emitted_tokens = 4
    site.follow()
    assert site.progress.barrier.capacity_tokens == 4 * 2 * 14
    assert site.progress.barrier.idle_tokens == 4 * 4


def test_steps_of_ranks_that_are_no_part_of_the_fleet_lose_nothing_at_the_barrier() -> None:
    site = Site()
    site.begin(A)
    site.requests[A].emitted_tokens = 4
    site.progress.follow([])
    assert site.progress.steps.steps == 4
    assert (site.progress.barrier.capacity_tokens, site.progress.barrier.idle_tokens) == (0, 0)


def test_a_request_without_a_stream_joins_after_the_time_that_streams_took() -> None:
    site = Site(stream=False)
    site.requests[A].stream = True
    site.now_s += 10.0
    site.begin(A)  # 10 s after it was admitted, which moves the mean from 0 to 1 s.
    site.progress.admitted(site.session(B))
    site.now_s += 0.9
    assert site.follow() == []
    site.now_s += 0.2
    assert site.follow() == [DecodeStarted(B, token_seen=False)]
    assert set(site.progress.started) == {A, B}


def test_only_requests_without_a_stream_are_waited_for() -> None:
    site = Site()
    site.progress.admitted(site.session(A))
    assert site.progress.idle
    site.requests[B].stream = False
    site.progress.admitted(site.session(B))
    assert not site.progress.idle


@pytest.mark.parametrize("event", [DecodeLost(A), PrefillLost(A, elsewhere=True)])
def test_a_request_that_was_taken_for_started_is_prefilled_again(
    event: DecodeLost | PrefillLost,
) -> None:
    site = Site(stream=False)
    site.progress.admitted(site.session(A))
    site.follow()
    site.tell(TokensEmitted(A, 7))
    assert site.progress.left(event) == RequestRecomputed(A, elsewhere=True)
    assert site.scheduler.emitted(A) == 0  # No client has what it was thought to have emitted.
    assert site.requests[A].prefilled_again == 1
    assert site.progress.idle


def test_a_request_that_did_not_start_is_lost_as_it_says() -> None:
    site = Site(stream=False)
    site.progress.admitted(site.session(A))
    assert site.progress.left(DecodeLost(A)) == DecodeLost(A)
    assert site.requests[A].prefilled_again == 0
    assert site.progress.idle


def test_a_request_that_its_rank_hands_back_keeps_what_it_emitted() -> None:
    site = Site()
    site.begin(A)
    site.tell(TokensEmitted(A, 7))
    assert site.progress.left(RequestRecomputed(A)) == RequestRecomputed(A)
    assert site.scheduler.emitted(A) == 7
    assert site.progress.idle


@pytest.mark.parametrize(
    ("changes", "learns"),
    [
        ({}, True),
        ({"output_tokens": 15}, False),
        ({"outcome": Outcome.CANCELLED}, False),
        ({"admitted_ns": None}, False),
    ],
)
def test_a_whole_answer_tells_how_long_a_step_is_if_it_is_long(
    changes: dict[str, object], learns: bool
) -> None:
    site = Site(stream=False)
    record = site.requests[A].record
    record.outcome, record.output_tokens, record.ended_ns = Outcome.OK, 20, 101 * 10**9
    vars(record).update(changes)
    site.progress.ended(site.session(A))
    assert site.progress.steps.step_s == (0.05 if learns else 0.0)


# The time lost at the barrier, over the latest minutes.


def loads(*tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(tokens, np.int64)


def test_nothing_is_idle_before_the_first_step() -> None:
    barrier = BarrierIdle()
    assert barrier.share(10.0) == 0.0
    assert barrier.shares(10.0) == [None] * BUCKETS


def test_steps_count_in_the_bucket_of_their_time() -> None:
    barrier = BarrierIdle()
    barrier.add(2, loads(100, 50), 0.0)
    barrier.add(1, loads(100, 100), BUCKET_S - 0.1)
    barrier.add(1, loads(100, 0), BUCKET_S)
    assert (barrier.idle_tokens, barrier.capacity_tokens) == (200, 800)
    assert barrier.shares(BUCKET_S)[-2:] == [pytest.approx(100 / 600), pytest.approx(0.5)]
    assert barrier.share(BUCKET_S) == pytest.approx(200 / 800)


def test_what_is_older_than_the_window_counts_only_in_the_sums() -> None:
    barrier = BarrierIdle()
    barrier.add(1, loads(100, 0), 1.0)
    end_s = 1.0 + BUCKETS * BUCKET_S
    assert barrier.share(end_s - BUCKET_S) == 0.5
    assert barrier.share(end_s) == 0.0
    assert barrier.shares(end_s) == [None] * BUCKETS
    assert barrier.idle_tokens == 100


def test_memory_is_bounded() -> None:
    barrier = BarrierIdle()
    for number in range(10 * BUCKETS):
        barrier.add(1, loads(10, 10), BUCKET_S * number)
    assert barrier.shares(BUCKET_S * (10 * BUCKETS - 1)) == [0.0] * BUCKETS


# Steps inferred from streams: right in lock step, bounded when not, and proof against nonsense.


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


@pytest.mark.parametrize(
    ("looks", "step_s"),
    [
        pytest.param([(0, 0.02), (7, 0.14), (7, 0.14)], 0.02, id="several steps between two looks"),
        pytest.param([(1, 0.02)] * 21 + [(1, 60.0)], 0.026, id="a pause of all streams"),
        # A burst that was held up somewhere.
        pytest.param(
            [(1, 0.02), (100, 0.000_1)] + [(1, 0.02)] * 60, 0.02, id="a first one too short"
        ),
        pytest.param([(0, 0.02)] + [(1, 0.0), (1, 0.04)] * 20, 0.02, id="seen at one instant"),
    ],
)
def test_how_long_a_step_is(fleet: Fleet, looks: list[tuple[int, float]], step_s: float) -> None:
    fleet.start()
    for steps, after_s in looks:
        fleet.emit(steps)
        assert fleet.advance(after_s).steps == steps
    assert fleet.clock.step_s == pytest.approx(step_s, rel=0.15)


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


@pytest.mark.parametrize(
    ("told_s", "looks"),
    [
        (None, [(1.0, {0}), (1.0, {0}), (1.0, {0})]),  # Nothing is guessed.
        (0.05, [(1.0, {19, 20})]),
        (1e-12, [(0.05, {499, 500})]),  # One that lies does not make the clock race.
        (0.02, [(86_400.0, {0}), (0.25, {12, 13})]),  # Nor does time spent suspended.
    ],
)
def test_a_whole_answer_tells_the_step_time_if_nothing_else_does(
    fleet: Fleet, told_s: float | None, looks: list[tuple[float, set[int]]]
) -> None:
    fleet.start(None)
    if told_s is not None:
        fleet.clock.observe_answer(told_s)
        fleet.advance()
    for after_s, steps in looks:
        assert fleet.advance(after_s).steps in steps


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
