"""What is noted in a request's trace when the times of its record do not tell its way any more."""

from balanceroute.proxy.live.request.phases import Phase
from balanceroute.proxy.live.telemetry.record import Event, Leg, RequestRecord, Step, stages_of

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
    """Note that a request enters a phase, if that repeats one or follows a repetition.

    Args:
        record: Of a request that is traced.
        before: The phase that it leaves.
        phase: The one that it enters.
        now_s: The loop's time.
        decodes: Whether a rank decodes it.
    """
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
        stage = "decode"  # Nobody knows when its first token comes.
    trace.steps.append(Step(stage, now_ns, engine))


def trace_failure(record: RequestRecord, leg: Leg, reason: str, now_s: float) -> None:
    """Note in the trace of a request, if it is traced, that an attempt failed."""
    trace = record.trace
    if trace is not None:
        trace.steps = trace.steps or stages_of(record)
        trace.steps[-1].fault = reason
        trace.events.append(Event(f"{leg.value} failed", round(now_s * 1e9), reason))
