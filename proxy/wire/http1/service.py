"""What the connections of one server share, and the sweep that enforces their deadlines."""

import asyncio
import re
from collections.abc import Callable
from typing import Protocol, TypeVarTuple

from balanceroute.proxy.wire.connection_limit import ConnectionLimit, Evictable
from balanceroute.proxy.wire.http1.heads import (
    STATUS_LINES,
    RequestHead,
    connection_fields,
    encode_fields,
)
from balanceroute.proxy.wire.messages import BodyBudget, Headers, Rejection, ServerLimits
from balanceroute.proxy.wire.reply import Application
from balanceroute.proxy.wire.turn_writes import WriteProgress, WriteTurn

Ts = TypeVarTuple("Ts")

Admit = Callable[[RequestHead, str], Rejection | None]
"""Checks a head and the client's address before the body is read."""
Refuse = Callable[[Rejection, RequestHead | None, str], tuple[Headers, bytes]]
"""Renders the answer to a request that does not reach the application.

Called with the rejection, the head if it could be parsed, and the client's address.
"""
Common = Callable[[Headers], Headers]
"""Returns headers for every answer to a request, in addition to the application's.

Called with the request's headers; of a head that could not be parsed, with its Origin, if it has one.
"""
_ORIGIN = re.compile(rb"\r\n[Oo][Rr][Ii][Gg][Ii][Nn]:[ \t]*([\x21-\x7e]{1,1024})[ \t]*(?=\r\n)")


class SweptConnection(Evictable, Protocol):
    """A connection whose deadline the sweep enforces."""

    deadline_s: float  # When the sweep calls `expire`, on the loop's clock.

    def placed(self, *, is_served: bool) -> None:
        """Begin: it is counted, or rejected by the limit."""

    def expire(self, now_s: float) -> None:
        """Act on a deadline that has passed."""

    def end(self, idle_s: float) -> None:
        """Close after the present answer, or at once if idle.

        With `idle_s` it closes after an answer that says so, or after so many idle seconds.
        """

    def drop(self) -> None:
        """Abort now."""


class Service:
    """The state of a started server.

    One coarse timer serves every deadline: a timer per connection or request would cost more than
    precise deadlines are worth. It is off while there is no connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        application: Application,
        limits: ServerLimits,
        *,
        refuse: Refuse,
        admit: Admit | None,
        common: Common | None,
    ) -> None:
        self.loop = loop
        self.application = application
        self.admit = admit
        self._common = common
        self.limits = limits
        self.refuse = refuse
        # Decides which connections are served.
        self.limit = ConnectionLimit(
            limits.connection_limit, limits.peer_connection_limit, clock=loop.time
        )
        self.turn = WriteTurn(loop)  # Gathers the writes of all connections.
        # Counts the bytes of the bodies in flight.
        self.bodies = BodyBudget(limits.body_budget_bytes)
        # How long after an answer a connection is looked at.
        self.idle_check_s = min(
            limits.keep_alive_timeout_s, WriteProgress(limits.write_timeout_s).check_s
        )
        # The open connections, in order of arrival (the order of a set differs from run to run).
        self.connections: dict[SweptConnection, None] = {}
        self._waiting: dict[SweptConnection, str] = {}  # For a place, with their hosts.
        self.stopping = False  # Every connection closes after its present answer.
        self.on_empty: Callable[[], None] | None = None  # Called when the last connection is gone.
        shortest_s = min(
            limits.header_timeout_s,
            limits.body_timeout_s,
            limits.keep_alive_timeout_s,
            limits.write_timeout_s,
        )
        self._sweep_s = min(1.0, shortest_s / 4)
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._woke = False

    def add(self, connection: SweptConnection, host: str) -> None:
        """Count a new connection, and place it: at once unless another one has to make room."""
        waits = self.limit.is_full(len(self._waiting))
        is_served = not waits and self.limit.take(connection, host, self.connections)
        self.connections[connection] = None
        if self._timer is None:
            self._plan_sweep()
        if waits:
            self._waiting[connection] = host
            self.after_reads(self._place, connection)
        else:
            connection.placed(is_served=is_served)

    def after_reads(self, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call back once the loop has read what has arrived by now."""
        # The loop looks for what has arrived between two turns of what is called soon. A new connection is
        # one turn late: the loop begins to read when the protocol knows of it.
        self.loop.call_soon(self.loop.call_soon, callback, *args)

    def shed(self) -> None:
        """Close connections that are idle."""
        self.limit.shed(self.connections)

    def _place(self, connection: SweptConnection) -> None:
        host = self._waiting.pop(connection, None)
        if host is not None:
            connection.placed(is_served=self.limit.take(connection, host, self.connections))

    def take_place(self, connection: SweptConnection, of: SweptConnection) -> bool:
        """Count a connection in place of another one; return whether it is served."""
        del self.connections[of]
        self.connections[connection] = None
        return self.limit.take_place(connection, of)

    def remove(self, connection: SweptConnection, *, served: bool) -> None:
        """Remove a lost connection."""
        del self.connections[connection]
        if self._waiting.pop(connection, None) is None:
            self.limit.leave(connection, served=served)
        if self.connections:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.on_empty is not None:
            self.on_empty()

    def common_headers(self, headers: Headers) -> Headers:
        """Return the headers of every answer to a request that has these."""
        return [] if self._common is None else self._common(headers)

    def common_fields(self, headers: Headers) -> bytes:
        """Return them as lines."""
        return b"" if self._common is None else encode_fields(self._common(headers))

    def last_answer(
        self, rejection: Rejection, head: RequestHead | None, peer: str, received: bytes = b""
    ) -> bytes:
        """Return the whole answer to a request that is not served, after which the connection ends.

        Args:
            rejection: Why it is not served.
            head: Its head if it could be parsed.
            peer: The client's address.
            received: What has come of a head that could not be.
        """
        headers, body = self.refuse(rejection, head, peer)
        read = _origin_of(received) if head is None else head.headers
        fields = encode_fields(headers) + self.common_fields(read)
        return b"%b%bcontent-length: %d\r\n%b\r\n%b" % (
            STATUS_LINES[rejection.status],
            fields,
            len(body),
            connection_fields(rejection.status, b"close"),
            body,
        )

    def _plan_sweep(self) -> None:
        self._timer = self.loop.call_later(self._sweep_s, self._sweep)
        self._due_s = self.loop.time() + self._sweep_s

    def _sweep(self) -> None:
        now_s = self.loop.time()
        # After a standstill of this process what clients sent meanwhile is read behind the timers, so nothing
        # is overdue yet. Not twice in a row: a loop may be late for ever.
        self._woke = now_s - self._due_s > self._sweep_s and not self._woke
        self._plan_sweep()
        if self._woke:
            return
        for connection in list(self.connections):
            if connection.deadline_s <= now_s:
                connection.expire(now_s)


def _origin_of(received: bytes) -> Headers:
    """Return the Origin of a head that could not be parsed, if it has one.

    With it the page that sent the request may read why it is refused.
    """
    found = _ORIGIN.findall(received.partition(b"\r\n\r\n")[0] + b"\r\n")
    return [(b"origin", found[0])] if len(found) == 1 else []
