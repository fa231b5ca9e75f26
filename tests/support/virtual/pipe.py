"""One direction of a connection: bytes in order, after a delay, through a window.

The kernel's part of TCP. A segment is (due time, bytes); the empty segment is the FIN, as recv()
returns it. A reset travels beside the queue, because it is felt by a writer whose reader is paused.
"""

import math
from collections import deque
from contextvars import Context
from typing import TYPE_CHECKING, Protocol

from tests.support.virtual.addresses import Link, Traffic

if TYPE_CHECKING:
    import asyncio


READ_BYTES = 256 * 1024  # The most that asyncio reads at once.
FIN = b""


class PipeSource(Protocol):
    """The end that writes to a pipe."""

    context: Context  # In which it is called.

    def get_write_buffer_size(self) -> int:
        """Return how many bytes wait for the window."""

    def flush(self) -> None:
        """Write from the buffer what the window now takes."""


class PipeTarget(Protocol):
    """The end that reads from a pipe."""

    context: Context  # In which it is called.
    name: str  # "client" or "server".
    is_shut: bool  # The socket is closed.
    was_reset: bool  # The peer's reset has arrived.

    @property
    def wants_bytes(self) -> bool:
        """Whether a read is wanted."""

    def look(self) -> None:
        """Read what has arrived, or notice a reset behind it."""

    def receive(self, segment: bytes) -> None:
        """Give the protocol bytes."""

    def receive_eof(self) -> None:
        """Report the peer's FIN to the protocol."""

    def receive_reset(self) -> None:
        """Take the peer's reset."""


class Duplex(Protocol):
    """The connection that a pipe is one direction of."""

    number: int  # Counts connections from 1.

    def opposite(self, pipe: "Pipe") -> "Pipe":
        """Return the other direction."""

    def reset(self) -> None:
        """Reset both ends."""

    def end_shut(self) -> None:
        """Note that one end was shut."""


