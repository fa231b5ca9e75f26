"""The client of probes and scrapes: it goes where it is told, takes no more than it asked for."""

import asyncio
import errno
import random
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest
import uvloop
from tests.support.played import in_virtual_time
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.recorder import Recorder
from tests.support.virtual.runner import run

from balanceroute.proxy.live.engines.engine_url import EngineUrl, Fault, Fetcher, FetchError
from balanceroute.proxy.live.environment import PAGES_BYTES
from balanceroute.proxy.wire.http1.client import Endpoint, ResponseRoom

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import ResponseHandler

T = TypeVar("T")
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def make_fetcher(*, timeout_s: float = 5.0, connect_timeout_s: float = 2.0) -> Fetcher:
    def connect(url: EngineUrl) -> Endpoint:
        context = ssl.create_default_context() if url.scheme == "https" else None
        return Endpoint(url.host, url.port, ssl=context, connect_timeout_s=connect_timeout_s)

    return Fetcher(connect, timeout_s=timeout_s, key=None, room=ResponseRoom(PAGES_BYTES))


def exchange(
    answer: Answer,
    main: Callable[[Fetcher, str], Coroutine[Any, Any, T]],
    *,
    timeout_s: float = 5.0,
) -> T:
    """Serve every connection with `answer`, which is given the head of each request."""
    serving: list[asyncio.Task[Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.append(task)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await answer(head, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def both() -> T:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        fetcher = make_fetcher(timeout_s=timeout_s)
        try:
            port = server.sockets[0].getsockname()[1]
            return await main(fetcher, f"http://127.0.0.1:{port}")
        finally:
            fetcher.close()
            server.close()
            for task in serving:
                task.cancel()  # Some answers hang.
            await asyncio.gather(*serving, return_exceptions=True)

    return uvloop.run(both())


def answering(raw: bytes) -> Answer:
    async def answer(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    return answer


async def hang(_head: bytes, _writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def close(_head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.close()


def fault_of(answer: Answer, *, max_bytes: int = 1000, timeout_s: float = 5.0) -> tuple[Fault, str]:
    async def main(fetcher: Fetcher, url: str) -> tuple[Fault, str]:
        with pytest.raises(FetchError) as caught:
            await fetcher.body(f"{url}/metrics", max_bytes=max_bytes)
        return caught.value.fault, str(caught.value)

    return exchange(answer, main, timeout_s=timeout_s)


def test_a_page_comes_back_whole() -> None:
    async def main(fetcher: Fetcher, url: str) -> bytes:
        return await fetcher.body(f"{url}/metrics", max_bytes=5)

    assert (
        exchange(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"), main) == b"hello"
    )


@pytest.mark.parametrize("status", [200, 204, 404, 500, 503])
def test_every_status_is_a_status(status: int) -> None:
    async def main(fetcher: Fetcher, url: str) -> int:
        return await fetcher.status(f"{url}/health")

    raw = b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status
    assert exchange(answering(raw), main) == status


def test_a_health_page_without_end_does_not_matter() -> None:
    async def main(fetcher: Fetcher, url: str) -> int:
        return await fetcher.status(f"{url}/health")

    async def endless(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()

    assert exchange(endless, main) == 200


def test_a_page_over_the_cap_is_cut_off() -> None:
    raw = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001
    assert fault_of(answering(raw)) == (
        Fault.PROTOCOL,
        "protocol: a response is larger than 1000 bytes",
    )


def test_a_compressed_page_is_not_decompressed() -> None:
    requests = []

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(head.lower())
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\n\x1f\x8b\x08\x00"
        )

    async def main(fetcher: Fetcher, url: str) -> bytes:
        return await fetcher.body(f"{url}/metrics", max_bytes=100)

    assert exchange(answer, main) == b"\x1f\x8b\x08\x00"
    assert b"accept-encoding: identity\r\n" in requests[0]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (close, Fault.RESET),
        (answering(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx"), Fault.TIMEOUT),
        (answering(b"hello there\r\n\r\n"), Fault.PROTOCOL),
        (answering(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n"), Fault.SERVER_ERROR),
        (answering(b"HTTP/1.1 404 X\r\ncontent-length: 0\r\n\r\n"), Fault.PROTOCOL),
        (hang, Fault.TIMEOUT),
    ],
)
def test_what_is_no_page_is_a_fault(answer: Answer, fault: Fault) -> None:
    assert fault_of(answer, timeout_s=0.05 if fault is Fault.TIMEOUT else 5.0)[0] is fault


def test_redirects_are_not_followed() -> None:
    requests = []

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(head)
        writer.write(
            b"HTTP/1.1 302 Found\r\nlocation: http://169.254.169.254/\r\ncontent-length: 0\r\n\r\n"
        )

    assert fault_of(answer) == (Fault.PROTOCOL, "protocol: status 302")
    assert len(requests) == 1


def test_the_environment_names_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", "")

    async def main(fetcher: Fetcher, url: str) -> int:
        return await fetcher.status(f"{url}/health")

    raw = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    assert exchange(answering(raw), main) == 200


def test_cookies_are_not_kept() -> None:
    requests = []

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n")

    async def main(fetcher: Fetcher, url: str) -> None:
        await fetcher.status(f"{url}/health")
        await fetcher.status(f"{url}/health")

    exchange(answer, main)
    assert len(requests) == 2
    assert b"cookie" not in requests[1].lower()


async def fault_at(url: str) -> Fault:
    fetcher = make_fetcher()
    with pytest.raises(FetchError) as caught:
        await fetcher.status(url)
    fetcher.close()
    return caught.value.fault


def test_a_refused_connection_is_told_from_others() -> None:
    with socket.socket() as bound:  # Bound, not listening: nobody else gets the port.
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/health"
        assert asyncio.run(fault_at(url)) is Fault.CONNECT


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS])
def test_a_want_of_descriptors_or_ports_is_ours(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(fetcher: Fetcher, url: str) -> Fault:
        async def create_connection(*_args: object, **_options: object) -> None:
            raise OSError(code, "out of something")

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "create_connection", create_connection)
        with pytest.raises(FetchError) as caught:
            await fetcher.status(f"{url}/health")
        return caught.value.fault

    assert exchange(close, main) is Fault.LOCAL


def test_exchanges_do_not_wait_for_one_another() -> None:
    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        await (hang if b"/slow" in head else answering(OK))(head, writer)

    async def main(fetcher: Fetcher, url: str) -> bytes:
        slow = [asyncio.create_task(fetcher.status(f"{url}/slow")) for _ in range(10)]
        await asyncio.sleep(0)
        page = await fetcher.body(f"{url}/metrics", max_bytes=2)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return page

    assert exchange(answer, main) == b"ok"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        # A resolver that fails says nothing of the engine; one that knows of no such name does.
        (socket.EAI_AGAIN, Fault.LOCAL),
        (socket.EAI_NONAME, Fault.UNREACHABLE),
    ],
)
def test_a_resolver_that_fails_is_not_the_engines_fault(
    code: int, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def getaddrinfo(*_args: object, **_options: object) -> None:
        raise socket.gaierror(code, "no answer")

    async def main() -> Fault:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        return await fault_at("http://engine-0:8000/health")

    assert asyncio.run(main()) is fault


def test_an_engine_whose_handshake_fails_is_unreachable() -> None:
    async def no_tls(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def main() -> Fault:
        async with await asyncio.start_server(no_tls, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await fault_at(f"https://127.0.0.1:{port}/health")

    assert asyncio.run(main()) is Fault.UNREACHABLE


def test_a_key_is_sent_from_the_next_request_on() -> None:
    heads = []

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        heads.append(head.lower())
        writer.write(OK)

    async def main(fetcher: Fetcher, url: str) -> None:
        await fetcher.status(f"{url}/health")
        for key in (b"sk-1", b"sk-2"):
            fetcher.use_key(key)
            await fetcher.status(f"{url}/health")
            await fetcher.body(f"{url}/metrics", max_bytes=2)

    exchange(answer, main)
    assert b"authorization" not in heads[0]
    keys = [head.partition(b"authorization: bearer ")[2].partition(b"\r\n")[0] for head in heads]
    assert keys == [b"", b"sk-1", b"sk-1", b"sk-2", b"sk-2"]


def test_no_cancellation_leaves_a_connection_behind() -> None:
    rng = random.Random(3)

    async def main() -> None:
        made: list[Endpoint] = []

        def connect(url: EngineUrl) -> Endpoint:
            made.append(Endpoint(url.host, url.port))
            return made[-1]

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    writer.write(OK)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        fetcher = Fetcher(connect, timeout_s=2.0, key=None, room=ResponseRoom(PAGES_BYTES))
        for _ in range(100):
            task = asyncio.create_task(fetcher.status(url))
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await fetcher.body(url, max_bytes=10) == b"ok"
        fetcher.close()
        listener.close()
        await listener.wait_closed()
        while made[0].connections:  # noqa: ASYNC110 (no event tells)
            await asyncio.sleep(0)
        assert len(made) == 1

    uvloop.run(main())


def test_time_limits_tell_an_engine_that_is_not_there_from_a_silent_one() -> None:
    """In virtual time, as the seeded fault runs are."""

    async def main(loop: VirtualLoop) -> list[tuple[Fault, float]]:
        listener = await loop.create_server(Recorder, "10.0.0.1", 8000)
        fetcher = make_fetcher(timeout_s=5.0, connect_timeout_s=2.0)
        faults = []

        async def ask() -> None:
            begin_s = loop.time()
            with pytest.raises(FetchError) as caught:
                await fetcher.status("http://10.0.0.1:8000/health")
            faults.append((caught.value.fault, round(loop.time() - begin_s, 2)))

        await ask()
        loop.network.silence("10.0.0.1", 8000)
        await ask()
        loop.network.kill("10.0.0.1", 8000)
        await ask()
        fetcher.close()
        listener.close()
        return faults

    assert run(main, seed=1) == [
        (Fault.TIMEOUT, 5.0),
        (Fault.CONNECT_TIMEOUT, 2.0),
        (Fault.CONNECT, 0.0),
    ]


class Sending:
    """An engine that answers in its own time; see `Caller` and `Calling`."""

    name = "engine"
    sent = answered = True

    def __init__(self) -> None:
        self.handler: ResponseHandler | None = None

    def request(self, *request: Any) -> "Sending":
        self.handler = request[-1]
        self.handler.on_head(200, [])
        return self

    def abort(self) -> None:
        self.handler = None

    def send(self, data: bytes) -> None:
        if self.handler is not None:
            self.handler.on_data(data)

    def end(self) -> None:
        if self.handler is not None:
            self.handler.on_end()


async def fleet(count: int, read: Callable[[Fetcher, str], Awaitable[T]]) -> tuple[Any, ...]:
    """Have pages of so many engines read; return what bounds them, the engines, and the readers."""
    engines: dict[int, Sending] = {}
    room = ResponseRoom(PAGES_BYTES)
    connect = cast("Any", lambda url: engines.setdefault(url.port, Sending()))
    fetcher = Fetcher(connect, timeout_s=1e6, key=None, room=room)
    reading = [
        asyncio.ensure_future(read(fetcher, f"http://e:{1 + port}/metrics"))
        for port in range(count)
    ]
    await asyncio.sleep(0)
    return room, list(engines.values()), reading


@in_virtual_time()
async def test_engines_that_answer_at_length_take_no_room_of_the_others(loop: VirtualLoop) -> None:
    """2,000 send what each of them may, but for its last byte, and three as much as an engine does."""
    part, longest, page = 256 << 10, 4 << 20, b"x" * 200_000
    del loop
    room, engines, reading = await fleet(
        2003, lambda fetcher, url: fetcher.body(url, max_bytes=longest)
    )
    honest, others, most = engines[::1000], [*engines], 0
    del others[::1000]
    data = b"x" * part
    for half in range(2):
        for one in honest:
            one.send(page[half::2])
        for _ in range(longest // part // 2):
            for engine in others:
                engine.send(data)
                most = max(most, room.held)
                assert room.held <= PAGES_BYTES
    for one in honest:
        one.end()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [await one for one in reading[::1000]] == [page] * 3
    assert most > PAGES_BYTES - part
    del reading[::1000]
    ended = [one.exception() for one in reading if one.done()]
    assert len(ended) >= 2000 - PAGES_BYTES // part
    assert {type(one) for one in ended} == {FetchError}
    assert {cast("FetchError", one).fault for one in ended} == {Fault.PROTOCOL}
    for one in reading:
        one.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    assert room.held == 0


@in_virtual_time()
async def test_a_page_of_which_only_the_status_counts_gives_way_as_well(loop: VirtualLoop) -> None:
    del loop
    room, engines, reading = await fleet(2000, lambda fetcher, url: fetcher.status(url))
    for engine in engines:
        engine.send(b"x" * 65_536)
        assert room.held <= PAGES_BYTES
    for engine in engines:
        engine.end()
    assert set(await asyncio.gather(*reading)) == {200}
    assert room.held == 0
