"""How far the requests in decode are, as the scheduler's ledger takes them to be."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from balanceroute.proxy.core.events import (
    DecodeLost,
    DecodeStarted,
    Event,
    PrefillLost,
    RequestId,
    RequestRecomputed,
    StepCompleted,
    TokensEmitted,
)
from balanceroute.proxy.live.scheduling.barrier_idle import BarrierIdle
from balanceroute.proxy.live.scheduling.pulled_counts import PulledCounts
from balanceroute.proxy.live.scheduling.pumped_counts import PumpedCounts
from balanceroute.proxy.live.scheduling.step_clock import StepClock
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from balanceroute.proxy.core.events import RankId
    from balanceroute.proxy.core.scheduler import Scheduler
    from balanceroute.proxy.live.request.reports import StreamLent, StreamReturned
    from balanceroute.proxy.live.request.session import Session

# Tokens of an answer from which its time tells the time of a step.
_TELLING = 16
# Up to Python 3.11 each look at a member of an enumeration is a call.
_OK = Outcome.OK


class Progress:
    """Follows the requests that ranks have.

    Args:
        scheduler: Its ledger is updated.
        feed: Tells it that one has joined its rank's batch, and performs what follows.
        clock: The loop's time.
        pumped: Tokens of the streams that the pump moves, by slot; None if nobody moves any.

    Attributes:
        started: The requests in their rank's batch.
        steps: The inferred steps.
        barrier: What the inferred steps lost at the barrier.
        transfer_s: The mean time from an admission to the first token.
    """

    def __init__(
        self,
        scheduler: "Scheduler",
        feed: Callable[[Event], None],
        clock: Callable[[], float],
        pumped: "NDArray[np.uint32] | None" = None,
    ) -> None:
        self.started: dict[RequestId, Session] = {}
        self.steps = StepClock()
        self._counts = PulledCounts() if pumped is None else PumpedCounts(pumped)
        self.barrier = BarrierIdle()
        self._scheduler = scheduler
        self._feed = feed
        self._clock = clock
        # Since when those were admitted that have no stream to tell when they join the batch.
        self._unheard: dict[RequestId, tuple[Session, float]] = {}
        self.transfer_s = 0.0

    @property
    def idle(self) -> bool:
        """Whether nothing is kept for any request."""
        return not self.started and not self._unheard

    def admitted(self, session: "Session") -> None:
        """Note that a request is on its way to its rank."""
        if not session.shape.stream:
            self._unheard[session.number] = session, self._clock()

    def began(self, session: "Session") -> None:
        """Note that a stream began: its request is in its rank's batch."""
        self._join(session)
        assert session.record.admitted_ns is not None
        waited_s = self._clock() - session.record.admitted_ns / 1e9
        self.transfer_s += 0.1 * (waited_s - self.transfer_s)

    def left(self, event: RequestRecomputed | DecodeLost | PrefillLost) -> Event:
        """Forget a request that is on no rank any more; return what the scheduler is to hear.

        It may have been taken for started without a stream to tell. Then its KV cache may have left
        the prefiller, as the scheduler was told, or not: so it is prefilled again. What it is thought
        to have emitted is taken back, as no client has it.
        """
        number = event.request
        self._unheard.pop(number, None)
        session = self._leave(number)
        if session is None or isinstance(event, RequestRecomputed):
            return event
        emitted = self._scheduler.emitted(number)
        if emitted:
            self._tell(TokensEmitted(number, -emitted))
        session.prefill_again()
        return RequestRecomputed(number, elsewhere=True)

    def lent(self, report: "StreamLent") -> None:
        """Note that a stream is away."""
        assert isinstance(self._counts, PumpedCounts)
        self._counts.lent(report.request, report.slot)

    def returned(self, report: "StreamReturned") -> None:
        """Note that it is back."""
        assert isinstance(self._counts, PumpedCounts)
        self._counts.returned(report.slot)

    def ended(self, session: "Session") -> None:
        """Forget a request that is over, and learn from a whole answer how long a step is."""
        number, record = session.number, session.record
        self._leave(number)
        self._unheard.pop(number, None)
        if session.shape.stream or record.outcome is not _OK or record.admitted_ns is None:
            return
        rounds = record.output_tokens / record.choices
        if rounds >= _TELLING:  # A short answer's time is mostly not that of its steps.
            self.steps.observe_answer((record.ended_ns - record.admitted_ns) / 1e9 / rounds)

    def follow(self, serving: "Sequence[RankId]") -> None:
        """Bring the mirror up to date; `serving` are the ranks whose loads make the barrier."""
        now_s = self._clock()
        for number, (session, since_s) in list(self._unheard.items()):
            if now_s - since_s >= self.transfer_s:
                self._join(session)
                self._feed(DecodeStarted(number, heard=False))
        advance = self.steps.advance(self._counts, now_s)
        if advance.steps:
            step_s, scheduler = advance.step_s, self._scheduler
            step = StepCompleted(None if step_s is None else round(1e9 * step_s))
            for _ in range(advance.steps):
                self._tell(step)
            loads = scheduler.ranks.loads_at_mean_speed(scheduler.ledger, scheduler.config)
            self.barrier.add(advance.steps, loads[serving], now_s)
        for session, rounds in advance.corrections:
            self._tell(TokensEmitted(session.number, rounds * session.shape.sequences))

    def age(self, number: RequestId) -> int:
        """Return the tokens that each sequence of a started request has emitted."""
        session = self.started[number]
        if session.shape.stream:
            return session.emitted_tokens // session.shape.sequences
        # As far as the step clock tells.
        return self._scheduler.emitted(number) // session.shape.sequences

    def _join(self, session: "Session") -> None:
        """Follow a request that joins its rank's batch."""
        self._unheard.pop(session.number, None)
        self.started[session.number] = session
        self._counts.start(session, self.steps.steps)

    def _leave(self, number: RequestId) -> "Session | None":
        session = self.started.pop(number, None)
        if session is not None:
            self._counts.stop(session)
        return session

    def _tell(self, event: Event) -> None:
        """Tell what nothing follows from."""
        self._scheduler.handle(event, now_ns=round(self._clock() * 1e9))
