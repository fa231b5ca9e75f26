"""The limit of a server's connections, and what happens to new ones above it.

Rules:
1. A new connection replaces the one that has been without a request for longest.
2. If every connection has a request, the first request of a new one is answered with 503, or with 429
   if its own address has too many connections. A few new connections may wait for that answer; more
   are aborted.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from balanceroute.proxy.wire.messages import Rejection

_LOG = logging.getLogger(__name__)

_RETRY_AFTER = ((b"retry-after", b"1"),)
_FULL = Rejection(503, "too many connections", _RETRY_AFTER)
_PEER_FULL = Rejection(429, "too many connections from this address", _RETRY_AFTER)
_MOST_REJECTED = 256
# A search of all connections for idle ones does not pay if fewer than one in this many is idle.
_WORTH_LOOKING = 8
_LOOK_AGAIN_S = 0.1
_NEW_S = 1.0
_LOG_INTERVAL_S = 60.0


class Evictable(Protocol):
    """A connection that the limit may close."""

    @property
    def idle_since_s(self) -> float | None:
        """When it became idle (no request, nothing to send), on the loop's clock; None if it is not."""

    def evict(self) -> bool:
        """Close if idle; return whether it was closed."""


class ConnectionLimit:
    """Bounds the connections of one server.

    Args:
        most: Connections at a time; None for no limit.
        most_per_peer: Connections of one address; None for no limit.
        clock: The loop's clock, in seconds.

    Attributes:
        rejected: New connections that were not served, by reason: "limit" or "peer".
        evicted: Idle connections that were closed for a new one, or for want of file descriptors.
    """

    def __init__(
        self, most: int | None, most_per_peer: int | None, clock: Callable[[], float]
    ) -> None:
        self.rejected = {"limit": 0, "peer": 0}
        self.evicted = 0
        self._most = most
        self._most_per_peer = most_per_peer
        self._clock = clock
        self._open = 0
        self._hosts: dict[Evictable, str] = {}
        self._of_host: dict[str, int] = {}
        self._to_reject: dict[Evictable, Rejection] = {}
        self._room_to_reject = (
            _MOST_REJECTED if most is None else min(_MOST_REJECTED, max(1, most // 4))
        )
        # Idle at the last search, the longest idle at the end.
        self._idle: list[Evictable] = []
        self._look_at_s = 0.0
        self._log_at_s = 0.0
        self._unlogged = 0

    def take(self, newcomer: Evictable, host: str, others: Iterable[Evictable]) -> bool:
        """Count a new connection; return whether it is served.

        Args:
            newcomer: Must be passed to `leave` once, whatever this returns.
            host: The client's address, without the port.
            others: The open connections.
        """
        if self._most_per_peer is not None and self._of_host.get(host, 0) >= self._most_per_peer:
            self._reject(newcomer, _PEER_FULL, "peer", host)
            return False
        if self._most is not None and self._open >= self._most and not self._evict(others):
            self._reject(newcomer, _FULL, "limit", host)
            return False
        self._open += 1
        if self._most_per_peer is not None:
            self._hosts[newcomer] = host
            self._of_host[host] = self._of_host.get(host, 0) + 1
        return True

    def rejection(self, newcomer: Evictable) -> Rejection | None:
        """Return the answer to a connection that is not served; None to abort it without one."""
        return self._to_reject.get(newcomer)

    def leave(self, connection: Evictable, *, served: bool) -> None:
        """Remove a lost connection."""
        if not served:
            self._to_reject.pop(connection, None)
            return
        self._open -= 1
        if self._most_per_peer is not None:
            host = self._hosts.pop(connection)
            self._of_host[host] -= 1
            if not self._of_host[host]:
                del self._of_host[host]

    def shed(self, connections: Iterable[Evictable]) -> None:
        """Close those that are idle, but for new ones, whose request may be there and unread."""
        idle_s = self._clock() - _NEW_S
        for one in list(connections):
            since_s = one.idle_since_s
            if since_s is not None and since_s <= idle_s and one.evict():
                self.evicted += 1

    def _evict(self, others: Iterable[Evictable]) -> bool:
        now_s = self._clock()
        while True:
            while self._idle:
                if self._idle.pop().evict():
                    self.evicted += 1
                    return True
            if now_s < self._look_at_s:
                return False
            found = [
                (since_s, other) for other in others if (since_s := other.idle_since_s) is not None
            ]
            if len(found) * _WORTH_LOOKING < self._open:
                self._look_at_s = now_s + _LOOK_AGAIN_S
            found.sort(key=lambda pair: -pair[0])
            self._idle = [connection for _, connection in found]

    def _reject(self, newcomer: Evictable, rejection: Rejection, reason: str, host: str) -> None:
        self.rejected[reason] += 1
        if len(self._to_reject) < self._room_to_reject:
            self._to_reject[newcomer] = rejection
        self._unlogged += 1
        now_s = self._clock()
        if now_s >= self._log_at_s:
            self._log_at_s = now_s + _LOG_INTERVAL_S
            fields = {"reason": reason, "count": self._unlogged, "open": self._open, "peer": host}
            self._unlogged = 0
            _LOG.warning("connections were rejected: too many are open", extra={"fields": fields})
