"""Clients that break the rules of QUIC, HTTP/3 and QPACK, or flood: what becomes of them, and of others."""

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, cast

import pytest
import uvloop

pytest.importorskip("aioquic", reason="needs the extra h3")

from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import ErrorCode, FrameType, encode_frame
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from tests.http3_client import HOST, Http3Client, http3_client
from tests.support.certificate import make_certificate
from tests.wire.http3.site import Http3Site, http3_site

from balanceroute.proxy.live.settings.declared import Http3Settings
from balanceroute.proxy.wire.messages import ServerLimits
from balanceroute.proxy.wire.quic import endpoint

if TYPE_CHECKING:
    from pathlib import Path

    from balanceroute.proxy.wire.messages import HttpRequest, Reply
    from balanceroute.proxy.wire.quic.endpoint import QuicEndpoint


# One loop is enough: what differs between loops is tested with the server's tests.
pytestmark = pytest.mark.parametrize("new_loop", [uvloop.new_event_loop], ids=["uvloop"])


class Slow:
    """Answers at once, but for /slow, which is answered piece by piece as told."""

    def __init__(self) -> None:
        self.slow: Reply | None = None

    def __call__(self, request: "HttpRequest", reply: "Reply") -> None:
        if request.path == b"/slow":
            self.slow = reply
            reply.start(200, [])
            reply.write(b"begun")
        elif request.path != b"/never":
            reply.send(200, [], request.body)


def raw(client: Http3Client, number: int, data: bytes, *, end: bool = False) -> None:
    client.quic.send_stream_data(number, data, end_stream=end)
    client.transmit()


def on_request(data: bytes, *, end: bool = False) -> Callable[[Http3Client], None]:
    return lambda client: raw(client, client.quic.get_next_available_stream_id(), data, end=end)


def on_control(data: bytes, *, end: bool = False) -> Callable[[Http3Client], None]:
    def send(client: Http3Client) -> None:
        assert client.h3._local_control_stream_id is not None
        raw(client, client.h3._local_control_stream_id, data, end=end)

    return send


def on_encoder(data: bytes) -> Callable[[Http3Client], None]:
    def send(client: Http3Client) -> None:
        assert client.h3._local_encoder_stream_id is not None
        raw(client, client.h3._local_encoder_stream_id, data)

    return send


def on_new(data: bytes) -> Callable[[Http3Client], None]:
    return lambda client: raw(
        client, client.quic.get_next_available_stream_id(is_unidirectional=True), data
    )


def too_many_streams(client: Http3Client) -> None:
    client.quic._remote_max_streams_bidi = 10_000
    number = 4 * 5_000
    client.quic._local_next_stream_id_bidi = number
    raw(client, number, b"?")


def reset_control(client: Http3Client) -> None:
    assert client.h3._local_control_stream_id is not None
    client.quic.reset_stream(client.h3._local_control_stream_id, 0)
    client.transmit()


VIOLATIONS: dict[str, tuple[Callable[[Http3Client], None], int]] = {
    "data before headers": (on_request(encode_frame(FrameType.DATA, b"?")), 0x105),
    "settings on a request": (on_request(encode_frame(FrameType.SETTINGS, b"")), 0x105),
    "a frame of HTTP/2": (on_request(encode_frame(0x2, b"")), 0x105),
    "webtransport": (on_request(encode_uint_var(0x41) + b"\0?"), 0x105),
    "a frame cut off": (on_request(b"\x01\x20abc", end=True), 0x106),
    "a bad field section": (on_request(encode_frame(FrameType.HEADERS, b"\xff" * 9)), 0x200),
    "second settings": (on_control(encode_frame(FrameType.SETTINGS, b"")), 0x105),
    "data on control": (on_control(encode_frame(FrameType.DATA, b"")), 0x105),
    "the control stream ends": (on_control(b"", end=True), 0x104),
    "the control stream is reset": (reset_control, 0x104),
    "long settings": (on_control(b"\x04\x80\x10\x00\x00"), 0x107),
    "a priority for nothing": (on_control(encode_frame(0xF0700, b"\x02u=1")), 0x108),
    "a priority beyond all": (on_control(encode_frame(0xF0700, b"\x80\x10\0\0u=1")), 0x108),
    "a second control stream": (on_new(b"\0"), 0x103),
    "a push by a client": (on_new(b"\x01"), 0x103),
    "a table that is not there": (on_encoder(b"\x3f\xe1\x1f"), 0x201),
    "too many streams": (too_many_streams, 0x4),
}


