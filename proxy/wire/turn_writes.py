"""Connections write to their sockets together, at the end of each turn of the loop.

A write wakes its reader. On a machine that has not one core for each process the reader then takes the
writer's core, and comes back for the next write: a turn with many writes is quicker if they follow
each other.
"""

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


# So many connections at most: those that wait longer would notice.
_MOST_WAITING = 32
# No more is gathered of one connection.
_LARGE_BYTES = 65_536


class WriteTurn:
    """The connections that have something to write in the present turn."""

    __slots__ = ("_call_soon", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self.waiting: list[TurnTransport] = []  # Those that wait for it to end.

    def begin(self) -> None:
        """See that those that wait are flushed at the end of the turn."""
        self._call_soon(self.flush)

    def flush(self) -> None:
        waiting = self.waiting.copy()
        self.waiting.clear()
        for one in waiting:
            pending, one.pending = one.pending, b""
            # Without a call for each: of a stream every event comes here.
            if pending and not one.is_closing():
                one.send(pending)


class Borrower(Protocol):
    """Uses a socket in place of its transport for a while."""

    @property
    def waiting(self) -> int:
        """Bytes of its writes that the socket has not taken."""

    def stop(self) -> None:
        """Leave it at once, and say so by `TurnTransport.returned`."""


class TurnTransport:
    """A transport whose writes wait for the end of the turn, or for the next other call."""

    __slots__ = ("_borrower", "_transport", "_turn", "_waiting", "is_closing", "pending", "send")

    def __init__(self, transport: asyncio.Transport, turn: WriteTurn) -> None:
        self.is_closing = transport.is_closing  # Returns whether it is closed or about to be.
        self.send: Callable[[bytes], None] = transport.write  # Writes to the transport itself.
        self._transport = transport
        self._turn = turn
        self._waiting = turn.waiting
        self._borrower: Borrower | None = None
        self.pending = b""  # Bytes that wait.

    def lend(self, borrower: Borrower) -> int:
        """Lend the socket to `borrower` until `reclaim`; return its descriptor, -1 if that is impossible.

        Every write, and a close, reclaims it first.
        """
        inner = self._transport
        if self.is_closing() or self.is_encrypted or self.get_write_buffer_size():
            return -1
        socket = inner.get_extra_info("socket")
        number: int = -1 if socket is None else socket.fileno()
        if number >= 0:
            self._borrower = borrower
            self.send = self._send_back
        return number

    def returned(self, unsent: bytes) -> None:
        """Take the socket back, with bytes to send before all others."""
        self._borrower = None
        self.send = self._transport.write
        if unsent and not self.is_closing():
            self.send(unsent)

    def reclaim(self) -> None:
        if self._borrower is not None:
            self._borrower.stop()

    def _send_back(self, data: bytes) -> None:
        self.reclaim()
        if not self.is_closing():
            self.send(data)

    @property
    def is_encrypted(self) -> bool:
        return self._transport.get_extra_info("sslcontext") is not None

    def write(self, data: bytes) -> None:
        if len(data) > _LARGE_BYTES:
            self.flush()
            self.send(data)
        elif self.pending:
            self.pending += data
            if len(self.pending) > _LARGE_BYTES:  # So that the writer notices a slow reader.
                self.flush()
        else:
            self.pending = data
            waiting = self._waiting
            waiting.append(self)
            count = len(waiting)
            if count == 1:
                self._turn.begin()
            elif count == _MOST_WAITING:
                self._turn.flush()

    def write_pieces(self, pieces: list[bytes | memoryview]) -> None:
        """Send large data, behind waiting bytes: at once, and without copying it together."""
        self.flush()
        self.reclaim()
        if not self._transport.is_closing():
            self._transport.writelines(pieces)

    def write_at_once(self, data: bytes) -> None:
        """Send data, behind waiting bytes, without waiting for the end of the turn."""
        if self.pending:
            self.flush()
        if not self.is_closing():
            self.send(data)

    def flush(self) -> None:
        pending, self.pending = self.pending, b""
        if pending and not self.is_closing():
            self.send(pending)

    def is_busy(self) -> bool:
        """Return whether the socket has not taken all that was written."""
        return bool(self.pending or self._transport.get_write_buffer_size())

    def get_write_buffer_size(self) -> int:
        self.flush()
        lent = 0 if self._borrower is None else self._borrower.waiting
        return lent + self._transport.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        self.flush()
        self.reclaim()
        self._transport.write_eof()

    def close(self) -> None:
        self.flush()
        self.reclaim()
        self._transport.close()

    def abort(self) -> None:
        self.flush()
        self.reclaim()
        self._transport.abort()

    def get_extra_info(self, name: str) -> Any:
        return self._transport.get_extra_info(name)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()


# Whether a peer takes what is written to it.
#
# The kernel holds megabytes for a peer, and takes more only when a third of that has gone. So a write
# buffer that does not shrink does not prove a slow peer: the bytes that the kernel holds count, too.

_COUNT = struct.Struct("i")


def held_by_kernel(connected: socket.socket | None) -> int:
    """Return the bytes written that a peer has not acknowledged; 0 where the system has no such count."""
    if connected is None or sys.platform != "linux" or connected.fileno() < 0:
        return 0
    try:
        found = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size))
    except OSError:
        return 0
    count: int = _COUNT.unpack(found)[0]
    return count


