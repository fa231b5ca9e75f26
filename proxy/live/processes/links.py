"""Where each request of a relay stands with the scheduler process."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from balanceroute.proxy.core import events
from balanceroute.proxy.core.standing import Standing
from balanceroute.proxy.live.processes import from_relay, to_relay

if TYPE_CHECKING:
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


class Link(Struct, eq=False):
    """One request.

    Attributes:
        arrival: As it came.
        message: Its arrival, as it was told.
        session: Serves it.
        accepted: Whether a scheduler process has accepted it.
        accounted: Whether one has, and accounts for it. If not, it goes on all the same.
        engine_id: What the engines know it by, once it is accepted.
        sent: Core events sent on this connection.
        taken: Bindings acted on likewise.
        over: Whether it has ended for the scheduler.
        how: How, as its `SessionEnded` is to tell; empty if the scheduler process said so.
        answered: Likewise.
        row: Names it in `Progress`.
    """

    arrival: "Arrival"
    message: from_relay.Arrival
    session: "Session"
    accepted: bool = False
    accounted: bool = False
    engine_id: str = ""
    sent: int = 0
    taken: int = 0
    over: bool = False
    how: _Ending | Literal[""] = ""
    answered: bool = False
    row: int = -1
    # Where it stands is asked for only if the scheduler process is gone: it is followed then, from its
    # acceptance and from what is noted here.
    _begun: tuple[events.Ticket, int] | None = None
    _standing: Standing | None = None
    _noted: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def loose(self) -> bool:
        """Whether an engine works on it and no scheduler process accounts for that."""
        return self.accepted and not self.accounted

    @property
    def standing(self) -> Standing:
        """Where it stands; it is accounted for."""
        assert self._begun is not None
        if self._standing is None:
            self._standing = Standing(events.RequestId(self.message.number), *self._begun)
        for note, arguments in self._noted:
            note(self._standing, *arguments)
        self._noted.clear()
        return self._standing

    def accept(self, engine_id: str, now_ns: int) -> None:
        """Note that a scheduler process has accepted it, as its session knows."""
        self.accepted = self.accounted = True
        self.engine_id = engine_id
        self._begun = self.session.ticket, now_ns

    def begin_anew(self) -> None:
        """Count anew, for another scheduler process."""
        self.sent = self.taken = 0
        self.row = -1

    def arrive_anew(self) -> None:
        """Count anew, for another scheduler process that is to accept it."""
        self.begin_anew()
        self.accepted = self.accounted = False
        self._begun = self._standing = None
        self._noted.clear()

    def ended_by(self, event: events.Event, *, answered: bool) -> bool:
        """Note how it ends; return whether it has ended, now or before."""
        how = _ENDINGS.get(type(event))
        if how is not None and not self.over:
            self.over, self.how, self.answered = True, how, answered
        return self.over

    def ended(self, report: "SessionEnded") -> from_relay.SessionEnded:
        """Return the message of its end."""
        return from_relay.SessionEnded(report.request, report.record, self.how, self.answered)

    def fed(self, event: events.Event, now_ns: int) -> None:
        """Note a core event."""
        if self.accounted:
            session = self.session
            # Of several sequences it is their mean, rounded up, as in the core.
            emitted_before = -(-session.emitted.tokens // session.shape.sequences)
            self._noted.append((Standing.fed, (event, now_ns, emitted_before)))

    def starts_prefill(self, order: to_relay.StartPrefill, now_ns: int) -> bool:
        """Note an order; return whether it is to be obeyed, which a void binding is not."""
        if self.over or order.heard < self.sent:
            return False
        self.taken += 1
        self._noted.append((Standing.start_prefill, (order.prefiller, now_ns)))
        return True

    def starts_decode(self, order: to_relay.StartDecode) -> bool:
        """Note an order likewise."""
        if self.over or order.heard < self.sent:
            return False
        self.taken += 1
        self._noted.append((Standing.start_decode, (order.rank,)))
        return True

    def takes(self, order: Any, now_ns: int) -> bool:
        """Note an order that is no binding; return whether it is to be obeyed."""
        if self.over:
            return False
        match order:
            case to_relay.LeaseEnded():
                self._noted.append((Standing.lease_ended, (now_ns,)))
            case to_relay.PrefillAgain():
                self._noted.append((Standing.prefill_again, (now_ns,)))
            case to_relay.Expire() | to_relay.Crash():
                self.over = True
            case _:
                pass
        return True
