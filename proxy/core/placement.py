"""Who computes the prompt of a request that arrives: a prefiller, or the rank that decodes it."""

from balanceroute.proxy.core.events import PrefillerId, Ticket
from balanceroute.proxy.core.local_prefill import FleetState
from balanceroute.proxy.core.scheduler import Scheduler


def placed(scheduler: Scheduler, ticket: Ticket, now_ns: int) -> Ticket:
    """Return the ticket of a request that is about to arrive; without prefill if a rank computes it."""
    local = scheduler.intake.local_prefill
    if local is None:
        return ticket
    able, ledger = ticket.eligible, scheduler.ledger
    is_open = enumerate(scheduler.prefillers.is_open)
    free_slots = scheduler.free_slots() * scheduler.ranks.is_open
    if able is not None:
        free_slots *= [rank in able.ranks for rank in range(len(free_slots))]
    state = FleetState(
        [
            PrefillerId(n)
            for n, yes in is_open
            if yes
            and (able is None or n in able.prefillers)
            and scheduler.prefillers.pairs.feeds(PrefillerId(n), able)
        ],
        waiting_slots=scheduler.pool.slots,
        free_slots=free_slots,
        loads=ledger.loads,
        bound=len(ledger),
        departures_per_step=ledger.turnover.per_step,
    )
    return local.placed(ticket, state, now_ns)
