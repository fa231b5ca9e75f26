"""The client of HTTP/3 against the server, in virtual time, over links that lose packets."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("aioquic", reason="needs the extra h3")

from tests.support.certificate import CERT, KEY
from tests.support.virtual.datagrams import DatagramNetwork, ThinLinkSettings
from tests.support.virtual.runner import run

from balanceroute.proxy.live.http3_listener import (
    Http3Listener,
    priority_of,
)
from balanceroute.proxy.live.settings.declared import Http3Settings
from balanceroute.proxy.wire.http1.client import fetch
from balanceroute.proxy.wire.http1.server import Server
from balanceroute.proxy.wire.http3.client import Http3Endpoint, Trust
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.virtual.loop import VirtualLoop

    from balanceroute.proxy.live.telemetry.component_metrics import Http3Counts
    from balanceroute.proxy.wire.messages import Application, HttpRequest, Reply

LINK = ThinLinkSettings(bits_per_s=20e6, delay_s=0.01, loss=0.0)
HARD = Http3Settings(http3_order="edf", http3_hard_deadlines=True)


def echo(request: "HttpRequest", reply: "Reply") -> None:
    reply.send(200, [(b"x-path", request.path)], request.body)


def play(
    folder: "Path",
    application: "Application",
    scenario: Callable[[Http3Endpoint, Server], Awaitable[None]],
    *,
    settings: Http3Settings | None = None,
    counts: "list[Http3Counts] | None" = None,
    loss: float = 0.0,
    seed: int = 1,
) -> None:
    """Run a scenario between a client and a server."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_text(CERT)
    key.write_text(KEY)
    link = replace(LINK, loss=loss)

    async def main(loop: "VirtualLoop") -> None:
        loop.datagrams = DatagramNetwork(loop, random.Random(seed), up=link, down=link)
        server = Server(application)
        await server.start("127.0.0.1", 0)
        listener = Http3Listener(settings or Http3Settings(), cert, key)
        await listener.start(server.service, server.addresses)
        endpoint = Http3Endpoint(
            "localhost", server.port, trust=Trust(str(cert)), priority=priority_of
        )
        await scenario(endpoint, server)
        endpoint.close()
        server.stop_accepting()
        await server.drain()
        if counts is not None:
            counts.append(listener.counts())
        listener.close()

    run(main, seed=seed, limit_s=1_000.0)


async def ask(
    endpoint: Http3Endpoint, path: bytes, body: bytes = b"", headers: "Headers | None" = None
) -> bytes:
    answer = await fetch(
        endpoint, b"POST", path, headers or [], body, timeout_s=100.0, max_bytes=1 << 24
    )
    assert answer.status == 200
    assert answer.header(b"x-path") == path
    return answer.body


@pytest.mark.parametrize("loss", [0.0, 0.05])
def test_exchanges_share_a_connection_and_survive_losses(tmp_path: "Path", loss: float) -> None:
    async def scenario(endpoint: Http3Endpoint, server: Server) -> None:
        bodies = [random.Random(n).randbytes(500 * n) for n in range(40)]
        answers = await asyncio.gather(
            *(ask(endpoint, b"/%d" % n, body) for n, body in enumerate(bodies))
        )
        assert answers == bodies
        assert server.connections == 1

    play(tmp_path, echo, scenario, loss=loss)


def test_who_gives_up_while_it_waits_for_a_stream_harms_nobody(tmp_path: "Path") -> None:
    replies: list[Reply] = []

    async def scenario(endpoint: Http3Endpoint, server: Server) -> None:
        asked = [asyncio.create_task(ask(endpoint, b"/%d" % n)) for n in range(6)]
        while len(replies) < 2:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.01)
        # Two streams are open; the third and the last wait, and their clients leave.
        for number in (2, 5):
            asked[number].cancel()
        served = 0
        while served < 4:
            await asyncio.sleep(0.05)
            for reply in replies[served:]:
                reply.send(200, [(b"x-path", b"/%d" % (0, 1, 3, 4)[served])], b"yes")
                served += 1
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert [one for one in answers if one == b"yes"] == [b"yes"] * 4
        assert len(replies) == 4
        assert server.connections == 1

    two = Http3Settings(http3_streams=2)
    play(tmp_path, lambda _, reply: replies.append(reply), scenario, settings=two)


def test_what_comes_of_an_answer_that_was_given_up_harms_nobody(tmp_path: "Path") -> None:
    begun: list[Reply] = []

    def stream(request: "HttpRequest", reply: "Reply") -> None:
        if request.path == b"/long":
            begun.append(reply)
            reply.start(200, [])
            reply.write(bytes(400_000))
        else:
            reply.send(200, [(b"x-path", request.path)], b"yes")

    async def scenario(endpoint: Http3Endpoint, server: Server) -> None:
        long = asyncio.create_task(ask(endpoint, b"/long"))
        while not begun:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.03)  # Some of it has come, and more is on its way.
        long.cancel()
        assert await ask(endpoint, b"/other") == b"yes"
        await asyncio.sleep(0.5)
        assert server.connections == 1
        assert await ask(endpoint, b"/other") == b"yes"
        assert begun[0].closed

    play(tmp_path, stream, scenario)


def test_an_answer_may_take_longer_than_any_idle_timeout(tmp_path: "Path") -> None:
    def late(request: "HttpRequest", reply: "Reply") -> None:
        send = asyncio.get_running_loop().call_later
        send(300.0, reply.send, 200, [(b"x-path", request.path)], b"late")

    async def scenario(endpoint: Http3Endpoint, server: Server) -> None:
        answer = await fetch(endpoint, b"POST", b"/", [], b"?", timeout_s=400.0, max_bytes=1 << 20)
        assert answer.body == b"late"

    play(tmp_path, late, scenario)


