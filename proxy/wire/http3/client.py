"""A client of HTTP/3: all exchanges with one address share a connection."""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aioquic.h3.connection import H3_ALPN, ErrorCode
from aioquic.h3.events import DataReceived, H3Event, HeadersReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import stream_is_unidirectional
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    QuicEvent,
    StreamDataReceived,
    StreamReset,
)

from balanceroute.proxy.wire.http3.framing import Framing, MalformedMessage
from balanceroute.proxy.wire.messages import (
    Headers,
    ResponseHandler,
    WireError,
    WireFault,
    bracketed,
)
from balanceroute.proxy.wire.quic.connection import Carrier, NetworkAddress, OrderedConnection
from balanceroute.proxy.wire.quic.stream_orders import USUAL, StreamPriority
from balanceroute.proxy.wire.streams import sent_fields

# How far the server may be ahead, in one answer and in all.
_STREAM_BYTES, _CONNECTION_BYTES = 1 << 20, 16 << 20
_HEAD_BYTES = 65_536
_IDLE_S = 60.0
_PING_S = 10.0


@dataclass(frozen=True, slots=True)
class Trust:
    cafile: str | None = None  # A file of authorities; None for the system's.

    def apply(self, configuration: QuicConfiguration) -> None:
        paths = ssl.get_default_verify_paths()
        if self.cafile is not None:
            configuration.load_verify_locations(cafile=self.cafile)
        elif paths.cafile is not None or paths.capath is not None:
            configuration.load_verify_locations(cafile=paths.cafile, capath=paths.capath)


class Http3Call:
    """One exchange in flight; see `Calling`."""

    __slots__ = ("answered", "body", "connection", "done", "fields", "handler", "number", "sent")

    def __init__(self, fields: Headers, body: bytes, handler: ResponseHandler) -> None:
        self.fields = fields
        self.body = body
        self.handler = handler
        self.connection: _Connection | None = None
        self.number = -1
        self.sent = self.answered = self.done = False

    def abort(self) -> None:
        if self.done:
            return
        self.done = True
        if self.connection is not None:
            self.connection.give_up(self)

    def fail(self, kind: WireFault, message: str) -> None:
        if not self.done:
            self.done = True
            error = WireError(kind, message, sent=self.sent, answered=self.answered)
            self.handler.on_error(error)


# Until a connection is open.
_CONNECT_S = 5.0


