"""Connecting to engines: what comes of it before a request was sent."""

import asyncio
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from ssl import create_default_context
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.played import in_virtual_time
from tests.support.virtual.addresses import Connect, Link
from tests.support.virtual.loop import VirtualLoop
from tests.wire.http1.test_client import (
    OK,
    Handler,
    answer_and_close,
    answering,
    begin,
    exchange,
    request_of,
)
from tests.wire.raw_bytes import RawConnection, Script, engine, until

from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.http1.client_connection import Call, ClientConnection
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Response, WireError, WireFault

if TYPE_CHECKING:
    from ssl import SSLContext


BARE_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class ConnectingHandler:
    """Keeps how a call ends, and checks that it does so once."""

    def __init__(self) -> None:
        self.body = b""
        self.over = False
        self.error: WireError | None = None

    def on_head(self, status: int, headers: Headers) -> None:
        assert not self.over

    def on_data(self, data: bytes) -> None:
        self.body += data

    def on_end(self) -> None:
        assert not self.over
        self.over = True

    def on_error(self, error: WireError) -> None:
        assert not self.over
        self.over = True
        self.error = error


async def until_so(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (What is waited for sets no event.)
        await asyncio.sleep(0)


def begin_connecting(endpoint: Endpoint) -> ConnectingHandler:
    handler = ConnectingHandler()
    endpoint.request(b"GET", b"/", [], b"", handler)
    assert not handler.over
    return handler


async def connect_and_exchange(endpoint: Endpoint) -> ConnectingHandler:
    handler = begin_connecting(endpoint)
    await until_so(lambda: handler.over)
    return handler


async def wait_for_the_end(connection: RawConnection) -> None:
    await connection.rest()


async def test_a_refused_connection_was_never_sent_anything() -> None:
    listener = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    endpoint = Endpoint("127.0.0.1", port)
    handler = await connect_and_exchange(endpoint)
    assert handler.error is not None
    assert handler.error.kind is WireFault.CONNECT
    assert (handler.error.sent, handler.error.answered) == (False, False)
    assert isinstance(handler.error.__cause__, ConnectionRefusedError)
    await until_so(lambda: endpoint.connections == 0)


@pytest.mark.parametrize("banner", [b"", b"220 mail ESMTP\r\n"])
@pytest.mark.both_loops
async def test_an_engine_that_closes_at_once_is_an_error(banner: bytes) -> None:
    async def slam(connection: RawConnection) -> None:
        connection.send(banner)
        connection.reset()

    async with engine(*[slam] * 50) as raw:
        handlers = [begin_connecting(raw.endpoint) for _ in range(50)]
        await until_so(lambda: all(handler.over for handler in handlers))
        for handler in handlers:
            assert handler.error is not None
            assert handler.error.kind in (WireFault.RESET, WireFault.PROTOCOL)


async def test_a_connection_lost_before_its_request_was_never_sent_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection_made = ClientConnection.connection_made

    def lose(self: ClientConnection, transport: asyncio.BaseTransport) -> None:
        connection_made(self, transport)
        self.drop()

    async with engine(wait_for_the_end) as raw:
        monkeypatch.setattr(ClientConnection, "connection_made", lose)
        handler = await connect_and_exchange(raw.endpoint)
        assert handler.error is not None
        assert handler.error.kind is WireFault.RESET
        assert (handler.error.sent, handler.error.answered) == (False, False)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.both_loops
async def test_a_call_aborted_while_its_connection_opens_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
    cyclic: Callable[[], Counter[str]],
    later: bool,
) -> None:
    connection_made = ClientConnection.connection_made

    async with engine(wait_for_the_end) as raw:
        call: Call | None = raw.endpoint.request(b"POST", b"/", [], b"large", ConnectingHandler())
        made = asyncio.Event()

        def leave(self: ClientConnection, transport: asyncio.BaseTransport) -> None:
            connection_made(self, transport)
            made.set()
            assert call is not None
            if later:
                asyncio.get_running_loop().call_soon(call.abort)
            else:
                call.abort()

        with monkeypatch.context() as patch:
            patch.setattr(ClientConnection, "connection_made", leave)
            await made.wait()
            await until_so(lambda: raw.endpoint.connections == 0)
        call = None
        assert not cyclic()["Call"]


