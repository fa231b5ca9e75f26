"""A served application, and clients and engines that speak in raw bytes."""

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.http1.server import Application, Make, Server
from balanceroute.proxy.wire.http1.server_connection import ServerConnection
from balanceroute.proxy.wire.messages import HttpRequest, Reply, ServerLimits

HOST = "127.0.0.1"


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


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (What is waited for sets no event.)
        await asyncio.sleep(0)


class Desk:
    """An application that keeps what it was given, and counts the calls of its replies."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.replies: list[Reply] = []
        self.closed: list[HttpRequest] = []
        self.paused = self.resumed = 0

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        self.requests.append(request)
        self.replies.append(reply)

        def closed() -> None:
            assert reply.closed
            self.closed.append(request)

        def paused() -> None:
            assert reply.paused
            self.paused += 1

        def resumed() -> None:
            assert not reply.paused
            self.resumed += 1

        reply.on_closed, reply.on_pause, reply.on_resume = closed, paused, resumed

    async def reply(self, number: int = 1) -> Reply:
        """Return a request's reply, once the request is there."""
        await until(lambda: len(self.replies) >= number)
        return self.replies[number - 1]


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[RawConnection]:
    """Open a raw connection to a port."""
    connection = RawConnection(*await asyncio.open_connection(HOST, port))
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def serving(
    application: Application, make: Make = ServerConnection, **limits: Any
) -> AsyncIterator[Server]:
    """Serve an application with the given limits; in the end no connection may be left."""
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


@asynccontextmanager
async def engine(*scripts: Script, **options: Any) -> AsyncIterator[RawEngine]:
    """Serve scripts, one per connection, to an endpoint; in the end it may have no connection."""
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
