"""The cost of a grant: the next request among many tenants, charged, and settled when it ends.

    python scripts/bench_grants.py [--tenants N] [--queued N ..]

Prints microseconds per grant for each cost: the head of the queue, its removal and charge, and the
settlement of an earlier one. The queue stays as long as it is; what is added for that is not counted.
"""

import argparse
import random
import time
from statistics import quantiles

from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.queueing import FAIR_COSTS, QUEUE_ORDERS, fair_queueing
from balanceroute.proxy.testing.arguments import positive

GRANTS, IN_FLIGHT = 20_000, 1_024


def grant_times(cost: str, order: str, tenants: int, queued: int) -> list[float]:
    """Return the time of every grant, in microseconds."""
    queueing, rng = fair_queueing(cost, QUEUE_ORDERS[order]), random.Random(0)
    queue, meter = queueing.make_order(), queueing.meter
    tickets: dict[RequestId, Ticket] = {}
    running: list[RequestId] = []
    times: list[float] = []

    def add(number: int) -> None:
        ticket = tickets[RequestId(number)] = Ticket(
            rng.randint(10, 8_000),
            tenant=f"tenant-{rng.randrange(tenants)}",
            weight=float(rng.randint(1, 8)),
            deadline_ns=rng.randrange(10**9),
            predicted_tokens=rng.randint(1, 2_000),
        )
        queue.add(RequestId(number), ticket)

    for number in range(queued):
        add(number)
    for grant in range(GRANTS):
        ended = running.pop(rng.randrange(len(running))) if len(running) == IN_FLIGHT else None
        begin_s = time.perf_counter()
        if ended is not None and meter is not None:
            ticket = tickets[ended]
            meter.end(ended, ticket, ticket.prompt_tokens + ticket.predicted_tokens)
        head = queue.head()
        assert head is not None
        queue.serve(head)
        times.append(1e6 * (time.perf_counter() - begin_s))
        if meter is not None:
            meter.begin(head, tickets[head], tickets[head].prompt_tokens)
            meter.step(30_000_000)
        running.append(head)
        add(queued + grant)
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tenants", type=positive, default=1_000, help="(default 1000)")
    parser.add_argument("--queued", type=positive, nargs="*", default=[4_096, 409_600])
    arguments = parser.parse_args()
    print("| tenants | queued | order | `--fair-queue` | p50, us | p99, us |")
    print("| ---: | ---: | --- | --- | ---: | ---: |")
    for queued in arguments.queued:
        for order in ("fcfs", "edf"):
            for cost in FAIR_COSTS:
                cuts = quantiles(grant_times(cost, order, arguments.tenants, queued), n=100)
                row = (arguments.tenants, queued, f"`{order}`", f"`{cost}`")
                cells = [*map(str, row), f"{cuts[49]:.1f}", f"{cuts[98]:.1f}"]
                print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
