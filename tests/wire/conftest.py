"""Both event loops, a served application, and clients and engines that speak in raw bytes."""

import asyncio
import inspect
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from tests.extended import usually
from tests.support.certificate import CERT, KEY

from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.server import Application, Make, Server
from balanceroute.proxy.wire.http1.server_connection import ServerConnection
from balanceroute.proxy.wire.messages import ServerLimits

HOST = "127.0.0.1"
PATIENCE_S = 10.0  # Only ever waited for by a test that fails.

NewLoop = Callable[[], asyncio.AbstractEventLoop]
Run = Callable[[Coroutine[Any, Any, None]], None]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Have event loops run each test that is a coroutine, or takes `run`, and names none itself.

    Always the one that serves, uvloop's. Asyncio's own, whose buffers, half-closes and cancellations differ, in
    `make test` where the test is marked `both_loops`.
    """
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("new_loop")
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "new_loop" in metafunc.fixturenames and "new_loop" not in named:
        usual = {"uvloop"}
        if metafunc.definition.get_closest_marker("both_loops"):
            usual.add("asyncio")
        loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
        metafunc.parametrize("new_loop", usually(usual, loops.values(), ids=loops))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    run_silently(cast("NewLoop", pyfuncitem.callspec.params["new_loop"]), test)
    return True


def run_silently(new_loop: NewLoop, main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine; nothing may be left behind or reported to the loop's exception handler."""
    reported: list[dict[str, Any]] = []

    async def guarded() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        async with asyncio.timeout(PATIENCE_S):
            await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(guarded())
    assert not reported


@pytest.fixture
def run(new_loop: NewLoop) -> Run:
    """Return `run_silently` for a test that Hypothesis calls many times, which is no coroutine."""
    return partial(run_silently, new_loop)


@dataclass(frozen=True)
class Answer:
    """A response as a client sees it."""

    status: int
    headers: dict[str, str]
    body: bytes


class RawConnection:
    """One end of a connection, in bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def send_each(self, pieces: list[bytes]) -> None:
        """Send pieces that arrive one by one."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def until(self, end: bytes) -> bytes:
        """Read up to and including some bytes."""
        return await self.reader.readuntil(end)

    async def exactly(self, size: int) -> bytes:
        return await self.reader.readexactly(size)

    async def rest(self) -> bytes:
        """Read to the end of the connection."""
        return await self.reader.read()

    async def answer(self, *, to_head: bool = False) -> Answer:
        """Read one response."""
        line, *fields = (await self.until(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        version, status, _ = line.split(" ", 2)
        assert version == "HTTP/1.1"
        headers = dict(field.split(": ", 1) for field in fields)
        assert len(headers) == len(fields)
        body = b""
        if to_head:
            pass
        elif "transfer-encoding" in headers:
            assert headers["transfer-encoding"] == "chunked"
            chunks = []
            while size := int(await self.until(b"\r\n"), 16):
                chunks.append(await self.exactly(size))
                assert await self.exactly(2) == b"\r\n"
            assert await self.exactly(2) == b"\r\n"
            body = b"".join(chunks)
        else:
            body = await self.exactly(int(headers.get("content-length", "0")))
        return Answer(int(status), headers, body)

    def finish(self) -> None:
        """Send a FIN and go on reading."""
        self.writer.write_eof()

    def reset(self) -> None:
        """Close with an RST."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


Connect = Callable[[int], AbstractAsyncContextManager[RawConnection]]


@pytest.fixture
def connect() -> Connect:
    """Open a raw connection to a port."""

    @asynccontextmanager
    async def connected(port: int) -> AsyncIterator[RawConnection]:
        connection = RawConnection(*await asyncio.open_connection(HOST, port))
        try:
            yield connection
        finally:
            await connection.close()

    return connected


Serving = Callable[..., AbstractAsyncContextManager[Server]]


@pytest.fixture
def serving() -> Serving:
    """Serve an application with the given limits; in the end no connection may be left."""

    @asynccontextmanager
    async def served(
        application: Application, make: Make = ServerConnection, **limits: Any
    ) -> AsyncIterator[Server]:
        server = Server(application, limits=ServerLimits(**limits), make=make)
        await server.start(HOST, 0)
        try:
            yield server
            server.stop_accepting()
            await server.drain()
            assert server.connections == 0
        finally:
            server.close()
            await server.drain()

    return served


Script = Callable[[RawConnection], Awaitable[None]]


class RawEngine:
    """Runs the next script for each connection it accepts."""

    def __init__(self, scripts: list[Script]) -> None:
        self._scripts = scripts
        self.accepted = 0  # Connections so far.
        self.errors: list[BaseException] = []
        self.endpoint: Endpoint  # The subject, connected to this engine.

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self._scripts[self.accepted]
        self.accepted += 1
        connection = RawConnection(reader, writer)
        try:
            with suppress(ConnectionError):
                await script(connection)
        except Exception as error:
            self.errors.append(error)
        await connection.close()


Engine = Callable[..., AbstractAsyncContextManager[RawEngine]]


@pytest.fixture
def engine() -> Engine:
    """Serve scripts, one per connection, to an endpoint; in the end it may have no connection."""

    @asynccontextmanager
    async def served(*scripts: Script, **options: Any) -> AsyncIterator[RawEngine]:
        raw = RawEngine(list(scripts))
        listener = await asyncio.start_server(raw.serve, HOST, 0)
        raw.endpoint = Endpoint(HOST, listener.sockets[0].getsockname()[1], **options)
        try:
            yield raw
        finally:
            raw.endpoint.close()
            listener.close()
            await listener.wait_closed()
        while raw.endpoint.connections or len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert raw.endpoint.idle == 0
        assert not raw.errors

    return served


@pytest.fixture
def contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return TLS contexts of a server and of a client that trusts it."""
    path = tmp_path / "localhost.pem"
    path.write_text(CERT + KEY)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(path)
    return server, ssl.create_default_context(cadata=CERT)
