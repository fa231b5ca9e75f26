"""Which requests need no prefiller, as the rank that decodes them computes their prompt.

A rank computes a prompt within a step, which then takes so much longer for all ranks. With C for
that time and N for the requests that are decoded or wait for a rank, the sum of the delays is

    C x (1 + N).

A rank that has the beginning of the prompt, as of a conversation's next turn, computes only the rest. But
the request then has to go to this rank. If that takes the rank x tokens beyond the fullest one, every step
is b x longer at first, until the rank has shed the overflow. It sheds r tokens in a step, those of the
requests that leave it, so this delays all by N b x^2 / 2r; see `resources`. It counts fivefold, as balance
is worth more once there are more requests.

Ranks that compute in the same step wait for the longest of them. So C is only what the step takes longer
than it does anyway: less, if another rank computes too, and more, if the same rank does.

A prefiller has it done in R = w + s: w for the work ahead of it, s for the prompt. Only the part of R
beyond the wait for a free slot counts, as both ways have that wait. Requests that come to the prefiller
until its queue is empty wait s longer, as in `PrefixAware`. The transfer of the KV cache takes T:

    R x (1 + s / m x u / (1 - u)) + T, for a utilisation of u and a mean prefill of m.

The rank computes the prompt if its own sums, C x (1 + N) and that of the overflow, are less than this. All
times are measured. If no prefiller is open, ranks compute every prompt up to the limit.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter

from msgspec.structs import replace

from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeLost,
    DecodeStarted,
    Event,
    Expire,
    PrefillDone,
    PrefillLost,
    RankId,
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
from balanceroute.proxy.core.rank_memory import RankMemory
from balanceroute.proxy.core.ranks import FleetState
from balanceroute.proxy.core.steps import StepModel

# The prompts that ranks compute: since when, and which prompts at the same time.
#
# All ranks step together, so a step takes as long as the rank that computes longest. So a step shows the
# time of a prompt only if its rank computes that prompt alone, and computes longest.


@dataclass(slots=True)
class RankPrompt:
    rank: RankId
    compute_ns: float  # The expected time of its computation.
    begun_ns: int  # When the step that computes it began.
    # By rank, the expected time of other prompts that are computed at the same time.
    concurrent_ns: defaultdict[RankId, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def longest_ns(self) -> float:
        """The expected time of the rank that computes longest."""
        own_ns = self.concurrent_ns.get(self.rank, 0.0) + self.compute_ns
        return max([own_ns, *self.concurrent_ns.values()])

    @property
    def decides(self) -> bool:
        """Whether this prompt alone makes that time."""
        return self.longest_ns == self.compute_ns


class RankPrompts:
    """Those between their admission and their first token."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, RankPrompt] = {}  # For the end of the step that runs.
        self._begun: dict[RequestId, RankPrompt] = {}
        self._step_end_ns = -1

    def add(self, request: RequestId, rank: RankId, compute_ns: float, now_ns: int) -> None:
        # At the end of a step it is in time for the next one.
        among = self._begun if now_ns == self._step_end_ns else self._waiting
        among[request] = RankPrompt(rank, compute_ns, now_ns)

    def longer_ns(self, compute_ns: float, rank: RankId | None = None) -> float:
        """Return by how much the next step is longer if a rank computes one more prompt.

        Args:
            compute_ns: The expected time of its computation.
            rank: None for a rank that computes no other prompt.
        """
        sums_ns: defaultdict[RankId, float] = defaultdict(float)
        for prompt in self._waiting.values():
            sums_ns[prompt.rank] += prompt.compute_ns
        own_ns = compute_ns if rank is None else compute_ns + sums_ns[rank]
        return max(0.0, own_ns - max(sums_ns.values(), default=0.0))

    def step(self, now_ns: int) -> None:
        self._step_end_ns = now_ns
        for prompt in self._waiting.values():
            prompt.begun_ns = now_ns
        self._begun |= self._waiting
        self._waiting.clear()

    def end(self, request: RequestId, now_ns: int) -> RankPrompt | None:
        """Note the first token or the end of a request; return its prompt, None if no rank computes it."""
        # It may still wait: if no step ran, it began at once.
        ended = self._waiting.pop(request, None) or self._begun.pop(request, None)
        if ended is not None:
            for other in self._begun.values():
                if other.begun_ns < now_ns:
                    other.concurrent_ns[ended.rank] += ended.compute_ns
                    ended.concurrent_ns[other.rank] += other.compute_ns
        return ended


# u / (1 - u) for a utilisation of 0.8, as in `PrefixAware`.
_QUEUE_FACTOR = 4.0
# Steps that their mean time covers.
_WINDOW_STEPS = 64
# Prefills that the mean share of computed tokens covers.
_WINDOW_PREFILLS = 64
# Steps by which a first token is too late to be within its usual variation.
_SURE_STEPS = 4.0
# The longest mean stay of a request on a rank that counts; also its stay before any has left.
_LONGEST_STAY_STEPS = 1_000
# Of an overflow, whose time is short where few requests are decoded. On the Mooncake trace at a load of
# 0.8 the ranks idle 68.5 % with 1, 67.2 % with 5 and 65.9 % with 30; the mean latency is the same within
# half a percent, and TTFT of later turns 0.15, 0.19 and 0.19 s.
_OVERFLOW_WEIGHT = 5.0
# Until ranks have computed so many prompts, a rank counts as fast as a prefiller.
_LEAST = 16


