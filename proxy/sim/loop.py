"""Virtual time: a heap of callbacks, ordered by time and then by when they were scheduled."""

import heapq
from collections.abc import Callable


class EventLoop:
    """Runs callbacks in order of virtual time.

    Attributes:
        now_ns: The present time, integer nanoseconds from the start.
        stopped: Set to end the run after this instant.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._order = 0
        self.stopped = False
        self._heap: list[tuple[int, int, Callable[[], None]]] = []

    def call_at(self, time_ns: int, callback: Callable[[], None]) -> None:
        """Schedule `callback`; a time in the past is a programming error."""
        assert time_ns >= self.now_ns, f"{time_ns} ns is before {self.now_ns} ns"
        heapq.heappush(self._heap, (time_ns, self._order, callback))
        self._order += 1

    def due(self) -> bool:
        """Return whether more callbacks are scheduled for this instant."""
        return bool(self._heap) and self._heap[0][0] == self.now_ns

    def run(self, settle: Callable[[], None]) -> None:
        """Run until nothing is scheduled, or it is stopped.

        `settle` is called when all callbacks of an instant have run, and again if more were scheduled
        for the same instant since.
        """
        while self._heap and not self.stopped:
            self.now_ns = self._heap[0][0]
            while self._heap and self._heap[0][0] == self.now_ns:
                heapq.heappop(self._heap)[2]()
            settle()
