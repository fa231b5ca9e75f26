"""The scheduler's self-check: what is charged against what the requests' states say."""

from typing import TYPE_CHECKING

from balanceroute.proxy.core.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Collection

    from balanceroute.proxy.core.ledger import Ledger
    from balanceroute.proxy.core.lifecycle import Request
    from balanceroute.proxy.core.pool import Pool
    from balanceroute.proxy.core.prefill import Prefillers
    from balanceroute.proxy.core.prefill_queue import PrefillQueue


def check_holdings(
    requests: "Collection[Request]",
    *,
    prefill_queue: "PrefillQueue",
    prefillers: "Prefillers",
    pool: "Pool",
    ledger: "Ledger",
    waiting: int,
) -> None:
    """Recount every holding from the requests' states and assert that nothing leaked."""
    ledger.check()
    held = [0] * len(prefillers.held_tokens)
    prefills, direct = held.copy(), held.copy()
    slots = [0] * len(ledger.bound)
    for request in requests:
        state, decodes = request.state, request.decode
        # Rule 2 of `lifecycle`: what a request holds follows from its state.
        if request.prefiller is not None:
            assert request.ticket.prefill
            held[request.prefiller] += request.held_tokens()
            prefills[request.prefiller] += request.prefilling
            direct[request.prefiller] += 0 if decodes else request.ticket.slots
        if request.rank is not None:
            slots[request.rank] += request.ticket.slots
        # A direct request holds sequences instead of a prefill.
        assert request.prefilling == (state is State.PREFILLING and decodes)
        assert (request.rank is not None) == (state is State.DECODING)
        assert (request.request in pool) == (state is State.POOLED)
        assert (request in prefill_queue) == (state is State.QUEUED)
        assert request.ticket.prefill or state is not State.PREFILLING
        assert decodes or state in {State.QUEUED, State.PREFILLING}
    assert direct == prefillers.direct, f"{direct} != {prefillers.direct}"
    assert held == prefillers.held_tokens, f"{held} != {prefillers.held_tokens}"
    assert prefills == prefillers.prefills, f"{prefills} != {prefillers.prefills}"
    assert sum(prefills) == prefillers.prefilling
    assert slots == ledger.bound.tolist(), f"{slots} != {ledger.bound}"
    assert pool.slots == sum(entry.slots for entry in pool)
    # The count that bounds admission, derived from its complement.
    answered = sum(
        request.rank is not None or (request.state is State.PREFILLING and not request.decode)
        for request in requests
    )
    assert waiting == len(requests) - answered