class Http3Endpoint:
    """Sends requests to one address over one connection at a time; see `Caller`.

    Args:
        port: The server's UDP port.
        order: In which requests are sent; see `STREAM_ORDERS`.
        priority: Returns the priority of a request by its headers and the present time.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        trust: Trust | None = None,
        order: str = "rr",
        priority: Callable[[Headers, float], StreamPriority] = lambda headers, now_s: USUAL,
    ) -> None:
        address = f"{bracketed(host)}:{port}"
        self.name = f"https://{address}"
        self.priority = priority
        self._host, self._port = host, port
        self._authority = address.encode()
        self._trust = trust or Trust()
        self._order = order
        self._loop = asyncio.get_running_loop()
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._waiting: list[Http3Call] = []
        self._closed = False

    def request(
        self, method: bytes, target: bytes, headers: Headers, body: bytes, handler: ResponseHandler
    ) -> Http3Call:
        fields = [
            *((b":method", method), (b":scheme", b"https"), (b":authority", self._authority)),
            (b":path", target),
            *sent_fields(headers),
        ]
        if body or method in (b"PATCH", b"POST", b"PUT"):
            fields.append((b"content-length", b"%d" % len(body)))
        call = Http3Call(fields, body, handler)
        connection = self._connection
        if connection is not None and connection.usable:
            connection.begin(call)
            return call
        self._waiting.append(call)
        if self._opening is None:
            self._opening = self._loop.create_task(self._open())
        return call

    def close(self) -> None:
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()
        if self._connection is not None:
            self._connection.leave()

    async def _open(self) -> None:
        configuration = QuicConfiguration(
            alpn_protocols=H3_ALPN,
            congestion_control_algorithm="cubic",
            idle_timeout=_IDLE_S,
            is_client=True,
            max_data=_CONNECTION_BYTES,
            max_stream_data=_STREAM_BYTES,
            server_name=self._host,
        )
        self._trust.apply(configuration)
        connection = _Connection(self, configuration, self._order, self._loop)
        try:
            async with asyncio.timeout(_CONNECT_S):
                await self._loop.create_datagram_endpoint(
                    lambda: connection, remote_addr=(self._host, self._port)
                )
                await connection.ready
        except (OSError, TimeoutError) as error:
            connection.leave()
            timed_out = isinstance(error, TimeoutError)
            kind = WireFault.CONNECT_TIMEOUT if timed_out else WireFault.CONNECT
            reason = "not in time" if timed_out else str(error)
            self._opening = None
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call.fail(kind, f"no connection to {self.name}: {reason}")
            return
        self._opening = None
        self._connection = connection
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            if not call.done:
                connection.begin(call)
        if self._closed:
            connection.leave()


class _Connection(asyncio.DatagramProtocol):
    """One connection: a socket, and the exchanges on it."""

    def __init__(
        self,
        endpoint: Http3Endpoint,
        configuration: QuicConfiguration,
        order: str,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.ready: asyncio.Future[None] = loop.create_future()
        self.usable = False
        self._endpoint = endpoint
        self._loop = loop
        self._quic = OrderedConnection(order=order, configuration=configuration)
        self._framing: Framing
        self._calls: dict[int, Http3Call] = {}
        # Until the server allows one more stream.
        self._waiting: deque[Http3Call] = deque()
        self._transport: asyncio.DatagramTransport | None = None
        self._carrier = Carrier(self._quic, self, loop)
        self._carrier.carried = self
        self._pinger: asyncio.TimerHandle | None = None
        self._leaves = False

    # The socket.

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._quic.connect(transport.get_extra_info("peername"), now=self._loop.time())
        self._carrier.send()

    def datagram_received(self, data: bytes, addr: NetworkAddress) -> None:
        self._carrier.receive(data, addr)

    def error_received(self, exc: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(exc)

    def sendto(self, data: bytes, addr: NetworkAddress | None = None) -> None:
        """Send a datagram to the only address."""
        del addr
        if self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(data)

    # Exchanges.

    def begin(self, call: Http3Call) -> None:
        """Send a request, or have it wait for a stream."""
        call.connection = self
        self._waiting.append(call)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and self._quic.streams_left > 0:
            self._begin(self._waiting.popleft())

    def _begin(self, call: Http3Call) -> None:
        number = call.number = self._quic.get_next_available_stream_id()
        self._calls[number] = call
        call.sent = True
        priority = self._endpoint.priority(call.fields, self._loop.time())
        self._framing.send_headers(number, call.fields, end_stream=not call.body)
        self._quic.prioritise(number, priority)
        if call.body:
            self._framing.send_data(number, call.body, end_stream=True)
            call.body = b""
        self._carrier.send_soon()
        if self._pinger is None:
            self._pinger = self._loop.call_later(_PING_S, self._ping)

    def give_up(self, call: Http3Call) -> None:
        """End an exchange that its caller has given up."""
        if not call.sent:
            self._waiting.remove(call)
            self._leave_if_done()
            return
        self._forget(call)
        self._quic.reset_stream(call.number, ErrorCode.H3_REQUEST_CANCELLED)
        self._quic.refuse_data(call.number, ErrorCode.H3_REQUEST_CANCELLED)
        self._framing.release(call.number)
        self._carrier.send_soon()

    def leave(self) -> None:
        """Close behind the exchanges that run."""
        self._leaves, self.usable = True, False
        if not self._calls and not self._waiting:
            self._quic.close(error_code=ErrorCode.H3_NO_ERROR)
            self._carrier.send()
            self._end()

    # What happens: Carried.

    def on_event(self, event: QuicEvent) -> None:
        """See `Carried`."""
        match event:
            case HandshakeCompleted():
                self._framing = Framing(self._quic, head_limit_bytes=_HEAD_BYTES)
                self.usable = True
                if not self.ready.done():
                    self.ready.set_result(None)
            # More of an answer that was given up may be on its way: its call is forgotten.
            case StreamDataReceived() if not (
                stream_is_unidirectional(event.stream_id) or event.stream_id in self._calls
            ):
                pass
            case StreamDataReceived():
                for one in self._framing.handle_event(event):
                    self._on_message(one)
            case StreamReset():
                self._framing.handle_event(event)
                self._on_reset(event)
            case ConnectionTerminated():
                self._on_end(event)
            case _:
                pass

    def on_progress(self) -> None:
        """See `Carried`."""
        self._begin_waiting()

    def _on_message(self, event: H3Event) -> None:
        match event:
            case HeadersReceived():
                call = self._calls.get(event.stream_id)
                status = int(dict(event.headers).get(b":status", b"0"))
                if call is None or (status and status < 200):
                    return
                call.answered = True
                if status:  # Else it is behind the body.
                    headers = [field for field in event.headers if field[0] != b":status"]
                    call.handler.on_head(status, headers)
                self._on_part(call, b"", ended=event.stream_ended)
            case DataReceived():
                call = self._calls.get(event.stream_id)
                if call is not None:
                    self._on_part(call, event.data or b"", ended=event.stream_ended)
            case MalformedMessage():
                call = self._calls.get(event.stream_id)
                if call is not None:
                    self.give_up(call)
                    call.fail(WireFault.PROTOCOL, f"a malformed response: {event.reason}")
            case _:
                pass

    def _on_part(self, call: Http3Call, data: bytes, *, ended: bool) -> None:
        if data and not call.done:
            call.handler.on_data(data)
        if ended and not call.done:
            call.done = True
            self._forget(call)
            call.handler.on_end()

    def _on_reset(self, event: StreamReset) -> None:
        call = self._calls.get(event.stream_id)
        if call is None:
            return
        if event.error_code == ErrorCode.H3_REQUEST_REJECTED:
            self.usable = False  # It takes no new requests.
        self._forget(call)
        code = f"0x{event.error_code:x}"
        call.fail(WireFault.RESET, f"{self._endpoint.name} reset the stream with {code}")

    def _on_end(self, event: ConnectionTerminated) -> None:
        reason = event.reason_phrase or f"code 0x{event.error_code:x}"
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(reason))
        calls = [*self._calls.values(), *self._waiting]
        self._calls.clear()
        self._waiting.clear()
        self._end()
        for call in calls:
            call.fail(WireFault.RESET, f"{self._endpoint.name} closed the connection: {reason}")

    def _forget(self, call: Http3Call) -> None:
        self._calls.pop(call.number, None)
        self._quic.drop_priority(call.number)
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self._leaves and not self._calls and not self._waiting:
            self._loop.call_soon(self.leave)

    def _ping(self) -> None:
        self._pinger = None
        if self._calls:
            self._pinger = self._loop.call_later(_PING_S, self._ping)
            self._quic.send_ping(0)
            self._carrier.send_soon()

    def _end(self) -> None:
        self.usable = False
        self._carrier.stop()
        if self._pinger is not None:
            self._pinger.cancel()
        if self._transport is not None:
            self._transport.close()
