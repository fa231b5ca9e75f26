"""The HTTP/3 server over real sockets, before aioquic's client: what it serves, and what it refuses."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

pytest.importorskip("aioquic", reason="needs the extra h3")

from aioquic.tls import CipherSuite, Epoch, SessionTicket
from tests.http3_client import HOST, Answered
from tests.wire.http3.site import http3_site

from balanceroute.proxy.wire.messages import Rejection, ServerLimits

if TYPE_CHECKING:
    from pathlib import Path

    from balanceroute.proxy.wire.http1.heads import RequestHead
    from balanceroute.proxy.wire.messages import HttpRequest, Reply


def echo(request: "HttpRequest", reply: "Reply") -> None:
    """Answer with what was understood."""
    head = b"%b %b?%b " % (request.method, request.path, request.query)
    reply.send(200, [(b"content-type", b"text/plain")], head + request.body)


class Recorder:
    """An application that keeps what it was given."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.replies: list[Reply] = []
        self.more = asyncio.Event()

    def __call__(self, request: "HttpRequest", reply: "Reply") -> None:
        self.requests.append(request)
        self.replies.append(reply)
        self.more.set()

    async def next(self) -> "Reply":
        while not self.replies:
            self.more.clear()
            await self.more.wait()
        return self.replies.pop(0)


async def test_a_request_is_answered_whole(tmp_path: "Path") -> None:
    async with http3_site(echo, tmp_path) as site, site.client() as client:
        answer = await client.ask(b"POST", b"/v1/x?a=1", [(b"x-one", b"1")], b"hello")
        assert answer.status == 200
        assert bytes(answer.body) == b"POST /v1/x?a=1 hello"
        assert (b"content-length", b"20") in answer.headers
        assert site.server.connections == 1
        head = await client.ask(b"HEAD", b"/")
        assert not head.body
        assert (b"content-length", b"8") in head.headers


@pytest.mark.both_loops
async def test_a_large_body_and_a_large_answer_pass(tmp_path: "Path") -> None:
    body = bytes(range(256)) * 3_072  # 768 KiB: several windows.
    async with http3_site(echo, tmp_path) as site, site.client() as client:
        answer = await client.ask(b"POST", b"/", None, body)
        assert bytes(answer.body) == b"POST /? " + body
        assert site.server.bodies.used == 0


async def test_an_answer_is_streamed_piece_by_piece(tmp_path: "Path") -> None:
    recorder = Recorder()
    async with http3_site(recorder, tmp_path) as site, site.client() as client:
        number = client.begin(b"GET", b"/")
        reply = await recorder.next()
        reply.start(200, [(b"content-type", b"text/event-stream")])
        for piece in (b"data: 1\n\n", b"data: 2\n\n"):
            seen = len(client.streams[number].body)
            reply.write(piece)
            while len(client.streams[number].body) == seen:  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0)
        reply.end()
        answer = await client.answer(number)
        assert bytes(answer.body) == b"data: 1\n\ndata: 2\n\n"
        assert answer.reset is None


async def test_many_requests_share_a_connection(tmp_path: "Path") -> None:
    async with http3_site(echo, tmp_path) as site, site.client() as client:
        bodies = [b"%d" % n * 1_000 for n in range(130)]  # More than may be open at a time.
        numbers = []
        for body in bodies:
            numbers.append(client.begin(b"POST", b"/", end=False))
            client.more(numbers[-1], body)
        for body, number in zip(bodies, numbers, strict=True):
            assert bytes((await client.answer(number)).body).endswith(body)


async def test_what_the_head_rules_out_is_answered_before_the_body(tmp_path: "Path") -> None:
    def refuse(head: object, peer: str) -> Rejection:
        del head, peer
        return Rejection(401, "no")

    async with http3_site(echo, tmp_path, admit=refuse) as site, site.client() as client:
        number = client.begin(b"POST", b"/", end=False)
        answer = await client.answer(number)
        assert answer.status == 401
        assert b"no" in answer.body


