"""What clients do in a plan that is out of the ordinary."""

from collections import Counter

from balanceroute.proxy.testing.chaos.plan import Plan

_BIG_BYTES = 20_000


def client_faults(plan: Plan) -> Counter[str]:
    """Count what clients do that is out of the ordinary, besides leaving."""
    counts: Counter[str] = Counter()
    for visit in plan.visits:
        counts["client: pipelines"] += visit.pipelined
        counts["client: speaks HTTP/1.0"] += visit.http_1_0
        counts["client: stops reading for a while"] += bool(visit.pauses)
        counts["client: has a bad wire"] += visit.link is not None and not visit.pauses
        counts["client: sends a big prompt"] += any(
            len(request.body) > _BIG_BYTES for request in visit.requests
        )
    names = Counter(request.request_id for request in plan.requests)
    counts["client: repeats a request id"] += sum(count - 1 for count in names.values())
    starts = Counter(visit.start_s for visit in plan.visits)
    counts["client: comes in a herd"] += sum(count for count in starts.values() if count > 1)
    return +counts


def is_shared(plan: Plan, name: str) -> bool:
    """Return whether several requests have a name."""
    return sum(request.request_id == name for request in plan.requests) > 1