@pytest.mark.parametrize("name", VIOLATIONS)
async def test_a_violation_ends_its_connection_alone(tmp_path: "Path", name: str) -> None:
    violate, code = VIOLATIONS[name]

    application = Slow()
    async with http3_site(application, tmp_path) as site, site.client() as good:
        number = good.begin(b"GET", b"/slow")
        while not good.streams[number].body:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)
        async with site.client() as bad:
            assert (await bad.ask(b"GET", b"/")).status == 200
            # Its own answer that runs goes with it.
            waiting = bad.begin(b"GET", b"/never")
            violate(bad)
            await bad.answer(waiting)
            assert bad.ended is not None
            assert bad.ended.error_code == code
        assert application.slow is not None
        application.slow.write(b", and done")
        application.slow.end()
        assert bytes((await good.answer(number)).body) == b"begun, and done"


async def test_a_head_that_does_not_end_is_refused(tmp_path: "Path") -> None:
    limits = ServerLimits(header_limit_bytes=4_096)
    async with http3_site(Slow(), tmp_path, limits=limits) as site, site.client() as client:
        number = client.begin(b"GET", b"/never")  # Only to have a stream to listen to.
        del number
        other = client.quic.get_next_available_stream_id()
        client.streams[other] = type(client.streams[0])([], bytearray(), asyncio.Event())
        raw(client, other, b"\x01" + encode_uint_var(1 << 30) + bytes(5_000))
        assert (await client.answer(other)).status == 431


async def test_a_client_that_sends_nothing_is_given_up(tmp_path: "Path") -> None:
    limits = ServerLimits(header_timeout_s=0.2, body_timeout_s=0.2)
    async with http3_site(Slow(), tmp_path, limits=limits) as site:
        async with site.client() as client:
            number = client.begin(b"POST", b"/", end=False)
            assert (await client.answer(number)).status == 408
        async with site.client() as client:
            await client.wait_closed()  # It never asked for anything.
            assert client.ended is not None
            assert client.ended.error_code == 0x100


async def test_a_client_that_reads_nothing_is_given_up(tmp_path: "Path") -> None:
    limits = ServerLimits(write_timeout_s=0.4)
    application = Slow()
    async with (
        http3_site(application, tmp_path, limits=limits) as site,
        site.client(max_stream_data=4_096, max_data=8_192) as client,
    ):
        client.quic._write_stream_limits = lambda **_: None  # type: ignore[method-assign]
        client.quic._write_connection_limits = lambda **_: None  # type: ignore[method-assign]
        number = client.begin(b"GET", b"/slow")
        while application.slow is None:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)
        left = asyncio.Event()
        application.slow.on_closed = left.set
        application.slow.write(bytes(200_000))
        assert application.slow.paused
        await left.wait()
        assert (await client.answer(number)).reset == 0x10C


async def test_requests_that_are_given_up_at_once_end_the_connection(tmp_path: "Path") -> None:
    async with http3_site(Slow(), tmp_path) as site, site.client() as client:
        for _ in range(40):
            for _ in range(20):
                number = client.begin(b"GET", b"/never")
                client.quic.stop_stream(number, 0x10C)
                client.quic.reset_stream(number, 0x10C)
            client.transmit()
            if client.ended is None:
                await asyncio.sleep(0.01)
        await client.wait_closed()
        assert client.ended is not None
        assert client.ended.error_code == 0x107


def endpoint_of(site: Http3Site) -> "QuicEndpoint":
    (one,) = site.listener._endpoints
    return one


class Spoofed(asyncio.DatagramProtocol):
    """Begins handshakes, and never answers."""

    def __init__(self) -> None:
        self.got: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: object) -> None:
        self.got.append(data)

    def begin(self) -> None:
        quic = QuicConnection(configuration=QuicConfiguration(alpn_protocols=["h3"]))
        quic.connect((HOST, 1), now=0.0)
        for data, _ in quic.datagrams_to_send(now=0.0):
            self.transport.sendto(data)


