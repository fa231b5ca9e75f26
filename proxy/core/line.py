"""The requests that wait for a prefiller, and which of them start.

Those that a prefiller will answer whole wait in a line of their own: how many of them run at a time is
limited, and that limit holds up nobody else.
"""

from collections.abc import Iterator, Mapping

from balanceroute.proxy.core.events import PrefillerId, RequestId
from balanceroute.proxy.core.lifecycle import Request
from balanceroute.proxy.core.prefill import Prefillers
from balanceroute.proxy.core.queue_order import FirstCome, QueueOrder
from balanceroute.proxy.core.timers import Timers


class Line:
    """What waits before prefill.

    Args:
        requests: The scheduler's.
        prefillers: Charged with what starts.
        order: Of the requests that will be decoded; None for `FirstCome`.
    """

    def __init__(
        self,
        requests: Mapping[RequestId, Request],
        prefillers: Prefillers,
        order: QueueOrder | None,
    ) -> None:
        self._requests = requests
        self._prefillers = prefillers
        self._queue: QueueOrder = FirstCome() if order is None else order
        self._direct: QueueOrder = FirstCome()
        self._expiries = Timers()
        self._waiting = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return self._waiting

    def __contains__(self, request: Request) -> bool:
        """Return whether `request` waits here, in the line that it belongs to."""
        return request.request in self._queue_of(request)

    def add(self, request: Request, expires_ns: int | None, *, returned: bool) -> None:
        """Take a request in; `returned` says that it has been probed before and came back."""
        self._queue_of(request).add(request.request, request.prompt_tokens, returned=returned)
        self._waiting += 1
        self._expiries.set(request.request, expires_ns)

    def remove(self, request: Request) -> None:
        """Take a request out: it starts, or has ended."""
        self._take_out(request.request, self._queue_of(request))

    def expire_at(self, request: Request, expires_ns: int | None) -> None:
        """Change when a request is given up; None for never."""
        self._expiries.set(request.request, expires_ns)

    def next_expiry_ns(self) -> int | None:
        """Return when the first one is given up; None for never."""
        return self._expiries.first_ns()

    def take_expired(self, now_ns: int) -> list[RequestId]:
        """Return who has waited too long; each is told once."""
        return self._expiries.take_due(now_ns)

    def start(self, room: int) -> Iterator[tuple[Request, PrefillerId]]:
        """Take out and charge the requests that budgets let start, in order, with their prefillers.

        Args:
            room: How many probes may start; of what is answered whole there is another limit.
        """
        while (number := self._direct.first()) is not None:
            request = self._requests[number]
            prefiller = self._begin(request, self._direct)
            if prefiller is not None:
                yield request, prefiller
            elif self._prefillers.waits_for_memory(request.slots):
                return  # Smaller prompts would pass it over for ever.
            else:
                break
        while room > 0 and (number := self._queue.first()) is not None:
            request = self._requests[number]
            prefiller = self._begin(request, self._queue)
            if prefiller is None:
                return
            room -= 1
            yield request, prefiller

    def _begin(self, request: Request, queue: QueueOrder) -> PrefillerId | None:
        tokens, sequences = request.held_tokens, 0 if request.decode else request.slots
        prefiller = self._prefillers.choose(
            request.request, tokens, request.lost_on_prefillers, sequences=sequences
        )
        if prefiller is not None:
            self._take_out(request.request, queue)
            if request.decode:
                self._prefillers.begin_probe(prefiller, tokens)
            else:
                self._prefillers.begin_direct(prefiller, tokens, sequences)
        return prefiller

    def _take_out(self, number: RequestId, queue: QueueOrder) -> None:
        queue.remove(number)
        self._waiting -= 1
        self._expiries.clear(number)

    def _queue_of(self, request: Request) -> QueueOrder:
        return self._queue if request.decode else self._direct
