"""Scripted clients: what they send, how they read, and when they leave."""

import asyncio
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, cast
from zlib import crc32

from tests.support.chaos.requests import ClientRequest
from tests.support.chaos.world import World
from tests.support.virtual.addresses import Link

from balanceroute.proxy.wire.http1.chunked import ChunkedDecoder
from balanceroute.proxy.wire.http1.heads import parse_response_head
from balanceroute.proxy.wire.messages import Headers

if TYPE_CHECKING:
    from collections.abc import Callable


# The client's side of HTTP: responses cut out of the bytes of one connection, in order.


class ClientEnding(Enum):
    """How an answer ended, as its client saw it."""

    OPEN = "open"  # It has not.
    COMPLETE = "complete"
    CUT = "cut"  # The connection ended first.
    UNANSWERED = "unanswered"  # It ended before any byte of the answer.


@dataclass(slots=True, eq=False)
class Received:
    """One answer, as far as it came."""

    status: int = 0  # 0 until the head came.
    headers: Headers = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    ending: ClientEnding = ClientEnding.OPEN  # How it ended.
    was_reset: bool = False  # Whether the connection ended with a reset.
    left: bool = False  # Whether the client had gone by itself.
    ended_s: float = 0.0  # When it ended, on the loop's clock.

    def header(self, name: bytes) -> bytes:
        """Return the values of a header, joined; empty if it is absent."""
        return b", ".join(value for key, value in self.headers if key == name)


class ClientAnswerReader:
    """Reads one answer."""

    def __init__(self, received: Received) -> None:
        self.rest = b""  # What came after the answer, once it is complete.
        self._received = received
        self._head = b""
        self._decoder: ChunkedDecoder | None = None
        self._left: int | None = None

    def feed(self, data: bytes) -> None:
        """Take the next bytes.

        Raises:
            MalformedError: They are not HTTP.
        """
        received = self._received
        if received.ending is ClientEnding.COMPLETE:
            self.rest += data
            return
        if not received.status:
            self._head += data
            end = self._head.find(b"\r\n\r\n") + 4
            if end < 4:
                return
            data = self._head[end:]
            head = parse_response_head(self._head[:end])
            received.status, received.headers = head.status, head.headers
            if head.chunked:
                self._decoder = ChunkedDecoder()
            else:
                self._left = head.content_length
        if self._decoder is not None:
            if data:
                received.body += self._decoder.feed(data)
            if self._decoder.finished:
                self._complete(self._decoder.rest)
        elif self._left is None:
            received.body += data
        else:
            received.body += data[: self._left]
            rest = data[self._left :]
            self._left -= min(self._left, len(data))
            if not self._left:
                self._complete(rest)

    def end(self, *, was_reset: bool) -> None:
        received = self._received
        received.was_reset = was_reset
        if received.ending is not ClientEnding.OPEN:
            return
        if not received.status:
            received.ending = ClientEnding.UNANSWERED
        elif self._decoder is None and self._left is None and not was_reset:
            received.ending = ClientEnding.COMPLETE
        else:
            received.ending = ClientEnding.CUT

    def _complete(self, rest: bytes) -> None:
        self._received.ending = ClientEnding.COMPLETE
        self.rest = rest


_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Half: "
_COMES_AGAIN_S, _DRIP_S = 0.1, 0.1
# The client sees the end of the text, and not that of the stream.
_LAST_WORDS = (
    b'"finish_reason":"',
    b"event: content_block_stop",
    b"event: response.output_item.done",
)
_SESSIONS = 12  # Every other one has a name.


class ClientPhase(Enum):
    """When a client leaves."""

    SENDING = "sending"  # Its request is not sent whole.
    QUEUED = "queued"  # Its request has arrived.
    PREFILLING = "prefilling"
    PREFILLED = "prefilled"  # The prefiller has answered.
    ADMITTED = "admitted"  # Sent to a decode rank.
    STREAMING = "streaming"  # So many bytes of the answer's body came.
    LAST_WORD = "last_word"  # The answer has a finish reason, but not its end.
    AFTER = "after"  # So much time since it was sent.


class Leaving(Enum):
    """How a client leaves."""

    RESET = "reset"
    CLOSE = "close"
    HALF_CLOSE = "half_close"  # It says that it sends no more, and goes on reading.


class HeldConnection(Enum):
    """What a connection is held with."""

    SILENT = "nothing"
    HALF_HEAD = "half a head"
    DRIP = "a head byte by byte"


