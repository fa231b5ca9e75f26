"""HTTP/2 on the port of HTTP/1.1: what is served, what is refused, and what a client cannot make the server do."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    InformationalResponseReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes
from hyperframe.frame import ContinuationFrame, GoAwayFrame, HeadersFrame
from tests.wire.raw_bytes import Desk, RawConnection, connect, serving, until

from balanceroute.proxy.wire.http2 import PREFACE, EitherConnection
from balanceroute.proxy.wire.messages import HttpRequest, Reply

EITHER = partial(EitherConnection, 4)
GET = [(":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/p?q=1")]
POST = [(":method", "POST"), *GET[1:]]


def echo(request: HttpRequest, reply: Reply) -> None:
    head = b"%b %b?%b " % (request.method, request.path, request.query)
    reply.send(200, [(b"content-type", b"text/plain")], head + request.body)


class Client:
    """Speaks HTTP/2 over a connection."""

    def __init__(self, raw: RawConnection) -> None:
        self.raw = raw
        config = H2Configuration(
            client_side=True,
            header_encoding="utf-8",
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
        )
        self.h2 = H2Connection(config)
        self.h2.initiate_connection()
        self.events: list[Event] = []
        self.opens_windows = True
        self.over = False
        self.flush()

    def flush(self) -> None:
        data = self.h2.data_to_send()
        if data:
            self.raw.send(data)

    def ask(self, fields: list[tuple[str, str]] = GET, body: bytes | None = None) -> int:
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, fields, end_stream=body is None)
        if body is not None:
            self.h2.send_data(number, body, end_stream=True)
        self.flush()
        return number

    async def read(self) -> None:
        """Take in what comes next."""
        data = await self.raw.reader.read(1 << 16)
        if not data:
            self.over = True
            return
        for event in self.h2.receive_data(data):
            self.events.append(event)
            if isinstance(event, DataReceived) and self.opens_windows:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        self.flush()

    def find(self, kind: type[Any], number: int | None = None) -> list[Any]:
        return [
            one
            for one in self.events
            if isinstance(one, kind) and number in (None, getattr(one, "stream_id", None))
        ]

    async def until(self, kind: type[Any], number: int | None = None) -> Any:
        while not (found := self.find(kind, number)):
            assert not self.over, self.events
            await self.read()
        return found[0]

    def body(self, number: int) -> bytes:
        return b"".join(one.data for one in self.find(DataReceived, number))

    async def answer(self, number: int) -> tuple[int, dict[str, str], bytes]:
        """Return the whole answer to a request."""
        await self.until(StreamEnded, number)
        headers = dict(self.find(ResponseReceived, number)[0].headers)
        return int(headers.pop(":status")), headers, self.body(number)

    async def end(self) -> int | None:
        """Read to the end of the connection; return the code that it ended with, if it says one."""
        while not self.over:
            await self.read()
        codes = [one.error_code for one in self.find(ConnectionTerminated)]
        return codes[-1] if codes else None


@asynccontextmanager
async def client_of(port: int) -> AsyncIterator[Client]:
    async with connect(port) as raw:
        yield Client(raw)


@pytest.mark.both_loops
async def test_requests_are_answered_beside_each_other_and_beside_http_1() -> None:
    async with serving(echo, EITHER) as server, client_of(server.port) as client:
        first, second = client.ask(), client.ask([*POST, ("x-a", "1")], b"hello")
        fields = {"content-type": "text/plain", "content-length": "17"}
        assert await client.answer(second) == (200, fields, b"POST /p?q=1 hello")
        assert (await client.answer(first))[::2] == (200, b"GET /p?q=1 ")
        async with connect(server.port) as plain:
            plain.send(b"GET /p HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await plain.answer()).body == b"GET /p? "
            # In pieces, and a method that begins as the preface does.
            await plain.send_each([b"PRI", b"VATE /p HTTP/1.1\r\nHost: a\r\n\r\n"])
            assert (await plain.answer()).status == 501


async def test_a_preface_may_come_in_pieces() -> None:
    async with serving(echo, EITHER) as server, connect(server.port) as raw:
        config = H2Configuration(client_side=True, header_encoding="utf-8")
        h2 = H2Connection(config)
        h2.initiate_connection()
        h2.send_headers(1, GET, end_stream=True)
        for byte in h2.data_to_send():
            await raw.send_each([bytes([byte])])
        client = Client.__new__(Client)
        client.raw, client.h2, client.events = raw, h2, []
        client.opens_windows, client.over = True, False
        assert (await client.answer(1))[2] == b"GET /p?q=1 "


async def test_a_body_and_an_answer_are_larger_than_their_windows() -> None:
    body = bytes(range(256)) * 8_000  # 2 MB, eight windows.
    async with serving(echo, EITHER) as server, client_of(server.port) as client:
        number = client.h2.get_next_available_stream_id()
        client.h2.send_headers(number, POST)
        sent = 0
        while sent < len(body):
            room = min(client.h2.local_flow_control_window(number), 16_384)
            part = body[sent : sent + room]
            if part:
                client.h2.send_data(number, part)
                sent += len(part)
                client.flush()
            else:
                await client.read()
        client.h2.end_stream(number)
        client.flush()
        status, headers, got = await client.answer(number)
        assert (status, got) == (200, b"POST /p?q=1 " + body)
        assert headers["content-length"] == str(len(got))


async def test_a_stream_is_sent_as_it_is_written_and_its_trailers_are_taken() -> None:
    desk = Desk()
    async with serving(desk, EITHER) as server, client_of(server.port) as client:
        number = client.h2.get_next_available_stream_id()
        client.h2.send_headers(number, POST)
        client.h2.send_data(number, b"body")
        client.h2.send_headers(number, [("x-checksum", "1")], end_stream=True)
        client.flush()
        await desk.reply(1)
        assert desk.requests[0].body == b"body"
        (reply,) = desk.replies
        reply.start(200, [(b"content-type", b"text/event-stream")])
        await client.until(ResponseReceived)
        for i in range(3):
            reply.write(b"data: %d\n\n" % i)
            while client.body(number).count(b"\n\n") <= i:
                await client.read()
        reply.end()
        assert (await client.answer(number))[2] == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


async def test_an_unread_answer_pauses_its_engine_alone() -> None:
    desk = Desk()
    async with (
        serving(desk, EITHER, write_buffer_bytes=1_000) as server,
        client_of(server.port) as client,
    ):
        client.opens_windows = False
        slow, quick = client.ask(), client.ask()
        await desk.reply(2)
        paused: list[str] = []
        first, second = desk.replies
        first.on_pause = lambda: paused.append("paused")
        first.on_resume = lambda: paused.append("resumed")
        second.on_pause = lambda: paused.append("wrong")
        first.start(200, [])
        first.write(b"x" * 70_000)  # The stream's window, and more.
        assert paused == ["paused"]
        second.start(200, [])
        client.h2.increment_flow_control_window(1 << 20)
        client.flush()
        second.write(b"quick")
        second.end()
        assert (await client.answer(quick))[2] == b"quick"
        assert first.paused
        client.h2.increment_flow_control_window(1 << 20, slow)
        client.flush()
        while paused[-1] != "resumed":
            await client.read()
        first.end()
        assert len((await client.answer(slow))[2]) == 70_000


async def test_a_client_that_gives_up_is_noticed_and_the_others_go_on() -> None:
    desk = Desk()
    async with serving(desk, EITHER) as server, client_of(server.port) as client:
        left, stays = client.ask(), client.ask()
        await desk.reply(2)
        desk.replies[0].start(200, [])
        desk.replies[0].write(b"a")
        await client.until(DataReceived, left)
        client.h2.reset_stream(left, ErrorCodes.CANCEL)
        client.flush()
        await until(lambda: bool(desk.closed))
        assert desk.closed == [desk.requests[0]]
        desk.replies[0].write(b"to nobody")
        desk.replies[1].send(200, [], b"b")
        assert (await client.answer(stays))[2] == b"b"
        client.ask()
        await desk.reply(3)
        await client.raw.close()
        await until(lambda: len(desk.closed) == 2)
        assert desk.closed[1] is desk.requests[2]


@pytest.mark.parametrize("path", ["/kept", "/answered", "no-slash"])
@pytest.mark.parametrize("beyond", [False, True])
async def test_who_gives_up_in_the_same_bytes_harms_no_other_stream(
    path: str, beyond: bool
) -> None:
    """Answered at once, refused as it is malformed, refused as there are too many, or kept."""
    desk = Desk()

    def application(request: HttpRequest, reply: Reply) -> None:
        (echo if request.path == b"/answered" else desk)(request, reply)

    async with serving(application, EITHER) as server, client_of(server.port) as client:
        stays = [client.ask() for _ in range(4 if beyond else 3)]
        await desk.reply(len(stays))
        client.h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 100
        left = client.h2.get_next_available_stream_id()
        whole = path == "/answered"
        client.h2.send_headers(left, [*POST[:3], (":path", path)], end_stream=whole)
        client.h2.reset_stream(left, ErrorCodes.CANCEL)
        client.flush()
        for reply in desk.replies[: len(stays)]:
            reply.send(200, [], b"whole")
        assert [(await client.answer(number))[2] for number in stays] == [b"whole"] * len(stays)
        assert (await client.answer(client.ask([*GET[:3], (":path", "/answered")])))[0] == 200


async def test_answers_end_though_the_client_says_that_it_goes() -> None:
    """RFC 9113 section 6.8: GOAWAY ends nothing that runs."""
    desk = Desk()
    async with serving(desk, EITHER) as server, client_of(server.port) as client:
        number = client.ask()
        await desk.reply(1)
        desk.replies[0].start(200, [])
        desk.replies[0].write(b"part ")
        client.raw.send(GoAwayFrame(0).serialize() * 2)
        await client.until(DataReceived, number)
        desk.replies[0].write(b"and rest")
        desk.replies[0].end()
        assert (await client.answer(number))[2] == b"part and rest"
        assert await client.end() is None


async def test_an_answer_that_breaks_off_resets_its_stream_behind_what_was_written() -> None:
    desk = Desk()
    async with serving(desk, EITHER) as server, client_of(server.port) as client:
        number = client.ask()
        await desk.reply(1)
        desk.replies[0].start(200, [])
        desk.replies[0].write(b"part")
        desk.replies[0].abort()
        assert (await client.until(StreamReset, number)).error_code == ErrorCodes.INTERNAL_ERROR
        assert client.body(number) == b"part"
        desk.closed.clear()
        again = client.ask()
        await desk.reply(2)
        desk.replies[1].send(204, [], b"")
        assert (await client.answer(again))[::2] == (204, b"")


@pytest.mark.parametrize(
    ("fields", "body", "status"),
    [
        ([*GET, ("X-Upper", "1")], None, 400),
        ([*GET, ("connection", "close")], None, 400),
        ([*GET, ("te", "gzip")], None, 400),
        ([*GET, (":path", "/again")], None, 400),
        ([("x-a", "1"), *GET], None, 400),
        ([*GET, (":status", "200")], None, 400),
        (GET[:3], None, 400),
        ([*GET[:3], (":path", "no-slash")], None, 400),
        ([(":method", "BREW"), *GET[1:]], None, 501),
        ([*GET[:3], (":path", "/" + "a" * 9_000)], None, 414),
        ([*GET, ("x-long", "a" * 40_000)], None, 431),
        ([*GET, *((f"x-{i}", "1") for i in range(101))], None, 431),
        ([*GET, ("host", "other")], None, 400),
        ([*POST, ("content-length", "9")], b"short", 400),
        ([*POST, ("content-length", "2")], b"long", 400),
        ([*POST, ("content-length", "x")], b"", 400),
        ([*POST, ("content-length", "99999999999")], b"", 413),
        ([*POST, ("expect", "tea")], b"", 417),
    ],
)
async def test_what_is_wrong_with_one_request_ends_that_one_alone(
    fields: list[tuple[str, str]],
    body: bytes | None,
    status: int,
) -> None:
    desk = Desk()
    async with serving(desk, EITHER) as server, client_of(server.port) as client:
        good = client.ask()
        await desk.reply(1)
        bad = client.ask(fields, body)
        assert (await client.answer(bad))[0] == status
        desk.replies[0].send(200, [], b"good")
        assert (await client.answer(good))[2] == b"good"
        assert len(desk.requests) == 1


async def test_a_host_stands_for_an_authority() -> None:
    desk = Desk()
    async with serving(desk, EITHER) as server, client_of(server.port) as client:
        client.ask([GET[0], GET[1], GET[3], ("host", "b")])
        await desk.reply(1)
        assert desk.requests[0].header(b"host") == b"b"
        desk.replies[0].send(200, [], b"")


async def test_what_the_head_rules_out_is_answered_before_the_body() -> None:
    async with (
        serving(echo, EITHER, body_limit_bytes=10) as server,
        client_of(server.port) as client,
    ):
        number = client.h2.get_next_available_stream_id()
        client.h2.send_headers(number, [*POST, ("content-length", "11")])
        client.flush()
        assert (await client.answer(number))[0] == 413
        # The client need not send what nobody reads.
        assert (await client.until(StreamReset, number)).error_code == ErrorCodes.NO_ERROR
        other = client.h2.get_next_available_stream_id()
        client.h2.send_headers(other, [*POST, ("expect", "100-continue")])
        client.flush()
        await client.until(InformationalResponseReceived, other)
        client.h2.send_data(other, b"short", end_stream=True)
        client.flush()
        assert (await client.answer(other))[2] == b"POST /p?q=1 short"


async def test_while_bodies_fill_their_budget_requests_without_one_are_taken() -> None:
    desk = Desk()
    async with (
        serving(desk, EITHER, body_budget_bytes=10, body_limit_bytes=10) as server,
        client_of(server.port) as client,
    ):
        client.ask(POST, b"a" * 10)
        await desk.reply(1)
        assert server.bodies.used == 10
        refused = client.ask([*POST, ("content-length", "1")], b"b")
        assert (await client.answer(refused))[0] == 503
        taken = client.ask()
        await desk.reply(2)
        desk.replies[1].send(200, [], b"")
        assert (await client.answer(taken))[0] == 200


async def test_streams_beyond_the_limit_are_refused_and_may_be_repeated() -> None:
    desk = Desk()
    async with serving(desk, EITHER) as server, client_of(server.port) as client:
        # At once: it has not seen the server's settings.
        numbers = [client.ask() for _ in range(6)]
        for number in numbers[4:]:
            code = (await client.until(StreamReset, number)).error_code
            assert code == ErrorCodes.REFUSED_STREAM
        assert len(desk.requests) == 4
        assert client.h2.remote_settings.max_concurrent_streams == 4
        for reply in desk.replies:
            reply.send(200, [], b"")
        for number in numbers[:4]:
            assert (await client.answer(number))[0] == 200
        again = client.ask()
        await desk.reply(5)
        desk.replies[4].send(200, [], b"again")
        assert (await client.answer(again))[2] == b"again"


def reset_at_once(h2: H2Connection, i: int) -> None:
    del i
    number = h2.get_next_available_stream_id()
    h2.send_headers(number, GET)
    h2.reset_stream(number)


def ping(h2: H2Connection, i: int) -> None:
    h2.ping(i.to_bytes(8))


def change_settings(h2: H2Connection, i: int) -> None:
    h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 65_535 + i % 2})


def open_window(h2: H2Connection, i: int) -> None:
    del i
    h2.increment_flow_control_window(1)


def prioritise(h2: H2Connection, i: int) -> None:
    h2.prioritize(1, weight=1 + i % 256)


def send_nothing(h2: H2Connection, i: int) -> None:
    if not i:
        h2.send_headers(1, POST)
    h2.send_data(1, b"")


def say_goodbye(h2: H2Connection, i: int) -> None:
    if not i:
        h2.send_headers(1, POST)
    h2._data_to_send += GoAwayFrame(0).serialize()


FLOODS = [
    reset_at_once,
    ping,
    change_settings,
    open_window,
    prioritise,
    send_nothing,
    say_goodbye,
]


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_ends_the_connection(flood: Any) -> None:
    desk = Desk()
    async with serving(desk, EITHER) as server, client_of(server.port) as client:
        for i in range(4_000):
            flood(client.h2, i)
        client.flush()
        assert await client.end() == ErrorCodes.ENHANCE_YOUR_CALM
        assert len(desk.requests) <= 500
        async with client_of(server.port) as other:
            other.ask()
            await desk.reply(len(desk.requests) + 1)
            desk.replies[-1].send(200, [], b"")


@pytest.mark.parametrize("flood", FLOODS[:2])
async def test_a_little_of_that_is_usual(flood: Any) -> None:
    async with serving(echo, EITHER) as server, client_of(server.port) as client:
        for i in range(200):
            flood(client.h2, i)
        client.flush()
        assert (await client.answer(client.ask()))[0] == 200


async def test_windows_may_be_opened_for_each_frame_of_a_long_answer() -> None:
    desk = Desk()
    async with serving(desk, EITHER) as server, client_of(server.port) as client:
        number = client.ask()
        reply = await desk.reply()
        reply.start(200, [])
        for _ in range(2_000):
            reply.write(b"data: x\n\n")
            seen = len(client.events)
            while not any(isinstance(one, DataReceived) for one in client.events[seen:]):
                await client.read()
            client.h2.increment_flow_control_window(9)
            client.h2.increment_flow_control_window(9, number)
            client.flush()
        reply.end()
        assert len((await client.answer(number))[2]) == 18_000


async def test_a_head_without_end_ends_the_connection() -> None:
    async with serving(echo, EITHER) as server, client_of(server.port) as client:
        client.h2.send_headers(1, [*GET, *((f"x-{i}", "a" * 4_000) for i in range(60))])
        client.flush()
        assert await client.end() is not None


async def test_bytes_that_are_no_frames_end_the_connection() -> None:
    async with serving(echo, EITHER) as server, connect(server.port) as raw:
        raw.send(PREFACE + bytes(9) + b"\xff" * 20_000)
        assert b"GET" not in await raw.rest()


async def test_a_frame_or_a_head_that_never_ends_is_not_kept() -> None:
    """The library keeps 16 MB of a frame that is too long, and 1 MB of a head."""
    long = (1 << 24) - 1
    head = HeadersFrame(1, data=bytes(16_000)).serialize()
    parts = [ContinuationFrame(1, data=bytes(16_000)).serialize() for _ in range(20)]
    unknown = long.to_bytes(3) + b"\xee" + bytes(5)
    for data in (unknown + bytes(1 << 20), head + b"".join(parts)):
        async with serving(echo, EITHER) as server, client_of(server.port) as client:
            client.raw.send(data)
            assert await client.end() == ErrorCodes.FRAME_SIZE_ERROR


async def test_a_drain_lets_answers_end_and_says_where_to_go_on() -> None:
    desk = Desk()
    async with serving(desk, EITHER) as server, client_of(server.port) as client:
        number = client.ask()
        await desk.reply(1)
        server.stop_accepting()
        goaway = await client.until(ConnectionTerminated)
        assert (goaway.error_code, goaway.last_stream_id) == (ErrorCodes.NO_ERROR, number)
        desk.replies[0].start(200, [])
        desk.replies[0].write(b"whole ")
        await asyncio.sleep(0.01)
        desk.replies[0].write(b"answer")
        desk.replies[0].end()
        data = b""
        while part := await client.raw.reader.read(1 << 16):
            data += part
        # The library takes nothing more after GOAWAY.
        assert b"whole " in data
        assert b"answer" in data


async def test_an_idle_connection_is_told_to_go_at_a_drain() -> None:
    async with serving(echo, EITHER) as server, client_of(server.port) as client:
        await client.answer(client.ask())
        server.stop_accepting()
        assert await client.end() == ErrorCodes.NO_ERROR


@pytest.mark.parametrize(
    ("limits", "part"),
    [
        ({"header_timeout_s": 0.05}, PREFACE[:5]),
        ({"header_timeout_s": 0.05}, PREFACE),
        ({"keep_alive_timeout_s": 0.05}, None),
    ],
)
async def test_who_asks_for_nothing_is_sent_away(
    limits: dict[str, float], part: bytes | None
) -> None:
    async with serving(echo, EITHER, **limits) as server, connect(server.port) as raw:
        if part is not None:
            raw.send(part)
            await raw.rest()
            return
        client = Client(raw)
        await client.answer(client.ask())
        assert await client.end() == ErrorCodes.NO_ERROR


async def test_a_late_body_is_answered_and_a_client_that_stalls_loses_its_answer() -> None:
    desk = Desk()
    limits = {"body_timeout_s": 0.05, "write_timeout_s": 0.2}
    async with (
        serving(desk, EITHER, **limits) as server,
        client_of(server.port) as client,
    ):
        late = client.h2.get_next_available_stream_id()
        client.h2.send_headers(late, POST)
        client.flush()
        assert (await client.answer(late))[0] == 408
        client.opens_windows = False
        stalls = client.ask()
        await desk.reply(1)
        desk.replies[0].start(200, [])
        desk.replies[0].write(b"x" * 100_000)
        assert (await client.until(StreamReset, stalls)).error_code == ErrorCodes.CANCEL
        assert desk.closed == desk.requests


async def test_above_the_limit_of_connections_requests_are_refused() -> None:
    desk = Desk()
    async with (
        serving(desk, EITHER, connection_limit=1) as server,
        client_of(server.port) as busy,
    ):
        number = busy.ask()
        await desk.reply(1)
        async with client_of(server.port) as refused:
            status, headers, _ = await refused.answer(refused.ask())
            assert (status, headers["retry-after"]) == (503, "1")
            await refused.end()
        desk.replies[0].send(200, [], b"served")
        assert (await busy.answer(number))[2] == b"served"
        # It is idle now, and gives its place.
        async with client_of(server.port) as newcomer:
            newcomer.ask()
            await desk.reply(2)
            assert await busy.end() == ErrorCodes.NO_ERROR
            desk.replies[1].send(200, [], b"")


async def test_an_application_that_fails_harms_one_stream() -> None:
    def fails(request: HttpRequest, reply: Reply) -> None:
        if request.path == b"/bad":
            raise RuntimeError
        echo(request, reply)

    async with serving(fails, EITHER) as server, client_of(server.port) as client:
        bad, good = client.ask([*GET[:3], (":path", "/bad")]), client.ask()
        assert (await client.answer(bad))[0] == 500
        assert (await client.answer(good))[0] == 200
        head = client.ask([(":method", "HEAD"), *GET[1:]])
        status, headers, body = await client.answer(head)
        assert (status, headers["content-length"], body) == (200, "12", b"")


def test_the_library_has_what_is_replaced_in_it() -> None:
    """Of what is not public: a method, a property that it counts by, and what it keeps."""
    names = vars(H2Connection)
    assert {"_begin_new_stream", "_receive_goaway_frame", "open_inbound_streams"} <= names.keys()
    assert {"_data", "_headers_buffer"} <= vars(H2Connection().incoming_buffer).keys()
