"""Addresses of the in-memory network, and what stands for a socket."""

import errno
import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Any

Address = tuple[str, int]


def resolve(host: str | None) -> str:
    """Return the literal address of a host; every literal address exists.

    Raises:
        socket.gaierror: A name other than localhost.
    """
    if not host:
        return "0.0.0.0"  # noqa: S104 (no real interface is bound)
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        raise socket.gaierror(
            socket.EAI_NONAME, f"{host!r}: the virtual network has no names but localhost"
        ) from None


def infos(addresses: Iterable[str], port: int) -> list[Any]:
    """Return IPv4 addresses as getaddrinfo does."""
    kind = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, ""
    return [(*kind, (one, port)) for one in addresses]


class VirtualSocket:
    """The socket of a transport or listener, as far as it can be asked.

    It knows its names, and that of a transport what the kernel would answer to a poll.
    """

    __slots__ = ("_has_arrived", "_own", "_peer")

    type = socket.SOCK_STREAM
    proto = socket.IPPROTO_TCP

    def __init__(
        self,
        own: Address,
        peer: Address | None = None,
        has_arrived: Callable[[], bool] = lambda: False,
    ) -> None:
        self._own = own
        self._peer = peer
        self._has_arrived = has_arrived

    @property
    def readable(self) -> bool:
        """Whether something has arrived that was not read, as in a process that stood still."""
        return self._has_arrived()

    @property
    def family(self) -> socket.AddressFamily:
        """The family of the own address."""
        return socket.AF_INET6 if ":" in self._own[0] else socket.AF_INET

    def getsockname(self) -> Address:
        """Return (host, port)."""
        return self._own

    def getpeername(self) -> Address:
        """Return the peer's (host, port)."""
        if self._peer is None:
            raise OSError(errno.ENOTCONN, "a listener has no peer")
        return self._peer

    def fileno(self) -> int:
        """Return -1: there is nothing to select on."""
        return -1

    def setsockopt(self, *_option: object) -> None:
        """Accept any option; none changes the in-memory network."""
