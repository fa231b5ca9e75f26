"""Connections that are used again: what is sent twice, what never, and which are not taken."""

import asyncio
import socket
import struct
from typing import TYPE_CHECKING

import pytest
from tests.wire.http1.test_client import (
    OK,
    Handler,
    answer_and_close,
    answering,
    begin,
    exchange,
    request_of,
    until,
)

from balanceroute.proxy.wire.http1.client import Endpoint
from balanceroute.proxy.wire.messages import WireFault

if TYPE_CHECKING:
    from tests.wire.conftest import Engine, RawConnection, Script

OK_HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"


def stale(*, reset: bool) -> "Script":
    """Answer one request and close at the next, unanswered."""

    async def script(connection: "RawConnection") -> None:
        await request_of(connection)
        connection.send(OK)
        await request_of(connection)
        if reset:
            connection.reset()

    return script


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
@pytest.mark.parametrize("reset", [False, True])
async def test_a_get_on_a_reused_connection_that_closes_unanswered_is_sent_once_more(
    engine: "Engine", *, reset: bool, method: bytes
) -> None:
    async with engine(stale(reset=reset), answering(OK_HEAD if method == b"HEAD" else OK)) as raw:
        assert (await exchange(raw.endpoint)).ended
        assert (await exchange(raw.endpoint, method=method)).ended
        assert raw.accepted == 2


@pytest.mark.parametrize("reset", [False, True])
async def test_a_post_is_never_sent_twice(engine: "Engine", *, reset: bool) -> None:
    """What was written may have been done, so the loss is reported to the caller."""
    async with engine(stale(reset=reset), answering(OK)) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler = await exchange(raw.endpoint, b"pull this KV cache")
        assert handler.error is not None
        assert handler.error.kind is WireFault.STALE
        assert (handler.error.sent, handler.error.answered) == (True, False)
        assert (raw.accepted, raw.endpoint.idle) == (2, 1)
        # The connection that showed that the engine is there is the next request's.
        assert (await exchange(raw.endpoint)).ended
        assert raw.accepted == 2


async def test_a_post_that_is_lost_with_its_engine_is_a_reset() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        handler, _ = begin(endpoint, b"work")
        peer, _ = await loop.sock_accept(listener)
        await loop.sock_recv(peer, 65_536)
        await loop.sock_sendall(peer, OK)
        await until(lambda: handler.ended)
        handler, _ = begin(endpoint, b"kill it")
        await loop.sock_recv(peer, 65_536)
    peer.close()
    await until(lambda: handler.over)
    assert handler.error is not None
    assert handler.error.kind is WireFault.RESET
    assert (handler.error.sent, handler.error.answered) == (True, False)
    await until(lambda: endpoint.connections == 0)


async def test_an_engine_that_ends_whatever_is_reused_gets_new_connections(
    engine: "Engine",
) -> None:
    """After two losses in a row each request has one of its own, for a minute."""
    scripts = [stale(reset=False), stale(reset=False), *[answering(OK)] * 2]
    async with engine(*scripts) as raw:
        lost = 0
        for _ in range(6):
            handler = await exchange(raw.endpoint, b"work")
            lost += handler.error is not None
        assert lost == 2
        assert raw.accepted == 4
        assert raw.endpoint.idle == 0


async def test_an_engine_that_answers_on_a_reused_connection_keeps_them(engine: "Engine") -> None:
    async def thrice(connection: "RawConnection") -> None:
        for _ in range(2):
            await request_of(connection)
            connection.send(OK)
        await request_of(connection)

    async with engine(thrice, thrice, thrice, answering()) as raw:
        errors = [(await exchange(raw.endpoint, b"work")).error for _ in range(9)]
        assert [error is not None for error in errors] == [False, False, True] * 3
        assert raw.endpoint.idle == 1


async def test_a_fresh_request_takes_no_connection_that_was_used(engine: "Engine") -> None:
    async with engine(answering(OK), answering(OK)) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler = Handler()
        raw.endpoint.request(b"POST", b"/", [], b"work", handler, fresh=True)
        await until(lambda: handler.ended)
        assert (raw.accepted, raw.endpoint.idle) == (2, 2)


