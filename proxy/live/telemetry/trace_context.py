"""W3C trace context (https://www.w3.org/TR/trace-context/): whose span a request belongs under."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from balanceroute.proxy.live.telemetry.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from balanceroute.proxy.live.telemetry.record import RequestRecord

Headers = list[tuple[bytes, bytes]]

# A later version may have more behind the flags.
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NAMES = frozenset({b"traceparent", b"tracestate"})
_SAMPLED = 1
_MAX_STATE = 512
# The ratio of a sampler counts in these bits of the trace id, as in OpenTelemetry's SDKs.
_RATIO_BITS = 64
# An id of a trace, and the first 15 digits of one of a span.
_DRAWN_DIGITS = 32 + 15
# Requests whose ids are drawn at once: each draw asks the system.
_DRAWN_AT_ONCE = 64


class Parent(NamedTuple):
    """The span that a client names as the request's parent."""

    trace_id: str
    span_id: str
    sampled: bool


def read_parent(headers: "Iterable[tuple[bytes, bytes]]") -> Parent | None:
    """Return the parent that the `traceparent` header names; None if there is none, or no valid one."""
    given = None
    for name, value in headers:
        if name == b"traceparent":
            if given is not None:
                return None
            given = value
    if given is None:
        return None
    match = _PARENT.fullmatch(given.strip())
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5] is not None):
        return None
    if not (match[2].strip(b"0") and match[3].strip(b"0")):
        return None
    sampled = bool(int(match[4], 16) & _SAMPLED)
    return Parent(match[2].decode(), match[3].decode(), sampled)


class Tracer:
    """Decides which requests are traced.

    Args:
        share: Of the requests without a parent, which are traced; a parent's own flag decides.
        random_bits: Returns an integer of so many random bits.
    """

    def __init__(self, share: float, random_bits: Callable[[int], int]) -> None:
        self._all = share == 1.0
        self._bound = round(share * (1 << _RATIO_BITS))
        self._random_bits = random_bits
        self._drawn = self._draw()

    def begin(self, headers: Headers, record: "RequestRecord") -> Headers:
        """Begin the request's trace; return its headers with the context that engines are to get.

        They get one of a request that is not traced too: it says so, and they do not begin their own.
        """
        parent_id, sampled = "", False
        states: Headers = []
        drawn = next(self._drawn)
        trace_id, span_id = drawn[15:], f"{drawn[:15]}0"
        given = dict(headers)
        if b"traceparent" in given or b"tracestate" in given:
            parent = read_parent(headers)
            states = [one for one in headers if one[0] == b"tracestate"]
            headers = [one for one in headers if one[0] not in _NAMES]
            if parent is None:
                states = []  # It belongs to a parent.
            else:
                trace_id, parent_id, sampled = parent
        if not parent_id:
            sampled = self._all or int(trace_id[16:], 16) < self._bound
        record.trace_id = trace_id
        if sampled:
            state = b",".join([value for _, value in states])[:_MAX_STATE].decode("latin-1")
            record.trace = Trace(trace_id, span_id, parent_id, state)
        flag = "01" if sampled else "00"
        return [*headers, *states, (b"traceparent", f"00-{trace_id}-{span_id}-{flag}".encode())]

    def _draw(self) -> "Iterator[str]":
        """Return random digits, those of a request each time."""
        digits = _DRAWN_DIGITS * _DRAWN_AT_ONCE
        while True:
            drawn = f"{self._random_bits(4 * digits):0{digits}x}"
            for begin in range(0, digits, _DRAWN_DIGITS):
                yield drawn[begin : begin + _DRAWN_DIGITS]
