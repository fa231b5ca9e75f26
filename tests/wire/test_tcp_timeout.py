"""The socket options for hosts that vanish."""

import asyncio
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.turn_writes import end_if_silent

if TYPE_CHECKING:
    from tests.wire.conftest import Engine, RawConnection

linux = pytest.mark.skipif(sys.platform != "linux", reason="options of Linux")


def options_of(connected: socket.socket) -> dict[str, int]:
    tcp = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    found = {name: connected.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in tcp}
    return found | {"SO_KEEPALIVE": connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}


@linux
@pytest.mark.parametrize(
    ("timeout_s", "idle_s", "interval_s", "user_ms"),
    [(30.0, 15, 5, 30_000), (2.0, 1, 1, 2_000), (90.5, 45, 15, 90_500)],
)
def test_probes_take_the_second_half_of_the_time(
    timeout_s: float, idle_s: int, interval_s: int, user_ms: int
) -> None:
    with socket.socket() as connected:
        end_if_silent(connected, timeout_s)
        assert options_of(connected) == {
            "SO_KEEPALIVE": 1,
            "TCP_KEEPIDLE": idle_s,
            "TCP_KEEPINTVL": interval_s,
            "TCP_KEEPCNT": 3,
            "TCP_USER_TIMEOUT": user_ms,
        }


@linux
@pytest.mark.parametrize(("timeout_s", "is_set"), [(30.0, True), (0.0, False)])
@pytest.mark.both_loops
async def test_connections_to_engines_are_watched(
    engine: "Engine", timeout_s: float, is_set: bool
) -> None:
    """A host that vanishes ends its connections in tens of seconds."""

    async def answer(connection: "RawConnection") -> None:
        await connection.until(b"\r\n\r\n")
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        await connection.rest()

    async def ask(endpoint: Endpoint) -> socket.socket:
        await fetch(endpoint, b"GET", b"/", [], b"", timeout_s=9.0, max_bytes=9)
        (connection,) = endpoint._idle
        connected: socket.socket = connection._transport.get_extra_info("socket")
        return connected

    async with engine(answer, tcp_timeout_s=timeout_s) as raw:
        options = options_of(await ask(raw.endpoint))
        assert bool(options["SO_KEEPALIVE"]) == is_set
        assert (options["TCP_USER_TIMEOUT"] == 30_000) == is_set
        await asyncio.sleep(0)
