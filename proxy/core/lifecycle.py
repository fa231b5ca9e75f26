"""The life cycle of one request: every state, every transition, everything it can hold.

Rules:

1. Every transition is a row of `TRANSITIONS`; anything else raises `LifecycleError`.
2. What a request holds follows from its state alone: a prefill and KV budget on one prefiller from
   `PREFILLING` on, a place in the pool in `POOLED`, its slots on one rank in `DECODING`. The KV
   budget outlives the pool: it is held until the first decoded token shows that the transfer is
   over. Two kinds of request differ:

   * Without prefill, a request never holds a prefiller. It is `QUEUED` only for the instant before
     it goes to the pool, or as long as the intake has all requests wait in the queue.
   * Without decode (a direct request), it is `PREFILLING` until it ends. It holds its sequences on
     the prefiller and the KV budget of all of them, instead of a prefill.
3. The scheduler releases everything exactly once; a second release is an assertion failure.
"""

from dataclasses import dataclass
from enum import Enum, auto

from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import PrefillDone, PrefillerId, RankId, RequestId, Ticket


class LifecycleState(Enum):
    # Enum's own hash is Python code, and every transition hashes a pair.
    __hash__ = object.__hash__

    QUEUED = auto()
    PREFILLING = auto()
    POOLED = auto()
    DECODING = auto()
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()


QUEUED, PREFILLING, DECODING = (
    LifecycleState.QUEUED,
    LifecycleState.PREFILLING,
    LifecycleState.DECODING,
)


class Trigger(Enum):
    """What moves a request from one state to another."""

    __hash__ = object.__hash__

    PREFILL = auto()
    SKIP_PREFILL = auto()
    PREFILLED = auto()
    PREFILL_LOST = auto()
    ADMIT = auto()
    DECODE_LOST = auto()
    RECOMPUTE = auto()
    FINISH = auto()
    FAIL = auto()
    CANCEL = auto()


PREFILL, PREFILLED, ADMIT, FINISH = (
    Trigger.PREFILL,
    Trigger.PREFILLED,
    Trigger.ADMIT,
    Trigger.FINISH,
)


TRANSITIONS: dict[tuple[LifecycleState, Trigger], LifecycleState] = {
    (LifecycleState.QUEUED, Trigger.PREFILL): LifecycleState.PREFILLING,
    # The decode engine computes the prompt itself.
    (LifecycleState.QUEUED, Trigger.SKIP_PREFILL): LifecycleState.POOLED,
    # The KV cache is on the prefiller, under a lease: the request waits for a rank.
    (LifecycleState.PREFILLING, Trigger.PREFILLED): LifecycleState.POOLED,
    # It is prefilled again, and keeps its place in the order of arrival.
    (LifecycleState.PREFILLING, Trigger.PREFILL_LOST): LifecycleState.QUEUED,
    # A prefiller answers the whole request if its one token meets the stop condition, or if the
    # request is direct.
    (LifecycleState.PREFILLING, Trigger.FINISH): LifecycleState.DONE,
    (LifecycleState.POOLED, Trigger.ADMIT): LifecycleState.DECODING,
    # The lease of its KV cache ended before a rank had a slot.
    (LifecycleState.POOLED, Trigger.PREFILL_LOST): LifecycleState.QUEUED,
    # The rank dropped its KV cache. The emitted tokens are prefilled with the prompt.
    (LifecycleState.DECODING, Trigger.RECOMPUTE): LifecycleState.QUEUED,
    # The decoder found the KV cache gone before it could pull it.
    (LifecycleState.DECODING, Trigger.PREFILL_LOST): LifecycleState.QUEUED,
    # The rank never took the request: the KV cache is still on the prefiller.
    (LifecycleState.DECODING, Trigger.DECODE_LOST): LifecycleState.POOLED,
    (LifecycleState.DECODING, Trigger.FINISH): LifecycleState.DONE,
} | {
    # An error, or a client that leaves, may end a request in every state but the last three.
    (state, trigger): end
    for state in (
        LifecycleState.QUEUED,
        LifecycleState.PREFILLING,
        LifecycleState.POOLED,
        LifecycleState.DECODING,
    )
    for trigger, end in (
        (Trigger.FAIL, LifecycleState.FAILED),
        (Trigger.CANCEL, LifecycleState.CANCELLED),
    )
}


