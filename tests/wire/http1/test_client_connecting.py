"""Connecting to engines: what comes of it before a request was sent."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from ssl import create_default_context
from typing import TYPE_CHECKING, Any

import pytest

from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.client_connection import Call, ClientConnection
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault

if TYPE_CHECKING:
    from ssl import SSLContext

    from tests.wire.conftest import Engine, RawConnection

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Handler:
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


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (What is waited for sets no event.)
        await asyncio.sleep(0)


def begin(endpoint: Endpoint) -> Handler:
    handler = Handler()
    endpoint.request(b"GET", b"/", [], b"", handler)
    assert not handler.over
    return handler


async def exchange(endpoint: Endpoint) -> Handler:
    handler = begin(endpoint)
    await until(lambda: handler.over)
    return handler


async def wait_for_the_end(connection: "RawConnection") -> None:
    await connection.rest()


async def test_a_refused_connection_was_never_sent_anything() -> None:
    listener = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    listener.close()
    await listener.wait_closed()
    endpoint = Endpoint("127.0.0.1", port)
    handler = await exchange(endpoint)
    assert handler.error is not None
    assert handler.error.kind is WireFault.CONNECT
    assert (handler.error.sent, handler.error.answered) == (False, False)
    assert isinstance(handler.error.__cause__, ConnectionRefusedError)
    await until(lambda: endpoint.connections == 0)


@pytest.mark.parametrize("banner", [b"", b"220 mail ESMTP\r\n"])
@pytest.mark.both_loops
async def test_an_engine_that_closes_at_once_is_an_error(engine: "Engine", banner: bytes) -> None:
    async def slam(connection: "RawConnection") -> None:
        connection.send(banner)
        connection.reset()

    async with engine(*[slam] * 50) as raw:
        handlers = [begin(raw.endpoint) for _ in range(50)]
        await until(lambda: all(handler.over for handler in handlers))
        for handler in handlers:
            assert handler.error is not None
            assert handler.error.kind in (WireFault.RESET, WireFault.PROTOCOL)


async def test_a_connection_lost_before_its_request_was_never_sent_anything(
    engine: "Engine", monkeypatch: pytest.MonkeyPatch
) -> None:
    connection_made = ClientConnection.connection_made

    def lose(self: ClientConnection, transport: asyncio.BaseTransport) -> None:
        connection_made(self, transport)
        self.drop()

    async with engine(wait_for_the_end) as raw:
        monkeypatch.setattr(ClientConnection, "connection_made", lose)
        handler = await exchange(raw.endpoint)
        assert handler.error is not None
        assert handler.error.kind is WireFault.RESET
        assert (handler.error.sent, handler.error.answered) == (False, False)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.both_loops
async def test_a_call_aborted_while_its_connection_opens_is_forgotten(
    engine: "Engine",
    monkeypatch: pytest.MonkeyPatch,
    cyclic: Callable[[], Counter[str]],
    later: bool,
) -> None:
    connection_made = ClientConnection.connection_made

    async with engine(wait_for_the_end) as raw:
        call: Call | None = raw.endpoint.request(b"POST", b"/", [], b"large", Handler())
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
            await until(lambda: raw.endpoint.connections == 0)
        call = None
        assert not cyclic()["Call"]


async def answer(
    served: asyncio.Event, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer one request, and set the event when its client is gone."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(OK)
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
    handler = await exchange(endpoint)
    assert handler.error is None
    assert handler.body == b"ok"
    endpoint.close()
    await until(lambda: endpoint.connections == 0)
    await served.wait()
    listener.close()
    await listener.wait_closed()


@pytest.mark.both_loops
async def test_a_name_that_cannot_be_resolved_is_a_connect_error() -> None:
    endpoint = Endpoint("a" * 64 + ".invalid", 80)
    handler = await exchange(endpoint)
    assert handler.error is not None
    assert handler.error.kind is WireFault.CONNECT
    await until(lambda: endpoint.connections == 0)


@pytest.mark.both_loops
async def test_an_engine_behind_tls_is_verified(contexts: "tuple[SSLContext, SSLContext]") -> None:
    served = asyncio.Event()

    listener = await asyncio.start_server(partial(answer, served), "127.0.0.1", 0, ssl=contexts[0])
    port = listener.sockets[0].getsockname()[1]
    stranger = Endpoint("127.0.0.1", port, ssl=create_default_context())
    handler = await exchange(stranger)
    assert handler.error is not None
    assert handler.error.kind is WireFault.CONNECT
    assert not handler.error.sent
    endpoint = Endpoint("127.0.0.1", port, ssl=contexts[1])
    assert endpoint.name == f"https://127.0.0.1:{port}"
    assert (await exchange(endpoint)).body == b"ok"
    endpoint.close()
    await until(lambda: stranger.connections + endpoint.connections == 0)
    await served.wait()
    listener.close()
    await listener.wait_closed()