@asynccontextmanager
async def spoofed(site: Http3Site) -> AsyncIterator[Spoofed]:
    """Open a socket to a server's port."""
    transport, flood = await asyncio.get_running_loop().create_datagram_endpoint(
        Spoofed, remote_addr=(HOST, site.server.port)
    )
    try:
        yield flood
    finally:
        transport.close()


async def test_a_flood_of_handshakes_makes_newcomers_show_their_address(tmp_path: "Path") -> None:
    settings = Http3Settings(http3_handshakes=3)
    async with (
        http3_site(Slow(), tmp_path, settings=settings) as site,
        spoofed(site) as flood,
    ):
        for _ in range(50):
            flood.begin()
            await asyncio.sleep(0)
        async with site.client() as client:  # Which answers the Retry.
            assert (await client.ask(b"GET", b"/")).status == 200
        told = site.listener.counts()
        assert (told.open, told.ended_badly) == (3, {"crowd": 0, "late": 0, "failed": 0})
        assert told.retries >= 47


async def test_a_newcomer_takes_the_place_of_a_handshake_that_does_not_end(
    tmp_path: "Path", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_MOST_HANDSHAKES", 1)
    settings = Http3Settings(http3_handshakes=3)
    async with (
        http3_site(Slow(), tmp_path, settings=settings) as site,
        spoofed(site) as flood,
    ):
        while endpoint_of(site).handshakes < 3:
            flood.begin()
            await asyncio.sleep(0)
        for count in (1, 2):
            async with site.client() as client:
                assert (await client.ask(b"GET", b"/")).status == 200
            assert site.listener.counts().ended_badly["crowd"] == 1
            if count == 1:  # There is room again, without another one that ends.
                assert site.listener.counts().open == 2


async def test_handshakes_that_do_not_end_are_given_up(tmp_path: "Path") -> None:
    limits = ServerLimits(header_timeout_s=0.2)
    async with http3_site(Slow(), tmp_path, limits=limits) as site, spoofed(site) as flood:
        its = endpoint_of(site)
        flood.begin()
        while not its.handshakes:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)
        while its.handshakes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not its._carriers
        told = site.listener.counts()
        assert told.ended_badly == {"crowd": 0, "late": 1, "failed": 0}


