"""What connections write within one turn of the loop goes to their sockets together, at its end.

A write wakes its reader. On a machine that has not one core for each process the reader then takes the
writer's core, and comes back for the next write: a turn with many writes is quicker if they follow
each other.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

# So many connections at most: those that wait longer would notice.
_MOST_WAITING = 32
# No more is gathered of one connection.
_LARGE_BYTES = 65_536


class WriteTurn:
    """The connections that have something to write in the present turn.

    Attributes:
        waiting: Those that wait for it to end.
    """

    __slots__ = ("_call_soon", "waiting")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self.waiting: list[TurnTransport] = []

    def begin(self) -> None:
        """See that those that wait are flushed at the end of the turn."""
        self._call_soon(self.flush)

    def flush(self) -> None:
        """Have all send what waits."""
        waiting = self.waiting.copy()
        self.waiting.clear()
        for one in waiting:
            pending, one.pending = one.pending, b""
            # Without a call for each: of a stream every event comes here.
            if pending and not one.is_closing():
                one.send(pending)


class Borrower(Protocol):
    """Who uses a socket in place of its transport for a while."""

    @property
    def waiting(self) -> int:
        """Bytes that the socket has not taken of what was written so."""

    def stop(self) -> None:
        """Leave it at once, and say so by `TurnTransport.returned`."""


class TurnTransport:
    """A transport whose writes wait for the end of the turn, or for whatever else is asked of it.

    Attributes:
        is_closing: Returns whether it is closed or about to be.
        pending: What waits.
        send: Writes to the transport itself.
    """

    __slots__ = ("_borrower", "_transport", "_turn", "_waiting", "is_closing", "pending", "send")

    def __init__(self, transport: asyncio.Transport, turn: WriteTurn) -> None:
        self.is_closing = transport.is_closing
        self.send: Callable[[bytes], None] = transport.write
        self._transport = transport
        self._turn = turn
        self._waiting = turn.waiting
        self._borrower: Borrower | None = None
        self.pending = b""

    def lend(self, borrower: Borrower) -> int:
        """Let somebody else use the socket until `reclaim`; return its descriptor, -1 if nobody can.

        Whatever is written here meanwhile, and whatever closes it, gets it back first.
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
        """Take it back, with what was to be sent before anything else."""
        self._borrower = None
        self.send = self._transport.write
        if unsent and not self.is_closing():
            self.send(unsent)

    def reclaim(self) -> None:
        """Get it back if it is lent."""
        if self._borrower is not None:
            self._borrower.stop()

    def _send_back(self, data: bytes) -> None:
        self.reclaim()
        if not self.is_closing():
            self.send(data)

    @property
    def is_encrypted(self) -> bool:
        """Whether it speaks TLS."""
        return self._transport.get_extra_info("sslcontext") is not None

    def write(self, data: bytes) -> None:
        """Send data, behind what waits."""
        if len(data) > _LARGE_BYTES:
            self.flush()
            self.send(data)
        elif self.pending:
            self.pending += data
            if len(self.pending) > _LARGE_BYTES:  # The writer is to learn that its reader is slow.
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
        """Send what is large, behind what waits: at once, and without copying it together."""
        self.flush()
        self.reclaim()
        if not self._transport.is_closing():
            self._transport.writelines(pieces)

    def write_at_once(self, data: bytes) -> None:
        """Send data, behind what waits, without waiting for the end of the turn."""
        if self.pending:
            self.flush()
        if not self.is_closing():
            self.send(data)

    def flush(self) -> None:
        """Send what waits."""
        pending, self.pending = self.pending, b""
        if pending and not self.is_closing():
            self.send(pending)

    def is_busy(self) -> bool:
        """Return whether the socket has not taken all that was written."""
        return bool(self.pending or self._transport.get_write_buffer_size())

    def get_write_buffer_size(self) -> int:
        """Return the bytes that the socket has not taken."""
        self.flush()
        lent = 0 if self._borrower is None else self._borrower.waiting
        return lent + self._transport.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        """Return whether `write_eof` is possible."""
        return self._transport.can_write_eof()

    def write_eof(self) -> None:
        """Close the sending side."""
        self.flush()
        self.reclaim()
        self._transport.write_eof()

    def close(self) -> None:
        """Close when everything is sent."""
        self.flush()
        self.reclaim()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self.flush()
        self.reclaim()
        self._transport.abort()

    def get_extra_info(self, name: str) -> Any:
        """See asyncio."""
        return self._transport.get_extra_info(name)

    def pause_reading(self) -> None:
        """Stop receiving."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Go on receiving."""
        self._transport.resume_reading()
