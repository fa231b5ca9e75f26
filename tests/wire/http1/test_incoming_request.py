"""A request as it arrives, without a connection."""

import pytest

from balanceroute.proxy.wire.http1.incoming_request import IncomingRequest
from balanceroute.proxy.wire.messages import BodyBudget, MalformedError, ServerLimits

LIMITS = ServerLimits(
    header_limit_bytes=200, body_limit_bytes=64, body_timeout_s=60.0, body_bytes_per_s=2
)
HEAD = b"POST /a?b HTTP/1.1\r\nhost: h\r\n"
WHOLE = HEAD + b"content-length: 5\r\n\r\nhello"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
NEXT = b"GET /next"


def incoming(budget: BodyBudget | None = None, *, now_s: float = 1000.0) -> IncomingRequest:
    return IncomingRequest(LIMITS, budget or BodyBudget(None), clock=lambda: now_s)


def read(request: IncomingRequest, data: bytes, size: int) -> bytes | None:
    """Feed data in pieces of `size` bytes; return the body once it is complete."""
    body = None
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        if request.head is not None and body is None:
            body = request.feed_body(piece)
            continue
        request.buffer += piece
        if request.head is None and request.take_head() is not None:
            body = request.begin_body()
    return body


@pytest.mark.parametrize(
    "data", [WHOLE, CHUNKED, b"\r\n" + WHOLE], ids=["length", "chunked", "blank"]
)
def test_how_a_request_is_cut_does_not_matter(data: bytes) -> None:
    for size in range(1, len(data) + len(NEXT) + 1):
        budget = BodyBudget(None)
        request = incoming(budget)
        assert read(request, data + NEXT, size) == b"hello"
        assert request.head is not None
        assert (request.head.path, request.head.query) == (b"/a", b"b")
        assert request.buffer == NEXT
        assert budget.used == 5
        request.finish()
        assert budget.used == 0
        assert not request.begun


def test_a_further_request_begins_with_nothing_of_the_last_one() -> None:
    request = incoming()
    read(request, WHOLE + b"\r\n" + WHOLE, 7)
    request.finish()
    request.begin()
    assert request.head is None
    assert request.begun
    assert request.take_head() is not None
    assert request.begin_body() == b"hello"
    assert request.buffer == b""


@pytest.mark.parametrize(("arrived", "skipped"), [(b"hello" + NEXT, True), (b"hell", False)])
def test_a_body_is_skipped_only_as_a_whole(arrived: bytes, skipped: bool) -> None:
    request = incoming()
    request.buffer = HEAD + b"content-length: 5\r\n\r\n" + arrived
    request.take_head()
    assert request.skip_body() == skipped
    assert request.buffer == (NEXT if skipped else arrived)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"x: " + b"a" * 200, 431),
        (HEAD + b"x: " + b"a" * 200 + b"\r\n\r\n", 431),
        (b"GET\n", 400),
        (HEAD + b"content-length: 65\r\n\r\n", 413),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n41\r\n", 413),
    ],
)
def test_what_is_not_accepted(data: bytes, status: int) -> None:
    with pytest.raises(MalformedError) as caught:
        read(incoming(), data, len(data))
    assert caught.value.rejection.status == status


def test_a_body_earns_time_with_the_bytes_that_arrive() -> None:
    request = incoming(now_s=1000.0)
    read(request, HEAD + b"content-length: 5\r\n\r\n", 100)
    assert request.body_deadline_s == 1060.0
    request.feed_body(b"hell")
    assert request.body_deadline_s == 1062.0


def test_what_is_dropped_is_released() -> None:
    budget = BodyBudget(None)
    request = incoming(budget)
    read(request, WHOLE[:-1], 9)
    assert budget.used == 4
    request.drop()
    assert (budget.used, request.buffer) == (0, b"")
