"""The endpoint against engines that answer in raw bytes, well and badly."""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.wire.raw_bytes import RawConnection, Script, engine, until

from balanceroute.proxy.wire.http1.client import Call, Endpoint, fetch
from balanceroute.proxy.wire.messages import (
    Headers,
    Payload,
    Pieces,
    Response,
    UnsafeHeaderError,
    WireError,
    WireFault,
)

if TYPE_CHECKING:
    from tests.wire.conftest import Run

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Handler:
    """Records its calls, and checks their order and that none comes after the end."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.pieces: list[bytes] = []
        self.ended = False
        self.error: WireError | None = None
        self.then: Callable[[], None] | None = None

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def over(self) -> bool:
        return self.ended or self.error is not None

    def on_head(self, status: int, headers: Headers) -> None:
        assert not self.over
        assert self.status == 0
        self.status = status
        self.headers = headers

    def on_data(self, data: bytes) -> None:
        assert data
        assert self.status
        assert not self.over
        self.pieces.append(data)

    def on_end(self) -> None:
        assert self.status
        assert not self.over
        self.ended = True
        if self.then is not None:
            self.then()

    def on_error(self, error: WireError) -> None:
        assert not self.over
        self.error = error


def begin(endpoint: Endpoint, body: Payload = b"", method: bytes = b"POST") -> tuple[Handler, Call]:
    handler = Handler()
    call = endpoint.request(method, b"/x?y", [(b"x-id", b"1")], body, handler)
    assert not handler.over
    assert handler.status == 0
    return handler, call


async def exchange(endpoint: Endpoint, body: Payload = b"", method: bytes = b"POST") -> Handler:
    handler, call = begin(endpoint, body, method)
    await until(lambda: handler.over)
    assert call.done
    return handler


async def request_of(connection: RawConnection) -> bytes:
    """Read one request with a length, or without a body."""
    head = await connection.until(b"\r\n\r\n")
    _, found, rest = head.partition(b"content-length: ")
    return head + await connection.exactly(int(rest.partition(b"\r\n")[0]) if found else 0)


def answering(*answers: bytes, split: bool = False) -> Script:
    """Answer each request in turn, then wait for the end of the connection."""

    async def script(connection: RawConnection) -> None:
        for answer in answers:
            await request_of(connection)
            pieces = [answer[i : i + 1] for i in range(len(answer))] if split else [answer]
            await connection.send_each(pieces)
        await connection.rest()

    return script


def answer_and_close(
    answer: bytes, *, reset: bool = False, seen: Callable[[], bool] = lambda: True
) -> Script:
    """Answer one request and close.

    Args:
        answer: Its start, maybe.
        reset: Close with an RST.
        seen: The client has read the answer: an RST discards what it has not.
    """

    async def script(connection: RawConnection) -> None:
        await request_of(connection)
        connection.send(answer)
        await connection.writer.drain()
        if reset:
            await until(seen)
            connection.reset()

    return script


async def test_a_request_is_written_with_host_and_length() -> None:
    seen: list[bytes] = []

    async def script(connection: RawConnection) -> None:
        for _ in range(2):
            seen.append(await request_of(connection))
            connection.send(OK)
        await connection.rest()

    async with engine(script) as raw:
        await exchange(raw.endpoint, b"hello")
        await exchange(raw.endpoint, method=b"GET")
        host = raw.endpoint.name.removeprefix("http://").encode()
        assert seen == [
            b"POST /x?y HTTP/1.1\r\nhost: %b\r\nx-id: 1\r\ncontent-length: 5\r\n\r\nhello" % host,
            b"GET /x?y HTTP/1.1\r\nhost: %b\r\nx-id: 1\r\n\r\n" % host,
        ]


async def test_a_request_that_cannot_be_written_is_not_begun() -> None:
    async with engine() as raw:
        for target, headers in ((b"/ HTTP/1.1\r\n", []), (b"/", [(b"x", b"\r\n")])):
            with pytest.raises(UnsafeHeaderError):
                raw.endpoint.request(b"GET", target, headers, b"", Handler())
        assert raw.endpoint.connections == 0


WHOLE = {
    "a length": (OK, b"ok"),
    "a length of zero": (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
    "chunks": (STREAM + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", b"hello world"),
    "extensions and trailers": (STREAM + b"2;a=b\r\nok\r\n0;c\r\nx: y\r\n\r\n", b"ok"),
    "white space in extensions": (STREAM + b'2 ; a = "b"\t\r\nok\r\n0\t;c\r\n\r\n', b"ok"),
    "no chunk": (STREAM + b"0\r\n\r\n", b""),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "not modified": (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n", b""),
    "interim responses": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + OK,
        b"ok",
    ),
}


@pytest.mark.parametrize(("answer", "body"), WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.both_loops
async def test_a_response_is_read_and_its_connection_reused(
    answer: bytes, body: bytes, *, split: bool
) -> None:
    async with engine(answering(answer, answer, split=split)) as raw:
        for _ in range(2):
            handler = await exchange(raw.endpoint)
            assert handler.ended
            assert handler.body == body
            assert handler.status in (200, 204, 304)
            assert (raw.endpoint.connections, raw.endpoint.idle) == (1, 1)
        assert raw.accepted == 1


async def test_one_head_says_nothing_about_the_next() -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: %b\r\n\r\n" % (b"x" * 1000)
    answers = [interim + OK, b"HTTP/1.1 204 No\r\n\r\n"] * 3

    async with engine(answering(*answers, split=True), max_head_bytes=2000) as raw:
        for _ in answers:
            assert (await exchange(raw.endpoint)).ended
        assert raw.accepted == 1


async def test_a_connection_that_closes_is_not_taken() -> None:
    async with engine(answering(OK), answering(OK)) as raw:
        await exchange(raw.endpoint)
        (connection,) = raw.endpoint._idle
        connection._transport.close()
        _, call = begin(raw.endpoint)
        assert call.connection is None
        await until(lambda: call.done)
        assert raw.accepted == 2


async def test_a_segment_of_several_chunks_is_one_piece() -> None:
    async with engine(answering(STREAM + b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n")) as raw:
        assert (await exchange(raw.endpoint)).pieces == [b"abc"]


async def test_head_has_no_body_whatever_its_length_says() -> None:
    answers = b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n", STREAM

    async with engine(answering(*answers)) as raw:
        for _ in answers:
            handler = await exchange(raw.endpoint, method=b"HEAD")
            assert handler.ended
            assert handler.body == b""
        assert raw.accepted == 1


NOT_REUSED = {
    "connection: close": b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 2\r\n\r\nok",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
    "bytes after the length": OK + b"!",
    "bytes after the last chunk": STREAM + b"2\r\nok\r\n0\r\n\r\n\r\n",
    "a second response": OK + OK,
}


@pytest.mark.parametrize("answer", NOT_REUSED.values(), ids=NOT_REUSED)
@pytest.mark.both_loops
async def test_a_connection_in_doubt_is_not_reused(answer: bytes) -> None:
    async with engine(answering(answer), answering(OK)) as raw:
        for accepted in (1, 2):
            handler = await exchange(raw.endpoint)
            assert (handler.ended, handler.body) == (True, b"ok")
            assert raw.accepted == accepted


async def test_a_body_without_a_length_ends_with_the_connection() -> None:
    async with engine(answer_and_close(b"HTTP/1.1 200 OK\r\n\r\nto the end")) as raw:
        handler = await exchange(raw.endpoint)
        assert handler.ended
        assert handler.body == b"to the end"
        assert raw.endpoint.idle == 0


@pytest.mark.both_loops
async def test_an_answer_before_the_request_was_read_is_not_reused() -> None:
    done = asyncio.Event()

    async def early(connection: RawConnection) -> None:
        await connection.until(b"\r\n\r\n")
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await done.wait()

    async with engine(early, answering(OK)) as raw:
        handler = await exchange(raw.endpoint, bytes(32 << 20))
        assert (handler.ended, handler.status) == (True, 413)
        assert raw.endpoint.idle == 0
        assert (await exchange(raw.endpoint)).ended
        done.set()


PROTOCOL_ERRORS = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.9\r\n",
    "HTTP/2": b"HTTP/2 200\r\n\r\n",
    "a malformed status": b"HTTP/1.1 2x0 OK\r\n\r\n",
    "LF": b"HTTP/1.1 200 OK\ncontent-length: 0\n\n",
    "a folded header": b"HTTP/1.1 200 OK\r\na: b\r\n c\r\n\r\n",
    "a header split by CR": b"HTTP/1.1 200 OK\r\na: b\rset-cookie: c\r\n\r\n",
    "NUL in a header": b"HTTP/1.1 200 OK\r\na: \0\r\n\r\n",
    "length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\ntransfer-encoding: chunked\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    "another coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
    "switched protocols": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n",
    "a long head": b"HTTP/1.1 200 OK\r\nx: %b\r\n\r\n" % (b"x" * 70_000),
    "an endless head": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 12_000,
    "endless interim responses": b"HTTP/1.1 100 Continue\r\n\r\n" * 3_000,
    "a bad chunk size": STREAM + b"2\r\nok\r\nxyz\r\n",
    "a chunk size overflow": STREAM + b"10000000000000002\r\nok\r\n",
    "a chunk without CRLF": STREAM + b"2\r\nok0\r\n\r\n",
    "a chunk after the last": STREAM + b"0\r\n2\r\nok\r\n",
}


@pytest.mark.parametrize("answer", PROTOCOL_ERRORS.values(), ids=PROTOCOL_ERRORS)
@pytest.mark.both_loops
async def test_a_malformed_response_is_a_protocol_error(answer: bytes) -> None:
    async with engine(answering(answer)) as raw:
        handler = await exchange(raw.endpoint)
        assert handler.error is not None
        assert handler.error.kind is WireFault.PROTOCOL
        assert (handler.error.sent, handler.error.answered) == (True, True)
        assert raw.accepted == 1


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize(
    ("answer", "answered"),
    [
        (b"", False),
        (b"H", True),
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\npart", True),
        (STREAM, True),
        (STREAM + b"5\r\npart", True),
        (STREAM + b"4\r\npart\r\n", True),
        (STREAM + b"4\r\npart\r\n0\r\n", True),
    ],
)
async def test_a_response_that_is_cut_is_an_error_in_every_phase(
    answer: bytes, *, answered: bool, reset: bool
) -> None:
    calls: list[Call] = []
    script = answer_and_close(
        answer, reset=reset, seen=lambda: bool(calls) and calls[0].answered is answered
    )

    async with engine(script) as raw:
        handler, call = begin(raw.endpoint)
        calls.append(call)
        await until(lambda: handler.over)
        assert handler.error is not None
        assert handler.error.kind is WireFault.RESET
        assert (handler.error.sent, handler.error.answered) == (True, answered)
        assert handler.body == (b"part" if b"part" in answer else b"")
        assert raw.accepted == 1
        assert raw.endpoint.idle == 0


@pytest.mark.both_loops
async def test_a_reset_never_ends_a_body_without_a_length() -> None:
    handlers: list[Handler] = []
    script = answer_and_close(
        b"HTTP/1.1 200 OK\r\n\r\npart",
        reset=True,
        seen=lambda: bool(handlers) and handlers[0].body == b"part",
    )

    async with engine(script) as raw:
        handler, _ = begin(raw.endpoint)
        handlers.append(handler)
        await until(lambda: handler.over)
        assert handler.error is not None
        assert handler.error.kind is WireFault.RESET
        assert handler.body == b"part"


@pytest.mark.parametrize("unasked", [b"", b"HTTP/1.1 408 Timeout\r\n\r\n", b"\r\n"])
async def test_an_idle_connection_that_shows_life_is_closed(unasked: bytes) -> None:
    idle = asyncio.Event()

    async def script(connection: RawConnection) -> None:
        await request_of(connection)
        connection.send(OK)
        await idle.wait()
        connection.send(unasked)
        if unasked:
            assert await connection.rest() == b""

    async with engine(script, answering(OK)) as raw:
        assert (await exchange(raw.endpoint)).ended
        assert raw.endpoint.idle == 1
        idle.set()
        await until(lambda: raw.endpoint.connections == 0)
        assert raw.endpoint.idle == 0
        assert (await exchange(raw.endpoint)).ended
        assert raw.accepted == 2


async def test_the_connection_used_last_is_taken_first() -> None:
    waiting: dict[bytes, asyncio.Event] = {}
    used: dict[bytes, object] = {}

    async def script(connection: RawConnection) -> None:
        with suppress(asyncio.IncompleteReadError):
            while request := await request_of(connection):
                body = request[-1:]
                used[body] = connection
                if body in waiting:
                    await waiting[body].wait()
                connection.send(OK)

    async with engine(*[script] * 3) as raw:
        waiting.update({body: asyncio.Event() for body in (b"a", b"b", b"c")})
        handlers = {body: begin(raw.endpoint, body)[0] for body in waiting}
        assert raw.endpoint.connections == 3
        await until(lambda: len(used) == 3)
        for body in (b"a", b"c", b"b"):
            waiting[body].set()
            await until(lambda: handlers[body].ended)  # noqa: B023
        assert raw.endpoint.idle == 3
        await exchange(raw.endpoint, b"d")
        await exchange(raw.endpoint, b"e")
        assert used[b"d"] is used[b"e"] is used[b"b"]


async def test_a_request_made_as_a_response_ends_reuses_its_connection() -> None:
    async with engine(answering(OK, OK)) as raw:
        handler, _ = begin(raw.endpoint)
        following = Handler()

        def follow() -> None:
            raw.endpoint.request(b"GET", b"/", [], b"", following)

        handler.then = follow
        await until(lambda: following.over)
        assert following.ended
        assert raw.accepted == 1


async def test_no_more_than_max_idle_connections_are_kept() -> None:
    async with engine(*[answering(OK)] * 5, max_idle=2) as raw:
        handlers = [begin(raw.endpoint)[0] for _ in range(5)]
        await until(lambda: all(handler.ended for handler in handlers))
        assert raw.endpoint.idle == 2
        await until(lambda: raw.endpoint.connections == 2)


async def test_a_closed_endpoint_keeps_nothing() -> None:
    async with engine(answering(OK), answering(OK), answering(OK)) as raw:
        handlers = [begin(raw.endpoint)[0] for _ in range(2)]
        await until(lambda: all(handler.ended for handler in handlers))
        raw.endpoint.close()
        assert raw.endpoint.idle == 0
        await until(lambda: raw.endpoint.connections == 0)
        handler, _ = begin(raw.endpoint)
        raw.endpoint.close()
        await until(lambda: handler.ended)
        assert raw.endpoint.idle == 0


@pytest.mark.parametrize(
    "answer",
    [None, b"", b"HTTP/1.1 200", STREAM, STREAM + b"4\r\ndata\r\n", b"HTTP/1.1 200 O\r\n\r\n"],
)
@pytest.mark.both_loops
async def test_an_aborted_call_closes_its_connection_and_stays_silent(answer: bytes | None) -> None:
    seen: list[bytes] = []

    async def script(connection: RawConnection) -> None:
        await request_of(connection)
        connection.send(answer or b"")
        seen.append(await connection.rest())

    async with engine(*[script] if answer is not None else []) as raw:
        handler, call = begin(raw.endpoint)
        if answer is not None:
            await until(lambda: raw.accepted == 1 and call.sent)
            await until(lambda: call.answered is bool(answer))
        call.abort()
        call.abort()
        call.pause()
        call.resume()
        assert not handler.over
        await until(lambda: raw.endpoint.connections == 0)
        assert not handler.over
        if answer is not None:
            await until(lambda: bool(seen))
    assert not handler.over


@pytest.mark.parametrize("phase", ["on_head", "on_data"])
@pytest.mark.parametrize(
    "answer", [OK, STREAM + b"2\r\nok\r\n0\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\nok"]
)
async def test_a_call_may_be_aborted_from_within_a_callback(answer: bytes, phase: str) -> None:
    async with engine(answering(answer)) as raw:
        handler, call = begin(raw.endpoint)
        taken = getattr(handler, phase)
        calls = 0

        def aborting(*arguments: object) -> None:
            nonlocal calls
            calls += 1
            taken(*arguments)
            call.abort()

        setattr(handler, phase, aborting)
        await until(lambda: calls == 1)
        await until(lambda: raw.endpoint.connections == 0)
        assert not handler.over
        assert raw.endpoint.idle == 0


@pytest.mark.both_loops
async def test_a_paused_call_holds_the_engine_back() -> None:
    piece = bytes(100_000)
    total = 40_000_000  # More than sockets hold.
    written = 0

    async def script(connection: RawConnection) -> None:
        nonlocal written
        await request_of(connection)
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while written < total:
            connection.send(piece)
            await connection.writer.drain()
            written += len(piece)
        await request_of(connection)
        connection.send(OK)
        await connection.rest()

    async with engine(script) as raw:
        handler, call = begin(raw.endpoint)
        call.pause()
        call.pause()
        idle_rounds = 0
        while idle_rounds < 50:
            before = written
            await asyncio.sleep(0)
            idle_rounds = idle_rounds + 1 if written == before and written else 0
        assert 0 < written < total
        assert not handler.pieces
        call.resume()
        await until(lambda: bool(handler.pieces))
        call.pause()
        taken = len(handler.pieces)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(handler.pieces) <= taken + 1
        call.resume()
        await until(lambda: handler.over)
        assert len(handler.body) == total
        assert (await exchange(raw.endpoint)).body == b"ok"


@pytest.mark.both_loops
async def test_a_connection_paused_at_its_end_is_read_again() -> None:
    async with engine(answering(OK, OK)) as raw:
        handler, call = begin(raw.endpoint)
        handler.on_data = lambda data: call.pause()  # type: ignore[method-assign]
        await until(lambda: handler.over)
        assert (await exchange(raw.endpoint)).body == b"ok"
        assert raw.accepted == 1


async def test_large_bodies_go_both_ways() -> None:
    body = bytes(range(256)) * 32_768
    coded = b"".join(b"10000\r\n%b\r\n" % body[i : i + 65_536] for i in range(0, len(body), 65_536))

    async def script(connection: RawConnection) -> None:
        for answer in (
            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body),
            STREAM + coded + b"0\r\n\r\n",
        ):
            assert (await request_of(connection)).endswith(body)
            connection.send(answer)
        await connection.rest()

    async with engine(script) as raw:
        for sent in (body, Pieces([body[:9], memoryview(body)[9:-1], body[-1:]])):
            assert (await exchange(raw.endpoint, sent)).body == body
        assert raw.accepted == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    st.lists(
        st.sampled_from(
            [
                b"HTTP/1.1 200 OK\r\n",
                b"HTTP/1.1 100 Continue\r\n\r\n",
                b"transfer-encoding: chunked\r\n",
                b"content-length: 3\r\n",
                b"\r\n",
                b"\n",
                b"3\r\nabc\r\n",
                b"abc",
                b"0\r\n\r\n",
                b"\0",
            ]
        )
        | st.binary(max_size=20),
        max_size=10,
    )
)
def test_any_answer_ends_the_call_once(run: "Run", pieces: list[bytes]) -> None:
    async def script(connection: RawConnection) -> None:
        await request_of(connection)
        await connection.send_each(pieces)

    async def main() -> None:
        async with engine(script) as raw:
            handler = await exchange(raw.endpoint)
            assert handler.ended != (handler.error is not None)

    run(main())


# One small exchange: what is left of it when it is over.


Cyclic = Callable[[], Counter[str]]
PAGE = b"x" * 30_000
FETCHED = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(PAGE) + PAGE
TIMES = 5


async def get(
    endpoint: Endpoint,
    method: bytes = b"GET",
    *,
    timeout_s: float = 5.0,
    max_bytes: int = 1 << 20,
    cut: bool = False,
) -> Response:
    """Fetch a page."""
    return await fetch(
        endpoint, method, b"/", [], PAGE, timeout_s=timeout_s, max_bytes=max_bytes, cut=cut
    )


def telling(*pieces: bytes) -> Script:
    async def tell(connection: RawConnection) -> None:
        for piece in pieces:
            await connection.until(b"\r\n\r\n")
            await connection.exactly(len(PAGE))
            connection.send(piece)

    return tell


async def keep_silent(connection: RawConnection) -> None:
    await connection.rest()


@pytest.mark.both_loops
async def test_nothing_is_left_of_pages(cyclic: Cyclic) -> None:
    async with engine(telling(*[FETCHED] * TIMES)) as raw:
        for _ in range(TIMES):
            assert (await get(raw.endpoint)).body == PAGE
        assert not cyclic()


@pytest.mark.parametrize(
    ("script", "options", "kind"),
    [
        (telling(FETCHED), {"max_bytes": 1000}, WireFault.TOO_LARGE),
        (telling(FETCHED[:-1]), {}, WireFault.RESET),
        (telling(b"HTTP/1.1 what\r\n\r\n"), {}, WireFault.PROTOCOL),
        (keep_silent, {"timeout_s": 0.001}, WireFault.TIMEOUT),
    ],
)
async def test_nothing_is_left_of_pages_that_do_not_come(
    cyclic: Cyclic,
    script: Script,
    options: dict[str, float],
    kind: WireFault,
) -> None:
    async with engine(*[script] * TIMES) as raw:
        kinds = []
        for _ in range(TIMES):
            # A task may keep the error, and so all that it refers to.
            asked = asyncio.create_task(get(raw.endpoint, b"POST", **options))  # type: ignore[arg-type]
            await asyncio.wait([asked])
            error = asked.exception()
            assert isinstance(error, WireError)
            kinds.append(error.kind)
            del asked, error
        assert kinds == [kind] * TIMES
        left = cyclic()
        assert not left.keys() & {"Call", "Endpoint", "Response", "WireError", "_Collector"}


@pytest.mark.both_loops
async def test_nothing_is_left_of_one_that_is_cut(cyclic: Cyclic) -> None:
    async with engine(telling(FETCHED)) as raw:
        assert len((await get(raw.endpoint, max_bytes=1000, cut=True)).body) > 1000
        assert not cyclic().keys() & {"Call", "Response", "_Collector"}


async def test_nothing_is_left_of_calls_to_who_is_not_there(cyclic: Cyclic) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # And does not listen.
        endpoint = Endpoint("127.0.0.1", taken.getsockname()[1])
        for _ in range(TIMES):
            asked = asyncio.create_task(get(endpoint, b"POST"))
            await asyncio.wait([asked])
            error = asked.exception()
            assert isinstance(error, WireError)
            assert error.kind is WireFault.CONNECT
            assert isinstance(error.__cause__, ConnectionRefusedError)
            del asked, error
        assert not cyclic()
