"""The requests that wait for a prefiller, and which of them start.

Direct requests, which a prefiller answers whole, wait in a queue of their own: they have a limit of
their own, which must not hold up the others. Requests that need no prefiller are here only where
requests in flight are limited, or first tokens are expected. Requests that only some prefillers can
serve have two such queues for each set of prefillers: one that has to wait holds up later requests
only on the prefillers that it waits for.
"""

from collections.abc import Collection, Iterator, Mapping

from balanceroute.proxy.core.events import Eligible, PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.leases import earliest
from balanceroute.proxy.core.lifecycle import Request
from balanceroute.proxy.core.pool import Timers
from balanceroute.proxy.core.prefill import Prefillers, PrefillRequest
from balanceroute.proxy.core.queueing import MakeStartOrder, StartOrder


class PrefillQueue:
    """The requests before prefill.

    Args:
        requests: All requests of the scheduler, by id.
        prefillers: Their budgets are charged with each request that starts.
        make_order: Makes the order of each queue.

    Attributes:
        waiting: How many requests wait.
    """

    def __init__(
        self,
        requests: Mapping[RequestId, Request],
        prefillers: Prefillers,
        make_order: MakeStartOrder,
    ) -> None:
        self._requests = requests
        self._prefillers = prefillers
        self._make_order = make_order
        self._queue, self._direct = make_order(), make_order()
        # The same two queues for each set of prefillers. Empty pairs are dropped, so that sets that
        # no longer occur cost nothing.
        self._restricted: dict[frozenset[PrefillerId], tuple[StartOrder, StartOrder]] = {}
        self._expiries = Timers()
        self._dues = Timers()
        self.waiting = 0

    def __contains__(self, request: Request) -> bool:
        """Return whether `request` waits here, in the queue that it belongs to."""
        if (
            # Checked first, because `_queue_of` creates the queues of a set that has none.
            request.ticket.eligible is not None
            and request.ticket.eligible.prefillers not in self._restricted
        ):
            return False
        return request.request in self._queue_of(request)

    def add(self, request: Request, expires_ns: int | None) -> None:
        """Add a request, also one that was here before."""
        self._queue_of(request).add(request.request, request.ticket)
        self.waiting += 1
        self._expiries.set(request.request, expires_ns)
        if request.due_ns is not None:
            self._dues.set(request.request, request.due_ns)

    def remove(self, request: Request) -> None:
        """Remove a request that starts or has ended."""
        self._queue_of(request).remove(request.request)
        self._left(request.request)
        self._drop_empty(request)

    def expire_at(self, request: Request, expires_ns: int | None) -> None:
        """Change when a request expires; None for never."""
        self._expiries.set(request.request, expires_ns)

    def next_expiry_ns(self) -> int | None:
        """Return when the first request expires; None for never."""
        return earliest(self._expiries.first_ns(), self._dues.first_ns())

    def ahead(self, ticket: Ticket) -> int:
        """Return about how many requests would start before one that came now."""
        queues = [(self._queue, self._direct)]
        if ticket.eligible is not None and ticket.eligible.prefillers in self._restricted:
            queues.append(self._restricted[ticket.eligible.prefillers])
        return sum(pair[not ticket.decode].ahead(ticket) for pair in queues)

    def take_expired(self, now_ns: int) -> list[RequestId]:
        """Return the requests that have expired, those that are due first; the caller removes them."""
        due, expired = self.take_due(now_ns), self._expiries.take_due(now_ns)
        return due + [one for one in expired if one not in due] if due else expired

    def take_due(self, now_ns: int) -> list[RequestId]:
        """Return the requests whose first token is due, once. The caller removes them."""
        return self._dues.take_due(now_ns)

    def start(self, room: int, now_ns: int) -> Iterator[tuple[Request, PrefillerId | None]]:
        """Yield the requests that the budgets allow to start, removed and charged, in order.

        With each its prefiller; None if it needs none.

        Args:
            room: How many requests may start. Direct requests have a limit of their own.
            now_ns: The time.
        """
        if self._restricted:
            yield from self._start_restricted(room, now_ns)
            return
        # Direct requests do not depend on `room`: they never enter the pool.
        while (first := self._direct.head()) is not None:
            request = self._requests[first]
            prefiller = self._begin(request, self._direct, now_ns)
            if prefiller is not None:
                yield request, prefiller
            elif self._prefillers.waits_for_memory(request.ticket.slots):
                # It lacks only KV tokens. Smaller prompts that started now would take them, and
                # overtake it for ever.
                return
            else:
                break
        while room > 0 and (first := self._queue.head()) is not None:
            request = self._requests[first]
            prefiller = self._begin(request, self._queue, now_ns)
            # The rest waits with the first one: smaller prompts would overtake it for ever.
            if prefiller is None and request.ticket.prefill:
                return
            room -= 1
            yield request, prefiller

    def _start_restricted(
        self, room: int, now_ns: int
    ) -> Iterator[tuple[Request, PrefillerId | None]]:
        """Do the same as `start` if only some prefillers can serve some of the requests."""
        # The set of requests without restriction, which hold up later ones on every prefiller.
        everyone = frozenset(map(PrefillerId, range(len(self._prefillers.is_open))))
        # Prefillers that a direct request lacks KV tokens on: prefills must leave them alone.
        starved: set[PrefillerId] = set()
        # In the order of `start`: direct requests, then prefills.
        for direct in (True, False):
            # Prefillers that an earlier request waits for, and the sets whose queues wait.
            withheld = set(starved)
            stuck: list[frozenset[PrefillerId] | None] = []
            while (direct or room > 0) and (head := self._head(stuck, direct=direct)) is not None:
                prefiller = self._begin(head, self._queue_of(head), now_ns, withheld)
                if prefiller is not None or not head.ticket.prefill:
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
        """Return the request that goes first among the first of all queues that are not stuck."""
        queues = [pair[direct] for among, pair in self._restricted.items() if among not in stuck]
        if None not in stuck:
            queues.append((self._queue, self._direct)[direct])
        heads = [
            (queue.place(head), head) for queue in queues if (head := queue.head()) is not None
        ]
        return self._requests[min(heads)[1]] if heads else None

    def _drop_empty(self, request: Request) -> None:
        if request.ticket.eligible is not None and not any(
            map(len, self._queues_of(request.ticket.eligible))
        ):
            del self._restricted[request.ticket.eligible.prefillers]

    def _begin(
        self,
        request: Request,
        queue: StartOrder,
        now_ns: int,
        withheld: Collection[PrefillerId] = (),
    ) -> PrefillerId | None:
        """Take the first request of a queue out if it can start; return its prefiller, if any."""
        if not request.ticket.prefill:
            queue.serve(request.request)
            self._left(request.request)
            return None
        # No sequences mark a prefill.
        tokens, sequences = request.held_tokens(), 0 if request.decode else request.ticket.slots
        prefiller = self._prefillers.choose(
            PrefillRequest(request.request, request.ticket, tokens, now_ns),
            request.lost_on_prefillers,
            sequences=sequences,
            among=None if request.ticket.eligible is None else request.ticket.eligible.prefillers,
            withheld=withheld,
        )
        if prefiller is not None:
            queue.serve(request.request)
            self._left(request.request)
            if request.decode:
                self._prefillers.begin_prefill(prefiller, tokens)
            else:
                self._prefillers.begin_direct(prefiller, tokens, sequences)
        return prefiller

    def _left(self, number: RequestId) -> None:
        self.waiting -= 1
        self._expiries.clear(number)
        self._dues.clear(number)

    def _queue_of(self, request: Request) -> StartOrder:
        if request.ticket.eligible is not None:
            return self._queues_of(request.ticket.eligible)[not request.decode]
        return self._queue if request.decode else self._direct

    def _queues_of(self, eligible: Eligible) -> tuple[StartOrder, StartOrder]:
        queues = self._restricted.get(eligible.prefillers)
        if queues is None:
            queues = self._make_order(), self._make_order()
            self._restricted[eligible.prefillers] = queues
        return queues
