"""The queue orders by name, and the costs that tenants can share.

| name | rule |
| --- | --- |
| `fcfs` | first come, first served |
| `edf` | the earliest deadline first; those without one last |
| `abs` | the lowest level first |
| `ml` | levels below 0 first, by deadline; then the rest, first come, first served |
| `srpt` | the least work first: KV tokens times steps in decode, as expected |

Before prefill each of them can be the order within a tenant's requests, see `fair_queueing.py`.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable
from functools import partial
from math import inf

from msgspec import structs

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.waiting import (
    Fcfs,
    MakeQueueOrder,
    MakeStartOrder,
    QueueOrder,
    StartOrder,
)

# Orders by the fields of a ticket: `edf`, `abs`, `ml` and `srpt`. Ties go first come, first served.
#
# None of them bounds how long a request waits behind more urgent ones; a time to live does.
# Source: earliest deadline first, absolute priority and multilevel are the stream schedulers of
# UCB/EECS-2024-64. Its multilevel order serves the lowest level round robin, packet by packet; a
# request is served whole, so here that level is first come, first served.

# In the running mean, which so covers about 128 requests.
_OUTPUT_WEIGHT = 1 / 128

Key = tuple[float, float]
Place = tuple[float, float, RequestId]


class ByTicket:
    """Requests sorted by two numbers that follow from their tickets, the lowest first.

    Adding and removal cost O(log n) plus one memory move.
    """

    def __init__(self, key: Callable[[Ticket], Key]) -> None:
        self._key = key
        self._order: list[Place] = []
        self._places: dict[RequestId, Place] = {}

    def add(self, request: RequestId, ticket: Ticket) -> None:
        assert request not in self._places, f"request {request} is queued twice"
        place = self._places[request] = (*self._key(ticket), request)
        insort(self._order, place)

    def remove(self, request: RequestId) -> None:
        del self._order[self._position(request)]
        del self._places[request]

    serve = remove

    def head(self) -> RequestId | None:
        return self._order[0][-1] if self._order else None

    def first(self, count: int) -> list[RequestId]:
        return [place[-1] for place in self._order[:count]]

    def ahead_of(self, request: RequestId) -> list[RequestId]:
        return [place[-1] for place in self._order[: self._position(request)]]

    def ahead(self, ticket: Ticket) -> int:
        """Return how many requests go before one that came now. Ties go to those that wait."""
        return bisect_right(self._order, (*self._key(ticket), inf))

    def place(self, request: RequestId) -> Place:
        return self._places[request]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request: RequestId, /) -> bool:
        return request in self._places

    def _position(self, request: RequestId) -> int:
        assert request in self._places, f"request {request} does not wait here"
        return bisect_left(self._order, self._places[request])


class ByWork(ByTicket):
    """`srpt`: the least work first.

    The proxy predicts an output once it lets a request in. `ahead` of a request without a prediction uses
    the mean prediction of the latest requests.
    """

    def __init__(self) -> None:
        super().__init__(by_work)
        self._mean_output = 0.0

    def add(self, request: RequestId, ticket: Ticket) -> None:
        super().add(request, ticket)
        output = ticket.predicted_tokens
        weight = _OUTPUT_WEIGHT if self._mean_output else 1.0
        self._mean_output += weight * (output - self._mean_output)

    def ahead(self, ticket: Ticket) -> int:
        if not ticket.predicted_tokens:
            ticket = structs.replace(ticket, predicted_tokens=round(self._mean_output))
        return super().ahead(ticket)


def by_deadline(ticket: Ticket) -> Key:
    """`edf`: the earliest deadline first; a request without one has all the time."""
    return inf if ticket.deadline_ns is None else ticket.deadline_ns, 0


def by_level(ticket: Ticket) -> Key:
    """`abs`: the lowest level first."""
    return ticket.level, 0


def urgent_by_deadline(ticket: Ticket) -> Key:
    """`ml`: levels below 0 first, the earliest deadline first; then the rest."""
    return (0, by_deadline(ticket)[0]) if ticket.level < 0 else (1, 0)


def by_work(ticket: Ticket) -> Key:
    """The least work first, in KV tokens of a decode rank times steps.

    All sequences of a request share its prompt. Without a prediction prompts decide.
    """
    output = max(1, ticket.predicted_tokens)
    return output * (ticket.prompt_tokens + ticket.slots * output / 2), 0


Cost = Callable[[Ticket], float]

COSTS: dict[str, Cost] = {
    "request": lambda _: 1.0,
    "prompt-tokens": lambda ticket: float(ticket.prompt_tokens),
}
"""The cost of a start to its tenant, by name. A repeated prefill costs it again."""
KV_SECONDS = "kv-token-seconds"
FAIR_COSTS = (*COSTS, KV_SECONDS)
"""The names of all costs that tenants can share."""

__all__ = [
    "COSTS",
    "FAIR_COSTS",
    "PREDICTING_ORDERS",
    "QUEUE_ORDERS",
    "ByTicket",
    "Fcfs",
    "MakeQueueOrder",
    "MakeStartOrder",
    "QueueOrder",
    "StartOrder",
]

QUEUE_ORDERS: dict[str, MakeQueueOrder] = {
    "fcfs": Fcfs,
    "edf": partial(ByTicket, by_deadline),
    "abs": partial(ByTicket, by_level),
    "ml": partial(ByTicket, urgent_by_deadline),
    "srpt": ByWork,
}
PREDICTING_ORDERS = frozenset({"srpt"})
"""The orders that use `Ticket.predicted_tokens`."""