async def test_a_drain_waits_for_lost_clients_until_its_deadline_and_no_longer(
    tmp_path: "Path", monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    async with (
        http3_site(recorder, tmp_path) as site,
        site.client() as idle,
        site.client() as client,
    ):
        client.begin(b"GET", b"/")
        reply = await recorder.next()
        for one in (idle, client):  # They are gone without a word.
            monkeypatch.setattr(one, "_transport", Mock())
            monkeypatch.setattr(one, "datagram_received", lambda *_: None)
        reply.send(200, [], b"for nobody")
        site.server.stop_accepting()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await site.server.drain()
        # Of the idle one nothing is awaited; the other one has acknowledged nothing.
        assert site.server.connections == 1
        site.server.close()
        async with asyncio.timeout(0.1):
            await site.server.drain()


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (b"no-slash", [], 400),
        (b"/" + b"a" * 9_000, [], 414),
        (b"/", [(b"x-%d" % n, b"1") for n in range(101)], 431),
        (b"/", [(b"x-long", b"a" * 40_000)], 431),
        (b"/", [(b"content-length", b"99999999999")], 413),
        (b"/", [(b"host", b"elsewhere")], 400),
        (b"/", [(b"connection", b"close")], 400),
        (b"/", [(b"x-bad", b"a\x01b")], 400),
        (b"/", [(b"expect", b"miracles")], 417),
    ],
)
async def test_a_bad_head_is_answered_alone(
    tmp_path: "Path", path: bytes, headers: list[tuple[bytes, bytes]], status: int
) -> None:
    async with http3_site(echo, tmp_path) as site, site.client() as client:
        number = client.begin(b"POST", path, headers, end=False)
        answer = await client.answer(number)
        assert answer.status == status
        # The connection goes on.
        assert (await client.ask(b"GET", b"/")).status == 200


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([(b":protocol", b"WebSocket")], 426),
        ([(b":protocol", b"connect-udp")], 405),
        ([], 405),
    ],
)
async def test_an_extended_connect_is_judged_as_the_upgrade_that_it_is(
    tmp_path: "Path", fields: list[tuple[bytes, bytes]], status: int
) -> None:
    def admit(head: "RequestHead", peer: str) -> Rejection | None:
        asks = head.method == b"CONNECT" and (b"upgrade", b"websocket") in head.headers
        return Rejection(426, "no WebSockets") if asks else None

    async with http3_site(echo, tmp_path, admit=admit) as site, site.client() as client:
        number = client.begin(b"CONNECT", b"/socket", fields, end=False)
        answer = await client.answer(number)
        assert answer.status == status
        # Both say something of a connection of HTTP/1.1 (RFC 9114 section 4.2).
        assert {b"upgrade", b"connection"}.isdisjoint(dict(answer.headers))
        assert (await client.ask(b"GET", b"/")).status == 200


HEAD = {b":method": b"GET", b":scheme": b"https", b":authority": b"localhost", b":path": b"/"}


@pytest.mark.parametrize(
    "changed",
    [
        *({name: None} for name in HEAD),
        {b":scheme": b"ftp"},
        {b":path": b"/a b"},
        {b":path": b"https://localhost/"},
        {b":authority": b"user@localhost"},
        {b":status": b"200"},
        {b"X-Upper": b"1"},
        {b"x-two": b"1\r\nx-lines: 2"},
        {b"transfer-encoding": b"chunked"},
        {b"te": b"gzip"},
        {b"content-length": b"+0"},
    ],
    ids=repr,
)
async def test_a_malformed_head_is_answered_alone(
    tmp_path: "Path", changed: dict[bytes, bytes | None]
) -> None:
    async with http3_site(echo, tmp_path) as site, site.client() as client:
        number = client.quic.get_next_available_stream_id()
        client.streams[number] = Answered([], bytearray(), asyncio.Event())
        fields = [(name, value) for name, value in (HEAD | changed).items() if value is not None]
        client.h3.send_headers(number, fields, end_stream=True)
        client.transmit()
        assert (await client.answer(number)).status == 400
        assert (await client.ask(b"GET", b"/")).status == 200


async def test_a_body_that_is_too_large_is_refused(tmp_path: "Path") -> None:
    limits = ServerLimits(body_limit_bytes=100)
    async with http3_site(echo, tmp_path, limits=limits) as site, site.client() as client:
        answer = await client.ask(b"POST", b"/", None, b"a" * 101)
        assert answer.status == 413
        assert site.server.bodies.used == 0


async def test_a_request_that_a_client_gives_up_is_ended(tmp_path: "Path") -> None:
    recorder, left = Recorder(), asyncio.Event()
    async with http3_site(recorder, tmp_path) as site, site.client() as client:
        number = client.begin(b"GET", b"/")
        reply = await recorder.next()
        reply.on_closed = left.set
        reply.start(200, [])
        client.quic.stop_stream(number, 0x10C)
        client.transmit()
        await left.wait()
        assert reply.closed


async def test_an_aborted_answer_arrives_as_far_as_it_was_written(tmp_path: "Path") -> None:
    recorder = Recorder()
    async with http3_site(recorder, tmp_path) as site, site.client() as client:
        number = client.begin(b"GET", b"/")
        reply = await recorder.next()
        reply.start(200, [])
        reply.write(b"half")
        reply.abort()
        answer = await client.answer(number)
        assert answer.reset == 0x102
        assert bytes(answer.body) == b"half"