class LocalPrefill:
    """Watches one scheduler, and decides who computes a prompt.

    Args:
        limit_tokens: The most tokens of a prompt that a rank computes.
        memory: The blocks of earlier prompts on the ranks; None for a memory of its own.
        always: Have ranks compute every prompt within the limit: a baseline.
    """

    def __init__(
        self, limit_tokens: int, memory: RankMemory | None = None, *, always: bool = False
    ) -> None:
        self._limit_tokens = limit_tokens
        self._always = always
        self._work = PrefillWork()
        # Requests without a first token, with their tokens; those of them that wait for a prefiller; and
        # when a rank got them.
        self._prompts: dict[RequestId, Ticket] = {}
        self._queued: dict[RequestId, int] = {}
        self._admitted_ns: dict[RequestId, int] = {}
        self._computing = RankPrompts()
        self._queued_tokens = 0
        # The scheduler reports admissions to it, and ranks that close.
        self.memory = RankMemory() if memory is None else memory
        self._waits_for: dict[RequestId, RankId] = {}  # Until it is admitted to its home.
        self._step_ns = self._envelope = 0.0
        self._steps = StepModel()
        self._computed = 1.0  # Share of their prompts that prefillers compute.
        self._transfers, self._local = ServiceModel(), ServiceModel()

    def placed(self, ticket: Ticket, state: FleetState, now_ns: int) -> Ticket:
        """Return the ticket of a request that arrives now, without prefill if a rank computes it."""
        if not (ticket.prefill and ticket.decode):
            return ticket
        delayed = state.waiting_slots + ticket.slots + state.bound
        token_ns = self._token_ns()
        # Any rank, or one that has the beginning.
        ways: list[tuple[float, int, RankId | None]] = [
            (self._computing.longer_ns(token_ns * ticket.prompt_tokens) * delayed, 0, None)
        ]
        for rank, cached in self.memory.expect(ticket).items():
            if state.free_slots[rank] > list(self._waits_for.values()).count(rank):
                overflow_ns = state.bound * self._overflow_ns(ticket, state, rank)
                compute_ns = token_ns * (ticket.prompt_tokens - cached)
                longer_ns = self._computing.longer_ns(compute_ns, rank)
                ways.append((longer_ns * delayed + overflow_ns, cached, rank))
        able = [way for way in ways if ticket.prompt_tokens - way[1] <= self._limit_tokens]
        if not able:
            return ticket
        cost_ns, cached, home = min(able, key=itemgetter(0))
        measured = self._work.mean_ns > 0.0
        if (
            not self._always
            and state.prefillers
            and not (measured and cost_ns < self._prefill_cost_ns(ticket, state, now_ns))
        ):
            return ticket
        return replace(ticket, prefill=False, home=home, home_tokens=cached)

    def _overflow_ns(self, ticket: Ticket, state: FleetState, rank: RankId) -> float:
        """Return by how much all steps are longer in sum if a request goes to `rank`."""
        loads, tokens = state.loads, ticket.prompt_tokens * ticket.slots
        beyond = max(0.0, float(loads[rank] + tokens - loads.max()))
        least = max(0.0, float(loads[state.free_slots > 0].min() + tokens - loads.max()))
        if beyond <= least:
            return 0.0
        leaving = max(state.departures_per_step, state.bound / _LONGEST_STAY_STEPS)
        shed = leaving / len(loads) * float(loads.sum()) / state.bound
        # While b is not known, all of the step's time counts as that of its tokens.
        token_ns = self._steps.ns_per_token or self._step_ns / max(1.0, self._envelope)
        return _OVERFLOW_WEIGHT * token_ns * (beyond**2 - least**2) / (2.0 * shed)

    def _prefill_cost_ns(self, ticket: Ticket, state: FleetState, now_ns: int) -> float:
        """Return the sum of the delays if a prefiller computes the prompt, in ns."""
        work, tokens = self._work, round(self._computed * ticket.prompt_tokens)
        service_ns, prefiller = min(
            (work.wait_ns(one, now_ns) + work.service_ns(one, tokens), one)
            for one in state.prefillers
        )
        own_ns = work.service_ns(prefiller, tokens)
        queued_ns = work.service_ns(prefiller, 0) * len(self._queued)
        queued_ns += work.token_ns * self._computed * self._queued_tokens
        done_ns = service_ns + queued_ns / len(state.prefillers)
        late_ns = max(0.0, done_ns - self._slot_wait_ns(ticket, state))
        delayed = _QUEUE_FACTOR * own_ns / work.mean_ns
        base_ns, token_ns = self._transfers.line
        transfer_ns = max(0.0, base_ns + token_ns * ticket.prompt_tokens - self._step_ns)
        return late_ns * (1.0 + delayed) + transfer_ns

    def _slot_wait_ns(self, ticket: Ticket, state: FleetState) -> float:
        """Return how long a request that came to the pool now would wait for a slot."""
        missing = state.waiting_slots + ticket.slots - int(state.free_slots.sum())
        if missing <= 0:
            return 0.0
        rate = state.departures_per_step
        return missing / rate * self._step_ns if rate else inf

    def _token_ns(self) -> float:
        """Return by how much a step is longer for each token of a prompt that a rank computes."""
        token_ns = self._work.token_ns
        if self._local.weight >= _LEAST:
            # Not all engines report when an answer begins, so a measured time may be too short.
            token_ns = max(token_ns, self._local.line[1])
        return token_ns

    # Measurements.

    def step(self, duration_ns: int, envelope_tokens: int) -> None:
        """Learn from a step: its time, and the KV tokens of the fullest rank."""
        self._steps.observe(envelope_tokens, duration_ns)
        weight = 1 / _WINDOW_STEPS if self._step_ns else 1.0
        self._step_ns += weight * (duration_ns - self._step_ns)
        self._envelope += weight * (envelope_tokens - self._envelope)

    def observe(self, event: Event, actions: Sequence[Action], now_ns: int) -> None:
        match event:
            case StepCompleted():
                self._computing.step(now_ns)  # For the rest see `step`.
                return
            case RequestArrived(request, ticket):
                self._prompts[request] = ticket
                if ticket.home is not None:
                    self._waits_for[request] = ticket.home
                if ticket.prefill and ticket.decode:
                    self._queue(request)
            case PrefillDone(request, prompt_tokens, _, cached_tokens):
                computed = prompt_tokens - (cached_tokens or 0)
                self._computed += (computed / prompt_tokens - self._computed) / _WINDOW_PREFILLS
                self._work.end(request, computed, now_ns)
            case DecodeLost(request) if request in self._prompts:
                self._leave_home(request)
                self._admitted_ns.pop(request, None)
                self._computing.end(request, now_ns)
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
                    tokens = round(self._computed * prompt_tokens)
                    self._work.begin(request, prefiller, tokens, now_ns)
            case Admit(request, rank):
                self._admit(request, rank, now_ns)
            case ReleasePrefill(request):
                self._requeue(request, now_ns)
            case Expire(request):
                self._forget(request, now_ns)
            case _:
                pass

    def _admit(self, request: RequestId, rank: RankId, now_ns: int) -> None:
        ticket = self._prompts.get(request)
        if ticket is None:
            return
        self._admitted_ns[request] = now_ns
        self._waits_for.pop(request, None)
        if ticket.home != rank:
            self._leave_home(request)
        if not ticket.prefill:
            computed = ticket.prompt_tokens - self._prompts[request].home_tokens
            self._computing.add(request, rank, self._token_ns() * computed, now_ns)

    def _leave_home(self, request: RequestId) -> None:
        """Note that the rank of a request has nothing of its prompt."""
        self._prompts[request] = replace(self._prompts[request], home=None, home_tokens=0)

    def _started(self, request: RequestId, now_ns: int) -> None:
        ticket = self._prompts.pop(request, None)
        since_ns = self._admitted_ns.pop(request, None)
        if ticket is None or since_ns is None:
            return
        prompt = self._computing.end(request, now_ns)
        if ticket.prefill:
            self._transfers.observe(ticket.prompt_tokens, now_ns - since_ns)
        elif prompt is not None and self._step_ns:
            # Else the step's own time is unknown.
            self._computed_by_rank(ticket, prompt, now_ns - prompt.begun_ns - self._step_ns)

    def _computed_by_rank(self, ticket: Ticket, prompt: RankPrompt, took_ns: float) -> None:
        """Learn from the time that a rank's prompt added to a step."""
        missed_ns = self._token_ns() * ticket.home_tokens
        sure_ns = max(missed_ns / 2, _SURE_STEPS * self._step_ns)
        if ticket.home is not None and took_ns > prompt.longest_ns + sure_ns:
            # It had to compute all: it has dropped those blocks, or has started again.
            self.memory.missed(ticket, ticket.home)
        elif prompt.decides:
            if ticket.home is not None:
                self.memory.had()
            computed = ticket.prompt_tokens - ticket.home_tokens
            self._local.observe(computed, max(0, round(took_ns)))

    def _queue(self, request: RequestId) -> None:
        tokens = self._prompts[request].prompt_tokens
        self._queued[request] = tokens
        self._queued_tokens += tokens

    def _unqueue(self, request: RequestId) -> bool:
        tokens = self._queued.pop(request, None)
        self._queued_tokens -= tokens or 0
        return tokens is not None

    def _requeue(self, request: RequestId, now_ns: int) -> None:
        self._work.end(request, None, now_ns)
        self._admitted_ns.pop(request, None)
        self._computing.end(request, now_ns)
        if request in self._prompts and request not in self._queued:
            self._queue(request)

    def _forget(self, request: RequestId, now_ns: int) -> None:
        self._work.end(request, None, now_ns)
        self._unqueue(request)
        self._prompts.pop(request, None)
        self._waits_for.pop(request, None)
        self._admitted_ns.pop(request, None)
        self._computing.end(request, now_ns)
