"""Listening sockets of several processes: bound once, by the process that outlives the others.

Each relay has a socket of its own at the same address (SO_REUSEPORT), and the kernel spreads
connections over them by a hash of both addresses. The supervisor keeps all of them open, and every relay
has all of them: what connects while a relay is dead waits in the socket's queue until the others, who are
told, accept there too. Nobody is refused.
"""

import socket
from contextlib import ExitStack

from balanceroute.proxy.wire.addresses import listened_at

_BACKLOG = 2048


def listen(host: str, port: int, *, copies: int) -> list[list[socket.socket]]:
    """Return listening sockets for each of so many processes: one for each address of a host.

    Args:
        host: An address, or a name, all of whose addresses are used; see `listened_at`.
        port: 0 for a free one, the same at all addresses.
        copies: Processes; one does not share the address.

    Raises:
        OSError: An address cannot be bound, or another process listens there.
    """
    addresses = [
        (family, (address[0], *address[2:]))
        for one in listened_at(host)
        for family, _, _, _, address in socket.getaddrinfo(
            one, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    ]
    shared = copies > 1
    if shared and port:
        # SO_REUSEPORT would let two proxies share a port by mistake. A plain socket does not.
        for family, (name, *rest) in addresses:
            _listening(family, (name, port, *rest), shared=False).close()
    found: list[list[socket.socket]] = []
    with ExitStack() as opened:
        for _ in range(copies):
            own: list[socket.socket] = []
            for family, (name, *rest) in addresses:
                one = _listening(family, (name, port, *rest), shared=shared)
                opened.callback(one.close)
                own.append(one)
                port = one.getsockname()[1]
            found.append(own)
        opened.pop_all()
    return found


def _listening(
    family: socket.AddressFamily, address: tuple[object, ...], *, shared: bool
) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:  # As asyncio does: the IPv4 address is bound by itself.
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
        one.listen(_BACKLOG)
        one.setblocking(False)
    except OSError:
        one.close()
        raise
    return one
