"""How far the requests in decode are, as the scheduler's ledger takes them to be."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import (
    DecodeLost,
    DecodeStarted,
    Event,
    PrefillLost,
    RankId,
    RequestId,
    RequestRecomputed,
    StepCompleted,
    TokensEmitted,
)
from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.core.subset import idle_tokens
from balanceroute.proxy.live.request.session import Session
from balanceroute.proxy.live.request.shared import StreamLent, StreamReturned
from balanceroute.proxy.live.telemetry.record import OK

# The decode fleet's steps, inferred from the token counts of the streams.
#
# An engine does not say when a step ends. But every started request emits one token a step, so
# the median progress of the streams shows how many steps passed, and one `StepCompleted` brings
# all of the scheduler's ledger forward. A request that deviates (its engine paused it, its text
# comes in larger pieces) is corrected singly once it is off by more than a few tokens: on loads
# of thousands of tokens less does not matter, and single corrections are expensive. With
# speculative decoding a step of this clock is a token of the median request, of which the
# engine's step has several.
#
# While no stream runs, answers that are not streamed progress by the running mean of the step
# time.

# Tokens that a request may be off before it is corrected.
_TOLERANCE = 4
# Weight of one more measurement in the running mean of the step time.
_WEIGHT = 0.1
# A step counts as at most this many mean steps: a pause of the fleet is not one slow step. It counts
# all the same, so that a first measurement which was too short is outgrown.
_LONGEST_STEP = 4.0
# No engine is faster. Without a least step, an answer with a wrong length would make the clock
# race.
_SHORTEST_STEP_S = 1e-4
# Steps assumed at a time without a stream that shows them: time spent suspended is no progress.
_MOST_SILENT_STEPS = 1_000


_Request = TypeVar("_Request", bound="Started")


@dataclass(slots=True)
class Advance(Generic[_Request]):
    """The changes since the last look."""

    steps: int  # Steps that passed.
    # Time of each, in seconds; None if it was not measured, or if the fleet paused.
    step_s: float | None
    # The requests that are off the clock, and by how many tokens of each sequence.
    corrections: list[tuple[_Request, int]]


class StepClock:
    """Counts inferred steps."""

    def __init__(self) -> None:
        self.steps = 0  # Steps so far.
        self.step_s = 0.0  # Running mean of a step's time; 0.0 before the first measurement.
        self._since_s: float | None = None  # When the last step was seen; None while nothing runs.
        self._from_streams = False  # Whether streams showed the progress the last time.

    def advance(self, counts: "PulledCounts[_Request]", now_s: float) -> Advance[_Request]:
        """Compare every started request with the clock and move the clock on."""
        steps = counts.passed(self.steps)
        self._from_streams = steps is not None
        if steps is None:
            steps = self._advance_silently(now_s) if counts.silent else self._rest()
            return Advance(steps, None, [])
        step_s = None
        if steps:
            self.steps += steps
            step_s = self._measure(steps, now_s)
        return Advance(steps, step_s, counts.corrected(self.steps, _TOLERANCE))

    def observe_answer(self, step_s: float) -> None:
        """Learn the time of a step, in seconds, from a whole answer, unless streams show it."""
        if step_s > 0.0 and (self._since_s is None or not self._from_streams):
            self._learn(step_s)

    def _learn(self, step_s: float) -> None:
        step_s = max(step_s, _SHORTEST_STEP_S)
        if self.step_s:
            step_s = min(step_s, _LONGEST_STEP * self.step_s)
            self.step_s += _WEIGHT * (step_s - self.step_s)
        else:
            self.step_s = step_s

    def _measure(self, steps: int, now_s: float) -> float | None:
        since_s, self._since_s = self._since_s, now_s
        if since_s is None:
            return None
        step_s, mean_s = (now_s - since_s) / steps, self.step_s
        self._learn(step_s)
        return step_s if mean_s and step_s <= _LONGEST_STEP * mean_s else None

    def _rest(self) -> int:
        self._since_s = None
        return 0

    def _advance_silently(self, now_s: float) -> int:
        if self._since_s is None or not self.step_s:
            self._since_s = now_s
            return 0
        steps = int((now_s - self._since_s) / self.step_s)
        if steps > _MOST_SILENT_STEPS:
            self._since_s = now_s
            return 0
        self._since_s += steps * self.step_s
        self.steps += steps
        return steps


# How far streams are: each is asked. The **lead** of a stream is its place on the step clock.


class Started(Protocol):
    """One started request."""

    offset: int  # What to add to its rounds to compare them with the clock; not its own to set.

    @property
    def rounds(self) -> int | None:
        """Tokens that each sequence has emitted on this binding; None if it is not streamed."""


class PulledCounts(Generic[_Request]):
    """Asks every started stream how far it is."""

    def __init__(self) -> None:
        self.silent = False  # Whether there is a request without a stream that shows how far it is.
        self._streams: dict[int, _Request] = {}  # In the order of their starts.
        self._unstreamed: dict[int, _Request] = {}
        self._leads: list[tuple[int, _Request]] = []

    def start(self, request: _Request, place: int) -> None:
        """Note that a request has started; a stream without a token has the lead `place`."""
        request.offset = place
        if request.rounds is None:
            self._unstreamed[id(request)] = request
        else:
            self._streams[id(request)] = request

    def stop(self, request: _Request) -> None:
        """Note that a request which had started is over, or on no rank any more."""
        for requests in (self._streams, self._unstreamed):
            requests.pop(id(request), None)

    def passed(self, steps: int) -> int | None:
        """Return by how much the median lead, of two the larger, exceeds `steps`; 0 if it is less.

        None if there is no stream.
        """
        places = sorted(self._ask())
        return max(0, places[len(places) // 2] - steps) if places else None

    def _ask(self) -> list[int]:
        leads: list[tuple[int, _Request]] = []
        self.silent = bool(self._unstreamed)
        for request in self._streams.values():
            rounds = request.rounds
            if rounds is None:
                self.silent = True
            else:
                leads.append((rounds + request.offset, request))
        self._leads = leads
        return [lead for lead, _ in leads]

    def corrected(self, steps: int, tolerance: int) -> list[tuple[_Request, int]]:
        """Put streams whose lead is more than `tolerance` off at `steps`; return each and by how much.

        The leads are those that `passed` has just looked at.
        """
        corrections: list[tuple[_Request, int]] = []
        for lead, request in self._leads:
            off = lead - steps
            if abs(off) > tolerance:
                request.offset -= off
                corrections.append((request, off))
        return corrections


# How far streams are if the native pump moves some of them: it writes the counts of those to an
# array; the proxy asks all other streams.


class PumpedCounts(PulledCounts["Session"]):
    """Asks the started requests that are here, and reads the counts of those that are away.

    Args:
        tokens: int[slots], of each stream that is away; the pump writes it.
    """

    def __init__(self, tokens: NDArray[np.uint32]) -> None:
        super().__init__()
        self._started: dict[RequestId, Session] = {}
        self._tokens = tokens
        self._away: dict[int, Session] = {}  # By slot, like the arrays.
        self._is_away = np.zeros(len(tokens), np.bool_)
        self._sequences = np.ones(len(tokens), np.int64)
        self._offset = np.zeros(len(tokens), np.int64)
        self._changed = False
        # Slots of those that are away, and their leads at the last look.
        self._slots = np.zeros(0, np.int64)
        self._places = np.zeros(0, np.int64)

    def start(self, request: Session, place: int) -> None:
        super().start(request, place)
        self._started[request.number] = request

    def stop(self, request: Session) -> None:
        """Note that a request is not started any more; its stream, of which nothing comes, is here."""
        super().stop(request)
        self._started.pop(request.number, None)

    def lent(self, number: RequestId, slot: int) -> None:
        """Read how far a request is in a slot, if it has started; any other has no rank."""
        request = self._started.get(number)
        if request is not None:
            self._streams.pop(id(request), None)
            self._away[slot] = request
            self._is_away[slot] = self._changed = True
            self._sequences[slot] = request.shape.sequences
            self._offset[slot] = request.offset

    def returned(self, slot: int) -> None:
        request = self._away.pop(slot, None)
        if request is not None:
            self._streams[id(request)] = request
            self._is_away[slot], self._changed = False, True
            request.offset = self._offset.item(slot)

    def passed(self, steps: int) -> int | None:
        if self._changed:
            self._changed = False
            self._slots = np.flatnonzero(self._is_away)
        slots = self._slots
        self._places = self._tokens[slots] // self._sequences[slots] + self._offset[slots]
        if not len(slots):
            return super().passed(steps)
        places = np.concatenate((np.array(self._ask(), np.int64), self._places))
        middle = len(places) // 2
        return max(0, int(np.partition(places, middle)[middle]) - steps)

    def corrected(self, steps: int, tolerance: int) -> list[tuple[Session, int]]:
        corrections = super().corrected(steps, tolerance)
        off = self._places - steps
        (which,) = (np.abs(off) > tolerance).nonzero()
        if len(which):
            slots, off = self._slots[which], off[which]
            self._offset[slots] -= off
            away = zip(slots.tolist(), off.tolist(), strict=True)
            corrections += [(self._away[slot], by) for slot, by in away]
        return corrections


# Rank time lost at the barrier: since the start, and in the latest minutes.

BUCKET_S = 5.0
BUCKETS = 60
"""Buckets of `BUCKET_S` that are kept."""


class BarrierIdle:
    """Sums what ranks have less than the fullest, step by step.

    Attributes:
        idle_tokens: Sum over the steps of sum_g (max L - L_g), since the start.
        capacity_tokens: Sum over the steps of G x max L, since the start.
    """

    def __init__(self) -> None:
        self.idle_tokens = self.capacity_tokens = 0
        # The number of a bucket since the clock's zero, and both sums in it.
        self._buckets: deque[tuple[int, int, int]] = deque(maxlen=BUCKETS)

    def add(self, steps: int, loads: NDArray[np.int64], now_s: float) -> None:
        """Note `steps` steps that had these loads, int64[G]."""
        tokens: list[int] = loads.tolist()
        idle, capacity = steps * idle_tokens(tokens), steps * len(tokens) * max(tokens)
        self.idle_tokens += idle
        self.capacity_tokens += capacity
        place = int(now_s // BUCKET_S)
        if self._buckets and self._buckets[-1][0] == place:
            _, before, capacity_before = self._buckets.pop()
            idle, capacity = before + idle, capacity_before + capacity
        self._buckets.append((place, idle, capacity))

    def shares(self, now_s: float) -> list[float | None]:
        """Return the idle share of each bucket, the oldest first; None where there was no load."""
        last = int(now_s // BUCKET_S)
        known = {place: (idle, capacity) for place, idle, capacity in self._buckets}
        sums = [known.get(place, (0, 0)) for place in range(last - BUCKETS + 1, last + 1)]
        return [idle / capacity if capacity else None for idle, capacity in sums]

    def share(self, now_s: float) -> float:
        """Return the idle share of all buckets together; 0 if there was no load."""
        first = int(now_s // BUCKET_S) - BUCKETS
        kept = [(idle, capacity) for place, idle, capacity in self._buckets if place > first]
        total = sum(capacity for _, capacity in kept)
        return sum(idle for idle, _ in kept) / total if total else 0.0


# Least tokens of a whole answer for its time to show the time of a step.
_LEAST_ROUNDS = 16


class Progress:
    """Follows the requests that ranks have.

    Args:
        scheduler: Its ledger is updated.
        feed: Passes it the event that one has joined its rank's batch, and performs what follows.
        pumped: Tokens of the streams that the pump moves, by slot; None without a pump.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        feed: Callable[[Event], None],
        clock: Callable[[], float],
        pumped: NDArray[np.uint32] | None = None,
    ) -> None:
        self.started: dict[RequestId, Session] = {}  # The requests in their rank's batch.
        self.steps = StepClock()  # The inferred steps.
        self._counts = PulledCounts() if pumped is None else PumpedCounts(pumped)
        self.barrier = BarrierIdle()  # What the inferred steps lost at the barrier.
        self._scheduler = scheduler
        self._feed = feed
        self._clock = clock
        # Requests without a stream, which would show when they join the batch, and since when each is admitted.
        self._joining: dict[RequestId, tuple[Session, float]] = {}
        self.transfer_s = 0.0  # The mean time from an admission to the first token.

    @property
    def idle(self) -> bool:
        return not self.started and not self._joining

    def admitted(self, session: Session) -> None:
        """Note that a request is on its way to its rank."""
        if not session.shape.stream:
            self._joining[session.number] = session, self._clock()

    def began(self, session: Session) -> None:
        """Note that a stream began: its request is in its rank's batch."""
        self._join(session)
        assert session.record.admitted_ns is not None
        waited_s = self._clock() - session.record.admitted_ns / 1e9
        self.transfer_s += 0.1 * (waited_s - self.transfer_s)

    def left(self, event: RequestRecomputed | DecodeLost | PrefillLost) -> Event:
        """Forget a request that is on no rank any more; return the event for the scheduler.

        The scheduler may have it for started without a stream that shows so. Then its KV cache may have
        left the prefiller, or not, and it is prefilled again. The tokens that the ledger counts for it are
        taken back, as no client has them.
        """
        number = event.request
        self._joining.pop(number, None)
        session = self._leave(number)
        if session is None or isinstance(event, RequestRecomputed):
            return event
        emitted = self._scheduler.emitted(number)
        if emitted:
            self._handle(TokensEmitted(number, -emitted))
        session.prefill_again()
        return RequestRecomputed(number, elsewhere=True)

    def lent(self, report: StreamLent) -> None:
        assert isinstance(self._counts, PumpedCounts)
        self._counts.lent(report.request, report.slot)

    def returned(self, report: StreamReturned) -> None:
        assert isinstance(self._counts, PumpedCounts)
        self._counts.returned(report.slot)

    def ended(self, session: Session) -> None:
        """Forget a request that is over, and learn from a whole answer how long a step is."""
        number, record = session.number, session.record
        self._leave(number)
        self._joining.pop(number, None)
        if session.shape.stream or record.outcome is not OK or record.admitted_ns is None:
            return
        rounds = record.output_tokens / record.choices
        if rounds >= _LEAST_ROUNDS:  # A short answer's time is mostly not that of its steps.
            self.steps.observe_answer((record.ended_ns - record.admitted_ns) / 1e9 / rounds)

    def follow(self, serving: Sequence[RankId]) -> None:
        """Bring the ledger up to date; `serving` are the ranks whose loads make the barrier."""
        now_s = self._clock()
        for number, (session, since_s) in list(self._joining.items()):
            if now_s - since_s >= self.transfer_s:
                self._join(session)
                self._feed(DecodeStarted(number, token_seen=False))
        advance = self.steps.advance(self._counts, now_s)
        if advance.steps:
            step_s, scheduler = advance.step_s, self._scheduler
            step = StepCompleted(None if step_s is None else round(1e9 * step_s))
            for _ in range(advance.steps):
                self._handle(step)
            loads = scheduler.ranks.loads_at_mean_speed(scheduler.ledger, scheduler.config)
            if serving:  # Else what steps is no part of the fleet any more.
                self.barrier.add(advance.steps, loads[serving], now_s)
        for session, rounds in advance.corrections:
            self._handle(TokensEmitted(session.number, rounds * session.shape.sequences))

    def age(self, number: RequestId) -> int:
        """Return the tokens that each sequence of a started request has emitted."""
        session = self.started[number]
        if session.shape.stream:
            return session.emitted_tokens // session.shape.sequences
        # By the step clock.
        return self._scheduler.emitted(number) // session.shape.sequences

    def _join(self, session: Session) -> None:
        """Follow a request that joins its rank's batch."""
        self._joining.pop(session.number, None)
        self.started[session.number] = session
        self._counts.start(session, self.steps.steps)

    def _leave(self, number: RequestId) -> Session | None:
        session = self.started.pop(number, None)
        if session is not None:
            self._counts.stop(session)
        return session

    def _handle(self, event: Event) -> None:
        self._scheduler.handle(event, now_ns=round(self._clock() * 1e9))