@dataclass(frozen=True, slots=True)
class Departure:
    """When and how a client leaves."""

    phase: ClientPhase
    how: Leaving
    delay_s: float = 0.0  # So much later.
    num_bytes: int = 0  # For `STREAMING`.


@dataclass(frozen=True, slots=True)
class Visit:
    """One connection of a client."""

    start_s: float  # When it comes, from the beginning of the run.
    requests: tuple[ClientRequest, ...]  # What it sends.
    pipelined: bool = False  # All at once, or one after the other.
    http_1_0: bool = False  # In HTTP/1.0.
    # With `Connection: close` on the last one; with HTTP/1.0 without keep-alive.
    close: bool = False
    departure: Departure | None = None  # Of the first request; None if the client stays.
    # After how many bytes of a body it stops reading, and for how long, in seconds.
    pauses: tuple[tuple[int, float], ...] = ()
    link: Link | None = None  # Its wire; None for the network's.


class Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, visit: Visit, *, on_left: "Callable[[Client], None]") -> None:
        self.visit = visit
        self.answers = [Received() for _ in visit.requests]
        self.sent = 0
        self.over = asyncio.Event()  # Set when nothing more can come.
        self.left = False  # Whether it has left.
        self._on_left = on_left
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._current = 0
        self._reader = ClientAnswerReader(self.answers[0])
        self._pauses = list(visit.pauses)
        self._timers: list[asyncio.TimerHandle] = []
        self._is_leaving = False

    @property
    def comes_late(self) -> bool:
        """Whether a request may be on its way for long, so that its connection seems to have none."""
        link = self.visit.link
        return link is not None and bool(link.split_bytes)

    async def run(self, host: str, port: int) -> None:
        """Connect, and do everything until nothing more can come."""
        try:
            await self._loop.create_connection(lambda: self, host, port)
        except OSError:
            self.connection_lost(None)
        try:
            await self.over.wait()
        finally:
            self.leave()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what is to be sent first."""
        self._transport = cast("asyncio.Transport", transport)
        requests, departure = self.visit.requests, self.visit.departure
        if departure is not None and departure.phase is ClientPhase.SENDING:
            self.sent = 1
            data = self._spell(0)
            self._transport.write(data[: len(data) * 2 // 3])
            self.leave_soon()
            return
        for i in range(len(requests) if self.visit.pipelined else 1):
            self._send(i)
        if departure is not None and departure.phase is ClientPhase.AFTER:
            self.leave_soon()

    def data_received(self, data: bytes) -> None:
        while data and self._current < len(self.answers):
            answer = self.answers[self._current]
            self._reader.feed(data)
            if answer.ending is ClientEnding.OPEN:
                break
            data = self._reader.rest
            self._next()
        if self._current < len(self.answers):
            self._react(self.answers[self._current])

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._current < len(self.answers):
            answer = self.answers[self._current]
            answer.left = self.left
            self._reader.end(was_reset=isinstance(exc, ConnectionError))
            answer.ended_s = self._loop.time()
            self._current += 1
        for answer in self.answers[self._current :]:
            answer.ending = ClientEnding.UNANSWERED
            answer.left = self.left
            answer.ended_s = self._loop.time()
        self._transport = None
        self.over.set()

    def reached(self, phase: ClientPhase) -> None:
        """Note what the proxy has done with the first request."""
        departure = self.visit.departure
        if departure is not None and departure.phase is phase:
            self.leave_soon()

    def leave_soon(self, delay_s: float | None = None) -> None:
        """Leave as planned; after `delay_s` also without a plan."""
        if self._is_leaving:
            return
        self._is_leaving = True
        if delay_s is None:
            assert self.visit.departure is not None
            delay_s = self.visit.departure.delay_s
        self._timers.append(self._loop.call_later(delay_s, self.leave))

    def leave(self) -> None:
        if self._transport is None or self._transport.is_closing() or self.left:
            return
        self.left = True
        departure = self.visit.departure
        how = Leaving.RESET if departure is None else departure.how
        match how:
            case Leaving.RESET:
                raw = self._transport.get_extra_info("socket")
                # uvloop has none any more once the peer or the loop has closed it.
                if raw is not None:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                self._transport.abort()
            case Leaving.CLOSE:
                self._transport.close()
            case Leaving.HALF_CLOSE:
                self._transport.write_eof()
        self._on_left(self)

    def _next(self) -> None:
        """Go on after a complete answer."""
        answer = self.answers[self._current]
        answer.left = self.left
        answer.ended_s = self._loop.time()
        self._current += 1
        if self._current < len(self.answers):
            self._reader = ClientAnswerReader(self.answers[self._current])
        assert self._transport is not None
        if self._current == len(self.answers) or b"close" in answer.header(b"connection"):
            self._transport.close()
        elif not self.visit.pipelined:
            self._send(self._current)

    def _react(self, answer: Received) -> None:
        """Do what is planned for what has come of an answer."""
        departure = self.visit.departure
        if departure is not None and self._current == 0:
            reached = departure.phase is ClientPhase.STREAMING and (
                answer.status and len(answer.body) >= departure.num_bytes
            )
            last = departure.phase is ClientPhase.LAST_WORD and (
                any(one in answer.body for one in _LAST_WORDS) and b"[DONE]" not in answer.body
            )
            if reached or last:
                self.leave_soon()
        if self._pauses and len(answer.body) >= self._pauses[0][0] and self._transport is not None:
            _, seconds = self._pauses.pop(0)
            self._transport.pause_reading()
            self._timers.append(self._loop.call_later(seconds, self._read_on))

    def _read_on(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def _send(self, place: int) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self.sent = place + 1
            self._transport.write(self._spell(place))

    def _spell(self, place: int) -> bytes:
        visit, request = self.visit, self.visit.requests[place]
        version = b"1.0" if visit.http_1_0 else b"1.1"
        head = b"POST %b HTTP/%b\r\nhost: proxy\r\ncontent-type: application/json\r\n" % (
            request.path.encode(),
            version,
        )
        head += b"x-request-id: %b\r\n" % request.request_id.encode()
        # Some requests are turns of conversations, whatever their prompts are.
        session = crc32(request.request_id.encode()) % _SESSIONS
        if request.session is not None:
            name = request.session.encode()
        else:
            name = b"%d" % session if session % 2 else b""
        if name:
            head += b"x-session-id: %b\r\n" % name
        if request.key:
            head += b"authorization: Bearer %b\r\n" % request.key.encode()
        if request.deadline_ms is not None:
            head += b"x-request-deadline-ms: %d\r\n" % request.deadline_ms
        last = place == len(visit.requests) - 1
        if visit.http_1_0 and not (visit.close and last):
            head += b"connection: keep-alive\r\n"
        elif visit.close and last:
            head += b"connection: close\r\n"
        return head + b"content-length: %d\r\n\r\n%b" % (len(request.body), request.body)


class Holders:
    """Clients of one address that hold connections without a request, and come again when they are closed.

    Args:
        ports: What they connect to.
        count: Connections to each.
        held_with: What they send.
        host: Their address.
    """

    def __init__(
        self, ports: "Sequence[int]", count: int, held_with: HeldConnection, host: str
    ) -> None:
        self._held_with = held_with
        self._host = host
        create = asyncio.get_running_loop().create_task
        self._tasks = [create(self._hold(port)) for port in ports for _ in range(count)]

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hold(self, port: int) -> None:
        while True:
            with suppress(OSError):  # A proxy that ends accepts no connection.
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", port, local_addr=(self._host, 0)
                )
                try:
                    await self._send(reader, writer)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(_COMES_AGAIN_S)

    async def _send(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._held_with is HeldConnection.HALF_HEAD:
            writer.write(_HALF_HEAD)
        if self._held_with is HeldConnection.DRIP:
            for byte in _HALF_HEAD:
                if reader.at_eof():
                    break
                writer.write(bytes([byte]))
                await asyncio.sleep(_DRIP_S)
        await reader.read()


# Requests one after the other, each by a client of its own that waits for the whole answer.


async def ask_all(world: World, requests: Sequence[ClientRequest], *, gap_s: float) -> list[Client]:
    """Send requests to the proxy, `gap_s` apart; return the clients when all have their answers."""

    async def ask(request: ClientRequest) -> Client:
        await asyncio.sleep(request.number * gap_s)
        client = Client(Visit(0.0, (request,)), on_left=lambda _: None)
        await world.loop.create_connection(lambda: client, "127.0.0.1", world.port)
        await client.over.wait()
        return client

    return await asyncio.gather(*map(ask, requests))
