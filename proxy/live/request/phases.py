"""The phases of a request between its client and the engines, and every way between them.

Rules:

1. Every move is a row of `TRANSITIONS`; anything else raises `LifecycleError`.
2. The work of a session follows from its phase alone: an attempt in `PREFILLING`, `DECODING` and
   `STREAMING`, the timer of the next one in `BACKOFF`, and nothing in all other phases, in which
   the scheduler decides what comes next. A session that leaves a phase closes its work there; only
   the attempt whose stream begins goes on.
3. Whether the client has the head of its answer is another matter: a request that its rank hands
   back in the middle of a stream is `QUEUED` again, and the stream stays open.
"""

from enum import Enum, auto

from balanceroute.proxy.core.errors import LifecycleError
from balanceroute.proxy.live.telemetry.record import Event, Leg, RequestRecord, Step, stages_of


class Phase(Enum):
    """The phase of a request."""

    # Enum's own hash is Python code, and every move looks a phase up.
    __hash__ = object.__hash__

    QUEUED = auto()  # Waits for a prefiller.
    PREFILLING = auto()  # A prefiller computes its prompt.
    POOLED = auto()  # Waits for a rank.
    DECODING = auto()  # An engine was asked for the answer.
    STREAMING = auto()  # The client gets it event by event.
    BACKOFF = auto()  # An attempt failed, and the next one waits.
    ENDED = auto()


QUEUED, PREFILLING, POOLED, DECODING, STREAMING, ENDED = (
    Phase.QUEUED,
    Phase.PREFILLING,
    Phase.POOLED,
    Phase.DECODING,
    Phase.STREAMING,
    Phase.ENDED,
)


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    # Without a prefill leg it waits for a rank from the start. A prefiller may be asked for all of it.
    Phase.QUEUED: frozenset({Phase.PREFILLING, Phase.POOLED, Phase.DECODING, Phase.ENDED}),
    # A prefill that left no KV cache behind may be one for another prefiller at once.
    Phase.PREFILLING: frozenset({Phase.POOLED, Phase.QUEUED, Phase.BACKOFF, Phase.ENDED}),
    # Its KV cache may be lost before a rank is found.
    Phase.POOLED: frozenset({Phase.DECODING, Phase.QUEUED, Phase.ENDED}),
    # It waits again if its rank hands it back, or if an engine goes that it was on.
    Phase.DECODING: frozenset(
        {Phase.STREAMING, Phase.QUEUED, Phase.POOLED, Phase.BACKOFF, Phase.ENDED}
    ),
    Phase.STREAMING: frozenset({Phase.QUEUED, Phase.POOLED, Phase.ENDED}),
    Phase.BACKOFF: frozenset({Phase.QUEUED, Phase.POOLED, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


def impossible(number: int, before: Phase, after: Phase) -> LifecycleError:
    """Return the error of a move that is no row of `TRANSITIONS`."""
    return LifecycleError(f"request {number}: {before.name} to {after.name}")


# Entries of a request's trace, for one whose record does not show its stages: it was retried, for example.

# Stages as traces name them.
_STAGES = {
    Phase.QUEUED: "queue",
    Phase.PREFILLING: "prefill",
    Phase.POOLED: "pool",
    Phase.DECODING: "transfer",
    Phase.STREAMING: "decode",
    Phase.BACKOFF: "backoff",
}
_WITH_ENGINE = frozenset({Phase.PREFILLING, Phase.DECODING, Phase.STREAMING})
# Of a request that goes its way for the first time.
_FIRST = frozenset({Phase.QUEUED, Phase.PREFILLING})
MAY_REPEAT = frozenset({Phase.QUEUED, Phase.POOLED})
"""The phases with which a repetition begins: until one has, only they are for `trace_move`."""


def trace_move(
    record: RequestRecord, before: Phase, phase: Phase, now_s: float, *, decodes: bool
) -> None:
    """Note that a request enters a phase, if that repeats one or follows a repetition."""
    trace = record.trace
    repeats = phase is Phase.QUEUED or (phase is Phase.POOLED and before not in _FIRST)
    if trace is None or not (repeats or trace.steps):
        return
    stage = _STAGES.get(phase)
    if stage is None:
        return
    now_ns = round(now_s * 1e9)
    if repeats:
        trace.steps = trace.steps or stages_of(record)
        trace.events.append(Event(f"{stage} again", now_ns))
    engine = ""
    if phase in _WITH_ENGINE:
        engine = record.rank if decodes and phase is not Phase.PREFILLING else record.prefiller
    if phase is Phase.DECODING and not record.stream:
        stage = "decode"  # When its first token comes is unknown.
    trace.steps.append(Step(stage, now_ns, engine))


def trace_failure(record: RequestRecord, leg: Leg, reason: str, now_s: float) -> None:
    """Note in the trace of a request, if it is traced, that an attempt failed."""
    trace = record.trace
    if trace is not None:
        trace.steps = trace.steps or stages_of(record)
        trace.steps[-1].fault = reason
        trace.events.append(Event(f"{leg.value} failed", round(now_s * 1e9), reason))
