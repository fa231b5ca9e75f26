"""What the scheduler's mirror is told of the requests in decode, and when."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from tests.core.conftest import Driver

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
from balanceroute.proxy.live.scheduling.progress import Progress
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.proxy.live.request.session import Session

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


def test_a_request_without_a_stream_joins_after_the_time_that_streams_took() -> None:
    site = Site(stream=False)
    site.requests[A].stream = True
    site.now_s += 10.0
    site.begin(A)  # 10 s after it was admitted, which moves the mean from 0 to 1 s.
    site.progress.admitted(site.session(B))
    site.now_s += 0.9
    assert site.follow() == []
    site.now_s += 0.2
    assert site.follow() == [DecodeStarted(B, heard=False)]
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
