"""Between the proxy and one engine: passes bytes on, and breaks HTTP's framing on demand.

An emulated engine speaks HTTP through `proxy/wire`, which writes no malformed framing. This speaks
raw bytes.
"""

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, cast

from balanceroute.proxy.wire.http1.chunked import ChunkedDecoder

if TYPE_CHECKING:
    from tests.support.virtual.loop import VirtualLoop

_HEAD_END = b"\r\n\r\n"
_SECOND_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nalien!"
TOO_LARGE = (
    b'{"error":{"message":"too large","type":"RequestTooLargeError","param":null,"code":413}}'
)
# After so many payloads a broken size comes.
_PAYLOADS_BEFORE_BREAK = 3


class Meddling(Enum):
    """What is done to the exchanges of a connection."""

    EXTENSIONS = "chunk extensions"
    TRAILERS = "trailers"
    TINY_CHUNKS = "tiny chunks"
    INTERIM = "interim responses"
    BAD_SIZE = "bad chunk size"
    OVERFLOW = "chunk size overflow"
    SWITCHING = "switching protocols"
    NO_CONTENT = "204 with a body"
    SECOND_RESPONSE = "a second response behind the first"
    EARLY_REFUSAL = "413 before the request was read"
    CLOSE_ON_REUSE = "close when used again"
    GARBAGE_WHEN_IDLE = "bytes when idle"


# Those that an HTTP client has to take without harm.
HARMLESS = (Meddling.EXTENSIONS, Meddling.TRAILERS, Meddling.TINY_CHUNKS, Meddling.INTERIM)


