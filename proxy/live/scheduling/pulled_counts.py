"""How far streams are: each is asked. The **lead** of a stream is its place on the step clock."""

from typing import Generic, Protocol, TypeVar


class Started(Protocol):
    """One started request.

    Attributes:
        offset: What to add to its rounds to compare them with the clock; not its own to set.
    """

    offset: int

    @property
    def rounds(self) -> int | None:
        """Tokens that each sequence has emitted on this binding; None if it is not streamed."""
        ...


_Request = TypeVar("_Request", bound=Started)


class PulledCounts(Generic[_Request]):
    """Asks every started stream how far it is.

    Attributes:
        silent: Whether there is a request without a stream to tell how far it is.
    """

    def __init__(self) -> None:
        self.silent = False
        self._streams: dict[int, _Request] = {}  # In the order of their starts.
        self._others: dict[int, _Request] = {}
        self._leads: list[tuple[int, _Request]] = []

    def start(self, request: _Request, place: int) -> None:
        """Note that a request has started; a stream without a token has the lead `place`."""
        request.offset = place
        if request.rounds is None:
            self._others[id(request)] = request
        else:
            self._streams[id(request)] = request

    def stop(self, request: _Request) -> None:
        """Note that a request which had started is over, or on no rank any more."""
        for requests in (self._streams, self._others):
            requests.pop(id(request), None)

    def passed(self, steps: int) -> int | None:
        """Return by how much the median lead, of two the larger, exceeds `steps`; 0 if it is less.

        None if there is no stream.
        """
        places = sorted(self._ask())
        return max(0, places[len(places) // 2] - steps) if places else None

    def _ask(self) -> list[int]:
        """Return the leads of all streams."""
        leads: list[tuple[int, _Request]] = []
        self.silent = bool(self._others)
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