class Pipe:
    """Carries what `source` writes to `target`."""

    __slots__ = (
        "_connection",
        "_line_free_s",
        "_link",
        "_loop",
        "_newest_due_s",
        "_outstanding",
        "_queue",
        "_reset_after",
        "_reset_due_s",
        "_silent",
        "_stall_after",
        "_stalled_until_s",
        "_timer",
        "_traffic",
        "_window_timer",
        "delivered",
        "is_reset",
        "source",
        "target",
    )

    source: PipeSource  # The writing end.
    target: PipeTarget  # The reading end.

    def __init__(
        self,
        traffic: Traffic,
        connection: Duplex,
        link: Link,
        *,
        reset_after: int | None,
        stall_after: int | None,
    ) -> None:
        self._traffic = traffic
        self._loop = traffic.loop
        self._connection = connection
        self._link = link
        self._reset_after = reset_after
        self._stall_after = stall_after
        self._queue: deque[tuple[float, bytes]] = deque()
        self._outstanding = 0  # Bytes taken from the source and not read by the target.
        self._newest_due_s = 0.0
        self._line_free_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._window_timer: asyncio.TimerHandle | None = None
        self._reset_due_s: float | None = None
        self._silent = False
        self._stalled_until_s = 0.0
        self.delivered = 0  # Bytes that the target's protocol was given.
        self.is_reset = False  # A reset is on its way or has arrived; what is sent now is lost.

    # The source's side

    @property
    def room(self) -> int:
        """How many bytes the window takes now."""
        return self._link.window_bytes - self._outstanding

    def send(self, segment: bytes) -> int:
        """Take what fits the window; return how many bytes that is."""
        room = self._link.window_bytes - self._outstanding
        if room < len(segment):
            if room <= 0:
                return 0
            segment = segment[:room]
        size = len(segment)
        self._traffic.bytes_sent += size
        if self.is_reset:
            return size
        self._outstanding += size
        if self._link.split_bytes is None:
            self._queue.append((self._due(size), segment))
        else:
            self._send_split(segment, self._link.split_bytes)
        self.arm()
        return size

    def _send_split(self, segment: bytes, most: int) -> None:
        at = 0
        while at < len(segment):
            piece = segment[at : at + self._traffic.rng.randint(1, most)]
            self._queue.append((self._due(len(piece)), piece))
            at += len(piece)

    def finish(self) -> None:
        """Send a FIN after what was sent."""
        if not self.is_reset:
            self._queue.append((self._due(0), FIN))
            self.arm()

    def reset(self, *, lose: bool) -> None:
        """Send a reset after what was sent; drop the tail of that, of a drawn length, if `lose`."""
        if self.is_reset:
            return
        self.is_reset = True
        if lose:
            self._keep(self._traffic.rng.randint(0, len(self._queue)))
        self._reset_due_s = self._due(0)
        self._loop.call_at(self._reset_due_s, self._reset_arrives, context=self.target.context)

    def cut(self) -> None:
        """Reset both directions here and now: nothing that is still on its way arrives."""
        self._keep(0)
        self._connection.reset()

    def _keep(self, count: int) -> None:
        while len(self._queue) > count:
            self._outstanding -= len(self._queue.pop()[1])

    def _due(self, size: int) -> float:
        """Return when a segment that leaves now arrives: never before its predecessor."""
        link = self._link
        leaves_s = self._loop.time()
        if link.bytes_per_s is not None:
            leaves_s = max(leaves_s, self._line_free_s) + size / link.bytes_per_s
            self._line_free_s = leaves_s
        due_s = leaves_s + link.latency_s
        if link.jitter_s:
            due_s += self._traffic.rng.uniform(0.0, link.jitter_s)
        if link.coalesce_s:
            due_s = math.ceil(due_s / link.coalesce_s) * link.coalesce_s
        self._newest_due_s = due_s = max(due_s, self._newest_due_s)
        return due_s

    # Outages

    @property
    def _blocked(self) -> bool:
        return self._silent or self._stalled_until_s > self._loop.time()

    def stall(self, seconds: float | None) -> None:
        """Deliver nothing, no FIN and no reset either, for so long; None is for ever."""
        if seconds is None:
            self._stalled_until_s = math.inf
            return
        self._stalled_until_s = max(self._stalled_until_s, self._loop.time() + seconds)
        self._loop.call_at(self._stalled_until_s, self._release)

    def set_silent(self, silent: bool) -> None:
        """Start or end a black hole, in which the window does not open either."""
        self._silent = silent
        self._release()

    def _release(self) -> None:
        if self._blocked:
            return
        self.arm()
        self._open_window()
        if self._reset_due_s is not None:
            self._loop.call_at(self._reset_due_s, self._reset_arrives, context=self.target.context)

    # The target's side

    @property
    def is_drained(self) -> bool:
        """Nothing is on its way or unread."""
        return not self._queue

    @property
    def has_unread(self) -> bool:
        """Bytes have arrived that the target did not read."""
        return (
            bool(self._queue) and self._queue[0][0] <= self._loop.time() and bool(self._queue[0][1])
        )

    def has_arrived(self) -> bool:
        """Return whether bytes, a FIN or a reset wait for the target to look."""
        if self._blocked:
            return False
        now = self._loop.time()
        reset = self._reset_due_s is not None and self._reset_due_s <= now
        return reset or (bool(self._queue) and self._queue[0][0] <= now)

    def arm(self) -> None:
        """See to the next delivery, if the target wants one. Safe to call at any time."""
        if self._timer is None and self._queue and (self.target.wants_bytes or self.target.is_shut):
            due_s, context = self._queue[0][0], self.target.context
            self._timer = self._loop.call_at(due_s, self._arrive, context=context)

    def shut(self) -> None:
        """Forget what arrived, the target being closed; what comes later is answered by a reset."""
        while self.has_unread:
            self._queue.popleft()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.arm()

    def _arrive(self) -> None:
        self._timer = None
        if self._blocked or not self._queue:
            return
        if self.target.is_shut:
            self._arrive_too_late()
            return
        if not self.target.wants_bytes or self._fault():
            return
        if self._queue[0][1] == FIN:
            self._queue.popleft()
            self._record("eof")
            self.target.receive_eof()
        else:
            segment = self._take()
            self.arm()
            self._open_window()
            self._record("bytes", len(segment))
            self.target.receive(segment)
            self._fault()
        if not self._queue and self.target.was_reset:
            self.target.look()

    def _take(self) -> bytes:
        """Take what has arrived, as one read would, up to the byte at which a fault is planned."""
        now = self._loop.time()
        limits = [at for at in (self._reset_after, self._stall_after) if at is not None]
        budget = min([READ_BYTES, *(at - self.delivered for at in limits)])
        pieces: list[bytes] = []
        while budget and self._queue and self._queue[0][0] <= now and self._queue[0][1]:
            due_s, piece = self._queue.popleft()
            if len(piece) > budget:
                self._queue.appendleft((due_s, piece[budget:]))
                piece = piece[:budget]
            budget -= len(piece)
            pieces.append(piece)
            if self._link.split_bytes is not None:
                break
        segment = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._outstanding -= len(segment)
        self.delivered += len(segment)
        self._traffic.bytes_delivered += len(segment)
        return segment

    def _fault(self) -> bool:
        """Let a planned fault happen if its byte is reached; return whether one did."""
        if self._reset_after is not None and self.delivered >= self._reset_after:
            self._reset_after = None
            self.cut()
            return True
        if self._stall_after is not None and self.delivered >= self._stall_after:
            self._stall_after = None
            self.stall(self._link.stall_s)
            return True
        return False

    def _arrive_too_late(self) -> None:
        if self._queue.popleft()[1] == FIN:
            return
        self._queue.clear()
        self._connection.opposite(self).reset(lose=False)

    def _reset_arrives(self) -> None:
        if self._blocked or self._reset_due_s is None:
            return
        self._reset_due_s = None
        self._record("reset")
        self.target.receive_reset()

    def _open_window(self) -> None:
        """Notify a source that waits for room; the notice takes as long as bytes do."""
        if self._window_timer is None and self.source.get_write_buffer_size() and self.room > 0:
            self._window_timer = self._loop.call_later(
                self._link.latency_s, self._window_opens, context=self.source.context
            )

    def _window_opens(self) -> None:
        self._window_timer = None
        if not self._silent:
            self.source.flush()

    def _record(self, kind: str, num_bytes: int = 0) -> None:
        self._traffic.record(kind, self._connection.number, self.target.name, num_bytes)
