"""One end of the connection between a relay and the scheduler process: frames over a Unix socket.

A peer that does not read blocks nobody: what it has not read waits in memory. From `_BEHIND_BYTES` on
the channel is `behind`, and what can wait is not to be sent; beyond `_MAX_UNREAD_BYTES` it is closed, as
if the peer had died.
"""

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from balanceroute.proxy.live.processes.frames import FrameError, FrameReader, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from balanceroute.proxy.live.processes.from_relay import FromRelay
    from balanceroute.proxy.live.processes.to_relay import ToRelay

_BEHIND_BYTES = 256 << 10
# 5 s of 1,000 requests and 1,000 records a second are less than 10 MiB.
_MAX_UNREAD_BYTES = 64 << 20

# Of struct ucred: process, user, group.
_CREDENTIALS = struct.Struct("3i")

_Heard = TypeVar("_Heard")


class Channel(asyncio.Protocol, Generic[_Heard]):
    """Sends and receives messages.

    Args:
        reader: For what the peer sends.
        on_messages: Called with the messages of whole frames, in order. It raises nothing but
            a FrameError, for messages that cannot stand there: that closes the channel.
        on_close: Called once with the reason, when the channel is of no use any more.

    Attributes:
        behind: Whether the peer reads too slowly for what can wait.
    """

    def __init__(
        self,
        reader: FrameReader[_Heard],
        *,
        on_messages: "Callable[[list[_Heard]], None]",
        on_close: "Callable[[str], None]",
        max_unread_bytes: int = _MAX_UNREAD_BYTES,
    ) -> None:
        self.behind = False
        self._reader = reader
        self._on_messages = on_messages
        self._on_close = on_close
        self._max_unread_bytes = max_unread_bytes
        self._transport: asyncio.Transport | None = None
        self._reason = ""

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent or received: not yet, or not any more."""
        return self._transport is None

    @property
    def peer_pid(self) -> int | None:
        """The number of the peer's process; None if the channel is closed or the system does not say."""
        if self._transport is None or not hasattr(socket, "SO_PEERCRED"):
            return None
        own = self._transport.get_extra_info("socket")
        credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid: int = _CREDENTIALS.unpack(credentials)[0]
        return pid

    def write(self, messages: "Sequence[FromRelay | ToRelay]") -> None:
        """Send messages as one frame; nothing if the channel is closed."""
        if self._transport is None:
            return
        self._transport.write(encode(messages))
        unread = self._transport.get_write_buffer_size()
        if unread > self._max_unread_bytes:
            self._abort(f"{unread:,} bytes were not read")

    def close(self, reason: str) -> None:
        """Close when everything is sent. `on_close` is called later, with the reason."""
        if self._transport is not None:
            self._reason = self._reason or reason
            self._transport.close()
            self._transport = None

    def _abort(self, reason: str) -> None:
        if self._transport is not None:
            self._reason = self._reason or reason
            self._transport.abort()
            self._transport = None

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_BEHIND_BYTES)

    def data_received(self, data: bytes) -> None:
        """Take what the peer sent."""
        if self._transport is None:
            return
        try:
            messages = self._reader.feed(data)
            if messages:
                self._on_messages(messages)
        except FrameError as error:
            self._abort(str(error))

    def pause_writing(self) -> None:
        """Note that the peer reads slowly."""
        self.behind = True

    def resume_writing(self) -> None:
        """Note that it has caught up."""
        self.behind = False

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the end."""
        self._transport = None
        self._on_close(self._reason or ("the peer is gone" if exc is None else str(exc)))
