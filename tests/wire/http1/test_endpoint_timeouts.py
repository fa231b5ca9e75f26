"""The endpoint's deadlines, in virtual time."""

import asyncio

import pytest
from tests.support.played import in_virtual_time
from tests.support.virtual.addresses import Connect, Link
from tests.support.virtual.loop import VirtualLoop

from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest, Response, WireError, WireFault


def answer(request: HttpRequest, reply: Reply) -> None:
    match request.path:
        case b"/never":
            pass
        case b"/begun":
            reply.start(200, [])
            reply.write(b"begun")
        case b"/large":
            reply.send(200, [], bytes(1001))
        case _:
            reply.send(200, [(b"x", b"y")], request.body)


async def get(endpoint: Endpoint, target: bytes = b"/") -> Response:
    return await fetch(endpoint, b"GET", target, [], b"", timeout_s=30, max_bytes=1000)


async def served(loop: VirtualLoop) -> tuple[Server, Endpoint]:
    server = Server(answer)
    await server.start("127.0.0.1", 0)
    return server, Endpoint("127.0.0.1", server.port)


async def end(server: Server, endpoint: Endpoint, loop: VirtualLoop) -> None:
    endpoint.close()
    server.close()
    await server.drain()
    await asyncio.sleep(0.1)
    assert (endpoint.connections, endpoint.idle, loop.pending_timers) == (0, 0, 0)


@pytest.mark.both_loops
@in_virtual_time(seed=0, link=Link(connect=Connect.HANG))
async def test_a_connect_that_hangs_ends_in_time(loop: VirtualLoop) -> None:
    endpoint = Endpoint("127.0.0.1", 8000)
    begin_s = loop.time()
    with pytest.raises(WireError) as raised:
        await get(endpoint)
    assert loop.time() - begin_s == pytest.approx(5)
    assert raised.value.kind is WireFault.CONNECT_TIMEOUT
    assert (raised.value.sent, raised.value.answered) == (False, False)
    await asyncio.sleep(0)
    assert endpoint.connections == 0
    assert loop.pending_timers == 0


@in_virtual_time(seed=0)
async def test_a_fetch_returns_the_response(loop: VirtualLoop) -> None:
    server, endpoint = await served(loop)
    response = await fetch(endpoint, b"POST", b"/", [], b"body", timeout_s=1, max_bytes=4)
    assert (response.status, response.body, response.header(b"x")) == (200, b"body", b"y")
    assert response.header(b"z") is None
    assert endpoint.idle == 1
    await end(server, endpoint, loop)


@pytest.mark.parametrize(("target", "answered"), [(b"/never", False), (b"/begun", True)])
@in_virtual_time(seed=0)
async def test_a_fetch_ends_in_time(loop: VirtualLoop, target: bytes, *, answered: bool) -> None:
    server, endpoint = await served(loop)
    begin_s = loop.time()
    with pytest.raises(WireError, match="within 30 s") as raised:
        await get(endpoint, target)
    assert loop.time() - begin_s == pytest.approx(30)
    assert raised.value.kind is WireFault.TIMEOUT
    assert (raised.value.sent, raised.value.answered) == (True, answered)
    await asyncio.sleep(0.1)
    assert endpoint.connections == 0
    await end(server, endpoint, loop)


@in_virtual_time(seed=0)
async def test_a_fetch_of_too_much_is_refused(loop: VirtualLoop) -> None:
    server, endpoint = await served(loop)
    with pytest.raises(WireError) as raised:
        await get(endpoint, b"/large")
    assert raised.value.kind is WireFault.TOO_LARGE
    await asyncio.sleep(0.1)
    assert endpoint.connections == 0
    await end(server, endpoint, loop)


@pytest.mark.both_loops
@in_virtual_time(seed=0)
async def test_a_cancelled_fetch_closes_its_connection(loop: VirtualLoop) -> None:
    server, endpoint = await served(loop)
    for wait_s in (0.0, 1e-5, 0.1):  # Before, while and after it connects.
        task = asyncio.create_task(get(endpoint, b"/never"))
        await asyncio.sleep(wait_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert endpoint.connections == 0
        assert server.connections == 0
    await end(server, endpoint, loop)


@in_virtual_time(seed=0)
async def test_idle_connections_are_closed_in_time_and_never_used_late(loop: VirtualLoop) -> None:
    server, endpoint = await served(loop)
    await get(endpoint)
    for _ in range(3):
        await asyncio.sleep(3.9)
        await get(endpoint)
        assert server.connections == 1
    await asyncio.sleep(3.99)
    assert endpoint.connections == 1
    await asyncio.sleep(1.01)
    assert endpoint.connections == 0
    await end(server, endpoint, loop)


@in_virtual_time(seed=0)
async def test_connections_idle_too_long_are_not_used_though_the_sweep_has_not_come(
    loop: VirtualLoop,
) -> None:
    server, endpoint = await served(loop)
    await get(endpoint)  # The sweep comes in whole seconds from here.
    await asyncio.sleep(0.5)
    await asyncio.gather(get(endpoint), get(endpoint))
    old = list(endpoint._idle)
    await asyncio.sleep(4.0)
    assert list(endpoint._idle) == old
    await get(endpoint)
    (fresh,) = endpoint._idle
    assert fresh not in old
    await asyncio.sleep(0.1)
    assert endpoint.connections == 1
    await end(server, endpoint, loop)


@in_virtual_time(seed=0)
async def test_the_oldest_idle_connections_close_first(loop: VirtualLoop) -> None:
    server, endpoint = await served(loop)
    await asyncio.gather(*(get(endpoint) for _ in range(10)))
    assert endpoint.idle == 10
    for _ in range(6):
        await asyncio.sleep(1)
        await get(endpoint)
    assert (endpoint.connections, endpoint.idle) == (1, 1)
    await end(server, endpoint, loop)


@in_virtual_time(seed=0)
async def test_names_of_endpoints(loop: VirtualLoop) -> None:
    assert Endpoint("::1", 80).name == "http://[::1]:80"
    assert Endpoint("engine", 8000).name == "http://engine:8000"
