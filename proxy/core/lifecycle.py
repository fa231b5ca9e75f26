"""The life cycle of one request: every state, every transition, everything it can hold.

Rules:

1. Every transition is a row of `TRANSITIONS`; anything else raises `LifecycleError`.
2. What a request holds follows from its state alone: a prefill and KV budget on one prefiller from
   `PREFILLING` on, a place in the pool in `POOLED`, its slots on one rank in `DECODING`. The
   prefill budget outlives the pool: it is held until the first decoded token shows that the
   transfer is over. A request without prefill never holds a prefill or a prefill budget, in any
   state; it is `QUEUED` only for the instant before it goes to the pool. A request without decode
   is `PREFILLING` until it ends: it holds no prefill, but its sequences and the KV budget of all of
   them.
3. A holding is released exactly once; releasing it again is an assertion failure, not a no-op.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId, Ticket


class State(Enum):
    """Where a request stands."""

    # Enum's own hash is Python code, and every transition looks a pair up.
    __hash__ = object.__hash__

    QUEUED = auto()
    PREFILLING = auto()
    POOLED = auto()
    DECODING = auto()
    DONE = auto()
    FAILED = auto()
    CANCELLED = auto()


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


TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (State.QUEUED, Trigger.PREFILL): State.PREFILLING,
    # The decode engine will compute the prompt itself.
    (State.QUEUED, Trigger.SKIP_PREFILL): State.POOLED,
    (State.PREFILLING, Trigger.PREFILLED): State.POOLED,
    (State.PREFILLING, Trigger.PREFILL_LOST): State.QUEUED,
    # A prefiller that meets the stop condition on its one token has answered the whole request; and
    # so has one that was asked for all of it.
    (State.PREFILLING, Trigger.FINISH): State.DONE,
    (State.POOLED, Trigger.ADMIT): State.DECODING,
    (State.POOLED, Trigger.PREFILL_LOST): State.QUEUED,
    (State.DECODING, Trigger.RECOMPUTE): State.QUEUED,
    # The decoder found the KV cache gone before it could pull it.
    (State.DECODING, Trigger.PREFILL_LOST): State.QUEUED,
    # The rank never took the request, whose KV cache is where it was.
    (State.DECODING, Trigger.DECODE_LOST): State.POOLED,
    (State.DECODING, Trigger.FINISH): State.DONE,
} | {
    (state, trigger): end
    for state in (State.QUEUED, State.PREFILLING, State.POOLED, State.DECODING)
    for trigger, end in ((Trigger.FAIL, State.FAILED), (Trigger.CANCEL, State.CANCELLED))
}


@dataclass(slots=True, eq=False)
class Request:
    """One request's state and holdings.

    Attributes:
        request: Arrival number.
        ticket: What was known of it when it came.
        waiting_since_ns: When it arrived, or else came back from being served.
        prompt_tokens: Tokens to prefill; after a recompute this includes the tokens emitted so far
            (of several sequences: their mean, rounded up).
        decode: Whether a rank decodes it; else a prefiller answers all of it.
        emitted_before: Tokens that a sequence emitted in earlier bindings (0 unless it was
            recomputed).
        prefiller: The prefiller whose budget it holds, if any.
        prefilling: Whether its prefill is still running there.
        pulled_from: The prefiller whose KV cache it decodes with, or did so last.
        lost_on_prefillers: Prefillers that it should not go to again, the latest last.
        prefilled_ns: When it was last prefilled.
        lease_expires_ns: When that prefill's KV cache may be dropped, if known.
        pooled_ns: When it first entered the pool since it was last served.
        rank: The rank whose slots it holds, if any.
        started: Whether it joined the rank's batch.
        lost_on_ranks: Ranks that it should not go to again, the latest last.
    """

    request: RequestId
    ticket: Ticket
    waiting_since_ns: int
    prompt_tokens: int = field(init=False)
    decode: bool = field(init=False)
    state: State = State.QUEUED
    emitted_before: int = 0
    prefiller: PrefillerId | None = None
    prefilling: bool = False
    pulled_from: PrefillerId | None = None
    lost_on_prefillers: tuple[PrefillerId, ...] = ()
    prefilled_ns: int | None = None
    lease_expires_ns: int | None = None
    pooled_ns: int | None = None
    rank: RankId | None = None
    started: bool = False
    lost_on_ranks: tuple[RankId, ...] = ()

    def __post_init__(self) -> None:
        self.prompt_tokens = self.ticket.prompt_tokens
        self.decode = self.ticket.decode

    @property
    def kv_tokens(self) -> int:
        """What it adds to the load of a rank that takes it now."""
        return self.prompt_tokens * self.ticket.slots

    @property
    def held_tokens(self) -> int:
        """What it adds to what a prefiller holds: a prefill is of one sequence."""
        return self.prompt_tokens if self.decode else self.kv_tokens

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
    """Refuse a request that nothing can be done about.

    Raises:
        LifecycleError: It has no tokens or no sequences, or nobody to compute its prompt.
    """
    for name, value in (("prompt tokens", ticket.prompt_tokens), ("slots", ticket.slots)):
        if value < 1:
            raise LifecycleError(f"request {request} arrived with {value} {name}")
    if not (ticket.prefill or ticket.decode):
        raise LifecycleError(f"request {request} arrived with nobody to compute its prompt")
