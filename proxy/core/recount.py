"""The scheduler's self-check: what is charged against what the requests' states say."""

from typing import TYPE_CHECKING

from balanceroute.proxy.core.lifecycle import State

if TYPE_CHECKING:
    from balanceroute.proxy.core.scheduler import Scheduler


def check_holdings(scheduler: "Scheduler") -> None:
    """Recount every holding from the requests' states and assert that nothing leaked."""
    scheduler.ledger.check()
    held = [0] * scheduler.config.prefillers
    prefills = [0] * scheduler.config.prefillers
    direct = [0] * scheduler.config.prefillers
    slots = [0] * scheduler.config.ranks
    for request in scheduler.requests.values():
        state, decodes = request.state, request.decode
        # Rule 2 of `lifecycle`: what a request holds follows from its state.
        if request.prefiller is not None:
            assert request.ticket.prefill
            held[request.prefiller] += request.held_tokens
            prefills[request.prefiller] += request.prefilling
            direct[request.prefiller] += 0 if decodes else request.ticket.slots
        if request.rank is not None:
            slots[request.rank] += request.ticket.slots
        # A direct request holds sequences instead of a prefill.
        assert request.prefilling == (state is State.PREFILLING and decodes)
        assert (request.rank is not None) == (state is State.DECODING)
        assert (request.request in scheduler.pool) == (state is State.POOLED)
        assert (request in scheduler.prefill_queue) == (state is State.QUEUED)
        assert request.ticket.prefill or state in {State.POOLED, State.DECODING}
        assert decodes or state in {State.QUEUED, State.PREFILLING}
    assert direct == scheduler.prefillers.direct, f"{direct} != {scheduler.prefillers.direct}"
    assert held == scheduler.prefillers.held_tokens, f"{held} != {scheduler.prefillers.held_tokens}"
    assert prefills == scheduler.prefillers.prefills, (
        f"{prefills} != {scheduler.prefillers.prefills}"
    )
    assert sum(prefills) == scheduler.prefillers.prefilling
    assert slots == scheduler.ledger.bound.tolist(), f"{slots} != {scheduler.ledger.bound}"
    assert scheduler.pool.slots == sum(entry.slots for entry in scheduler.pool)
    # The count that bounds admission, derived from its complement.
    answered = sum(
        request.rank is not None or (request.state is State.PREFILLING and not request.decode)
        for request in scheduler.requests.values()
    )
    assert scheduler.waiting == len(scheduler.requests) - answered
