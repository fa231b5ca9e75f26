"""The shared state of one server's connections, and the sweep that enforces their deadlines."""

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import IntEnum
from operator import itemgetter
from typing import Protocol, TypeVarTuple

from balanceroute.proxy.wire.http1.heads import (
    STATUS_LINES,
    RequestHead,
    connection_fields,
    encode_fields,
)
from balanceroute.proxy.wire.messages import (
    Application,
    BodyBudget,
    Headers,
    Rejection,
    ServerLimits,
)
from balanceroute.proxy.wire.turn_writes import WriteProgress, WriteTurn

# The limit of a server's connections, and the fate of new ones above it.
#
# Rules:
# 1. A new connection takes the place of one that has no request with the application, or none that is
#    complete: `Loss` orders them. Among equals it is one of the address that has most of them, and of
#    those the oldest, where connections on which nothing has come count for `_SILENT_S` older. So a client
#    that leaves connections unfinished loses them first, however many there are. If the server accepts a
#    whole backlog at once, an arriving head keeps its place before silent connections.
# 2. An address that has more than a quarter of the places takes none from an address that has not: no
#    address takes all of them by connecting often. This binds only at the limit, as one address may stand
#    for many clients (a gateway). A limit per address takes the place of this rule.
# 3. At the limit a new connection waits until the server has read all that has arrived: before that it
#    does not know which connections have a request. After a standstill, all come at once and unread.
# 4. The server answers the first request of a new connection with 503 if no connection gives way, and with
#    429 if its address has as many as its own limit allows. A few new connections may wait for that answer;
#    the server aborts more.

_LOG = logging.getLogger(__name__)

_RETRY_AFTER = ((b"retry-after", b"1"),)
_FULL = Rejection(503, "too many connections", _RETRY_AFTER)
_PEER_FULL = Rejection(429, "too many connections from this address", _RETRY_AFTER)
GAVE_WAY = Rejection(503, "too many connections, and the request's body is late", _RETRY_AFTER)
"""The answer to a request whose connection another one replaces."""
NEW_S = 1.0
"""For so long a client's bytes may be on their way."""
_SILENT_S = 0.01
_MOST_REJECTED = 256
_SHARE = 4
# All connections are searched at most so often, or once for so large a part of them that is new since: it
# took the place of as many. So few of them always.
_LOOK_AGAIN_S = 0.25
_WORTH_LOOKING = 8
_FEW = 64
_LOG_INTERVAL_S = 60.0


class Loss(IntEnum):
    """The loss with a connection that another one replaces, the least first."""

    NOTHING = 0
    """It has had its last answer for `NEW_S`, and is read to its end."""
    LATE_HEAD = 1
    """A request's head that has not arrived for `NEW_S`, or not begun on a new connection."""
    IDLE = 2
    """A connection that the client may want to use again."""
    LATE_BODY = 3
    """A request whose body is `NEW_S` behind the rate at which one is to arrive."""
    NEW = 4
    """A head or a body that is not so late: the rest may be on its way. Unless an address has them
    in a quarter of all places: then they are LATE_HEAD."""
    UNREAD = 5
    """An answer that the client has not read yet; see `ServerLimits.unread_gives_way`."""


def loss_of_head(since_s: float, now_s: float, *, begun: bool) -> tuple[Loss, float]:
    """Return what `Evictable.gives_way` does for a head that is awaited or has begun then."""
    loss = Loss.LATE_HEAD if since_s <= now_s - NEW_S else Loss.NEW
    return loss, since_s if begun else since_s - _SILENT_S


def loss_of_body(
    due_s: float, now_s: float, *, expects_continue: bool
) -> tuple[Loss, float] | None:
    """Return what `Evictable.gives_way` does for a body of which so much has arrived as was due then."""
    if expects_continue:
        due_s += NEW_S  # The client sends nothing before the 100 (Continue).
    if due_s > now_s:
        return None
    return (Loss.LATE_BODY if due_s <= now_s - NEW_S else Loss.NEW), due_s


