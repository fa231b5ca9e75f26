"""Ends connections to a host that has vanished: TCP itself would wait for minutes, or for ever."""

import socket
import sys

_PROBES = 3
_HAS_USER_TIMEOUT = sys.platform == "linux"
# What of this the platform has; on macOS the first is named otherwise.
_IDLE = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
_INTERVAL = getattr(socket, "TCP_KEEPINTVL", None)
_COUNT = getattr(socket, "TCP_KEEPCNT", None)


def end_if_silent(connected: socket.socket, timeout_s: float) -> None:
    """Have the kernel end a connection whose other side acknowledges nothing for some time.

    A connection on which nothing travels is probed after half of the time, then three times. What was
    sent and is not acknowledged, or not taken because the other side reads nothing, is given all of it.
    A host that is up answers the probes whatever its processes do: only what it does not read counts
    against it.

    Args:
        connected: The socket.
        timeout_s: In seconds, at least 2; the kernel knows whole ones. 0 leaves the socket as it is.
    """
    if not timeout_s:
        return
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle_s, interval_s = max(1, round(timeout_s / 2)), max(1, round(timeout_s / 2 / _PROBES))
    for option, value in ((_IDLE, idle_s), (_INTERVAL, interval_s), (_COUNT, _PROBES)):
        if option is not None:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
    if _HAS_USER_TIMEOUT:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout_s))
