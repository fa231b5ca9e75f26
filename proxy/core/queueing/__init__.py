"""The queue orders by name.

| name | rule |
| --- | --- |
| `fcfs` | first come, first served |
| `edf` | the earliest deadline first; those without one last |
| `abs` | the lowest level first |
| `ml` | levels below 0 first, by deadline; then all others, first come, first served |
| `srpt` | the least work first: KV tokens times steps in decode, as expected |

Before prefill each of them can be the order within a tenant's requests, see `fair_queueing`.
"""

from functools import partial

from balanceroute.proxy.core.queueing.base import (
    MakeQueueOrder,
    MakeStartOrder,
    QueueOrder,
    StartOrder,
)
from balanceroute.proxy.core.queueing.by_ticket import (
    ByTicket,
    ByWork,
    by_deadline,
    by_level,
    urgent_by_deadline,
)
from balanceroute.proxy.core.queueing.fair import COSTS, FairQueue, FairShares
from balanceroute.proxy.core.queueing.fcfs import (
    FAIR_COSTS,
    FairQueueing,
    Fcfs,
    InTurn,
    fair_queueing,
)
from balanceroute.proxy.core.queueing.held_shares import HeldShares
from balanceroute.proxy.core.queueing.kv_meter import KvMeter

__all__ = [
    "COSTS",
    "FAIR_COSTS",
    "PREDICTING_ORDERS",
    "QUEUE_ORDERS",
    "ByTicket",
    "FairQueue",
    "FairQueueing",
    "FairShares",
    "Fcfs",
    "HeldShares",
    "InTurn",
    "KvMeter",
    "MakeQueueOrder",
    "MakeStartOrder",
    "QueueOrder",
    "StartOrder",
    "fair_queueing",
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
