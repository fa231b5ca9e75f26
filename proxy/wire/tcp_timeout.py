"""Closes connections to a host that vanished: TCP itself would wait for minutes, or for ever."""

import socket
import sys

_PROBES = 3
_HAS_USER_TIMEOUT = sys.platform == "linux"
# None where the platform lacks it; macOS has another name for the first.
_IDLE = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
_INTERVAL = getattr(socket, "TCP_KEEPINTVL", None)
_COUNT = getattr(socket, "TCP_KEEPCNT", None)


def end_if_silent(connected: socket.socket, timeout_s: float) -> None:
    """Have the kernel close a connection whose other side acknowledges nothing for some time.

    On an idle connection the kernel sends the first keep-alive probe after half of the time, and three
    in all. Sent data may stay unacknowledged, or unread behind a full window, for the whole time. A
    host that is up answers the probes even if its processes hang: only data that they do not read
    closes the connection.

    Args:
        connected: The socket.
        timeout_s: At least 2, rounded to whole seconds. 0 leaves the socket as it is.
    """
    if not timeout_s:
        return
    descriptor = connected.fileno()
    if descriptor < 0:  # A loop in virtual time has no sockets.
        return
    idle_s, interval_s = max(1, round(timeout_s / 2)), max(1, round(timeout_s / 2 / _PROBES))
    # uvloop's own object would make such a socket for each option.
    same = socket.socket(connected.family, connected.type, connected.proto, descriptor)
    try:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((_IDLE, idle_s), (_INTERVAL, interval_s), (_COUNT, _PROBES)):
            if option is not None:
                same.setsockopt(socket.IPPROTO_TCP, option, value)
        if _HAS_USER_TIMEOUT:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * timeout_s))
    finally:
        same.detach()
