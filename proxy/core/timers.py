"""Times at which something is due for a request, the earliest first."""

import heapq

from balanceroute.proxy.core.events import RequestId

# Forgotten times that the heap may keep beyond the number of those that hold.
_SLACK = 64


class Timers:
    """At most one time per request; setting or clearing costs O(log requests) at most."""

    def __init__(self) -> None:
        self._times: dict[RequestId, int] = {}
        # (time, request); one that `_times` does not hold any more is skipped when it comes up.
        self._heap: list[tuple[int, RequestId]] = []

    def set(self, request: RequestId, time_ns: int | None) -> None:
        """Let `request` be due at `time_ns` and no other time; None for never."""
        if time_ns is None:
            self.clear(request)
            return
        self._times[request] = time_ns
        heapq.heappush(self._heap, (time_ns, request))
        if len(self._heap) > 2 * len(self._times) + _SLACK:
            self._heap = [(time_ns, request) for request, time_ns in self._times.items()]
            heapq.heapify(self._heap)

    def clear(self, request: RequestId) -> None:
        """Forget the time of `request`, if it has one."""
        self._times.pop(request, None)

    def first_ns(self) -> int | None:
        """Return the earliest time, or None if nothing will be due."""
        heap, times = self._heap, self._times
        while heap and times.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def take_due(self, now_ns: int) -> list[RequestId]:
        """Return who is due, the earliest first, and forget their times."""
        return [request for _, request in self._pop(now_ns)]

    def due(self, now_ns: int) -> list[RequestId]:
        """Return who is due, the earliest first; they stay due."""
        items = self._pop(now_ns)
        for time_ns, request in items:
            self.set(request, time_ns)
        return [request for _, request in items]

    def _pop(self, now_ns: int) -> list[tuple[int, RequestId]]:
        items: list[tuple[int, RequestId]] = []
        while self._heap and self._heap[0][0] <= now_ns:
            time_ns, request = heapq.heappop(self._heap)
            if self._times.get(request) == time_ns:
                del self._times[request]
                items.append((time_ns, request))
        return items