# No `Struct`: to set an attribute of one takes eight times as long, and each request's are set often.
@dataclass(slots=True, eq=False)
class Request:
    request: RequestId  # Its id, the arrival number.
    ticket: Ticket  # What was known when it arrived.
    # When it arrived, or was last queued after it had been answered or served.
    waiting_since_ns: int
    # As in the ticket at first.
    # Tokens to prefill; after a recompute this includes the tokens emitted so far (of several
    # sequences: their mean, rounded up).
    prompt_tokens: int = 0
    # Whether a rank decodes it; otherwise a prefiller answers the whole request.
    decode: bool = True
    # When it expires unless it is decoded; None for never, and once it was answered or served.
    due_ns: int | None = None
    arrived_ns: int = 0  # When it arrived; 0 if unknown.
    answered: bool = False  # Whether its client has its first token.
    state: LifecycleState = LifecycleState.QUEUED
    # Tokens that a sequence emitted in earlier bindings (0 unless it was recomputed).
    emitted_before: int = 0
    prefiller: PrefillerId | None = None  # The prefiller whose budget it holds, if any.
    prefilling: bool = False  # Whether its prefill is running there.
    pulled_from: PrefillerId | None = None  # The prefiller whose KV cache the rank pulled last.
    # Prefillers that lost it, to be avoided, the latest last.
    lost_on_prefillers: tuple[PrefillerId, ...] = ()
    prefilled_ns: int | None = None  # When it was last prefilled.
    lease_expires_ns: int | None = None  # When that prefill's KV cache may be dropped, if known.
    lapses: int = 0  # KV caches that it lost in the pool since it was last served.
    # When it last left the queue before prefill; None if it never did.
    left_queue_ns: int | None = None
    # How often it had been overtaken when it lost the last one; see `PoolEntry`.
    overtaken: int = 0
    pooled_ns: int | None = None  # When it first entered the pool since it was last served.
    rank: RankId | None = None  # The rank whose slots it holds, if any.
    started: bool = False  # Whether it joined the rank's batch.
    lost_on_ranks: tuple[RankId, ...] = ()  # Ranks that lost it, to be avoided, the latest last.

    def __post_init__(self) -> None:
        self.prompt_tokens = self.ticket.prompt_tokens
        self.decode = self.ticket.decode
        self.due_ns = self.ticket.deadline_ns
        self.arrived_ns = self.waiting_since_ns

    # No properties: up to Python 3.11 those take twice as long as methods.

    def kv_tokens(self) -> int:
        """Return the KV tokens that it adds to a rank when it is admitted."""
        return self.prompt_tokens * self.ticket.slots

    def held_tokens(self) -> int:
        """Return the KV tokens that it adds to a prefiller: of one sequence, of a direct request all."""
        return self.prompt_tokens if self.decode else self.kv_tokens()

    def begin_prefill(self, prefiller: PrefillerId) -> None:
        """Note the prefiller that computes its prompt, or answers all of it."""
        self.move(PREFILL)
        self.prefiller = prefiller
        # A direct request takes sequences of its prefiller and no place of a prefill.
        self.prefilling = self.decode

    def prefilled(self, event: PrefillDone, now_ns: int) -> None:
        self.prompt_tokens = event.prompt_tokens
        self.prefilled_ns = now_ns
        self.lease_expires_ns = event.lease_expires_ns
        # A prefill succeeded, so earlier failures no longer restrict a later one.
        self.lost_on_prefillers = ()

    def begin_answer(self) -> None:
        """Note that its client has its first token."""
        self.answered = True
        self.due_ns = None

    def wait_anew(self, now_ns: int) -> None:
        """Note that it was served, and waits from now on as if it had just arrived."""
        self.waiting_since_ns = now_ns
        # Its first token came in time, or late: it is not due again.
        self.due_ns = None
        self.pooled_ns = None
        self.lapses = self.overtaken = 0

    def move(self, trigger: Trigger) -> None:
        """Take the transition for `trigger`.

        Raises:
            LifecycleError: The present state has no such transition.
        """
        end = TRANSITIONS.get((self.state, trigger))
        if end is None:
            msg = f"request {self.request}: {trigger.name} is not allowed in {self.state.name}"
            raise LifecycleError(msg)
        self.state = end


def check_ticket(request: RequestId, ticket: Ticket) -> None:
    """Reject a request that cannot be served.

    Raises:
        LifecycleError: It has no tokens or no sequences, or neither prefill nor decode.
    """
    if ticket.prompt_tokens < 1:
        raise LifecycleError(f"request {request} arrived with {ticket.prompt_tokens} prompt tokens")
    if ticket.slots < 1:
        raise LifecycleError(f"request {request} arrived with {ticket.slots} slots")
    if not (ticket.prefill or ticket.decode):
        raise LifecycleError(f"request {request} arrived with neither prefill nor decode")
