"""The bound on the bodies of all requests together: what counts, for how long, and what is refused."""

import pytest
from tests.wire.raw_bytes import Desk, connect, serving, until

from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import HttpRequest

CHUNKED = b"POST /p HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


def head(length: int) -> bytes:
    return b"POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % length


async def test_bodies_count_as_they_come_and_until_they_are_answered() -> None:
    """Nothing bounded the sum of the bodies."""
    desk = Desk()
    async with (
        serving(desk, body_budget_bytes=1000, body_limit_bytes=900) as server,
        connect(server.port) as first,
        connect(server.port) as second,
        connect(server.port) as third,
    ):
        bodies = server.bodies
        # What is only announced holds nothing.
        first.send(head(900) + b"a" * 300)
        await until(lambda: bodies.used == 300)
        second.send(head(600) + b"b" * 600)
        await until(lambda: len(desk.requests) == 1)
        assert bodies.used == 900
        # Judged on the head.
        third.send(head(101))
        answer = await third.until(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in answer
        assert (bodies.used, bodies.rejected) == (900, 1)
        # And as it comes.
        first.send(b"a" * 101)
        assert (await first.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        assert (bodies.used, bodies.rejected) == (600, 2)
        desk.replies[0].send(200, [], b"")
        assert bodies.used == 0


async def test_a_chunked_body_counts_as_it_comes() -> None:
    desk = Desk()
    async with (
        serving(desk, body_budget_bytes=1000, body_limit_bytes=900) as server,
        connect(server.port) as first,
        connect(server.port) as second,
    ):
        first.send(CHUNKED + b"258\r\n" + b"a" * 600)
        await until(lambda: server.bodies.used == 600)
        second.send(CHUNKED + b"258\r\n" + b"a" * 401)
        assert (await second.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        assert server.bodies.used == 600
        first.send(b"\r\n0\r\n\r\n")
        await until(lambda: len(desk.requests) == 1)
        assert [one.body for one in desk.requests] == [b"a" * 600]


@pytest.mark.both_loops
async def test_who_leaves_and_who_needs_the_body_no_more_gives_room() -> None:
    desk = Desk()
    async with serving(desk, body_budget_bytes=1000) as server:
        async with connect(server.port) as first, connect(server.port) as second:
            first.send(head(500) + b"a" * 400)
            second.send(head(500) + b"b" * 500)
            await until(lambda: server.bodies.used == 900)
            desk.replies[0].release_body()
            desk.replies[0].release_body()
            assert server.bodies.used == 400
            desk.replies[0].start(200, [])
            desk.replies[0].end()
            assert server.bodies.used == 400
        await until(lambda: server.bodies.used == 0)


async def test_what_is_pipelined_counts_beyond_the_limit_of_a_head() -> None:
    """One read brings up to 256 KiB, which nothing bounded over all connections."""
    one = head(50_000) + b"b" * 50_000

    desk = Desk()
    async with (
        serving(desk, body_budget_bytes=400_000) as server,
        connect(server.port) as first,
        connect(server.port) as second,
    ):
        bodies = server.bodies
        first.send(one * 5)
        await until(lambda: bodies.used > 50_000)
        assert len(desk.requests) == 1
        second.send(head(400_001 - bodies.used))
        assert (await second.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        for number in range(5):
            await until(lambda: bool(desk.replies))
            assert 50_000 <= bodies.used <= 250_000
            desk.replies.pop().send(200, [], b"%d" % number)
            assert (await first.answer()).body == b"%d" % number
        assert [one.body for one in desk.requests] == [b"b" * 50_000] * 5
        assert bodies.used == 0


async def test_what_is_pipelined_beyond_the_budget_is_dropped_behind_the_present_answer() -> None:
    desk = Desk()
    async with (
        serving(desk, body_budget_bytes=60_000, body_limit_bytes=60_000) as server,
        connect(server.port) as client,
    ):
        client.send(head(5) + b"first" + (head(50_000) + b"b" * 50_000) * 40)
        await until(lambda: server.bodies.rejected == 1)
        assert server.bodies.used == 5
        desk.replies.pop().send(200, [], b"answer")
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (b"answer", "close")
        # No reset overtakes it, though much was not read.
        assert await client.rest() == b""
        assert [one.body for one in desk.requests] == [b"first"]
        assert server.bodies.used == 0


async def test_what_is_pipelined_by_who_reads_no_answer_is_dropped_beyond_the_budget() -> None:
    def answer(request: HttpRequest, reply: Reply) -> None:
        reply.send(200, [], bytes(1 << 22))

    async with (
        serving(answer, body_budget_bytes=60_000, body_limit_bytes=60_000) as server,
        connect(server.port) as client,
    ):
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 100_000)
        await until(lambda: server.bodies.rejected == 1)
        assert server.bodies.used == 0
        assert server.connections == 1
        for connection in list(server.service.connections):
            connection.drop()
