"""Where each request of a relay stands with the scheduler process."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from balanceroute.proxy.core import events
from balanceroute.proxy.live.processes import from_relay, to_relay

if TYPE_CHECKING:
    from balanceroute.proxy.core.standing import Standing
    from balanceroute.proxy.live.request.reports import SessionEnded
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.scheduling.arrival import Arrival


_Ending = Literal["finished", "failed", "cancelled"]

# The events after which a request is no more for the scheduler, told by its `SessionEnded`.
_ENDINGS: dict[type[events.Event], _Ending] = {
    events.RequestFinished: "finished",
    events.RequestFailed: "failed",
    events.RequestCancelled: "cancelled",
}
_BINDINGS = (to_relay.StartPrefill, to_relay.StartDecode)


@dataclass(slots=True)
class Link:
    """One request.

    Attributes:
        arrival: As it came.
        message: Its arrival, as it was told.
        accepted: Whether a scheduler process has accepted it.
        engine_id: What the engines know it by, from then on.
        standing: Follows it from then on; None too if it goes on unaccounted.
        sent: Core events sent on this connection.
        taken: Bindings acted on likewise.
        over: Whether it has ended for the scheduler.
        how: How, as its `SessionEnded` is to tell; empty if the scheduler process said so.
        answered: Likewise.
        row: Names it in `Progress`.
    """

    arrival: "Arrival"
    message: from_relay.Arrival
    accepted: bool = False
    engine_id: str = ""
    standing: "Standing | None" = None
    sent: int = 0
    taken: int = 0
    over: bool = False
    how: _Ending | Literal[""] = ""
    answered: bool = False
    row: int = -1

    @property
    def loose(self) -> bool:
        """Whether an engine works on it and no scheduler process accounts for that."""
        return self.accepted and self.standing is None

    def begin_anew(self) -> None:
        """Count anew, for another scheduler process."""
        self.sent = self.taken = 0
        self.row = -1

    def ended_by(self, event: events.Event, *, answered: bool) -> bool:
        """Note how it ends; return whether it has ended, now or before."""
        how = _ENDINGS.get(type(event))
        if how is not None and not self.over:
            self.over, self.how, self.answered = True, how, answered
        return self.over

    def ended(self, report: "SessionEnded") -> from_relay.SessionEnded:
        """Return the message of its end."""
        return from_relay.SessionEnded(report.request, report.record, self.how, self.answered)

    def fed(self, event: events.Event, session: "Session", now_ns: int) -> None:
        """Note a core event."""
        if self.standing is not None:
            # Of several sequences it is their mean, rounded up, as in the core.
            emitted_before = -(-session.emitted.tokens // session.shape.sequences)
            self.standing.fed(event, now_ns, emitted_before=emitted_before)

    def takes(self, order: Any, now_ns: int) -> bool:
        """Note an order; return whether it is to be obeyed, which a void binding is not."""
        if isinstance(order, _BINDINGS):
            if order.heard < self.sent:
                return False
            self.taken += 1
        standing = self.standing
        assert standing is not None, f"an order for request {order.number}, which is not accepted"
        match order:
            case to_relay.StartPrefill():
                standing.start_prefill(order.prefiller, now_ns)
            case to_relay.StartDecode():
                standing.start_decode(order.rank)
            case to_relay.LeaseEnded():
                standing.lease_ended()
            case to_relay.PrefillAgain():
                standing.prefill_again(now_ns)
            case to_relay.Expire() | to_relay.Crash():
                self.over = True
            case _:
                pass
        return True
