"""An HTTP/1.1 server for one application: listening, draining, closing."""

import asyncio
import errno
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from ssl import SSLContext
from typing import Any, cast

from balanceroute.proxy.wire.http1.heads import RequestHead
from balanceroute.proxy.wire.http1.server_connection import ServerConnection
from balanceroute.proxy.wire.http1.service import (
    Admit,
    Common,
    ConnectionLimit,
    Loss,
    Refuse,
    Service,
    loss_of_head,
)
from balanceroute.proxy.wire.messages import (
    Application,
    BodyBudget,
    Headers,
    Rejection,
    Reply,
    ServerLimits,
)

# A client's TLS handshake, which counts as a connection of the server already.
#
# An event loop that accepts and shakes hands in one step shows nothing of a handshake until it is over. So
# the server takes the accepted socket from the loop, and gives it back to shake hands.

_LOG = logging.getLogger(__name__)


Make = Callable[..., ServerConnection]
"""Makes a connection, given the server's `Service`, and the handshake whose place it takes, if any."""


class Handshake(asyncio.Protocol):
    """One handshake; see `SweptConnection`. Its connection, which `make` makes, takes its place."""

    __slots__ = (
        *("_begun_s", "_context", "_is_served", "_make", "_own", "_service", "_shaking"),
        "deadline_s",
    )

    def __init__(self, service: Service, context: SSLContext, make: Make) -> None:
        self._service = service
        self._make = make
        self._context = context
        self._begun_s = service.loop.time()
        self.deadline_s = self._begun_s + service.limits.header_timeout_s
        self._is_served = True
        self._own: socket.socket | None = None  # Until it begins.
        self._shaking: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        accepted = cast("asyncio.Transport", transport)
        address = accepted.get_extra_info("peername")
        try:
            self._own = socket.socket(fileno=os.dup(accepted.get_extra_info("socket").fileno()))
        except OSError:  # There is no descriptor left, or the client has gone.
            return
        finally:
            accepted.abort()
        self._own.setblocking(False)
        self._service.add(self, address[0] if address else "")

    def placed(self, *, is_served: bool) -> None:
        """See `SweptConnection`."""
        self._is_served = is_served
        if is_served or self._service.limit.rejection(self) is not None:
            own, self._own = self._own, None
            assert own is not None
            self._shaking = self._service.loop.create_task(self._shake(own))
        else:
            self.drop()

    def gives_way(self, now_s: float) -> tuple[Loss, float] | None:
        """See `Evictable`."""
        shaking = self._shaking
        if shaking is None or shaking.cancelling():
            return None
        return loss_of_head(self._begun_s, now_s, begun=True)  # Whether one has begun is unknown.

    def evict(self) -> bool:
        """See `Evictable`."""
        if self.gives_way(self._begun_s) is None:
            return False
        self.drop()
        return True

    def drop(self) -> None:
        if self._shaking is not None:
            self._shaking.cancel()
        elif self._own is not None:
            self._own.close()
            self._own = None
            self._service.remove(self, served=self._is_served)

    def end(self, idle_s: float) -> None:
        """See `SweptConnection`: its client has not asked for anything yet."""
        if not idle_s:
            self.drop()

    def expire(self, now_s: float) -> None:
        """Abort a handshake that took too long."""
        del now_s
        self.drop()

    async def _shake(self, own: socket.socket) -> None:
        service = self._service
        try:
            await service.loop.connect_accepted_socket(
                lambda: self._make(service, self),
                own,
                ssl=self._context,
                ssl_handshake_timeout=service.limits.header_timeout_s,
            )
        except OSError as error:
            _LOG.debug("a TLS handshake failed: %s", error)
            own.close()
        except asyncio.CancelledError:
            own.close()
        finally:
            if self in service.connections:
                service.remove(self, served=self._is_served)


# Listening sockets of a server that may accept nothing for a time.
#
# An event loop has no call for that. Without a file descriptor uvloop's accepts and closes what connects,
# and once it has lost the one that it keeps for this, it spins. So the server closes the loop's sockets,
# and keeps second descriptors of them open: new connections wait in the kernel's queue.