class WriteProgress:
    """Compares the bytes that the peer has taken from check to check.

    Args:
        timeout_s: A peer that takes nothing for this long, while data waits, has stalled.
    """

    __slots__ = ("_drained", "_since_s", "_timeout_s", "check_s")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._drained: int | None = None
        self._since_s = 0.0
        self.check_s = timeout_s / 4  # How often to check.

    def begin(self, now_s: float) -> None:
        self._drained = None
        self._since_s = now_s

    def has_stalled(self, now_s: float, *, written: int, waiting: int, held: int = 0) -> bool:
        """Return whether the peer has stalled.

        Args:
            written: Bytes of the answer that were passed to the transport.
            waiting: Bytes in its write buffer.
            held: Bytes that left it, and that the peer has not acknowledged.
        """
        drained = written - waiting - held
        if not waiting or drained != self._drained:
            self._drained = drained
            self._since_s = now_s
            return False
        return now_s - self._since_s >= self._timeout_s


# Closes connections to a host that vanished: TCP itself would wait for minutes, or for ever.

_PROBES = 3
_HAS_USER_TIMEOUT = sys.platform == "linux"
# None where the platform lacks it; macOS has another name for the first.
_IDLE = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
_INTERVAL = getattr(socket, "TCP_KEEPINTVL", None)
_KEEP_ALIVE_COUNT = getattr(socket, "TCP_KEEPCNT", None)


def end_if_silent(connected: socket.socket, timeout_s: float) -> None:
    """Have the kernel close a connection whose other side acknowledges nothing for some time.

    On an idle connection the kernel sends the first keep-alive probe after half of the time, and three
    in all. Sent data may stay unacknowledged, or unread behind a full window, for the whole time. A
    host that is up answers the probes even if its processes hang: only data that they do not read
    closes the connection.

    Args:
        timeout_s: At least 2, rounded to whole seconds. 0 leaves the socket as it is.
    """
    if not timeout_s:
        return
    descriptor = connected.fileno()
    if descriptor < 0:  # A loop in virtual time has no sockets.
        return
    idle_s, interval_s = max(1, round(timeout_s / 2)), max(1, round(timeout_s / 2 / _PROBES))
    # uvloop's own object would make such a socket for each option.
    same = socket.socket(connected.family, connected.type, connected.proto, descriptor)
    try:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (_IDLE, idle_s),
            (_INTERVAL, interval_s),
            (_KEEP_ALIVE_COUNT, _PROBES),
        ):
            if option is not None:
                same.setsockopt(socket.IPPROTO_TCP, option, value)
        if _HAS_USER_TIMEOUT:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout_s))
    finally:
        same.detach()