def test_a_connection_that_is_drained_is_replaced(tmp_path: "Path") -> None:
    async def scenario(endpoint: Http3Endpoint, server: Server) -> None:
        assert await ask(endpoint, b"/one", b"1") == b"1"
        server.drop_connections()
        await asyncio.sleep(1.0)
        assert await ask(endpoint, b"/two", b"2") == b"2"

    play(tmp_path, echo, scenario)


@pytest.mark.both_loops
def test_nobody_there_is_an_error_in_time(tmp_path: "Path") -> None:
    async def scenario(endpoint: Http3Endpoint, server: Server) -> None:
        nowhere = Http3Endpoint("localhost", 9)
        with pytest.raises(WireError, match="no connection to https://localhost:9") as error:
            await ask(nowhere, b"/")
        assert error.value.kind is WireFault.CONNECT_TIMEOUT
        assert not error.value.sent

    play(tmp_path, echo, scenario)


def test_an_exchange_that_is_given_up_ends_at_the_server(tmp_path: "Path") -> None:
    replies: list[Reply] = []

    async def scenario(endpoint: Http3Endpoint, server: Server) -> None:
        with pytest.raises(WireError):
            await fetch(endpoint, b"GET", b"/", [], b"", timeout_s=1.0, max_bytes=1 << 20)
        await asyncio.sleep(1.0)
        assert replies[0].closed

    play(tmp_path, lambda _, reply: replies.append(reply), scenario)


def test_a_hard_deadline_breaks_an_answer_off(tmp_path: "Path") -> None:
    """The link has 750 KB in 300 ms, and both answers have 1 MB."""
    left: list[float] = []

    def answer(request: "HttpRequest", reply: "Reply") -> None:
        reply.on_closed = lambda: left.append(asyncio.get_running_loop().time())
        reply.start(200, [(b"x-path", request.path)])
        reply.write(bytes(1_000_000))
        if request.path == b"/fits":
            reply.end()

    async def scenario(endpoint: Http3Endpoint, server: Server) -> None:
        begun_s = asyncio.get_running_loop().time()
        fits = asyncio.create_task(
            ask(endpoint, b"/fits", b"", [(b"x-answer-deadline-ms", b"5000")])
        )
        with pytest.raises(WireError, match="0x10c"):
            await ask(endpoint, b"/late", b"", [(b"x-answer-deadline-ms", b"300")])
        assert len(await fits) == 1_000_000
        (ended_s,) = left
        assert 0.3 <= ended_s - begun_s < 0.4  # From its head on.

    play(tmp_path, answer, scenario, settings=HARD)


def test_levels_and_kept_deadlines_are_counted(tmp_path: "Path") -> None:
    """In 300 ms the link has 750 KB."""
    counts: list[Http3Counts] = []

    def answer(request: "HttpRequest", reply: "Reply") -> None:
        if request.path == b"/cut":
            reply.start(200, [])
            reply.write(b"x")
            reply.abort()
        else:
            reply.send(200, [(b"x-path", request.path)], bytes(1_000_000))

    async def scenario(endpoint: Http3Endpoint, server: Server) -> None:
        late: Headers = [(b"x-answer-deadline-ms", b"300")]
        fits: Headers = [(b"x-answer-deadline-ms", b"60000"), (b"priority", b"u=0")]
        await ask(endpoint, b"/late", b"", late)
        await ask(endpoint, b"/fits", b"", fits)
        await ask(endpoint, b"/whenever", b"", [(b"priority", b"u=6")])
        with pytest.raises(WireError):
            await ask(endpoint, b"/cut", b"", fits)
        given_up = asyncio.create_task(ask(endpoint, b"/given-up", b"", fits))
        await asyncio.sleep(0.1)
        given_up.cancel()
        await asyncio.sleep(5.0)

    play(tmp_path, answer, scenario, counts=counts)
    assert counts[0].requests == {"raised": 3, "usual": 1, "lowered": 1}
    assert (counts[0].kept, counts[0].missed) == (1, 2)


def test_the_deadline_of_the_first_token_breaks_no_answer_off(tmp_path: "Path") -> None:
    def answer(request: "HttpRequest", reply: "Reply") -> None:
        reply.send(200, [(b"x-path", request.path)], bytes(1_000_000))

    async def scenario(endpoint: Http3Endpoint, server: Server) -> None:
        for more in ([], [(b"x-answer-deadline-ms", b"5000")]):
            due: Headers = [(b"x-request-deadline-ms", b"100"), *more]
            assert len(await ask(endpoint, b"/slow", b"", due)) == 1_000_000

    play(tmp_path, answer, scenario, settings=HARD)


def test_a_seed_repeats_a_run(tmp_path: "Path") -> None:
    ends: list[list[float]] = []

    async def scenario(endpoint: Http3Endpoint, server: Server) -> None:
        times: list[float] = []
        await ask(endpoint, b"/first")  # Its signature has one of several lengths.
        begun_s = asyncio.get_running_loop().time()

        async def one(number: int) -> None:
            await ask(endpoint, b"/%d" % number, bytes(9_000))
            times.append(round(asyncio.get_running_loop().time() - begun_s, 3))

        await asyncio.gather(*(one(number) for number in range(20)))
        ends.append(times)

    for _ in range(2):
        play(tmp_path, echo, scenario, loss=0.0)
    assert ends[0] == ends[1]
