"""The two ends of one in-memory connection and the pipes between them."""

from collections.abc import Callable
from contextvars import Context

from balanceroute.proxy.testing.virtual.address import Address
from balanceroute.proxy.testing.virtual.link import Link
from balanceroute.proxy.testing.virtual.pipe import Pipe
from balanceroute.proxy.testing.virtual.traffic import Traffic
from balanceroute.proxy.testing.virtual.transport import MemoryTransport


class Connection:
    """One connection, for tests that draw their own faults.

    Attributes:
        number: Counts connections from 1, in the order of their making.
        dialled: What the client connected to.
        listening: What the server had bound: other than `dialled` for a wildcard.
        client: The end that connected.
        server: The end that accepted.
        upload: From client to server.
        download: From server to client.
    """

    __slots__ = (
        "_forget",
        "client",
        "dialled",
        "download",
        "listening",
        "number",
        "server",
        "upload",
    )

    def __init__(
        self,
        traffic: Traffic,
        link: Link,
        *,
        number: int,
        local: Address,
        dialled: Address,
        listening: Address,
        contexts: tuple[Context, Context],
        forget: Callable[["Connection"], None],
    ) -> None:
        self._forget = forget  # Called once both ends are shut.
        self.number = number
        self.dialled = dialled
        self.listening = listening
        self.upload = Pipe(
            traffic,
            self,
            link,
            reset_after=link.reset_after_upload_bytes,
            stall_after=link.stall_after_upload_bytes,
        )
        self.download = Pipe(
            traffic,
            self,
            link,
            reset_after=link.reset_after_download_bytes,
            stall_after=link.stall_after_download_bytes,
        )
        self.client = MemoryTransport(
            traffic,
            self,
            "client",
            incoming=self.download,
            outgoing=self.upload,
            sockname=local,
            peername=dialled,
            context=contexts[0],
        )
        self.server = MemoryTransport(
            traffic,
            self,
            "server",
            incoming=self.upload,
            outgoing=self.download,
            sockname=dialled,
            peername=local,
            context=contexts[1],
        )

    def opposite(self, pipe: Pipe) -> Pipe:
        """Return the other direction."""
        return self.download if pipe is self.upload else self.upload

    def reset(self) -> None:
        """Reset both ends; of what is on its way, a tail of drawn length is lost."""
        self.upload.reset(lose=True)
        self.download.reset(lose=True)

    def end_shut(self) -> None:
        """Note that one end was shut."""
        if self.client.is_shut and self.server.is_shut:
            self._forget(self)

    def kill(self) -> None:
        """Reset both ends, the accepting one at once: its host is gone. Ends a black hole."""
        self.set_silent(False)
        self.reset()
        self.server.crash()

    def stall(
        self, seconds: float | None = None, *, upload: bool = True, download: bool = True
    ) -> None:
        """Deliver nothing for so long: no bytes, no FIN and no reset. None is for ever."""
        if upload:
            self.upload.stall(seconds)
        if download:
            self.download.stall(seconds)

    def set_silent(self, silent: bool) -> None:
        """Start or end a black hole in both directions."""
        self.upload.set_silent(silent)
        self.download.set_silent(silent)
