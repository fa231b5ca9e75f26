"""Listening sockets of a server that may accept nothing for a time.

An event loop has no word for that: uvloop's accepts what connects and closes it where there is no file
descriptor, and where it has lost the one that it keeps for this, the loop turns without a pause. So the
loop's sockets are closed, while second descriptors of them stay open: who connects waits in the kernel's
queue.
"""

import asyncio
import errno
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack


class Listener:
    """What one call has bound.

    Args:
        listen: Begins to accept at an address, or on a socket. Raises OSError.
    """

    def __init__(self, listen: Callable[..., Awaitable[asyncio.Server]]) -> None:
        self._listen = listen
        self._servers: list[asyncio.Server] = []
        self._spares: list[socket.socket] = []
        self._closed = False

    async def open(self, **place: object) -> None:
        """Accept at a place: `host` and `port`, or a `sock` that is bound. Raises OSError."""
        server = await self._listen(**place)
        self._servers.append(server)
        if not server.sockets:  # The loop leaves out what the machine does not have.
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """Those that accept; none while it is paused."""
        return [one for server in self._servers for one in server.sockets]

    @property
    def closed(self) -> bool:
        """Whether it accepts nothing any more."""
        return self._closed

    def keep_spares(self) -> None:
        """Open what `pause` leaves open: then there may be no descriptor for it. Raises OSError."""
        if not self._spares:
            self._spares += [socket.socket(fileno=os.dup(one.fileno())) for one in self.sockets]

    def pause(self) -> None:
        """Accept nothing until `resume`, if there are spares."""
        if self._spares:
            self._close_servers()

    async def resume(self) -> None:
        """Accept again. Raises OSError: there is no descriptor; then it stays paused."""
        if self._servers or self._closed:
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
        """Close the sockets."""
        self._closed = True
        self._close_servers()
        for one in self._spares:
            one.close()
        self._spares.clear()

    def _close_servers(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()
