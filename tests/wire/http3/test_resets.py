"""Streams that their client gives up in every phase: nothing of them stays, and others are untouched."""

import asyncio
from itertools import product
from typing import TYPE_CHECKING

import pytest
import uvloop

pytest.importorskip("aioquic", reason="needs the extra h3")

from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import encode_frame
from tests.http3_client import Answered, Http3Client
from tests.wire.http3.site import Http3Site, http3_site

from balanceroute.proxy.live.settings.declared import Http3Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from balanceroute.proxy.wire.http3.server import Http3ServerConnection
    from balanceroute.proxy.wire.messages import HttpRequest, Reply

pytestmark = pytest.mark.parametrize("new_loop", [uvloop.new_event_loop], ids=["uvloop"])

_CANCELLED = 0x10C


class Engines:
    """Answers whole, piece by piece without an end, or never."""

    def __init__(self) -> None:
        self.open: list[Reply] = []

    def __call__(self, request: "HttpRequest", reply: "Reply") -> None:
        if request.path == b"/whole":
            reply.send(200, [], bytes(3_000))
            return
        self.open.append(reply)
        reply.on_closed = lambda: self.open.remove(reply)
        if request.path == b"/stream":
            reply.start(200, [])
            reply.write(bytes(3_000))


def _number(client: Http3Client) -> int:
    number = client.quic.get_next_available_stream_id()
    client.streams[number] = Answered([], bytearray(), asyncio.Event())
    return number


def _part_of_head(client: Http3Client, path: bytes) -> int:
    del path
    number = _number(client)
    client.quic.send_stream_data(number, b"\x01" + encode_uint_var(40) + bytes(7))
    client.transmit()
    return number


def _head(client: Http3Client, path: bytes) -> int:
    return client.begin(b"POST", path, [(b"content-length", b"100")], end=False)


def _part_of_body(client: Http3Client, path: bytes) -> int:
    number = _head(client, path)
    client.more(number, bytes(60), end=False)
    return number


def _whole(client: Http3Client, path: bytes) -> int:
    number = _head(client, path)
    client.more(number, bytes(100))
    return number


def _expired(client: Http3Client, path: bytes) -> int:
    number = client.begin(b"POST", path, [(b"x-answer-deadline-ms", b"1")], end=False)
    client.more(number, bytes(100))
    return number


PHASES: "dict[str, Callable[[Http3Client, bytes], int]]" = {
    "part of the head": _part_of_head,
    "the head": _head,
    "part of the body": _part_of_body,
    "all": _whole,
    "all, with a deadline of a millisecond": _expired,
}


def _reset(client: Http3Client, number: int) -> None:
    if number in client.quic._streams and not client.quic._streams[number].sender.is_finished:
        client.quic.reset_stream(number, _CANCELLED)


def _stop(client: Http3Client, number: int) -> None:
    if number in client.quic._streams and not client.quic._streams[number].receiver.is_finished:
        client.quic.stop_stream(number, _CANCELLED)


def _both(client: Http3Client, number: int) -> None:
    _stop(client, number)
    _reset(client, number)


def _connection(site: Http3Site) -> "Http3ServerConnection":
    (connection,) = site.server.service.connections
    return connection  # type: ignore[return-value]


async def _settled(connection: "Http3ServerConnection") -> None:
    """Wait until the client has acknowledged all."""
    async with asyncio.timeout(5.0):
        while connection._streams:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("when", ["in the same packet", "at once", "settled"])
@pytest.mark.parametrize("phase", PHASES)
async def test_nothing_stays_of_what_is_given_up(
    tmp_path: "Path", phase: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    application = Engines()
    hard = Http3Settings(http3_order="edf", http3_hard_deadlines=True)
    async with (
        http3_site(application, tmp_path, settings=hard) as site,
        site.client() as client,
    ):
        # Who has sent all has nothing to reset: it only asks for no answer.
        ways = (_stop, _both) if phase.startswith("all") else (_reset, _stop, _both)
        for give_up, path in product(ways, (b"/whole", b"/stream", b"/never")):
            with monkeypatch.context() as held:
                if when == "in the same packet":
                    held.setattr(client, "transmit", lambda: None)
                number = PHASES[phase](client, path)
                if when == "settled":
                    assert (await client.ask(b"GET", b"/whole")).status == 200
                give_up(client, number)
            client.transmit()
            assert (await client.ask(b"GET", b"/whole")).status == 200
        assert client.ended is None
        connection = _connection(site)
        await _settled(connection)
        assert not application.open
        assert not connection._timers
        assert not connection._quic._priorities
        assert {one for one in connection._framing._stream if one % 4 == 0} == set()
        assert site.server.service.bodies.used == 0


async def test_an_answer_that_the_same_packet_gives_up_is_dropped(tmp_path: "Path") -> None:
    """A packet may have a request first and then that no answer is wanted."""

    def application(request: "HttpRequest", reply: "Reply") -> None:
        quic = _connection(site)._quic
        if request.path == b"/given-up":
            quic._streams[max(_connection(site)._streams)].sender.reset(error_code=_CANCELLED)
        reply.send(200, [], b"whole")

    async with http3_site(application, tmp_path) as site, site.client() as client:
        client.begin(b"GET", b"/given-up", [])
        assert (await client.ask(b"GET", b"/")).body == b"whole"
        assert client.ended is None


async def test_priorities_of_requests_that_are_refused_are_forgotten(tmp_path: "Path") -> None:
    async with http3_site(Engines(), tmp_path) as site, site.client() as client:
        assert (await client.ask(b"GET", b"/whole")).status == 200
        control = client.h3._local_control_stream_id
        assert control is not None
        for _ in range(5):
            number = client.quic.get_next_available_stream_id()
            update = encode_frame(0xF0700, encode_uint_var(number) + b"u=1")
            client.quic.send_stream_data(control, update)
            assert (await client.ask(b"GET", b"no-slash")).status == 400
        await _settled(_connection(site))
        assert not _connection(site)._early_levels


async def test_streams_of_unknown_types_that_are_reset_are_forgotten(tmp_path: "Path") -> None:
    async with http3_site(Engines(), tmp_path) as site, site.client() as client:
        assert (await client.ask(b"GET", b"/whole")).status == 200
        known = set(_connection(site)._control._ignored)
        # Of a type that nobody knows, and without a whole type.
        for begin in (b"\x21abc", b"\x40"):
            for _ in range(5):
                number = client.quic.get_next_available_stream_id(is_unidirectional=True)
                client.quic.send_stream_data(number, begin)
                assert (await client.ask(b"GET", b"/whole")).status == 200
                client.quic.reset_stream(number, 0)
                assert (await client.ask(b"GET", b"/whole")).status == 200
        frames = _connection(site)._control
        assert (frames._ignored, frames._begun) == (known, {})
