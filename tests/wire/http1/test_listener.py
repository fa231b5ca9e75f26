"""Where a server listens: each family of addresses, and what a loop leaves out."""

import errno
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tests.wire.raw_bytes import connect

from balanceroute.proxy.wire.http1.server import Listener, Reply, Server

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import HttpRequest


def answer(_: "HttpRequest", reply: Reply) -> None:
    reply.send(200, [], b"")


@pytest.mark.both_loops
async def test_every_interface_has_a_socket_of_each_family() -> None:
    server = Server(answer)
    try:
        await server.start("::", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    assert server.addresses == [("::", server.port), ("0.0.0.0", server.port)]  # noqa: S104
    async with connect(server.port) as client:  # IPv4, and known as such.
        client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.answer()).status == 200
    server.close()
    await server.drain()
    assert server.listening == []


@pytest.mark.both_loops
async def test_an_address_that_the_loop_leaves_out_is_refused() -> None:
    async def without_ipv6(**_: object) -> Any:
        return SimpleNamespace(sockets=(), close=lambda: None)  # As loops do.

    listener = Listener(without_ipv6)
    with pytest.raises(OSError, match="not supported") as caught:
        await listener.open(host="::", port=0)
    assert caught.value.errno == errno.EAFNOSUPPORT
    listener.close()