@pytest.mark.both_loops
async def test_a_reused_connection_that_dies_takes_the_other_idle_ones_with_it(
    engine: "Engine",
) -> None:
    async def once(connection: "RawConnection") -> None:
        await request_of(connection)
        connection.send(OK)
        if await connection.reader.read(1):
            connection.reset()

    async with engine(once, once, answering()) as raw:
        both = [begin(raw.endpoint)[0] for _ in range(2)]
        await until(lambda: all(handler.ended for handler in both))
        assert raw.endpoint.idle == 2
        assert (await exchange(raw.endpoint)).error is not None
        assert (raw.accepted, raw.endpoint.idle) == (3, 1)  # A new one.


@pytest.mark.parametrize("end", ["closed", "reset", "spoke"])
@pytest.mark.both_loops
async def test_a_connection_that_the_kernel_knows_to_be_over_is_not_used_again(end: str) -> None:
    """The loop has not read the engine's FIN, RST or stray bytes, but nothing is lost."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        loop = asyncio.get_running_loop()

        async def serve() -> socket.socket:
            """Begin an exchange, accept its connection and answer."""
            handler, _ = begin(endpoint, b"work")
            peer, _ = await loop.sock_accept(listener)
            await loop.sock_recv(peer, 65_536)
            await loop.sock_sendall(peer, OK)
            await until(lambda: handler.ended)
            return peer

        with await serve() as peer:
            # From here to the next request the loop does not run.
            if end == "spoke":
                peer.send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
            elif end == "reset":
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                peer.close()
            else:
                peer.close()
            with await serve():
                endpoint.close()
                await until(lambda: not endpoint.connections)


async def test_a_retry_that_fails_is_an_error_that_remembers_what_was_sent(
    engine: "Engine",
) -> None:
    async with engine(stale(reset=False), answer_and_close(b"")) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler = await exchange(raw.endpoint, method=b"GET")
        assert handler.error is not None
        assert handler.error.kind is WireFault.RESET
        assert (handler.error.sent, handler.error.answered) == (True, False)
        assert raw.accepted == 2


@pytest.mark.both_loops
async def test_a_call_may_be_aborted_while_it_is_retried(engine: "Engine") -> None:
    async with engine(stale(reset=False), answering()) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler, call = begin(raw.endpoint, method=b"GET")
        await until(lambda: call.connection is None)
        call.abort()
        await until(lambda: raw.endpoint.connections == 0)
        assert not handler.over


async def test_a_reused_connection_that_answered_a_byte_is_not_retried(engine: "Engine") -> None:
    async def half(connection: "RawConnection") -> None:
        await request_of(connection)
        connection.send(OK)
        await request_of(connection)
        connection.send(b"H")

    async with engine(half) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler = await exchange(raw.endpoint)
        assert handler.error is not None
        assert handler.error.kind is WireFault.RESET
        assert handler.error.answered
        assert raw.accepted == 1


async def test_a_request_whose_time_is_over_is_not_written(engine: "Engine") -> None:
    """It may be over when the connection is there, or when the process goes on after a stop."""

    async def late(endpoint: Endpoint) -> None:
        handler = Handler()
        expires_s = asyncio.get_running_loop().time()
        call = endpoint.request(b"POST", b"/", [], b"late", handler, expires_s=expires_s)
        assert not handler.over  # Never before the caller has the call.
        await until(lambda: handler.over)
        assert call.done
        assert handler.error is not None
        assert (handler.error.kind, handler.error.sent) == (WireFault.TOO_LATE, False)

    async with engine(answering(OK, OK)) as raw:
        await late(raw.endpoint)  # On a new connection, which is kept.
        assert raw.endpoint.idle == 1
        assert (await exchange(raw.endpoint)).ended
        await late(raw.endpoint)  # On an idle one.
        assert raw.endpoint.idle == 1
        in_time = Handler()
        expires_s = asyncio.get_running_loop().time() + 600.0
        raw.endpoint.request(b"POST", b"/", [], b"", in_time, expires_s=expires_s)
        await until(lambda: in_time.over)
        assert in_time.ended
        assert raw.accepted == 1


async def test_a_late_request_that_is_aborted_ends_without_a_callback(engine: "Engine") -> None:
    async with engine(answering(OK, OK)) as raw:
        assert (await exchange(raw.endpoint)).ended
        handler = Handler()
        raw.endpoint.request(b"POST", b"/", [], b"", handler, expires_s=0.0).abort()
        assert (await exchange(raw.endpoint)).ended
        assert not handler.over
