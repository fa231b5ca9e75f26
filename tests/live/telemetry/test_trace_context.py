"""Whose span a request belongs under, and which requests are traced."""

import random

import pytest

from balanceroute.proxy.live.telemetry.record import RequestRecord, Tracer, read_parent

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01".encode()
TRACE = b"traceparent"


def record() -> RequestRecord:
    return RequestRecord("r", "/v1/completions", 5, 0.0)


def tracer(share: float = 1.0) -> Tracer:
    return Tracer(share, random.Random(3).getrandbits)


@pytest.mark.parametrize(
    "value",
    [
        PARENT,
        b" " + PARENT + b" ",
        # A later version may have more behind what we know.
        b"01" + PARENT[2:],
        b"01" + PARENT[2:] + b"-more",
    ],
)
def test_the_parent_is_read(value: bytes) -> None:
    assert read_parent([(b"host", b"a"), (TRACE, value)]) == (TRACE_ID, SPAN_ID, True)


def test_of_the_flags_the_lowest_bit_says_whether_the_parent_is_traced() -> None:
    for flags, sampled in ((b"00", False), (b"02", False), (b"03", True), (b"ff", True)):
        parent = read_parent([(TRACE, PARENT[:-2] + flags)])
        assert parent is not None
        assert parent.sampled == sampled


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(TRACE, b"")],
        [(TRACE, b"00-1-2-01")],
        [(TRACE, PARENT), (TRACE, PARENT)],
        [(TRACE, b"ff" + PARENT[2:])],
        [(TRACE, PARENT + b"-more")],
        [(TRACE, PARENT.upper())],
        [(TRACE, PARENT.replace(TRACE_ID.encode(), b"0" * 32))],
        [(TRACE, PARENT.replace(SPAN_ID.encode(), b"0" * 16))],
    ],
)
def test_what_is_no_parent_is_none(headers: list[tuple[bytes, bytes]]) -> None:
    assert read_parent(headers) is None


def test_engines_get_the_request_s_own_span_as_their_parent() -> None:
    mine, state = record(), [(b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    headers = tracer().begin([(b"host", b"a"), (TRACE, PARENT), *state], mine)
    assert mine.trace_id == TRACE_ID
    trace = mine.trace
    assert trace is not None
    assert (trace.trace_id, trace.parent_id, trace.state) == (TRACE_ID, SPAN_ID, "a=1,b=2")
    assert trace.span_id != SPAN_ID
    context = (TRACE, f"00-{TRACE_ID}-{trace.span_id}-01".encode())
    assert headers == [(b"host", b"a"), *state, context]


def test_without_a_valid_parent_a_trace_begins() -> None:
    mine = record()
    headers = tracer().begin([(TRACE, b"00-1-2-01"), (b"tracestate", b"a=1")], mine)
    assert mine.trace is not None
    assert (mine.trace.trace_id, mine.trace.parent_id) == (mine.trace_id, "")
    assert len(mine.trace_id) == 32
    # The state belongs to a parent that is not there.
    assert [name for name, _ in headers] == [TRACE]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_the_requests_without_a_parent_is_traced(share: float) -> None:
    sampler, traced = tracer(share), 0
    for _ in range(2_000):
        mine = record()
        headers = sampler.begin([], mine)
        flag = b"00" if mine.trace is None else b"01"
        assert headers[0][1].endswith(b"-" + flag), "engines trace the same requests"
        traced += mine.trace is not None
    assert abs(traced / 2_000 - share) < 0.03


def test_a_parent_decides_for_itself() -> None:
    for share in (0.0, 1.0):
        kept, left = record(), record()
        tracer(share).begin([(TRACE, PARENT)], kept)
        headers = tracer(share).begin([(TRACE, PARENT[:-2] + b"00")], left)
        assert kept.trace is not None
        assert left.trace is None
        assert left.trace_id == TRACE_ID
        assert headers[0][1].endswith(b"-00")