@pytest.mark.parametrize("path", [b"/begins", b"/fails", b"/aborts"])
async def test_a_comment_begins_a_stream_whose_answer_may_be_any(
    tmp_path: "Path", path: bytes
) -> None:
    recorder = Recorder()
    async with http3_site(recorder, tmp_path) as site, site.client() as client:
        number = client.begin(b"GET", path)
        reply = await recorder.next()
        for _ in range(2):
            reply.comment([(b"x-a", b"1")], b": a\n\n", lambda status, body: b"%d " % status + body)
            assert (reply.commented, reply.started) == (True, False)
        if path == b"/begins":
            reply.start(200, [(b"x-too", b"late")])
            reply.write(b"data: 1\n\n")
            reply.end()
        elif path == b"/fails":
            reply.send(503, [], b"why")
        else:
            reply.abort()
        answer = await client.answer(number)
        rest = {b"/begins": b"data: 1\n\n", b"/fails": b"503 why"}.get(path, b"")
        assert (answer.status, bytes(answer.body)) == (200, b": a\n\n" * 2 + rest)
        assert answer.reset == (None if path == b"/begins" else 0x102)
        assert dict(answer.headers)[b"x-a"] == b"1"


@pytest.mark.both_loops
async def test_a_drain_lets_present_answers_end(tmp_path: "Path") -> None:
    recorder = Recorder()
    async with http3_site(recorder, tmp_path) as site, site.client() as client:
        number = client.begin(b"GET", b"/")
        reply = await recorder.next()
        site.server.stop_accepting()
        await asyncio.sleep(0.05)
        late = client.begin(b"GET", b"/late")
        assert (await client.answer(late)).reset == 0x10B
        reply.send(200, [], b"done")
        assert bytes((await client.answer(number)).body) == b"done"
        await site.server.drain()
        await client.wait_closed()
        assert client.ended is not None
        assert client.ended.error_code == 0x100


async def test_an_application_that_fails_is_a_500(
    tmp_path: "Path", caplog: pytest.LogCaptureFixture
) -> None:
    def fail(request: "HttpRequest", reply: "Reply") -> None:
        raise RuntimeError("on purpose")

    async with http3_site(fail, tmp_path) as site, site.client() as client:
        assert (await client.ask(b"GET", b"/")).status == 500
    assert "the application failed" in caplog.text


async def test_a_stream_may_overtake_another(tmp_path: "Path") -> None:
    """Packets are lost, and clients send by priority: a later stream can come first."""
    async with http3_site(echo, tmp_path) as site, site.client() as client:
        client.quic._local_next_stream_id_bidi = 8
        third = client.begin(b"GET", b"/third")
        assert bytes((await client.answer(third)).body) == b"GET /third? "
        client.quic._local_next_stream_id_bidi = 4
        second = client.begin(b"GET", b"/second")
        client.quic._local_next_stream_id_bidi = 0
        first = client.begin(b"GET", b"/first")
        assert bytes((await client.answer(second)).body) == b"GET /second? "
        assert bytes((await client.answer(first)).body) == b"GET /first? "


def forged_ticket() -> SessionTicket:
    """Return a ticket that this server never issued."""
    now = datetime.now(UTC)
    return SessionTicket(
        age_add=0,
        cipher_suite=CipherSuite.AES_128_GCM_SHA256,
        not_valid_after=now + timedelta(hours=1),
        not_valid_before=now - timedelta(hours=1),
        resumption_secret=bytes(32),
        server_name=HOST,
        ticket=bytes(64),
        max_early_data_size=0xFFFFFFFF,
    )


async def test_early_data_is_refused(tmp_path: "Path") -> None:
    """A POST that a client sends before the handshake could be sent again by somebody else."""
    recorder = Recorder()
    tickets: list[SessionTicket] = []

    async with http3_site(recorder, tmp_path) as site:
        async with site.client(tickets=tickets) as client:
            number = client.begin(b"GET", b"/")
            (await recorder.next()).send(200, [], b"")
            await client.answer(number)
        assert not tickets
        recorder.requests.clear()
        # As of another server with the same name.
        async with site.client(session_ticket=forged_ticket(), wait=False) as client:
            number = client.begin(b"POST", b"/", end=False)
            client.more(number, b"early")
            assert client.quic._cryptos[Epoch.ZERO_RTT].send.is_valid()  # It was sent.
            await client.wait_connected()
            assert not client.early_data_accepted
            await recorder.next()
            assert [one.body for one in recorder.requests] == [b"early"]


@pytest.mark.parametrize("refused", [False, True])
async def test_what_follows_the_body_does_not_serve_a_refused_request(
    tmp_path: "Path", *, refused: bool
) -> None:
    """Head, body and trailers may come at once: the last one ends the request."""
    served: list[bytes] = []

    def note(request: "HttpRequest", reply: "Reply") -> None:
        served.append(request.body)
        reply.send(200, [], b"")

    def admit(head: object, peer: str) -> Rejection | None:
        del head, peer
        return Rejection(401, "no") if refused else None

    async with http3_site(note, tmp_path, admit=admit) as site, site.client() as client:
        transmit, client.transmit = client.transmit, lambda: None  # type: ignore[method-assign]
        number = client.begin(b"POST", b"/", end=False)
        client.more(number, b"body", end=False)
        client.h3.send_headers(number, [(b"x-after", b"1")], end_stream=True)
        client.transmit = transmit  # type: ignore[method-assign]
        client.transmit()
        assert (await client.answer(number)).status == (401 if refused else 200)
        assert served == ([] if refused else [b"body"])