class Evictable(Protocol):
    """A connection that the limit may close."""

    def gives_way(self, now_s: float) -> tuple[Loss, float] | None:
        """Return the loss if it is closed, and since when that counts; None if it is at work."""

    def evict(self) -> bool:
        """Close if it gives way; return whether it was closed."""


_Row = tuple[tuple[Loss, int, float], Evictable]


class ConnectionLimit:
    """Bounds the connections of one server.

    Args:
        most: Connections at a time; None for no limit.
        most_per_peer: Connections of one address; 0 for no limit, None for rule 2.

    Attributes:
        rejected: New connections that were not served, by reason: "limit" or "peer".
        evicted: Connections that were closed for a new one, or for want of file descriptors.
    """

    def __init__(
        self, most: int | None, most_per_peer: int | None, clock: Callable[[], float]
    ) -> None:
        self.rejected = {"limit": 0, "peer": 0}
        self.evicted = 0
        self._most = most
        self._most_per_peer = most_per_peer or None
        self._share = None if most is None or most_per_peer is not None else max(1, most // _SHARE)
        self._clock = clock
        self._hosts: dict[Evictable, str] = {}  # Of those that are served.
        self._of_host: dict[str, int] = {}
        self._to_reject: dict[Evictable, Rejection] = {}
        self._room_to_reject = (
            _MOST_REJECTED if most is None else min(_MOST_REJECTED, max(1, most // 4))
        )
        # Found by the last search, the first to go at the end: of addresses within their share, and beyond.
        self._within: list[_Row] = []
        self._beyond: list[_Row] = []
        self._look_at_s = 0.0
        self._taken = 0  # New ones since then.
        self._log_at_s = 0.0
        self._unlogged = 0

    def is_full(self, waiting: int) -> bool:
        """Return whether one more needs the place of another one, if so many wait for one."""
        return self._most is not None and len(self._hosts) + waiting >= self._most

    def take(self, newcomer: Evictable, host: str, connections: Iterable[Evictable]) -> bool:
        """Count a new connection; return whether it is served.

        Args:
            newcomer: Must be passed to `leave` once, whatever this returns.
            host: The client's address, without the port.
        """
        count = self._of_host.get(host, 0)
        if self._most_per_peer is not None and count >= self._most_per_peer:
            self._reject(newcomer, _PEER_FULL, "peer", host)
            return False
        if (
            self._most is not None
            and len(self._hosts) >= self._most
            and not self._evict_for(host, self._most, connections)
        ):
            self._reject(newcomer, _FULL, "limit", host)
            return False
        self._taken += 1
        self._hosts[newcomer] = host
        self._of_host[host] = self._of_host.get(host, 0) + 1
        return True

    def take_place(self, connection: Evictable, of: Evictable) -> bool:
        """Count a connection in place of another one of its client; return whether it is served."""
        host = self._hosts.pop(of, None)
        if host is None:
            self._to_reject[connection] = self._to_reject.pop(of)
            return False
        self._hosts[connection] = host
        return True

    def rejection(self, newcomer: Evictable) -> Rejection | None:
        """Return the answer to a connection that is not served; None to abort it without one."""
        return self._to_reject.get(newcomer)

    def leave(self, connection: Evictable, *, served: bool) -> None:
        if not served:
            self._to_reject.pop(connection, None)
            return
        host = self._hosts.pop(connection)
        self._of_host[host] -= 1
        if not self._of_host[host]:
            del self._of_host[host]

    def shed(self, connections: Iterable[Evictable]) -> None:
        """Close those that give way, but for new ones, whose request may be there and unread."""
        now_s = self._clock()
        for one in list(connections):
            found = one.gives_way(now_s)
            if found is None or found[0] is Loss.NEW or found[1] > now_s - NEW_S:
                continue
            if one.evict():
                self.evicted += 1

    def _evict_for(self, host: str, most: int, connections: Iterable[Evictable]) -> bool:
        """Close a connection in favour of a newcomer of an address; return whether there was one."""
        now_s, count = self._clock(), len(self._hosts)
        if now_s >= self._look_at_s or count <= max(_FEW, self._taken * _WORTH_LOOKING):
            self._look_at_s = now_s + _LOOK_AGAIN_S
            self._taken = 0
            self._search(most, connections, now_s)
        within, beyond = self._within, self._beyond
        if not self._is_within(host):
            within = []
        while within or beyond:
            first = not beyond or (within and within[-1][0] < beyond[-1][0])
            _, one = (within if first else beyond).pop()
            if one.evict():
                self.evicted += 1
                return True
        return False

    def _is_within(self, host: str) -> bool:
        return self._share is None or self._of_host.get(host, 0) <= self._share

    def _search(self, most: int, connections: Iterable[Evictable], now_s: float) -> None:
        found: defaultdict[tuple[Loss, str], list[tuple[float, Evictable]]] = defaultdict(list)
        for other in connections:
            host = self._hosts.get(other)
            gives_way = None if host is None else other.gives_way(now_s)
            if host is not None and gives_way is not None:
                loss, since_s = gives_way
                found[loss, host].append((since_s, other))
        for host in self._of_host:
            new = found.get((Loss.NEW, host), [])
            late = found[Loss.LATE_HEAD, host]
            if len(new) + len(late) > most // _SHARE:
                late += new
                new.clear()
        self._within, self._beyond = [], []
        for (loss, host), ones in found.items():
            ones.sort(key=itemgetter(0))
            rows = self._within if self._is_within(host) else self._beyond
            # The first of an address counts for all of them, the last for itself.
            left = range(-len(ones), 0)
            rows += [((loss, n, one[0]), one[1]) for n, one in zip(left, ones, strict=True)]
        for rows in (self._within, self._beyond):
            rows.sort(key=itemgetter(0))
            rows.reverse()

    def _reject(self, newcomer: Evictable, rejection: Rejection, reason: str, host: str) -> None:
        self.rejected[reason] += 1
        if len(self._to_reject) < self._room_to_reject:
            self._to_reject[newcomer] = rejection
        self._unlogged += 1
        now_s = self._clock()
        if now_s >= self._log_at_s:
            self._log_at_s = now_s + _LOG_INTERVAL_S
            fields = {
                "reason": reason,
                "count": self._unlogged,
                "open": len(self._hosts),
                "peer": host,
            }
            self._unlogged = 0
            _LOG.warning("connections were rejected: too many are open", extra={"fields": fields})


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
        """Call back once the loop has read all bytes that have arrived by now."""
        # The loop polls its sockets between two turns of its ready callbacks. A new connection is one turn
        # late: the loop begins to read when the protocol knows of it.
        self.loop.call_soon(self.loop.call_soon, callback, *args)

    def shed(self) -> None:
        self.limit.shed(self.connections)

    def _place(self, connection: SweptConnection) -> None:
        host = self._waiting.pop(connection, None)
        if host is not None:
            connection.placed(is_served=self.limit.take(connection, host, self.connections))

    def take_place(self, connection: SweptConnection, of: SweptConnection) -> bool:
        del self.connections[of]
        self.connections[connection] = None
        return self.limit.take_place(connection, of)

    def remove(self, connection: SweptConnection, *, served: bool) -> None:
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
        return b"" if self._common is None else encode_fields(self._common(headers))

    def last_answer(
        self, rejection: Rejection, head: RequestHead | None, peer: str, received: bytes = b""
    ) -> bytes:
        """Return the whole answer to a request that is not served, after which the connection ends.

        Args:
            rejection: Why it is not served.
            head: Its head if it could be parsed.
            received: The bytes of a head that could not be parsed.
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
        # After a standstill of this process the loop reads clients' bytes behind the timers, so no deadline
        # counts yet. Not twice in a row: a loop may be late for ever.
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
