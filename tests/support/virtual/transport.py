"""One end of an in-memory connection, as a protocol sees it.

The order of callbacks, and what close(), abort() and write_eof() do in each state, are those of
asyncio's selector transport (CPython 3.11, asyncio/selector_events.py); the socket below it is a
pair of pipes.
"""

import asyncio
from contextvars import Context
from typing import Any

from tests.support.virtual.addresses import (
    Address,
    Traffic,
    VirtualServer,
    VirtualSocket,
)
from tests.support.virtual.pipe import Duplex, Pipe

# What a transport has not written yet.

HIGH_WATER_BYTES = 64 * 1024  # asyncio's default; the low one is a quarter of the high one.


class WriteBuffer:
    """Bytes to write, and the limits at which the protocol has to pause and to resume."""

    __slots__ = ("_data", "_is_paused", "high", "low")

    def __init__(self) -> None:
        self.high = HIGH_WATER_BYTES  # Above it the protocol pauses, in bytes.
        self.low = HIGH_WATER_BYTES // 4  # At it a paused protocol resumes, in bytes.
        self._data = bytearray()
        self._is_paused = False

    def __len__(self) -> int:
        return len(self._data)

    def set_limits(self, high: int | None, low: int | None) -> None:
        """Set the limits; each follows from the other if that alone is given.

        Raises:
            ValueError: They are negative, or the low one exceeds the high one.
        """
        if high is None:
            high = HIGH_WATER_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"high ({high!r}) must be >= low ({low!r}) must be >= 0")
        self.high, self.low = high, low

    def add(self, data: bytes) -> None:
        self._data += data

    def first(self, num_bytes: int) -> bytes:
        return bytes(memoryview(self._data)[: max(num_bytes, 0)])

    def drop(self, num_bytes: int) -> None:
        del self._data[:num_bytes]

    def clear(self) -> None:
        self._data.clear()

    def pauses(self) -> bool:
        """Return whether the protocol has to pause now, once for each time."""
        if self._is_paused or len(self._data) <= self.high:
            return False
        self._is_paused = True
        return True

    def resumes(self) -> bool:
        """Return whether a paused protocol may resume now, once for each time."""
        if not self._is_paused or len(self._data) > self.low:
            return False
        self._is_paused = False
        return True


DETACHED = asyncio.Protocol()  # The protocol of a transport before its start and after its end.


def streaming(protocol: asyncio.BaseProtocol) -> asyncio.Protocol:
    """Return the protocol if a virtual connection serves it.

    Raises:
        NotImplementedError: It is not an asyncio.Protocol; a BufferedProtocol is not served.
    """
    if not isinstance(protocol, asyncio.Protocol):
        raise NotImplementedError(f"a virtual connection needs an asyncio.Protocol: {protocol!r}")
    return protocol


