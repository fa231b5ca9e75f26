"""The way in: asks the admission rule about each arrival, and tells it how those let in ended."""

from collections.abc import Callable
from dataclasses import dataclass

from balanceroute.proxy.core.admission import Admission, Ending, Load, Refusal
from balanceroute.proxy.core.events import RequestId, Ticket


@dataclass(slots=True)
class _Guest:
    ticket: Ticket
    arrived_ns: int
    began: bool = False
    first_token_ns: int | None = None


class Entrance:
    """What stands between the clients of a simulation and its scheduler.

    Args:
        make_admission: Makes the rule; None lets in all.
    """

    def __init__(self, make_admission: Callable[[], Admission] | None) -> None:
        self._admission = None if make_admission is None else make_admission()
        self._guests: dict[RequestId, _Guest] = {}

    def offer(self, request: RequestId, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        """Return why a request that arrives now is rejected, or None."""
        if self._admission is None:
            return None
        refusal = self._admission.offer(ticket, load, now_ns)
        if refusal is None:
            self._guests[request] = _Guest(ticket, now_ns)
        return refusal

    def began(self, request: RequestId, now_ns: int) -> None:
        """Note that a prefill of a request starts."""
        guest = self._guests.get(request)
        if guest is not None and self._admission is not None and not guest.began:
            guest.began = True
            self._admission.began(guest.ticket, now_ns)

    def first_token(self, request: RequestId, now_ns: int) -> None:
        """Note a first token; after a recompute the request's own first one stays."""
        guest = self._guests.get(request)
        if guest is not None and guest.first_token_ns is None:
            guest.first_token_ns = now_ns - guest.arrived_ns

    def finished(self, request: RequestId, output_tokens: int, now_ns: int) -> None:
        """Note that a request that was let in was answered in full."""
        self._end(request, output_tokens, now_ns, served=True)

    def expired(self, request: RequestId, now_ns: int) -> None:
        """Note that a request that was let in was not decoded in time."""
        self._end(request, 0, now_ns, served=False)

    def _end(self, request: RequestId, output_tokens: int, now_ns: int, *, served: bool) -> None:
        guest = self._guests.pop(request, None)
        if guest is not None and self._admission is not None:
            prompt_tokens = guest.ticket.prompt_tokens if guest.began else 0
            ending = Ending(
                served, guest.first_token_ns, output_tokens, prompt_tokens, began=guest.began
            )
            self._admission.ended(guest.ticket, ending, now_ns)