async def answer(
    served: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer one request, and set the event when its client is gone."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(BARE_OK)
    await reader.read()
    writer.close()
    served.set()


async def test_a_connection_that_was_taken_during_a_standstill_is_in_time() -> None:
    loop = asyncio.get_running_loop()
    connect, served = loop.create_connection, asyncio.Event()

    async def connect_and_stand_still(*words: Any, **options: Any) -> Any:
        connecting = loop.create_task(connect(*words, **options))
        loop.call_soon(time.sleep, 0.3)  # In the turn in which it begins.
        return await connecting

    listener = await asyncio.start_server(partial(answer, served), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    endpoint = Endpoint("127.0.0.1", port, connect_timeout_s=0.2)
    loop.create_connection = connect_and_stand_still  # type: ignore[method-assign]
    handler = await connect_and_exchange(endpoint)
    assert handler.error is None
    assert handler.body == b"ok"
    endpoint.close()
    await until_so(lambda: endpoint.connections == 0)
    await served.wait()
    listener.close()
    await listener.wait_closed()


@pytest.mark.both_loops
async def test_a_name_that_cannot_be_resolved_is_a_connect_error() -> None:
    endpoint = Endpoint("a" * 64 + ".invalid", 80)
    handler = await connect_and_exchange(endpoint)
    assert handler.error is not None
    assert handler.error.kind is WireFault.CONNECT
    await until_so(lambda: endpoint.connections == 0)


@pytest.mark.both_loops
async def test_an_engine_behind_tls_is_verified(contexts: "tuple[SSLContext, SSLContext]") -> None:
    served = asyncio.Event()

    listener = await asyncio.start_server(partial(answer, served), "127.0.0.1", 0, ssl=contexts[0])
    port = listener.sockets[0].getsockname()[1]
    stranger = Endpoint("127.0.0.1", port, ssl=create_default_context())
    handler = await connect_and_exchange(stranger)
    assert handler.error is not None
    assert handler.error.kind is WireFault.CONNECT
    assert not handler.error.sent
    endpoint = Endpoint("127.0.0.1", port, ssl=contexts[1])
    assert endpoint.name == f"https://127.0.0.1:{port}"
    assert (await connect_and_exchange(endpoint)).body == b"ok"
    endpoint.close()
    await until_so(lambda: stranger.connections + endpoint.connections == 0)
    await served.wait()
    listener.close()
    await listener.wait_closed()


# Connections that are used again: what is sent twice, what never, and which are not taken.


OK_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


def stale(*, reset: bool) -> Script:
    """Answer one request and close at the next, unanswered."""

    async def script(connection: RawConnection) -> None:
        await request_of(connection)
        connection.send(OK)
        await request_of(connection)
        if reset:
            connection.reset()

    return script


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize("reset", [False, True])
async def test_a_get_on_a_reused_connection_that_closes_unanswered_is_sent_once_more(
    *, reset: bool, method: bytes
) -> None:
    async with engine(stale(reset=reset), answering(OK_HEAD if method == b"HEAD" else OK)) as raw:
        assert (await exchange(raw.endpoint)).ended
        assert (await exchange(raw.endpoint, method=method)).ended
        assert raw.accepted == 2


@pytest.mark.parametrize("reset", [False, True])
async def test_a_post_is_never_sent_twice(*, reset: bool) -> None:
    """What was written may have been done, so the loss is reported to the caller."""
    async with engine(stale(reset=reset), answering(OK)) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler = await exchange(raw.endpoint, b"pull this KV cache")
        assert handler.error is not None
        assert handler.error.kind is WireFault.STALE
        assert (handler.error.sent, handler.error.answered) == (True, False)
        assert (raw.accepted, raw.endpoint.idle) == (2, 1)
        # The connection that showed that the engine is there is the next request's.
        assert (await exchange(raw.endpoint)).ended
        assert raw.accepted == 2


async def test_a_post_that_is_lost_with_its_engine_is_a_reset() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        handler, _ = begin(endpoint, b"work")
        peer, _ = await loop.sock_accept(listener)
        await loop.sock_recv(peer, 65_536)
        await loop.sock_sendall(peer, OK)
        await until(lambda: handler.ended)
        handler, _ = begin(endpoint, b"kill it")
        await loop.sock_recv(peer, 65_536)
    peer.close()
    await until(lambda: handler.over)
    assert handler.error is not None
    assert handler.error.kind is WireFault.RESET
    assert (handler.error.sent, handler.error.answered) == (True, False)
    await until(lambda: endpoint.connections == 0)


async def test_an_engine_that_ends_whatever_is_reused_gets_new_connections() -> None:
    """After two losses in a row each request has one of its own, for a minute."""
    scripts = [stale(reset=False), stale(reset=False), *[answering(OK)] * 2]
    async with engine(*scripts) as raw:
        lost = 0
        for _ in range(6):
            handler = await exchange(raw.endpoint, b"work")
            lost += handler.error is not None
        assert lost == 2
        assert raw.accepted == 4
        assert raw.endpoint.idle == 0


async def test_an_engine_that_answers_on_a_reused_connection_keeps_them() -> None:
    async def thrice(connection: RawConnection) -> None:
        for _ in range(2):
            await request_of(connection)
            connection.send(OK)
        await request_of(connection)

    async with engine(thrice, thrice, thrice, answering()) as raw:
        errors = [(await exchange(raw.endpoint, b"work")).error for _ in range(9)]
        assert [error is not None for error in errors] == [False, False, True] * 3
        assert raw.endpoint.idle == 1


async def test_a_fresh_request_takes_no_connection_that_was_used() -> None:
    async with engine(answering(OK), answering(OK)) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler = Handler()
        raw.endpoint.request(b"POST", b"/", [], b"work", handler, fresh=True)
        await until(lambda: handler.ended)
        assert (raw.accepted, raw.endpoint.idle) == (2, 2)


@pytest.mark.both_loops
async def test_a_reused_connection_that_dies_takes_the_other_idle_ones_with_it() -> None:
    async def once(connection: RawConnection) -> None:
        await request_of(connection)
        connection.send(OK)
        if await connection.reader.read(1):
            connection.reset()

    async with engine(once, once, answering()) as raw:
        both = [begin(raw.endpoint)[0] for _ in range(2)]
        await until(lambda: all(handler.ended for handler in both))
        assert raw.endpoint.idle == 2
        assert (await exchange(raw.endpoint)).error is not None
        assert (raw.accepted, raw.endpoint.idle) == (3, 1)  # A new one.


@pytest.mark.parametrize("end", ["closed", "reset", "spoke"])
@pytest.mark.both_loops
async def test_a_connection_that_the_kernel_knows_to_be_over_is_not_used_again(end: str) -> None:
    """The loop has not read the engine's FIN, RST or stray bytes, but nothing is lost."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        loop = asyncio.get_running_loop()

        async def serve() -> socket.socket:
            """Begin an exchange, accept its connection and answer."""
            handler, _ = begin(endpoint, b"work")
            peer, _ = await loop.sock_accept(listener)
            await loop.sock_recv(peer, 65_536)
            await loop.sock_sendall(peer, OK)
            await until(lambda: handler.ended)
            return peer

        with await serve() as peer:
            # From here to the next request the loop does not run.
            if end == "spoke":
                peer.send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
            elif end == "reset":
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                peer.close()
            else:
                peer.close()
            with await serve():
                endpoint.close()
                await until(lambda: not endpoint.connections)


async def test_a_retry_that_fails_is_an_error_that_remembers_what_was_sent() -> None:
    async with engine(stale(reset=False), answer_and_close(b"")) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler = await exchange(raw.endpoint, method=b"GET")
        assert handler.error is not None
        assert handler.error.kind is WireFault.RESET
        assert (handler.error.sent, handler.error.answered) == (True, False)
        assert raw.accepted == 2


@pytest.mark.both_loops
async def test_a_call_may_be_aborted_while_it_is_retried() -> None:
    async with engine(stale(reset=False), answering()) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler, call = begin(raw.endpoint, method=b"GET")
        await until(lambda: call.connection is None)
        call.abort()
        await until(lambda: raw.endpoint.connections == 0)
        assert not handler.over


async def test_a_reused_connection_that_answered_a_byte_is_not_retried() -> None:
    async def half(connection: RawConnection) -> None:
        await request_of(connection)
        connection.send(OK)
        await request_of(connection)
        connection.send(b"H")

    async with engine(half) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler = await exchange(raw.endpoint)
        assert handler.error is not None
        assert handler.error.kind is WireFault.RESET
        assert handler.error.answered
        assert raw.accepted == 1


async def test_a_request_whose_time_is_over_is_not_written() -> None:
    """It may be over when the connection is there, or when the process goes on after a stop."""

    async def late(endpoint: Endpoint) -> None:
        handler = Handler()
        expires_s = asyncio.get_running_loop().time()
        call = endpoint.request(b"POST", b"/", [], b"late", handler, expires_s=expires_s)
        assert not handler.over  # Never before the caller has the call.
        await until(lambda: handler.over)
        assert call.done
        assert handler.error is not None
        assert (handler.error.kind, handler.error.sent) == (WireFault.TOO_LATE, False)

    async with engine(answering(OK, OK)) as raw:
        await late(raw.endpoint)  # On a new connection, which is kept.
        assert raw.endpoint.idle == 1
        assert (await exchange(raw.endpoint)).ended
        await late(raw.endpoint)  # On an idle one.
        assert raw.endpoint.idle == 1
        in_time = Handler()
        expires_s = asyncio.get_running_loop().time() + 600.0
        raw.endpoint.request(b"POST", b"/", [], b"", in_time, expires_s=expires_s)
        await until(lambda: in_time.over)
        assert in_time.ended
        assert raw.accepted == 1


async def test_a_late_request_that_is_aborted_ends_without_a_callback() -> None:
    async with engine(answering(OK, OK)) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler = Handler()
        raw.endpoint.request(b"POST", b"/", [], b"", handler, expires_s=0.0).abort()
        assert (await exchange(raw.endpoint)).ended
        assert not handler.over


# The endpoint's deadlines, in virtual time.


def timed_answer(request: HttpRequest, reply: Reply) -> None:
    match request.path:
        case b"/never":
            pass
        case b"/begun":
            reply.start(200, [])
            reply.write(b"begun")
        case b"/large":
            reply.send(200, [], bytes(1001))
        case _:
            reply.send(200, [(b"x", b"y")], request.body)


async def get(endpoint: Endpoint, target: bytes = b"/") -> Response:
    return await fetch(endpoint, b"GET", target, [], b"", timeout_s=30, max_bytes=1000)


async def served(loop: VirtualLoop) -> tuple[Server, Endpoint]:
    server = Server(timed_answer)
    await server.start("127.0.0.1", 0)
    return server, Endpoint("127.0.0.1", server.port)


async def end(server: Server, endpoint: Endpoint, loop: VirtualLoop) -> None:
    endpoint.close()
    server.close()
    await server.drain()
    await asyncio.sleep(0.1)
    assert (endpoint.connections, endpoint.idle, loop.pending_timers) == (0, 0, 0)


@pytest.mark.both_loops
@in_virtual_time(seed=0, link=Link(connect=Connect.HANG))
async def test_a_connect_that_hangs_ends_in_time(loop: VirtualLoop) -> None:
    endpoint = Endpoint("127.0.0.1", 8000)
    begin_s = loop.time()
    with pytest.raises(WireError) as raised:
        await get(endpoint)
    assert loop.time() - begin_s == pytest.approx(5)
    assert raised.value.kind is WireFault.CONNECT_TIMEOUT
    assert (raised.value.sent, raised.value.answered) == (False, False)
    await asyncio.sleep(0)
    assert endpoint.connections == 0
    assert loop.pending_timers == 0


@in_virtual_time(seed=0)
async def test_a_fetch_returns_the_response(loop: VirtualLoop) -> None:
    server, endpoint = await served(loop)
    response = await fetch(endpoint, b"POST", b"/", [], b"body", timeout_s=1, max_bytes=4)
    assert (response.status, response.body, response.header(b"x")) == (200, b"body", b"y")
    assert response.header(b"z") is None
    assert endpoint.idle == 1
    await end(server, endpoint, loop)


@pytest.mark.parametrize(("target", "answered"), [(b"/never", False), (b"/begun", True)])
@in_virtual_time(seed=0)
async def test_a_fetch_ends_in_time(loop: VirtualLoop, target: bytes, *, answered: bool) -> None:
    server, endpoint = await served(loop)
    begin_s = loop.time()
    with pytest.raises(WireError, match="within 30 s") as raised:
        await get(endpoint, target)
    assert loop.time() - begin_s == pytest.approx(30)
    assert raised.value.kind is WireFault.TIMEOUT
    assert (raised.value.sent, raised.value.answered) == (True, answered)
    await asyncio.sleep(0.1)
    assert endpoint.connections == 0
    await end(server, endpoint, loop)


@in_virtual_time(seed=0)
async def test_a_fetch_of_too_much_is_refused(loop: VirtualLoop) -> None:
    server, endpoint = await served(loop)
    with pytest.raises(WireError) as raised:
        await get(endpoint, b"/large")
    assert raised.value.kind is WireFault.TOO_LARGE
    await asyncio.sleep(0.1)
    assert endpoint.connections == 0
    await end(server, endpoint, loop)


@pytest.mark.both_loops
@in_virtual_time(seed=0)
async def test_a_cancelled_fetch_closes_its_connection(loop: VirtualLoop) -> None:
    server, endpoint = await served(loop)
    for wait_s in (0.0, 1e-5, 0.1):  # Before, while and after it connects.
        task = asyncio.create_task(get(endpoint, b"/never"))
        await asyncio.sleep(wait_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert endpoint.connections == 0
        assert server.connections == 0
    await end(server, endpoint, loop)


@in_virtual_time(seed=0)
async def test_idle_connections_are_closed_in_time_and_never_used_late(loop: VirtualLoop) -> None:
    server, endpoint = await served(loop)
    await get(endpoint)
    for _ in range(3):
        await asyncio.sleep(3.9)
        await get(endpoint)
        assert server.connections == 1
    await asyncio.sleep(3.99)
    assert endpoint.connections == 1
    await asyncio.sleep(1.01)
    assert endpoint.connections == 0
    await end(server, endpoint, loop)


@in_virtual_time(seed=0)
async def test_connections_idle_too_long_are_not_used_though_the_sweep_has_not_come(
    loop: VirtualLoop,
) -> None:
    server, endpoint = await served(loop)
    await get(endpoint)  # The sweep comes in whole seconds from here.
    await asyncio.sleep(0.5)
    await asyncio.gather(get(endpoint), get(endpoint))
    old = list(endpoint._idle)
    await asyncio.sleep(4.0)
    assert list(endpoint._idle) == old
    await get(endpoint)
    (fresh,) = endpoint._idle
    assert fresh not in old
    await asyncio.sleep(0.1)
    assert endpoint.connections == 1
    await end(server, endpoint, loop)


@in_virtual_time(seed=0)
async def test_the_oldest_idle_connections_close_first(loop: VirtualLoop) -> None:
    server, endpoint = await served(loop)
    await asyncio.gather(*(get(endpoint) for _ in range(10)))
    assert endpoint.idle == 10
    for _ in range(6):
        await asyncio.sleep(1)
        await get(endpoint)
    assert (endpoint.connections, endpoint.idle) == (1, 1)
    await end(server, endpoint, loop)


@in_virtual_time(seed=0)
async def test_names_of_endpoints(loop: VirtualLoop) -> None:
    assert Endpoint("::1", 80).name == "http://[::1]:80"
    assert Endpoint("engine", 8000).name == "http://engine:8000"
