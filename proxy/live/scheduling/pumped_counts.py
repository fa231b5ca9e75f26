"""How far streams are of which the native pump moves some: those it tells in an array, the others are asked."""

from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.live.scheduling.pulled_counts import PulledCounts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.live.request.session import Session


class PumpedCounts(PulledCounts["Session"]):
    """Asks the started requests that are here, and reads the counts of those that are away.

    Args:
        tokens: int[slots], of each stream that is away; the pump writes it.
    """

    def __init__(self, tokens: "NDArray[np.uint32]") -> None:
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

    def start(self, request: "Session", place: int) -> None:
        """Note that a request has started; see `PulledCounts`."""
        super().start(request, place)
        self._started[request.number] = request

    def stop(self, request: "Session") -> None:
        """Note that a request is not started any more; its stream, of which nothing comes, is here."""
        super().stop(request)
        self._started.pop(request.number, None)

    def lent(self, number: "RequestId", slot: int) -> None:
        """Read how far a request is in a slot, if it has started; others have no rank."""
        request = self._started.get(number)
        if request is not None:
            self._streams.pop(id(request), None)
            self._away[slot] = request
            self._is_away[slot] = self._changed = True
            self._sequences[slot] = request.shape.sequences
            self._offset[slot] = request.offset

    def returned(self, slot: int) -> None:
        """Ask the request of a slot again."""
        request = self._away.pop(slot, None)
        if request is not None:
            self._streams[id(request)] = request
            self._is_away[slot], self._changed = False, True
            request.offset = self._offset.item(slot)

    def passed(self, steps: int) -> int | None:
        """Return how far ahead of the clock the median is; see `PulledCounts`."""
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

    def corrected(self, steps: int, tolerance: int) -> "list[tuple[Session, int]]":
        """Put streams right that are off; see `PulledCounts`."""
        corrections = super().corrected(steps, tolerance)
        off = self._places - steps
        (which,) = (np.abs(off) > tolerance).nonzero()
        if len(which):
            slots, off = self._slots[which], off[which]
            self._offset[slots] -= off
            away = zip(slots.tolist(), off.tolist(), strict=True)
            corrections += [(self._away[slot], by) for slot, by in away]
        return corrections
