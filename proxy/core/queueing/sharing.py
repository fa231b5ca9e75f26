"""Fair queueing by name of its cost: `fair_queueing("kv-token-seconds", order)`."""

from typing import NamedTuple

from balanceroute.proxy.core.queueing.base import MakeQueueOrder, MakeStartOrder
from balanceroute.proxy.core.queueing.fair import COSTS, FairQueue, FairShares
from balanceroute.proxy.core.queueing.fcfs import Fcfs
from balanceroute.proxy.core.queueing.in_turn import InTurn
from balanceroute.proxy.core.queueing.kv_meter import KvMeter

KV_SECONDS = "kv-token-seconds"
FAIR_COSTS = (*COSTS, KV_SECONDS)
"""What tenants can share."""


class FairQueueing(NamedTuple):
    """The parts of one scheduler that share what starts.

    Attributes:
        make_order: Makes its queues before prefill.
        make_pool: Makes the order of its pool.
        meter: Settles what was charged; None if the cost is known at the start.
    """

    make_order: MakeStartOrder
    make_pool: MakeQueueOrder
    meter: KvMeter | None


def fair_queueing(cost: str, make_order: MakeQueueOrder) -> FairQueueing:
    """Return the parts for a cost of `FAIR_COSTS`, with an order of requests within each tenant.

    In the pool it is the order of all requests. First come, first served is there as they start: that
    they came in another order is what the shares are for.
    """
    meter = KvMeter() if cost == KV_SECONDS else None
    shares = FairShares(COSTS[cost]) if meter is None else meter.shares
    make_pool = InTurn if make_order is Fcfs else make_order
    return FairQueueing(lambda: FairQueue(shares, make_order), make_pool, meter)
