"""The limit of a server's connections, and what happens to new ones above it.

Rules:
1. A new connection takes the place of one that has no request with the application, or none that is
   complete: `Loss` orders them. Among equals it is one of the address that has most of them, and of
   those the oldest, where connections on which nothing has come count for `_SILENT_S` older. So who leaves
   connections unfinished loses them first, however many there are, and of a whole backlog that is accepted
   at once a head that is arriving stays beside those who send nothing.
2. An address that has more than a quarter of the places takes none from an address that has not: nobody
   takes all of them by connecting often. This binds only at the limit, as one address may stand for many
   clients (a gateway). A limit per address takes the place of this rule.
3. At the limit a new connection waits until what has arrived on all of them has been read: before that
   nobody knows who has a request. After a standstill, all come at once and unread.
4. If no place can be had, the first request of a new connection is answered with 503, or with 429 if its
   address has as many as its own limit allows. A few new connections may wait for that answer; more are
   aborted.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import IntEnum
from operator import itemgetter
from typing import Protocol

from balanceroute.proxy.wire.messages import Rejection

_LOG = logging.getLogger(__name__)

_RETRY_AFTER = ((b"retry-after", b"1"),)
_FULL = Rejection(503, "too many connections", _RETRY_AFTER)
_PEER_FULL = Rejection(429, "too many connections from this address", _RETRY_AFTER)
GAVE_WAY = Rejection(503, "too many connections, and the request's body is late", _RETRY_AFTER)
"""The answer to a request whose connection another one replaces."""
NEW_S = 1.0
"""For so long what a client sends may be on its way."""
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
    """What is lost with a connection that another one replaces, from nothing on."""

    NOTHING = 0
    """It has had its last answer for `NEW_S`, and is read to its end."""
    LATE_HEAD = 1
    """A request's head that has not arrived for `NEW_S`, or not begun on a new connection."""
    IDLE = 2
    """A connection that the client may want to use again."""
    LATE_BODY = 3
    """A request whose body is `NEW_S` behind the rate at which one is to arrive."""
    NEW = 4
    """A head or a body that is not so late: what is missing may be on its way. Unless an address has them
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
        due_s += NEW_S  # The client sends nothing until it is told to.
    if due_s > now_s:
        return None
    return (Loss.LATE_BODY if due_s <= now_s - NEW_S else Loss.NEW), due_s


class Evictable(Protocol):
    """A connection that the limit may close."""

    def gives_way(self, now_s: float) -> tuple[Loss, float] | None:
        """Return what is lost if it is closed, and since when that counts; None if it is at work."""

    def evict(self) -> bool:
        """Close if it gives way; return whether it was closed."""


_Row = tuple[tuple[Loss, int, float], Evictable]


class ConnectionLimit:
    """Bounds the connections of one server.

    Args:
        most: Connections at a time; None for no limit.
        most_per_peer: Connections of one address; 0 for no limit, None for rule 2.
        clock: The loop's clock, in seconds.

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
        # Found by the last search, who goes first at the end: of addresses within their share, and of others.
        self._within: list[_Row] = []
        self._beyond: list[_Row] = []
        self._look_at_s = 0.0
        self._taken = 0  # New ones since then.
        self._log_at_s = 0.0
        self._unlogged = 0

    def is_full(self, waiting: int) -> bool:
        """Return whether one more needs the place of another one, if so many wait for one."""
        return self._most is not None and len(self._hosts) + waiting >= self._most

    def take(self, newcomer: Evictable, host: str, others: Iterable[Evictable]) -> bool:
        """Count a new connection; return whether it is served.

        Args:
            newcomer: Must be passed to `leave` once, whatever this returns.
            host: The client's address, without the port.
            others: The open connections.
        """
        count = self._of_host.get(host, 0)
        if self._most_per_peer is not None and count >= self._most_per_peer:
            self._reject(newcomer, _PEER_FULL, "peer", host)
            return False
        if (
            self._most is not None
            and len(self._hosts) >= self._most
            and not self._evict_for(host, self._most, others)
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
        """Remove a lost connection."""
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

    def _evict_for(self, host: str, most: int, others: Iterable[Evictable]) -> bool:
        """Close a connection in favour of a newcomer of an address; return whether there was one."""
        now_s, count = self._clock(), len(self._hosts)
        if now_s >= self._look_at_s or count <= max(_FEW, self._taken * _WORTH_LOOKING):
            self._look_at_s = now_s + _LOOK_AGAIN_S
            self._taken = 0
            self._search(most, others, now_s)
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

    def _search(self, most: int, others: Iterable[Evictable], now_s: float) -> None:
        found: defaultdict[tuple[Loss, str], list[tuple[float, Evictable]]] = defaultdict(list)
        for other in others:
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
