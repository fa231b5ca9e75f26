"""One end of the connection between a relay and the scheduler process: frames over a Unix socket.

All that is sent in one turn of the loop leaves in one frame. A peer that does not read blocks nobody:
what it has not read waits in memory. From `_BEHIND_BYTES` on the channel is `behind`, and what can wait
is not to be sent; beyond `_MAX_UNREAD_BYTES` the channel is closed, as if the peer had died.
"""

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from balanceroute.proxy.live.processes.frames import FrameError, FrameReader, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.live.processes.from_relay import FromRelay
    from balanceroute.proxy.live.processes.to_relay import ToRelay

_BEHIND_BYTES = 256 << 10
# 5 s of 1,000 requests and 1,000 records a second are less than 10 MiB.
_MAX_UNREAD_BYTES = 64 << 20

_Heard = TypeVar("_Heard")


class Channel(asyncio.Protocol, Generic[_Heard]):
    """Sends and receives messages.

    Args:
        reader: For what the peer sends.
        on_message: Called with each message, in order. It must not raise.
        on_close: Called once with the reason, when the channel is of no use any more.

    Attributes:
        behind: Whether the peer reads too slowly for what can wait.
    """

    def __init__(
        self,
        reader: FrameReader[_Heard],
        *,
        on_message: "Callable[[Channel[_Heard], _Heard], None]",
        on_close: "Callable[[Channel[_Heard], str], None]",
        max_unread_bytes: int = _MAX_UNREAD_BYTES,
    ) -> None:
        self.behind = False
        self._reader = reader
        self._on_message = on_message
        self._on_close = on_close
        self._max_unread_bytes = max_unread_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[FromRelay | ToRelay] = []
        self._reason = ""

    @property
    def closed(self) -> bool:
        """Whether nothing more is sent or received."""
        return self._transport is None

    def send(self, message: "FromRelay | ToRelay") -> None:
        """Send a message at the end of the loop's turn; nothing if the channel is closed."""
        if self._transport is None:
            return
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(message)

    def close(self, reason: str) -> None:
        """Send what is to be sent, and close. `on_close` is called later, with the reason."""
        self._flush()
        if self._transport is not None:
            self._reason = self._reason or reason
            self._transport.close()
            self._transport = None

    def _flush(self) -> None:
        transport, unsent = self._transport, self._unsent
        if transport is None or not unsent:
            return
        self._unsent = []
        transport.write(encode(unsent))
        unread = transport.get_write_buffer_size()
        if unread > self._max_unread_bytes:
            self._abort(f"{unread:,} bytes were not read")

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
        try:
            for message in self._reader.feed(data):
                if self._transport is None:
                    return
                self._on_message(self, message)
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
        self._unsent.clear()
        reason = self._reason or ("the peer is gone" if exc is None else str(exc))
        self._on_close(self, reason)
