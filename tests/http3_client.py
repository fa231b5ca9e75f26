"""aioquic's own client of HTTP/3."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aioquic._buffer import Buffer
from aioquic.asyncio.client import connect
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.h3.connection import FrameType, H3Connection, StreamType
from aioquic.h3.events import DataReceived, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    QuicEvent,
    StreamDataReceived,
    StreamReset,
)
from aioquic.tls import SessionTicket

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers

HOST = "127.0.0.1"
_CONTROL = 3  # The server's first stream of one direction.


@dataclass
class Answered:
    """What came on one stream."""

    heads: "list[Headers]"
    body: bytearray
    over: asyncio.Event
    reset: int | None = None  # The code with which it was reset; None if it was not.

    @property
    def status(self) -> int:
        return int(dict(self.heads[-1])[b":status"])

    @property
    def headers(self) -> "Headers":
        return [field for field in self.heads[-1] if field[0] != b":status"]


class Http3Client(QuicConnectionProtocol):
    """aioquic's client, with its `H3Connection`.

    Attributes:
        ended: How the connection ended; None while it has not.
        early_data_accepted: Whether the server took what was sent before the handshake.
        turned_away: The first stream that the server does not serve, as its last GOAWAY said.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.quic = self._quic
        self.h3 = H3Connection(self._quic)
        # It would take the length in the answer to a HEAD for that of its body.
        self.h3._check_content_length = lambda stream: None  # type: ignore[method-assign]
        self.ended: ConnectionTerminated | None = None
        self.early_data_accepted = False
        self.turned_away: int | None = None
        self._control = b""  # Of the server's control stream.
        self.streams: dict[int, Answered] = {}

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, ConnectionTerminated):
            self.ended = event
            for one in self.streams.values():
                one.over.set()
        if isinstance(event, HandshakeCompleted):
            self.early_data_accepted = event.early_data_accepted
        if isinstance(event, StreamReset) and event.stream_id in self.streams:
            self.streams[event.stream_id].reset = event.error_code
            self.streams[event.stream_id].over.set()
        if isinstance(event, StreamDataReceived) and event.stream_id == _CONTROL:
            self._control += event.data
            self._read_control()
        for message in self.h3.handle_event(event):
            if isinstance(message, HeadersReceived):
                self.streams[message.stream_id].heads.append(message.headers)
            elif isinstance(message, DataReceived):
                self.streams[message.stream_id].body += message.data
            if isinstance(message, HeadersReceived | DataReceived) and message.stream_ended:
                self.streams[message.stream_id].over.set()

    def _read_control(self) -> None:
        buffer = Buffer(data=self._control)
        assert buffer.pull_uint_var() == StreamType.CONTROL
        while not buffer.eof():
            kind, value = buffer.pull_uint_var(), buffer.pull_bytes(buffer.pull_uint_var())
            if kind == FrameType.GOAWAY:
                self.turned_away = Buffer(data=value).pull_uint_var()

    def begin(
        self, method: bytes, path: bytes, headers: "Headers | None" = None, *, end: bool = True
    ) -> int:
        """Open a stream with the head of a request."""
        number = self.quic.get_next_available_stream_id()
        self.streams[number] = Answered([], bytearray(), asyncio.Event())
        head = [(b":method", method), (b":scheme", b"https"), (b":authority", b"localhost")]
        self.h3.send_headers(number, [*head, (b":path", path), *(headers or [])], end_stream=end)
        self.transmit()
        return number

    def more(self, number: int, data: bytes, *, end: bool = True) -> None:
        self.h3.send_data(number, data, end_stream=end)
        self.transmit()

    async def answer(self, number: int) -> Answered:
        """Wait for the end of an answer, or of its stream, or of the connection."""
        await self.streams[number].over.wait()
        return self.streams[number]

    async def ask(
        self, method: bytes, path: bytes, headers: "Headers | None" = None, body: bytes = b""
    ) -> Answered:
        number = self.begin(method, path, headers, end=not body)
        if body:
            self.more(number, body)
        return await self.answer(number)


@asynccontextmanager
async def http3_client(
    port: int,
    certificate: str,
    *,
    tickets: list[SessionTicket] | None = None,
    wait: bool = True,
    address: str = HOST,
    **options: Any,
) -> AsyncIterator[Http3Client]:
    """Connect to a port of loopback, whose certificate is this one, or made by it.

    Args:
        port: The port.
        certificate: The certificate.
        tickets: Takes those that the server issues.
        wait: For the end of the handshake.
        address: Of loopback.
        options: Of the connection.
    """
    configuration = QuicConfiguration(
        alpn_protocols=["h3"], is_client=True, server_name=HOST, **options
    )
    configuration.load_verify_locations(cadata=certificate.encode())
    async with connect(
        address,
        port,
        configuration=configuration,
        create_protocol=Http3Client,
        session_ticket_handler=None if tickets is None else tickets.append,
        wait_connected=wait,
    ) as client:
        assert isinstance(client, Http3Client)
        yield client
