"""Which requests need no prefiller, as the rank that decodes them computes their prompt.

A rank computes a prompt within a step, which then takes so much longer for all ranks. With C for
that time and N for the requests that are decoded or wait for a rank, the sum of the delays is

    C x (1 + N).

A prefiller has it done in R = w + s: w for the work that is before it, s for its own. Of that only
counts what is longer than the wait for a free slot, which both ways share. Those that come to the
prefiller until its queue is empty wait s longer, as in `prefix_aware`; then the KV cache is
transferred, which takes T:

    R x (1 + s / m x u / (1 - u)) + T, for a utilisation of u and a mean prefill of m.

The rank computes the prompt if the first sum is the smaller one. All times are measured. If no
prefiller is open, the rank computes every prompt up to the limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeStarted,
    Event,
    Expire,
    PrefillDone,
    PrefillerId,
    PrefillLost,
    ReleasePrefill,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    RequestRecomputed,
    StartPrefill,
    StepCompleted,
    Ticket,
)
from balanceroute.proxy.core.prefill.work import PrefillWork, ServiceModel

# u / (1 - u) for a utilisation of 0.8, as in `prefix_aware`.
_QUEUE_FACTOR = 4.0
# Steps that their mean time covers.
_WINDOW_STEPS = 64
# From its admission to its first token a request waits for half a step, and computes in the next.
_STEPS_TO_FIRST_TOKEN = 1.5
# Before so many prompts of the ranks their own, a rank counts as fast as a prefiller.
_LEAST = 16


@dataclass(frozen=True, slots=True)
class FleetState:
    """What the decision depends on, beside what was measured.

    Attributes:
        prefillers: Those that are open and can serve the request.
        waiting_slots: Slots that the requests in the pool need.
        free_slots: Of all ranks.
        bound: Requests that the ranks have.
        departures_per_step: Requests that leave the ranks in a step.
    """

    prefillers: Sequence[PrefillerId]
    waiting_slots: int
    free_slots: int
    bound: int
    departures_per_step: float


class LocalPrefill:
    """Watches one scheduler, and decides who computes a prompt.

    Args:
        limit_tokens: The longest prompt that a rank computes.
        always: Have ranks compute every prompt up to the limit: a baseline.
    """

    def __init__(self, limit_tokens: int, *, always: bool = False) -> None:
        self._limit_tokens = limit_tokens
        self._always = always
        self._work = PrefillWork()
        # Requests that arrived and have no first token, with their tokens; those of them that wait
        # for a prefiller; and when a rank got them.
        self._prompts: dict[RequestId, Ticket] = {}
        self._queued: dict[RequestId, int] = {}
        self._admitted_ns: dict[RequestId, int] = {}
        self._queued_tokens = 0
        self._step_ns = 0.0
        self._transfers, self._local = ServiceModel(), ServiceModel()

    def takes(self, ticket: Ticket, state: FleetState, now_ns: int) -> bool:
        """Return whether a rank is to compute the prompt of a request that arrives now."""
        tokens = ticket.prompt_tokens
        if not (ticket.prefill and ticket.decode) or tokens > self._limit_tokens:
            return False
        if self._always or not state.prefillers:
            return True
        if not self._work.mean_ns:
            return False
        waiting = state.waiting_slots + ticket.slots
        compute_ns = self._compute_ns(tokens, state.prefillers[0])
        return compute_ns * (waiting + state.bound) < self._prefill_cost_ns(ticket, state, now_ns)

    def _prefill_cost_ns(self, ticket: Ticket, state: FleetState, now_ns: int) -> float:
        """Return the sum of the delays if a prefiller computes the prompt, in ns."""
        work, tokens = self._work, ticket.prompt_tokens
        service_ns, prefiller = min(
            (work.wait_ns(one, now_ns) + work.service_ns(one, tokens), one)
            for one in state.prefillers
        )
        own_ns = work.service_ns(prefiller, tokens)
        base_ns = work.service_ns(prefiller, 0)
        token_ns = work.service_ns(prefiller, 1) - base_ns
        queued_ns = base_ns * len(self._queued) + token_ns * self._queued_tokens
        done_ns = service_ns + queued_ns / len(state.prefillers)
        late_ns = max(0.0, done_ns - self._slot_wait_ns(ticket, state))
        others = _QUEUE_FACTOR * own_ns / work.mean_ns
        base_ns, token_ns = self._transfers.line
        transfer_ns = max(0.0, base_ns + token_ns * tokens - self._step_ns)
        return late_ns * (1.0 + others) + transfer_ns

    def _slot_wait_ns(self, ticket: Ticket, state: FleetState) -> float:
        """Return how long a request that came to the pool now would wait for a slot."""
        missing = state.waiting_slots + ticket.slots - state.free_slots
        if missing <= 0:
            return 0.0
        rate = state.departures_per_step
        return missing / rate * self._step_ns if rate else inf

    def _compute_ns(self, tokens: int, prefiller: PrefillerId) -> float:
        """Return by how much a step is longer in which a rank computes `tokens`."""
        work = self._work
        token_ns = work.service_ns(prefiller, 1) - work.service_ns(prefiller, 0)
        if self._local.weight >= _LEAST:
            # Not all engines tell when an answer begins, so too short a time may have been measured.
            token_ns = max(token_ns, self._local.line[1])
        return token_ns * tokens

    # What is measured.

    def observe(self, event: Event, actions: Sequence[Action], now_ns: int) -> None:
        """Learn from an event and its actions."""
        match event:
            case StepCompleted(duration_ns):
                if duration_ns is not None:
                    weight = 1 / _WINDOW_STEPS if self._step_ns else 1.0
                    self._step_ns += weight * (duration_ns - self._step_ns)
                return
            case RequestArrived(request, ticket):
                self._prompts[request] = ticket
                if ticket.prefill and ticket.decode:
                    self._queue(request)
            case PrefillDone(request, prompt_tokens, _, cached_tokens):
                self._work.end(request, prompt_tokens - (cached_tokens or 0), now_ns)
            case PrefillLost(request, _, True):
                self._requeue(request, now_ns)
            case DecodeStarted(request):
                self._started(request, now_ns)
            case (
                RequestFinished(request)
                | RequestFailed(request)
                | RequestCancelled(request)
                | RequestRecomputed(request)
                | PrefillLost(request)  # A prefiller does all of it.
            ):
                self._forget(request, now_ns)
            case _:
                pass
        for action in actions:
            self._act(action, now_ns)

    def _act(self, action: Action, now_ns: int) -> None:
        match action:
            case StartPrefill(request, prefiller, prompt_tokens):
                if self._unqueue(request):
                    self._work.begin(request, prefiller, prompt_tokens, now_ns)
            case Admit(request):
                self._admitted_ns[request] = now_ns
            case ReleasePrefill(request):
                self._requeue(request, now_ns)
            case Expire(request):
                self._forget(request, now_ns)
            case _:
                pass

    def _started(self, request: RequestId, now_ns: int) -> None:
        ticket = self._prompts.pop(request, None)
        since_ns = self._admitted_ns.pop(request, None)
        if ticket is None or since_ns is None:
            return
        took_ns = now_ns - since_ns
        if ticket.prefill:
            self._transfers.observe(ticket.prompt_tokens, took_ns)
        else:
            own_ns = took_ns - _STEPS_TO_FIRST_TOKEN * self._step_ns
            self._local.observe(ticket.prompt_tokens, max(0, round(own_ns)))

    def _queue(self, request: RequestId) -> None:
        tokens = self._prompts[request].prompt_tokens
        self._queued[request] = tokens
        self._queued_tokens += tokens

    def _unqueue(self, request: RequestId) -> bool:
        tokens = self._queued.pop(request, None)
        self._queued_tokens -= tokens or 0
        return tokens is not None

    def _requeue(self, request: RequestId, now_ns: int) -> None:
        """Note that a request has to be prefilled again."""
        self._work.end(request, None, now_ns)
        self._admitted_ns.pop(request, None)
        if request in self._prompts and request not in self._queued:
            self._queue(request)

    def _forget(self, request: RequestId, now_ns: int) -> None:
        self._work.end(request, None, now_ns)
        self._unqueue(request)
        self._prompts.pop(request, None)
        self._admitted_ns.pop(request, None)
