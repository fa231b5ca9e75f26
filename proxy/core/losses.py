"""A request whose engine lost it: what it releases, and which instances it avoids from then on."""

from collections.abc import Mapping

from balanceroute.proxy.core.avoidance import with_loss
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import Action, PrefillLost, RequestId
from balanceroute.proxy.core.holdings import Holdings
from balanceroute.proxy.core.lifecycle import Request, State, Trigger
from balanceroute.proxy.core.prefill.pairs import Pairs


def lose_prefill(
    request: Request, event: PrefillLost, holdings: Holdings, now_ns: int
) -> list[Action]:
    """Release what a request holds that has to be prefilled again; the caller queues it.

    Raises:
        LifecycleError: Its rank has the KV cache already, or it has no prefill.
    """
    if request.started:
        # From the first token on the rank holds the KV cache, and its loss is a
        # `RequestRecomputed`.
        raise LifecycleError(f"request {request.request} has pulled its KV cache already")
    if not request.ticket.prefill:
        raise LifecycleError(f"request {request.request} has no prefill to lose")
    # Read first: the holdings follow from the state before the move, and `release` clears them.
    state, prefiller, rank = request.state, request.prefiller, request.rank
    request.move(Trigger.PREFILL_LOST)
    actions = holdings.release(request, state, gone=True)
    if rank is not None and not event.same_rank:
        request.lost_on_ranks = with_loss(request.lost_on_ranks, rank)
    if event.elsewhere:
        assert prefiller is not None
        request.lost_on_prefillers = with_loss(request.lost_on_prefillers, prefiller)
    request.decode = request.decode and event.decode
    if request.answered:
        # The limit of the wait before prefill is for the first token.
        request.waiting_since_ns = now_ns
    return actions


def lose_decode(request: Request, holdings: Holdings) -> None:
    """Release the rank of a request that never joined its batch; the caller puts it in the pool.

    Raises:
        LifecycleError: It is on no rank, or in the batch.
    """
    if request.started:
        # Likewise: a request in the batch can be recomputed, but not go back to the pool as it
        # was.
        raise LifecycleError(f"request {request.request} is in its rank's batch already")
    request.move(Trigger.DECODE_LOST)
    assert request.rank is not None
    request.lost_on_ranks = with_loss(request.lost_on_ranks, request.rank)
    # Only the rank's slots: the prefiller still holds the KV cache, under the same lease.
    holdings.unbind(request)


def recompute(
    request: Request, holdings: Holdings, now_ns: int, *, elsewhere: bool
) -> list[Action]:
    """Release what a request holds whose rank dropped it; the caller queues it.

    Raises:
        LifecycleError: It is on no rank.
    """
    state, rank = request.state, request.rank
    request.move(Trigger.RECOMPUTE)
    actions = holdings.release(request, state, gone=True)
    if elsewhere:
        assert rank is not None
        request.lost_on_ranks = with_loss(request.lost_on_ranks, rank)
        # Either end of the KV transfer may be at fault.
        if request.pulled_from is not None:
            lost_on = with_loss(request.lost_on_prefillers, request.pulled_from)
            request.lost_on_prefillers = lost_on
    # It was served in between, so a new wait begins, with new time limits.
    request.wait_anew(now_ns)
    return actions


def unpaired(requests: Mapping[RequestId, Request], pairs: Pairs) -> list[RequestId]:
    """Return the pooled requests whose KV caches no open rank can use."""
    if not pairs.limited:
        return []
    return [
        request.request
        for request in requests.values()
        if request.state is State.POOLED
        and request.prefiller is not None
        and not pairs.feeds(request.prefiller, request.ticket.eligible)
    ]