class MemoryTransport(asyncio.Transport):
    """See asyncio.Transport for the public methods."""

    __slots__ = (
        "_aborted",
        "_buffer",
        "_closing",
        "_connection",
        "_eof_received",
        "_eof_written",
        "_fin_sent",
        "_incoming",
        "_loop",
        "_losing",
        "_outgoing",
        "_paused",
        "_protocol",
        "_reading",
        "_server",
        "_traffic",
        "context",
        "is_shut",
        "name",
        "was_reset",
    )

    def __init__(
        self,
        traffic: Traffic,
        connection: Duplex,
        name: str,
        *,
        incoming: Pipe,
        outgoing: Pipe,
        sockname: Address,
        peername: Address,
        context: Context,
    ) -> None:
        super().__init__(
            {
                "sockname": sockname,
                "peername": peername,
                "socket": VirtualSocket(sockname, peername, incoming.has_arrived),
            }
        )
        self.name = name  # "client" or "server".
        # In which its protocol is called: that of the code that opened the socket.
        self.context = context
        self._traffic = traffic
        self._loop = traffic.loop
        self._connection = connection
        self._incoming = incoming
        self._outgoing = outgoing
        incoming.target = self
        outgoing.source = self
        self._protocol: asyncio.Protocol = DETACHED
        self._server: VirtualServer | None = None
        self._buffer = WriteBuffer()
        self._reading = False  # connection_made was called.
        self._paused = False
        self._closing = False
        self._losing = False  # connection_lost is scheduled: nothing more is written.
        self._aborted = False
        self._eof_written = False
        self._eof_received = False
        self._fin_sent = False
        self.is_shut = False  # The socket is closed: connection_lost was called.
        self.was_reset = False  # The peer's reset has arrived.

    def __repr__(self) -> str:
        state = "closed" if self.is_shut else "closing" if self._closing else "open"
        own, peer = self.get_extra_info("sockname"), self.get_extra_info("peername")
        return (
            f"<MemoryTransport #{self._connection.number} {own[0]}:{own[1]} -> {peer[0]}:{peer[1]}"
            f" {state}, {len(self._buffer)} B to write>"
        )

    def start(
        self,
        protocol: asyncio.Protocol,
        *,
        server: VirtualServer | None = None,
        waiter: asyncio.Future[None] | None = None,
    ) -> None:
        """Hand the connection to its protocol, then to the caller that waits for it."""
        self._protocol = protocol
        self._server = server
        if server is not None:
            server.attach()
        self._traffic.open_connections += 1
        self._loop.call_soon(self._protocol.connection_made, self, context=self.context)
        self._loop.call_soon(self._begin_reading, context=self.context)
        if waiter is not None:
            self._loop.call_soon(_wake, waiter)

    def discard(self) -> None:
        """Shut an end that no protocol was ever given."""
        self._closing = self._losing = self.is_shut = True
        self._incoming.shut()
        self._connection.end_shut()

    # Protocol and state

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Take a protocol; see `streaming` for which."""
        self._protocol = streaming(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        """Return whether close() or abort() was called, or the connection is lost."""
        return self._closing

    # Reading

    @property
    def wants_bytes(self) -> bool:
        """Whether a read is wanted: the socket is registered with the selector, so to speak."""
        return self._reading and not self._paused and not self._closing and not self._eof_received

    def is_reading(self) -> bool:
        """Return whether the protocol is given bytes."""
        return not self._closing and not self._paused

    def pause_reading(self) -> None:
        """Stop the calls of data_received; the peer's writes then fill the window."""
        self._paused = self._paused or not self._closing

    def resume_reading(self) -> None:
        if self._closing or not self._paused:
            return
        self._paused = False
        self._loop.call_soon(self.look)

    def _begin_reading(self) -> None:
        self._reading = True
        self.look()

    def look(self) -> None:
        if not self.wants_bytes:
            return
        if self._incoming.is_drained and self.was_reset:
            self._lose_to_reset()
        else:
            self._incoming.arm()

    def receive(self, segment: bytes) -> None:
        try:
            self._protocol.data_received(segment)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # As asyncio does: the connection is lost, the loop goes on.
            self._fatal(error, "Fatal error: protocol.data_received() call failed.")

    def receive_eof(self) -> None:
        """Report the peer's FIN to the protocol; close unless it wants to go on writing."""
        self._eof_received = True
        try:
            keep_open = self._protocol.eof_received()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # As above.
            self._fatal(error, "Fatal error: protocol.eof_received() call failed.")
            return
        if not keep_open:
            self.close()

    def receive_reset(self) -> None:
        """Take the peer's reset. An end that neither reads nor has bytes to write does not notice yet."""
        if self.is_shut:
            return
        self.was_reset = True
        if self._buffer:
            self._lose_to_reset()
        else:
            self.look()

    def crash(self) -> None:
        """Be reset at once, reading or not, if there is a protocol yet."""
        self.was_reset = True
        if self._protocol is not DETACHED:
            self._lose_to_reset()

    def _lose_to_reset(self) -> None:
        # Linux: EPIPE on a connection that has seen a FIN, else ECONNRESET (tcp_reset).
        error = BrokenPipeError if self._eof_received else ConnectionResetError
        self._force_close(error("reset by the peer on the virtual network"))

    # Writing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write bytes; what the window does not take is buffered."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise TypeError(
                f"data argument must be a bytes-like object, not {type(data).__name__!r}"
            )
        if self._eof_written:
            raise RuntimeError("Cannot call write() after write_eof()")
        if not data or self._losing:
            return
        segment = bytes(data)
        if not self._buffer:
            if self.was_reset:
                self._lose_to_reset()
                return
            sent = self._outgoing.send(segment)
            if sent == len(segment):
                return
            segment = segment[sent:]
        self._buffer.add(segment)
        self._maybe_pause()

    def flush(self) -> None:
        if self._losing or not self._buffer:
            return
        self._buffer.drop(self._outgoing.send(self._buffer.first(self._outgoing.room)))
        self._maybe_resume()  # May write, close or abort.
        if self._buffer or self._losing:
            return
        if self._closing:
            self._losing = True
            self._lose(None)
        elif self._eof_written:
            self._finish()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Send a FIN after what is buffered; reading goes on."""
        if self._closing or self._eof_written:
            return
        self._eof_written = True
        if not self._buffer:
            self._finish()

    def _finish(self) -> None:
        if not self._fin_sent:
            self._fin_sent = True
            self._outgoing.finish()

    def get_write_buffer_size(self) -> int:
        """Return how many bytes are buffered here, beyond those in the window."""
        return len(self._buffer)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        """Return (low, high), in bytes."""
        return self._buffer.low, self._buffer.high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set the limits at which the protocol has to pause and to resume writing, in bytes."""
        self._buffer.set_limits(high, low)
        self._maybe_pause()

    def _maybe_pause(self) -> None:
        if self._buffer.pauses():
            self._call(self._protocol.pause_writing)

    def _maybe_resume(self) -> None:
        if self._buffer.resumes():
            self._call(self._protocol.resume_writing)

    def _call(self, callback: Any) -> None:
        try:
            callback()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # As asyncio does: reported, and the connection stays.
            self._report(error, f"protocol.{callback.__name__}() failed")

    # The end

    def close(self) -> None:
        """Stop reading, flush the buffer, then close."""
        if self._closing:
            return
        self._closing = True
        if not self._buffer:
            self._losing = True
            self._loop.call_soon(self._lose, None, context=self.context)

    def abort(self) -> None:
        """Close at once and drop the buffer; see Traffic.abort_resets for what the peer sees."""
        self._aborted = self._aborted or not self._losing
        self._force_close(None)

    def _fatal(self, error: BaseException, message: str) -> None:
        # A socket's own errors are part of life; asyncio reports them in debug mode only.
        if not isinstance(error, OSError):
            self._report(error, message)
        self._force_close(error)

    def _report(self, error: BaseException, message: str) -> None:
        self._loop.call_exception_handler(
            {
                "message": message,
                "exception": error,
                "transport": self,
                "protocol": self._protocol,
            }
        )

    def _force_close(self, error: BaseException | None) -> None:
        if self._losing:
            return
        self._losing = self._closing = True
        self._buffer.clear()
        self._loop.call_soon(self._lose, error, context=self.context)

    def _lose(self, error: BaseException | None) -> None:
        try:
            # The annotation of asyncio says Exception; it passes on whatever was raised.
            self._protocol.connection_lost(error)  # type: ignore[arg-type]
        finally:
            self._close_socket()
            self._protocol = DETACHED
            if self._server is not None:
                self._server.detach()
                self._server = None
            self._traffic.open_connections -= 1
            self._traffic.record("closed", self._connection.number, self.name)
            self._connection.end_shut()

    def _close_socket(self) -> None:
        """Notify the peer, as Linux's close() would."""
        self.is_shut = True
        if not self.was_reset:
            if self._aborted and self._traffic.abort_resets:
                self._outgoing.reset(lose=True)
            elif self._incoming.has_unread:
                # RFC 2525 section 2.17: closing with unread bytes resets.
                self._outgoing.reset(lose=False)
            else:
                self._finish()
        self._incoming.shut()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
