"""Requests of an earlier scheduler, as their driver describes them.

An adopted request takes the transitions that led it to its phase, so that no state is reached here
that `lifecycle` does not allow. Nothing is decided before all of them are known.
"""

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import (
    InBatch,
    InPool,
    InQueue,
    KvOnPrefiller,
    OnPrefiller,
    OnRank,
    RequestAdopted,
)
from balanceroute.proxy.core.lifecycle import Request, Trigger, check_ticket


def adopted(event: RequestAdopted, config: SchedulerConfig) -> Request:
    """Return the request in the state that its description implies; it holds nothing yet.

    Its `prefiller` and `rank` name what it is to hold.

    Raises:
        LifecycleError: The description contradicts itself, or names an unknown instance.
    """
    _check(event, config)
    request = Request(event.request, event.ticket, waiting_since_ns=event.waiting_since_ns)
    request.prompt_tokens = event.prompt_tokens
    request.decode = event.decode
    request.emitted_before = event.emitted_before
    request.pooled_ns = event.pooled_ns
    request.lapses = event.lapses
    request.lost_on_prefillers = event.lost_on_prefillers
    request.lost_on_ranks = event.lost_on_ranks
    if event.served:
        request.due_ns = None
    if event.answered or isinstance(event.phase, InBatch):
        request.begin_answer()
    match event.phase:
        case InQueue():
            pass
        case OnPrefiller(prefiller):
            request.move(Trigger.PREFILL)
            request.prefiller = prefiller
        case InPool(kv):
            _to_pool(request, kv)
        case OnRank(rank, kv):
            _to_pool(request, kv)
            request.move(Trigger.ADMIT)
            request.rank = rank
        case InBatch(rank, _, pulled_from):
            _to_pool(request, None)
            request.move(Trigger.ADMIT)
            request.rank, request.started = rank, True
            request.pulled_from = pulled_from
    return request


def _to_pool(request: Request, kv: KvOnPrefiller | None) -> None:
    if not request.ticket.prefill:
        request.move(Trigger.SKIP_PREFILL)
        return
    request.move(Trigger.PREFILL)
    request.move(Trigger.PREFILLED)
    if kv is not None:
        request.prefiller = kv.prefiller
        request.prefilled_ns, request.lease_expires_ns = kv.prefilled_ns, kv.lease_expires_ns


def _check(event: RequestAdopted, config: SchedulerConfig) -> None:
    number, ticket, phase = event.request, event.ticket, event.phase
    check_ticket(number, ticket)
    least = {"prompt tokens": (event.prompt_tokens, 1)}
    least["tokens emitted before"] = event.emitted_before, 0
    least["lapses"] = event.lapses, 0
    if isinstance(phase, InBatch):
        least["emitted tokens"] = phase.tokens, 0
    for name, (value, lowest) in least.items():
        if value < lowest:
            raise LifecycleError(f"request {number} is adopted with {value} {name}")
    if event.decode and not ticket.decode:
        raise LifecycleError(
            f"request {number} is adopted to be decoded, which its ticket excludes"
        )
    before_decode = isinstance(phase, InQueue | OnPrefiller)
    if before_decode and not ticket.prefill:
        raise LifecycleError(f"request {number} is adopted before prefill, and needs none")
    if not (before_decode or event.decode):
        raise LifecycleError(f"request {number} is answered by a prefiller, not by a rank")
    if isinstance(phase, InPool | OnRank) and (phase.kv is not None) != ticket.prefill:
        needed = "without the" if ticket.prefill else "with a"
        raise LifecycleError(f"request {number} is adopted {needed} KV cache on a prefiller")
    _check_instances(event, config)


def _check_instances(event: RequestAdopted, config: SchedulerConfig) -> None:
    prefillers, ranks = list(event.lost_on_prefillers), list(event.lost_on_ranks)
    match event.phase:
        case OnPrefiller(prefiller) | InPool(KvOnPrefiller(prefiller)):
            prefillers.append(prefiller)
        case OnRank(rank, kv):
            ranks.append(rank)
            prefillers += [] if kv is None else [kv.prefiller]
        case InBatch(rank, _, pulled_from):
            ranks.append(rank)
            prefillers += [] if pulled_from is None else [pulled_from]
        case _:
            pass
    for role, there_are, named in (
        ("prefiller", config.prefillers, prefillers),
        ("rank", config.ranks, ranks),
    ):
        for instance in named:
            if not 0 <= instance < there_are:
                raise LifecycleError(
                    f"request {event.request} is adopted on {role} {instance}: there are {there_are}"
                )
