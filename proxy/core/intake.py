"""What limits the starts of one scheduler's requests, and settles what they cost: each may be off."""

from balanceroute.proxy.core.admission import Budget
from balanceroute.proxy.core.lifecycle import Request
from balanceroute.proxy.core.queueing import KvMeter
from balanceroute.proxy.core.ranks import Ranks


class Intake:
    """Passes on what the budget and the meter have to know.

    Attributes:
        budget: Limits the requests in flight; None for no limit.
    """

    def __init__(self, budget: Budget | None, meter: KvMeter | None) -> None:
        self.budget = budget
        self._meter = meter

    def advance(self, now_ns: int, *, demand: bool) -> None:
        """Note the time before an event; see `Budget.advance`."""
        if self.budget is not None:
            self.budget.advance(now_ns, demand=demand)

    def room(self, room: int, in_flight: int, ranks: Ranks) -> int:
        """Return how many of `room` requests may start."""
        return room if self.budget is None else min(room, self.budget.room(in_flight, ranks.open))

    def next_ns(self, waiting: int) -> int | None:
        """Return when a tick may let one of the waiting requests start; None for never."""
        return self.budget.next_tick_ns if waiting and self.budget is not None else None

    def step(self, duration_ns: int | None, now_ns: int) -> None:
        """Note a decode step."""
        if self._meter is not None:
            self._meter.step(duration_ns)
        if self.budget is not None and duration_ns is not None:
            self.budget.step(duration_ns, now_ns)

    def started(self, request: Request, kv_tokens: int, now_ns: int) -> None:
        """Note that a request joined its rank's batch."""
        if self._meter is not None:
            self._meter.begin(request.request, kv_tokens)
        # One that was decoded before has had its first token.
        if self.budget is not None and not request.emitted_before:
            self.budget.first_token(now_ns - request.waiting_since_ns, now_ns)