class Listener:
    """The sockets that one call has bound.

    Args:
        listen: Begins to accept at an address, or on a socket. Raises OSError.
    """

    def __init__(self, listen: Callable[..., Awaitable[asyncio.Server]]) -> None:
        self._listen = listen
        self._servers: list[asyncio.Server] = []
        self._spares: list[socket.socket] = []
        self.closed = False  # Whether it accepts nothing any more.

    async def open(self, **place: object) -> None:
        """Accept at a place: `host` and `port`, or a `sock` that is bound. Raises OSError."""
        server = await self._listen(**place)
        self._servers.append(server)
        if not server.sockets:  # The loop leaves out addresses that the machine does not have.
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """Those that accept; none while it is paused."""
        return [one for server in self._servers for one in server.sockets]

    def keep_spares(self) -> None:
        """Open the sockets that `pause` leaves open: later there may be no descriptor. Raises OSError."""
        if not self._spares:
            self._spares += [socket.socket(fileno=os.dup(one.fileno())) for one in self.sockets]

    def pause(self) -> None:
        """Accept nothing until `resume`, if there are spares."""
        if self._spares:
            self._close_servers()

    async def resume(self) -> None:
        """Accept again. Raises OSError: there is no descriptor; then it stays paused."""
        if self._servers or self.closed:
            return
        try:
            for spare in self._spares:
                with ExitStack() as opened:
                    one = opened.enter_context(spare.dup())
                    one.setblocking(False)
                    self._servers.append(await self._listen(sock=one))
                    opened.pop_all()
        except OSError:
            self._close_servers()
            raise

    def close(self) -> None:
        self.closed = True
        self._close_servers()
        for one in self._spares:
            one.close()
        self._spares.clear()

    def _close_servers(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()


__all__ = ["Admit", "Application", "Refuse", "Reply", "Server"]

# Connections that the kernel completes before they are accepted.
_BACKLOG = 2048


def plain_refusal(
    rejection: Rejection, head: RequestHead | None, peer: str
) -> tuple[Headers, bytes]:
    del head, peer
    error = {"code": rejection.status, "message": rejection.message}
    headers = [(b"content-type", b"application/json"), *rejection.headers]
    return headers, json.dumps({"error": error}).encode()


def listened_at(host: str) -> tuple[str, ...]:
    """Return where to listen for a host: `::` is every interface, for both families.

    Each family has a socket of its own, so that an IPv4 peer has the address that it has elsewhere.
    """
    return ("::", "0.0.0.0") if host == "::" else (host,)  # noqa: S104 - the user asks for it.


class Server:
    """Serves an application on one port.

    Args:
        application: Called with each complete request and its reply. It may answer at any time. It
            must not raise: if it does, the client gets a 500 and the error is logged.
        refuse: Renders the answer to a request that does not reach the application: a protocol error,
            or one that `admit` rejects.
        admit: Checks each head before its body is read, and before a 100 (Continue); None to admit
            everything. A rejected request is answered at once and its body dropped.
        common: Returns headers for every answer, in addition to the application's.
    """

    def __init__(
        self,
        application: Application,
        *,
        limits: ServerLimits | None = None,
        refuse: Refuse = plain_refusal,
        admit: Admit | None = None,
        common: Common | None = None,
        make: Make = ServerConnection,
    ) -> None:
        self._application = application
        self._make = make
        self._limits = limits or ServerLimits()
        self._refuse = refuse
        self._admit = admit
        self._common = common
        self._service: Service | None = None
        self._listeners: list[Listener] = []
        # Host and port of each listening socket, also after closing.
        self.addresses: list[tuple[str, int]] = []
        self._drained: asyncio.Future[None] | None = None

    async def start(self, host: str, port: int, *, ssl: SSLContext | None = None) -> None:
        """Listen.

        Args:
            host: An address, or a name, all of whose addresses are used; see `listened_at`.
            port: 0 for a free one.

        Raises:
            OSError: The address cannot be bound.
        """
        await self._listen([{"host": one, "port": port} for one in listened_at(host)], ssl)

    async def start_on(
        self, sockets: Sequence[socket.socket], *, ssl: SSLContext | None = None
    ) -> None:
        """Listen on sockets that are bound already, and close them with the server; see `start`."""
        await self._listen([{"sock": one} for one in sockets], ssl)

    async def _listen(self, places: list[dict[str, Any]], ssl: SSLContext | None) -> None:
        assert self._service is None, "already started"
        service = Service(
            asyncio.get_running_loop(),
            self._application,
            self._limits,
            refuse=self._refuse,
            admit=self._admit,
            common=self._common,
        )
        try:
            for place in places:
                if self.addresses and "port" in place:
                    place["port"] = self.port  # The same for all.
                listener = self._listener(service, ssl)
                self._listeners.append(listener)
                await listener.open(**place)
                self.addresses += [one.getsockname()[:2] for one in listener.sockets]
        except OSError:
            self._close_listeners()
            raise
        self._service = service

    def _listener(self, service: Service, ssl: SSLContext | None) -> Listener:
        # The loop accepts a whole backlog at once.
        limit = self._limits.connection_limit
        backlog = _BACKLOG if limit is None else min(_BACKLOG, limit)
        make = (
            partial(self._make, service)
            if ssl is None
            else partial(Handshake, service, ssl, self._make)
        )
        return Listener(partial(service.loop.create_server, make, backlog=backlog))

    def keep_spares(self) -> None:
        """Get the descriptors that `pause` needs. Raises OSError: there is none."""
        for listener in self._listeners:
            listener.keep_spares()

    def pause(self) -> None:
        """Accept nothing until `resume`, and close connections that are idle; see `Listener`.

        Who connects waits, and is not refused.
        """
        for listener in self._listeners:
            listener.pause()
        if self._service is not None:
            self._service.after_reads(self._service.shed)

    async def resume(self) -> None:
        """Accept again. Raises OSError: there is no file descriptor for it."""
        for listener in self._listeners:
            await listener.resume()

    @property
    def service(self) -> Service:
        """The state that its connections share, with those of another transport too."""
        assert self._service is not None, "not started"
        return self._service

    @property
    def port(self) -> int:
        return self.addresses[0][1]

    @property
    def connections(self) -> int:
        return 0 if self._service is None else len(self._service.connections)

    @property
    def limit(self) -> ConnectionLimit:
        """Counts the connections that were not served."""
        assert self._service is not None, "not started"
        return self._service.limit

    @property
    def bodies(self) -> BodyBudget:
        assert self._service is not None, "not started"
        return self._service.bodies

    @property
    def listening(self) -> list[int]:
        """The descriptors of the listening sockets; empty once nothing more is accepted."""
        return [one.fileno() for listener in self._listeners for one in listener.sockets]

    def stop_accepting(self) -> None:
        """Close the listeners and idle connections; busy ones close after their present answer."""
        self._close_listeners()
        if self._service is not None:
            for connection in list(self._service.connections):
                connection.end(0.0)

    def hand_over(self, *, idle_s: float) -> None:
        """Close the listeners, which another process has too, and let open connections end.

        A client that does not know may be about to send one more request. So each connection closes after an
        answer whose head says that it is the last, or after so many idle seconds.
        """
        self._close_listeners()
        if self._service is not None:
            for connection in self._service.connections:
                connection.end(idle_s)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        if self._service is not None:
            self._service.stopping = True

    async def drain(self) -> None:
        """Wait until no connection is left."""
        service = self._service
        if service is None:
            return
        while service.connections:
            if self._drained is None:
                self._drained = service.loop.create_future()
                service.on_empty = self._empty
            await asyncio.shield(self._drained)

    def close(self) -> None:
        """Abort everything. The connections are gone after the loop's next iteration; see `drain`."""
        self.stop_accepting()
        self.drop_connections()

    def drop_connections(self) -> None:
        """Abort every connection; new ones are accepted as before."""
        if self._service is not None:
            for connection in list(self._service.connections):
                connection.drop()

    def _empty(self) -> None:
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
