"""What a relay tells a new scheduler process of a request, and what the core makes of it.

A relay keeps a `Standing` for each of its requests: it feeds that with the core events that it sends
and with the orders that it acts on. See `resumption` for what it does when the scheduler process is
another one.
"""

from typing import Literal

from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    AdoptedPhase,
    InBatch,
    InPool,
    InQueue,
    KvOnPrefiller,
    OnPrefiller,
    OnRank,
    PrefillerId,
    RankId,
    RequestAdopted,
    RequestId,
    Ticket,
)
from balanceroute.proxy.core.standing import Standing
from balanceroute.proxy.live.processes.from_relay import Arrival, Live

_Name = Literal["queued", "prefilling", "pooled", "admitted", "decoding"]
_Told = tuple[_Name, RankId | None, PrefillerId | None, int, int | None]


def live_message(
    arrival: Arrival,
    standing: Standing,
    *,
    engine_id: str,
    emitted: int,
    emitted_before: int,
    pulls: bool,
) -> Live:
    """Return what a relay tells of a request; the arguments are those of `Live`."""
    told = standing.adoption(tokens=emitted - emitted_before)
    phase, rank, prefiller, since_ns, lease_expires_ns = _told(told.phase)
    return Live(
        arrival,
        engine_id,
        phase,
        told.prompt_tokens,
        emitted,
        emitted_before,
        told.decode,
        prefiller,
        since_ns,
        lease_expires_ns,
        pulls,
        rank,
        told.waiting_since_ns,
        told.pooled_ns,
        told.served,
        told.lapses,
        told.lost_on_prefillers,
        told.lost_on_ranks,
        told.answered,
    )


def adoption(live: Live, request: RequestId, ticket: Ticket) -> RequestAdopted:
    """Return what the scheduler is fed.

    Args:
        live: From the relay.
        request: The request's number here.
        ticket: Made anew from its arrival.

    Raises:
        LifecycleError: What the relay tells contradicts itself.
    """
    return RequestAdopted(
        request,
        ticket,
        _phase(live),
        prompt_tokens=live.prompt_tokens,
        waiting_since_ns=live.waiting_since_ns,
        decode=live.decode,
        # Of several sequences it is their mean, rounded up, as in the core.
        emitted_before=-(-live.emitted_before // ticket.slots),
        pooled_ns=live.pooled_ns,
        served=live.served,
        lapses=live.lapses,
        lost_on_prefillers=live.lost_on_prefillers,
        lost_on_ranks=live.lost_on_ranks,
        answered=live.answered,
    )


def _told(phase: AdoptedPhase) -> _Told:
    match phase:
        case InQueue():
            return "queued", None, None, 0, None
        case OnPrefiller(prefiller, since_ns):
            return "prefilling", None, prefiller, since_ns, None
        case InPool(kv):
            return ("pooled", None, *_told_kv(kv))
        case OnRank(rank, kv):
            return ("admitted", rank, *_told_kv(kv))
        case InBatch(rank, _, pulled_from):
            return "decoding", rank, pulled_from, 0, None


def _told_kv(kv: KvOnPrefiller | None) -> tuple[PrefillerId | None, int, int | None]:
    return (None, 0, None) if kv is None else (kv.prefiller, kv.prefilled_ns, kv.lease_expires_ns)


def _phase(live: Live) -> AdoptedPhase:
    kv = None
    if live.prefiller is not None:
        kv = KvOnPrefiller(live.prefiller, live.since_ns, live.lease_expires_ns)
    match live:
        case Live(phase="queued"):
            return InQueue()
        case Live(phase="prefilling", prefiller=int(prefiller)):
            return OnPrefiller(PrefillerId(prefiller), live.since_ns)
        case Live(phase="pooled"):
            return InPool(kv)
        case Live(phase="admitted", rank=int(rank)):
            return OnRank(RankId(rank), kv)
        case Live(phase="decoding", rank=int(rank)):
            tokens = live.emitted - live.emitted_before
            return InBatch(RankId(rank), tokens, live.prefiller)
        case _:
            number = live.arrival.number
            raise LifecycleError(f"request {number} of a relay is {live.phase} nowhere")
