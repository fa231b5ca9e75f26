"""A request's place in a trace, and what happened to it that the times of its record do not tell."""

from msgspec import Struct, field


class Step(Struct, array_like=True):
    """A stay in one stage.

    Attributes:
        name: "queue", "prefill", "pool", "transfer", "decode", "backoff", or "engine" of a request that
            one engine answers alone.
        began_ns: The loop's time.
        engine: Who works on the request; empty if nobody does.
        fault: What ended the stay, if that was a failure.
    """

    name: str
    began_ns: int
    engine: str = ""
    fault: str = ""


class Event(Struct, frozen=True, array_like=True):
    """Something that happened at one moment, in nanoseconds of the loop's time."""

    name: str
    at_ns: int
    detail: str = ""


class Trace(Struct):
    """The trace that a request belongs to.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 of them, those of the request's own span: the parent of the engines' spans. The last
            one is 0, and the ids that follow are those of its children.
        parent_id: Those of the client's span; empty if it gave none.
        state: The client's `tracestate`.
        steps: In order; each ends where the next one begins, and the last with the request. Empty as
            long as the times of the record tell them; see `stages_of`.
        events: In order.
    """

    trace_id: str
    span_id: str
    parent_id: str = ""
    state: str = ""
    steps: list[Step] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