async def test_a_handshake_that_fails_is_counted(tmp_path: "Path") -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    other, _ = make_certificate(folder)

    async with http3_site(Slow(), tmp_path) as site:
        with pytest.raises(ConnectionError):
            async with http3_client(site.server.port, other.read_text()):
                raise AssertionError("it trusted a stranger")
        while not site.listener.counts().ended_badly["failed"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert site.listener.counts().open == 0


async def test_limits_of_connections_hold(tmp_path: "Path") -> None:
    limits = ServerLimits(connection_limit=1)
    async with http3_site(Slow(), tmp_path, limits=limits) as site, site.client() as client:
        number = client.begin(b"GET", b"/never")
        await asyncio.sleep(0.1)
        async with site.client() as other:
            answer = await other.ask(b"GET", b"/")
            assert answer.status == 503
            await other.wait_closed()
        assert not client.streams[number].over.is_set()
        assert site.server.limit.rejected["limit"] == 1
        client.close()


@pytest.mark.parametrize(
    ("kind", "turned_away"),
    [
        ("silent", 0),
        ("answered", 4),
        ("half head", 0),
        ("half body", 0),
        ("half body behind an answer", 4),
        ("half body before an answer", 8),
        ("beside a request", None),
    ],
)
async def test_who_leaves_a_request_unfinished_makes_room(
    tmp_path: "Path", kind: str, turned_away: int | None
) -> None:
    """It learns which requests were not begun, so that it may repeat them."""
    limits = ServerLimits(connection_limit=1)
    async with http3_site(Slow(), tmp_path, limits=limits) as site, site.client() as holder:
        if kind in ("answered", "half body behind an answer"):
            assert (await holder.ask(b"GET", b"/")).status == 200
        if kind == "half head":  # A frame of the type HEADERS that does not end.
            raw(holder, 0, bytes([FrameType.HEADERS, 0x40, 0x80]))
        elif "body" in kind or kind == "beside a request":
            holder.begin(b"POST", b"/", [(b"content-length", b"1000000")], end=False)
        if kind == "half body before an answer":
            assert (await holder.ask(b"GET", b"/")).status == 200
        if kind == "beside a request":
            holder.begin(b"GET", b"/never")
        await asyncio.sleep(0.1)
        async with site.client() as other:
            answer = await other.ask(b"GET", b"/")
            if kind == "beside a request":
                assert answer.status == 503
                assert site.server.limit.rejected["limit"] == 1
                assert holder.turned_away is None
                return
            assert answer.status == 200
        await holder.wait_closed()
        assert site.server.limit.evicted == 1
        assert holder.turned_away == turned_away
        assert holder.ended is not None
        unfinished = [one for one in holder.streams.values() if not one.heads]
        assert [one.reset for one in unfinished] == [ErrorCode.H3_REQUEST_REJECTED] * (
            "body" in kind
        )
        code = ErrorCode.H3_EXCESSIVE_LOAD if "half" in kind else ErrorCode.H3_NO_ERROR
        assert holder.ended.error_code == code


async def test_what_comes_as_the_place_is_taken_is_known_to_be_not_begun(tmp_path: "Path") -> None:
    limits = ServerLimits(connection_limit=1)
    asked: list[bytes] = []

    def application(request: "HttpRequest", reply: "Reply") -> None:
        asked.append(request.path)
        reply.send(200, [], b"")

    async with http3_site(application, tmp_path, limits=limits) as site, site.client() as holder:
        assert (await holder.ask(b"GET", b"/first")).status == 200
        async with site.client() as other:
            asking = asyncio.ensure_future(other.ask(b"GET", b"/second"))
            while not site.server.limit.evicted:  # noqa: ASYNC110 (no event tells)
                await asyncio.sleep(0)
            late = holder.begin(
                b"GET", b"/late"
            )  # Before the client hears that it has no place any more.
            await holder.wait_closed()
            assert (await asking).status == 200
        assert holder.turned_away == late
        assert asked == [b"/first", b"/second"]


async def test_an_idle_connection_says_which_requests_were_begun_as_it_ends(
    tmp_path: "Path",
) -> None:
    limits = ServerLimits(keep_alive_timeout_s=0.2)
    async with http3_site(Slow(), tmp_path, limits=limits) as site, site.client() as client:
        assert (await client.ask(b"GET", b"/")).status == 200
        while client.ended is None:  # Else QUIC itself ends it, on both sides.
            client.quic.send_ping(0)
            client.transmit()
            await asyncio.sleep(0.02)
        assert client.turned_away == 4


async def test_who_gets_no_place_is_told_that_nothing_was_begun(tmp_path: "Path") -> None:
    """Of those to whom nobody says why: one is waited for at a time."""
    limits = ServerLimits(connection_limit=1)
    async with http3_site(Slow(), tmp_path, limits=limits) as site, site.client() as client:
        client.begin(b"GET", b"/never")
        await asyncio.sleep(0.1)
        async with site.client(), site.client() as third:
            await third.wait_closed()
            assert third.turned_away == 0
            assert third.ended is not None
            assert third.ended.error_code == ErrorCode.H3_EXCESSIVE_LOAD
        client.close()


async def test_floods_leave_no_memory_behind(tmp_path: "Path") -> None:
    async with (
        http3_site(Slow(), tmp_path) as site,
        spoofed(site) as flood,
        site.client() as client,
    ):
        held, drawn = [], Random(0)
        tracemalloc.start()
        try:
            for _ in range(4):
                for _ in range(12):
                    flood.transport.sendto(drawn.randbytes(1_200))
                    flood.transport.sendto(b"\xc0\0\0\0\x01\x08" + drawn.randbytes(1_200))
                    flood.transport.sendto(b"\x40" + drawn.randbytes(99))
                    answer = await client.ask(b"POST", b"no-slash", None, bytes(2_000))
                    assert answer.status == 400
                client.streams.clear()
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        # Requests that stayed would hold their 2,000 bytes in every round. A table that grows once
        # does so in one.
        assert min(after - before for before, after in pairwise(held)) < 12_000, held
