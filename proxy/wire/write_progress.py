"""Whether a peer takes what is written to it.

The kernel holds megabytes for a peer, and takes more only when a third of that has gone. So a buffer of
ours that does not shrink says little of a slow peer: what the kernel still holds is counted, too.
"""

import fcntl
import socket
import struct
import sys
import termios

_COUNT = struct.Struct("i")


def held_by_kernel(connected: socket.socket | None) -> int:
    """Return the bytes written that a peer has not acknowledged; 0 where the system does not tell."""
    if connected is None or sys.platform != "linux" or connected.fileno() < 0:
        return 0
    try:
        told = fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size))
    except OSError:
        return 0
    count: int = _COUNT.unpack(told)[0]
    return count


class WriteProgress:
    """Compares the bytes that the peer has taken from check to check.

    Args:
        timeout_s: A peer that takes nothing for this long, while data waits, has stalled.

    Attributes:
        check_s: How often to check.
    """

    __slots__ = ("_drained", "_since_s", "_timeout_s", "check_s")

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._drained: int | None = None
        self._since_s = 0.0
        self.check_s = timeout_s / 4

    def begin(self, now_s: float) -> None:
        """Begin with a new answer."""
        self._drained = None
        self._since_s = now_s

    def has_stalled(self, now_s: float, *, written: int, waiting: int, held: int = 0) -> bool:
        """Return whether the peer has stalled.

        Args:
            now_s: The present time.
            written: Bytes of the answer that were passed to the transport.
            waiting: Bytes in its write buffer.
            held: Bytes that left it, and that the peer has not acknowledged.
        """
        drained = written - waiting - held
        if not waiting or drained != self._drained:
            self._drained = drained
            self._since_s = now_s
            return False
        return now_s - self._since_s >= self._timeout_s