class Meddler:
    """Listens in place of one engine."""

    def __init__(self, loop: "VirtualLoop", host: str, port: int) -> None:
        # What to do to exchanges that begin from now on; None to pass bytes on.
        self.meddling: Meddling | None = None
        self.port = 0  # Where it listens.
        self._loop = loop
        self._address = host, port
        self._server: asyncio.Server | None = None
        self._links: dict[_FromProxy, None] = {}

    async def start(self) -> None:
        """Listen."""
        self._server = await self._loop.create_server(lambda: _FromProxy(self), self._address[0], 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Listen no more, and cut every connection."""
        assert self._server is not None
        self._server.close()
        for link in list(self._links):
            link.cut()

    def joined(self, link: "_FromProxy") -> None:
        """Count a connection."""
        self._links[link] = None

    def left(self, link: "_FromProxy") -> None:
        """Forget a connection."""
        self._links.pop(link, None)

    async def connect(self, protocol: "_ToEngine") -> None:
        """Connect a protocol to the engine.

        Raises:
            OSError: There is no connection.
        """
        await self._loop.create_connection(lambda: protocol, *self._address)


class _FromProxy(asyncio.Protocol):
    """The proxy's connection."""

    transport: asyncio.Transport

    def __init__(self, meddler: Meddler) -> None:
        self.meddler = meddler
        self._engine = _ToEngine(self)
        self._exchanges = 0
        self._waiting: list[bytes] = []
        self._connected = False
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.meddler.joined(self)
        self._task = asyncio.get_running_loop().create_task(self._connect())

    def data_received(self, data: bytes) -> None:
        meddling = self.meddler.meddling
        if data.startswith((b"POST ", b"GET ")):
            self._exchanges += 1
            self._engine.begin(meddling)
            if meddling is Meddling.CLOSE_ON_REUSE and self._exchanges > 1:
                self.cut()
                return
            if meddling is Meddling.EARLY_REFUSAL and data.startswith(b"POST "):
                self.transport.write(
                    b"HTTP/1.1 413 Too Large\r\ncontent-type: application/json\r\n"
                    b"connection: close\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(TOO_LARGE), TOO_LARGE)
                )
                self.transport.close()
                return
        if self._connected:
            self._engine.transport.write(data)
        else:
            self._waiting.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.meddler.left(self)
        if self._task is not None:
            self._task.cancel()
        if self._connected:
            self._engine.transport.abort()

    def cut(self) -> None:
        """Reset both sides."""
        self.transport.abort()

    async def _connect(self) -> None:
        try:
            await self.meddler.connect(self._engine)
        except OSError:
            self.transport.abort()
            return
        self._connected = True
        for data in self._waiting:
            self._engine.transport.write(data)
        self._waiting.clear()


class _ToEngine(asyncio.Protocol):
    """The connection to the engine."""

    transport: asyncio.Transport

    def __init__(self, proxy: _FromProxy) -> None:
        self._proxy = proxy
        self._meddling: Meddling | None = None
        self._head = b""
        self._in_head = True
        self._decoder: ChunkedDecoder | None = None
        self._payloads = 0

    def begin(self, meddling: Meddling | None) -> None:
        """Expect the response to one more request."""
        self._meddling = meddling
        self._head = b""
        self._in_head = True
        self._decoder = None
        self._payloads = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._meddling is None:
            self._proxy.transport.write(data)
        elif self._in_head:
            self._head += data
            head, mark, rest = self._head.partition(_HEAD_END)
            if mark:
                self._in_head = False
                self._pass_head(head + mark)
                self._pass_body(rest)
        else:
            self._pass_body(data)

    def eof_received(self) -> None:
        self._proxy.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None:
            self._proxy.transport.close()
        else:
            self._proxy.transport.abort()

    def _pass_head(self, head: bytes) -> None:
        write = self._proxy.transport.write
        if b"transfer-encoding: chunked" in head:
            self._decoder = ChunkedDecoder()
        match self._meddling:
            case Meddling.INTERIM:
                write(b"HTTP/1.1 100 Continue\r\n\r\n")
                write(b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + head)
            case Meddling.SWITCHING:
                write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n" + head)
            case Meddling.NO_CONTENT:
                write(head.replace(b"200 OK", b"204 No Content", 1))
            case _:
                write(head)

    def _pass_body(self, data: bytes) -> None:
        write = self._proxy.transport.write
        decoder = self._decoder
        if decoder is None:
            write(data)
            if self._meddling is Meddling.SECOND_RESPONSE and data:
                write(_SECOND_RESPONSE)
            return
        payload = decoder.feed(data) if data else b""
        if payload:
            self._payloads += 1
            self._pass_payload(payload)
        if decoder.finished:
            self._decoder = None
            self._end(write)

    def _end(self, write: Callable[[bytes], None]) -> None:
        match self._meddling:
            case Meddling.TRAILERS:
                write(b"0\r\nx-checksum: 1\r\nset-cookie: a=b\r\n\r\n")
            case Meddling.SECOND_RESPONSE:
                write(b"0\r\n\r\n" + _SECOND_RESPONSE)
            case Meddling.GARBAGE_WHEN_IDLE:
                write(b"0\r\n\r\n")
                asyncio.get_running_loop().call_later(0.01, write, _SECOND_RESPONSE)
            case _:
                write(b"0\r\n\r\n")

    def _pass_payload(self, payload: bytes) -> None:
        write = self._proxy.transport.write
        broken = self._payloads > _PAYLOADS_BEFORE_BREAK
        match self._meddling:
            case Meddling.EXTENSIONS:
                write(b'%X ;name = "va lue"\t; x\r\n%b\r\n' % (len(payload), payload))
            case Meddling.TINY_CHUNKS:
                for begin in range(0, len(payload), 3):
                    piece = payload[begin : begin + 3]
                    write(b"000%x\r\n%b\r\n" % (len(piece), piece))
            case Meddling.BAD_SIZE if broken:
                write(b"0x%x\r\n%b\r\n" % (len(payload), payload))
            case Meddling.OVERFLOW if broken:
                write(b"f" * 17 + b"\r\n" + payload)
            case _:
                write(b"%x\r\n%b\r\n" % (len(payload), payload))
