"""The requests that wait for a prefiller, and which of them start.

Those that a prefiller will answer whole wait in a line of their own: how many of them run at a time is
limited, and that limit holds up nobody else. So do those that the same few prefillers alone can serve:
whoever has to wait holds up later ones only on the prefillers that it waits for.
"""

from collections.abc import Collection, Iterator, Mapping

from balanceroute.proxy.core.events import Eligible, PrefillerId, RequestId
from balanceroute.proxy.core.lifecycle import Request
from balanceroute.proxy.core.prefill import Prefillers
from balanceroute.proxy.core.queueing import MakeQueueOrder, QueueOrder
from balanceroute.proxy.core.timers import Timers


class PrefillQueue:
    """What waits before prefill.

    Args:
        requests: The scheduler's.
        prefillers: Charged with what starts.
        make_order: Makes each line.
    """

    def __init__(
        self,
        requests: Mapping[RequestId, Request],
        prefillers: Prefillers,
        make_order: MakeQueueOrder,
    ) -> None:
        self._requests = requests
        self._prefillers = prefillers
        self._make_order = make_order
        self._queue, self._direct = make_order(), make_order()
        # By the only prefillers that can serve them: the same two lines. None is empty.
        self._restricted: dict[frozenset[PrefillerId], tuple[QueueOrder, QueueOrder]] = {}
        self._expiries = Timers()
        self._waiting = 0

    def __len__(self) -> int:
        """Return how many wait."""
        return self._waiting

    def __contains__(self, request: Request) -> bool:
        """Return whether `request` waits here, in the line that it belongs to."""
        if (
            request.ticket.eligible is not None
            and request.ticket.eligible.prefillers not in self._restricted
        ):
            return False
        return request.request in self._queue_of(request)

    def add(self, request: Request, expires_ns: int | None) -> None:
        """Take a request in, or in again."""
        self._queue_of(request).add(request.request, request.ticket)
        self._waiting += 1
        self._expiries.set(request.request, expires_ns)

    def remove(self, request: Request) -> None:
        """Take a request out: it starts, or has ended."""
        self._take_out(request.request, self._queue_of(request))
        self._drop_empty(request)

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
            room: How many prefills may start; of what is answered whole there is another limit.
        """
        if self._restricted:
            yield from self._start_restricted(room)
            return
        while first := self._direct.first(1):
            request = self._requests[first[0]]
            prefiller = self._begin(request, self._direct)
            if prefiller is not None:
                yield request, prefiller
            elif self._prefillers.waits_for_memory(request.ticket.slots):
                return  # Smaller prompts would pass it over for ever.
            else:
                break
        while room > 0 and (first := self._queue.first(1)):
            request = self._requests[first[0]]
            prefiller = self._begin(request, self._queue)
            if prefiller is None:
                return
            room -= 1
            yield request, prefiller

    def _start_restricted(self, room: int) -> Iterator[tuple[Request, PrefillerId]]:
        """Do as `start` does where some prefillers alone can serve some requests."""
        everyone = frozenset(map(PrefillerId, range(len(self._prefillers.is_open))))
        starved: set[PrefillerId] = set()  # Smaller prompts would pass somebody over for ever.
        for direct in (True, False):
            withheld = set(starved)
            stuck: list[frozenset[PrefillerId] | None] = []
            while (direct or room > 0) and (head := self._head(stuck, direct=direct)) is not None:
                prefiller = self._begin(head, self._queue_of(head), withheld)
                if prefiller is not None:
                    self._drop_empty(head)
                    room -= not direct
                    yield head, prefiller
                    continue
                among = None if head.ticket.eligible is None else head.ticket.eligible.prefillers
                stuck.append(among)
                awaited = everyone if among is None else among
                withheld |= awaited
                if direct and self._prefillers.waits_for_memory(head.ticket.slots, among):
                    starved |= awaited

    def _head(
        self, stuck: Collection[frozenset[PrefillerId] | None], *, direct: bool
    ) -> Request | None:
        """Return the earliest arrival of the first ones of all lines but some."""
        queues = [pair[direct] for among, pair in self._restricted.items() if among not in stuck]
        if None not in stuck:
            queues.append((self._queue, self._direct)[direct])
        number = min((first for queue in queues for first in queue.first(1)), default=None)
        return None if number is None else self._requests[number]

    def _drop_empty(self, request: Request) -> None:
        if request.ticket.eligible is not None and not any(
            map(len, self._queues_of(request.ticket.eligible))
        ):
            del self._restricted[request.ticket.eligible.prefillers]

    def _begin(
        self, request: Request, queue: QueueOrder, withheld: Collection[PrefillerId] = ()
    ) -> PrefillerId | None:
        tokens, sequences = request.held_tokens, 0 if request.decode else request.ticket.slots
        prefiller = self._prefillers.choose(
            request.ticket,
            tokens,
            request.lost_on_prefillers,
            sequences=sequences,
            among=None if request.ticket.eligible is None else request.ticket.eligible.prefillers,
            withheld=withheld,
        )
        if prefiller is not None:
            self._take_out(request.request, queue)
            if request.decode:
                self._prefillers.begin_prefill(prefiller, tokens)
            else:
                self._prefillers.begin_direct(prefiller, tokens, sequences)
        return prefiller

    def _take_out(self, number: RequestId, queue: QueueOrder) -> None:
        queue.remove(number)
        self._waiting -= 1
        self._expiries.clear(number)

    def _queue_of(self, request: Request) -> QueueOrder:
        if request.ticket.eligible is not None:
            return self._queues_of(request.ticket.eligible)[not request.decode]
        return self._queue if request.decode else self._direct

    def _queues_of(self, eligible: Eligible) -> tuple[QueueOrder, QueueOrder]:
        queues = self._restricted.get(eligible.prefillers)
        if queues is None:
            queues = self._make_order(), self._make_order()
            self._restricted[eligible.prefillers] = queues
        return queues
