"""Who computes the prompt of a request that arrives: a prefiller, or the rank that decodes it."""

from msgspec.structs import replace

from balanceroute.proxy.core.events import PrefillerId, Ticket
from balanceroute.proxy.core.local_prefill import FleetState
from balanceroute.proxy.core.scheduler import Scheduler


def placed(scheduler: Scheduler, ticket: Ticket, now_ns: int) -> Ticket:
    """Return the ticket of a request that is about to arrive, without prefill if a rank takes it."""
    local = scheduler.intake.local_prefill
    if local is None:
        return ticket
    able = None if ticket.eligible is None else ticket.eligible.prefillers
    is_open = enumerate(scheduler.prefillers.is_open)
    state = FleetState(
        [PrefillerId(one) for one, yes in is_open if yes and (able is None or one in able)],
        waiting_slots=scheduler.pool.slots,
        free_slots=int(scheduler.free_slots() @ scheduler.ranks.is_open),
        bound=len(scheduler.ledger),
        departures_per_step=scheduler.ledger.turnover.per_step,
    )
    return replace(ticket, prefill=False) if local.takes(ticket, state, now_ns) else ticket
