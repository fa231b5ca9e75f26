"""How far streams are that are served in this process: each is asked."""

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from balanceroute.proxy.core.events import RequestId


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
    """Asks every started request how far it is; see `Counts`.

    Args:
        started: All of them, now and later.
    """

    def __init__(self, started: Mapping[RequestId, _Request]) -> None:
        self.silent = False
        self._started = started
        self._leads: list[tuple[int, _Request]] = []

    def start(self, request: _Request, place: int) -> None:
        """Note that a request has started; see `Counts`."""
        request.offset = place

    def stop(self, request: _Request) -> None:
        """Do nothing: the request is not among the started ones any more."""

    def passed(self, steps: int) -> int | None:
        """Return how far ahead of the clock the median is; see `Counts`."""
        leads: list[tuple[int, _Request]] = []
        self.silent = False
        for request in self._started.values():
            rounds = request.rounds
            if rounds is None:
                self.silent = True
            else:
                leads.append((rounds + request.offset, request))
        self._leads = leads
        places = sorted(lead for lead, _ in leads)
        return max(0, places[len(places) // 2] - steps) if places else None

    def corrected(self, steps: int, tolerance: int) -> list[tuple[_Request, int]]:
        """Put streams right that are off; see `Counts`."""
        corrections: list[tuple[_Request, int]] = []
        for lead, request in self._leads:
            off = lead - steps
            if abs(off) > tolerance:
                request.offset -= off
                corrections.append((request, off))
        return corrections
