"""A client's TLS handshake, which is a connection of the server already: who does not end it holds one.

An event loop that accepts and shakes hands in one step shows nothing of it until it is over. So the socket
is taken from the loop when it is accepted, and given back to shake hands.
"""

import asyncio
import logging
import os
import socket
from ssl import SSLContext
from typing import cast

from balanceroute.proxy.wire.connection_limit import Loss, loss_of_head
from balanceroute.proxy.wire.http1.server_connection import ServerConnection
from balanceroute.proxy.wire.http1.service import Service

_LOG = logging.getLogger(__name__)


class Handshake(asyncio.Protocol):
    """One handshake; see `SweptConnection`. Its connection takes its place.

    Args:
        service: What the connections share.
        context: For TLS.
    """

    __slots__ = ("_begun_s", "_context", "_is_served", "_own", "_service", "_shaking", "deadline_s")

    def __init__(self, service: Service, context: SSLContext) -> None:
        self._service = service
        self._context = context
        self._begun_s = service.loop.time()
        self.deadline_s = self._begun_s + service.limits.header_timeout_s
        self._is_served = True
        self._own: socket.socket | None = None  # Until it begins.
        self._shaking: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the socket, and begin."""
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
        return loss_of_head(self._begun_s, now_s, begun=True)  # Nobody knows.

    def evict(self) -> bool:
        """See `Evictable`."""
        if self.gives_way(self._begun_s) is None:
            return False
        self.drop()
        return True

    def drop(self) -> None:
        """Abort now."""
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
        """Abort what took too long."""
        del now_s
        self.drop()

    async def _shake(self, own: socket.socket) -> None:
        service = self._service
        try:
            await service.loop.connect_accepted_socket(
                lambda: ServerConnection(service, self),
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
