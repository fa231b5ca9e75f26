"""Times at which something is due for a request, the earliest first."""

from heapq import heapify, heappop, heappush

from balanceroute.proxy.core.events import RequestId

# Cleared times that the heap may hold beyond the number of valid ones before it is rebuilt.
_SLACK = 64


class Timers:
    """At most one time per request; setting or clearing costs O(log requests) at most."""

    def __init__(self) -> None:
        self._times: dict[RequestId, int] = {}
        # (time, request): ties go to the lower request id. A cleared or changed time stays in the
        # heap and is skipped when it reaches the top: a heap has no cheap removal.
        self._heap: list[tuple[int, RequestId]] = []

    def set(self, request: RequestId, time_ns: int | None) -> None:
        """Set the one time at which `request` is due; None for never."""
        times = self._times
        if time_ns is None:
            times.pop(request, None)
            return
        times[request] = time_ns
        heap = self._heap
        heappush(heap, (time_ns, request))
        # Amortised O(1); without it cleared times would accumulate.
        if len(heap) > 2 * len(times) + _SLACK:
            self._heap = [(time_ns, request) for request, time_ns in times.items()]
            heapify(self._heap)

    def clear(self, request: RequestId) -> None:
        """Remove the time of `request`, if it has one."""
        self._times.pop(request, None)

    def first_ns(self) -> int | None:
        """Return the earliest time, or None if there is none."""
        heap, times = self._heap, self._times
        while heap and times.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take_due(self, now_ns: int) -> list[RequestId]:
        """Return the requests that are due, the earliest first, and remove their times."""
        if not self._heap or self._heap[0][0] > now_ns:  # Nearly always.
            return []
        return [request for _, request in self._pop(now_ns)]

    def due(self, now_ns: int) -> list[RequestId]:
        """Return the requests that are due, the earliest first; they stay due."""
        if not self._heap or self._heap[0][0] > now_ns:
            return []
        items = self._pop(now_ns)
        for time_ns, request in items:
            self.set(request, time_ns)
        return [request for _, request in items]

    def _pop(self, now_ns: int) -> list[tuple[int, RequestId]]:
        items: list[tuple[int, RequestId]] = []
        while self._heap and self._heap[0][0] <= now_ns:
            time_ns, request = heappop(self._heap)
            if self._times.get(request) == time_ns:
                del self._times[request]
                items.append((time_ns, request))
        return items
