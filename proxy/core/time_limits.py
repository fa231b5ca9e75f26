"""When a request's wait ends: before prefill, in the pool, and with its KV cache under a lease."""

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.lifecycle import Request
from balanceroute.proxy.core.pool import Pool, PoolEntry
from balanceroute.proxy.core.prefill.pairs import Pairs

# Share of its usable lease after which an entry is late.
_LATE_SHARE = 0.75


def queue_end_ns(request: Request, config: SchedulerConfig) -> int | None:
    """Return when a request that waits before prefill expires; None for never."""
    ttl_ns = config.queue_ttl_ns
    return None if ttl_ns is None else request.waiting_since_ns + ttl_ns


def earliest(*times_ns: int | None) -> int | None:
    """Return the earliest time; None, which stands for never, if there is none."""
    first_ns = None
    for time_ns in times_ns:
        if time_ns is not None and (first_ns is None or time_ns < first_ns):
            first_ns = time_ns
    return first_ns


def lease_used(pool: Pool, config: SchedulerConfig, now_ns: int) -> float | None:
    """Return the largest share of its usable lease that an entry has used, 0 to 1; None without leases."""
    if config.lease_ns is None:
        return None
    ends_ns = pool.first_lease_end_ns()
    if ends_ns is None:
        return 0.0
    usable_ns = config.lease_ns - min(config.lease_margin_ns, config.lease_ns // 2)
    return min(1.0, max(0.0, 1.0 - (ends_ns - now_ns) / usable_ns))


def pool_entry(request: Request, config: SchedulerConfig, pairs: Pairs) -> PoolEntry:
    """Return the pool entry of a request that has entered the pool."""
    since_ns = request.pooled_ns
    assert since_ns is not None
    deadline_ns = None if config.deadline_ns is None else since_ns + config.deadline_ns
    expires_ns = request.due_ns
    if config.ttl_ns is not None:
        end_ns = since_ns + config.ttl_ns
        expires_ns = end_ns if expires_ns is None else min(end_ns, expires_ns)
    lease_ends_ns = request.lease_expires_ns
    if lease_ends_ns is not None:
        assert request.prefilled_ns is not None
        # The margin covers the way to the rank and its pull. At most half of the lease, or a lease
        # shorter than the margin could never be used.
        left_ns = max(0, lease_ends_ns - request.prefilled_ns)
        lease_ends_ns -= min(config.lease_margin_ns, left_ns // 2)
        if deadline_ns is None:
            usable_ns = lease_ends_ns - request.prefilled_ns
            deadline_ns = request.prefilled_ns + round(_LATE_SHARE * usable_ns)
    return PoolEntry(
        request.request,
        request.ticket,
        request.prompt_tokens,
        age=request.emitted_before,
        deadline_ns=deadline_ns,
        expires_ns=expires_ns,
        lease_ends_ns=lease_ends_ns,
        lost_on=request.lost_on_ranks,
        overtaken=request.overtaken,
        since_ns=since_ns,
        # A rank that lost it, or gave it back, need not have that part any more.
        home=None if request.lost_on_ranks or request.emitted_before else request.ticket.home,
        partners=pairs.ranks_of(request.prefiller),
    )
