"""The queue orders by name.

| name | rule |
| --- | --- |
| `arrival` | first come, first served |
"""

from balanceroute.proxy.core.queueing.arrival import Arrival
from balanceroute.proxy.core.queueing.base import MakeQueueOrder, QueueOrder

__all__ = ["QUEUE_ORDERS", "Arrival", "MakeQueueOrder", "QueueOrder"]

QUEUE_ORDERS: dict[str, MakeQueueOrder] = {"arrival": Arrival}
