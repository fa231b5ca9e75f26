"""The client of probes and scrapes: it goes where it is told, takes no more than it asked for."""

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import httpx
import pytest

from balanceroute.proxy.live.engines.faults import Fault, FetchError
from balanceroute.proxy.live.engines.http_client import fetch_body, fetch_status, make_http_client
from balanceroute.proxy.live.security.tls import engine_context

T = TypeVar("T")
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
TLS = engine_context(None, insecure=False)


def exchange(
    answer: Answer,
    main: Callable[[httpx.AsyncClient, str], Coroutine[Any, Any, T]],
    *,
    timeout_s: float = 5.0,
    max_connections: int = 8,
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
        try:
            port = server.sockets[0].getsockname()[1]
            client = make_http_client(TLS, timeout_s=timeout_s, max_connections=max_connections)
            async with client:
                return await main(client, f"http://127.0.0.1:{port}")
        finally:
            server.close()
            for task in serving:
                task.cancel()  # Some answers hang.
            await asyncio.gather(*serving, return_exceptions=True)

    return asyncio.run(both())


def answering(raw: bytes) -> Answer:
    async def answer(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    return answer


async def hang(_head: bytes, _writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def close(_head: bytes, writer: asyncio.StreamWriter) -> None:
    writer.close()


def fault_of(answer: Answer, *, max_bytes: int = 1000, timeout_s: float = 5.0) -> tuple[Fault, str]:
    async def main(client: httpx.AsyncClient, url: str) -> tuple[Fault, str]:
        with pytest.raises(FetchError) as caught:
            await fetch_body(client, f"{url}/metrics", max_bytes=max_bytes)
        return caught.value.fault, str(caught.value)

    return exchange(answer, main, timeout_s=timeout_s)


def test_a_page_comes_back_whole() -> None:
    async def main(client: httpx.AsyncClient, url: str) -> bytes:
        return await fetch_body(client, f"{url}/metrics", max_bytes=5)

    assert (
        exchange(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"), main) == b"hello"
    )


@pytest.mark.parametrize("status", [200, 204, 404, 500, 503])
def test_every_status_is_a_status(status: int) -> None:
    async def main(client: httpx.AsyncClient, url: str) -> int:
        return await fetch_status(client, f"{url}/health")

    raw = b"HTTP/1.1 %d X\r\ncontent-length: 0\r\n\r\n" % status
    assert exchange(answering(raw), main) == status


def test_a_health_page_without_end_does_not_matter() -> None:
    async def main(client: httpx.AsyncClient, url: str) -> int:
        return await fetch_status(client, f"{url}/health")

    async def endless(_head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65_536)
            await writer.drain()

    assert exchange(endless, main) == 200


def test_a_page_over_the_cap_is_cut_off() -> None:
    raw = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001
    assert fault_of(answering(raw)) == (Fault.PROTOCOL, "protocol: more than 1000 bytes")


def test_a_compressed_page_is_not_decompressed() -> None:
    requests = []

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(head.lower())
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\n\x1f\x8b\x08\x00"
        )

    async def main(client: httpx.AsyncClient, url: str) -> bytes:
        return await fetch_body(client, url, max_bytes=100)

    assert exchange(answer, main) == b"\x1f\x8b\x08\x00"
    assert b"accept-encoding: identity\r\n" in requests[0]


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (close, Fault.PROTOCOL),
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

    async def main(client: httpx.AsyncClient, url: str) -> int:
        return await fetch_status(client, f"{url}/health")

    raw = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    assert exchange(answering(raw), main) == 200


def test_cookies_are_not_kept() -> None:
    requests = []

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: 0\r\n\r\n")

    async def main(client: httpx.AsyncClient, url: str) -> None:
        await fetch_status(client, f"{url}/health")
        await fetch_status(client, f"{url}/health")

    exchange(answer, main)
    assert len(requests) == 2
    assert b"cookie" not in requests[1].lower()


def test_a_refused_connection_is_told_from_others() -> None:
    with socket.socket() as bound:  # Bound, not listening: nobody else gets the port.
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/health"

        async def main() -> Fault:
            async with make_http_client(TLS, timeout_s=5.0) as client:
                with pytest.raises(FetchError) as caught:
                    await fetch_status(client, url)
            return caught.value.fault

        assert asyncio.run(main()) is Fault.CONNECT


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS])
def test_a_want_of_descriptors_or_ports_is_ours(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(client: httpx.AsyncClient, url: str) -> Fault:
        async def create_connection(*_args: object, **_options: object) -> None:
            raise OSError(code, "out of something")

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "create_connection", create_connection)
        with pytest.raises(FetchError) as caught:
            await fetch_status(client, f"{url}/health")
        return caught.value.fault

    assert exchange(close, main) is Fault.LOCAL


def test_waiting_for_our_own_other_exchanges_is_ours() -> None:
    async def main(client: httpx.AsyncClient, url: str) -> set[Fault]:
        results = await asyncio.gather(
            *(fetch_status(client, f"{url}/health") for _ in range(3)), return_exceptions=True
        )
        return {result.fault for result in results if isinstance(result, FetchError)}

    assert exchange(hang, main, timeout_s=0.1, max_connections=1) >= {Fault.LOCAL}


@pytest.mark.parametrize("code", [socket.EAI_AGAIN, socket.EAI_NONAME])
def test_a_name_that_does_not_resolve_is_not_the_engines_fault(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def getaddrinfo(*_args: object, **_options: object) -> None:
        raise socket.gaierror(code, "no answer")

    async def main() -> Fault:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
        async with make_http_client(TLS, timeout_s=5.0) as client:
            with pytest.raises(FetchError) as caught:
                await fetch_status(client, "http://engine-0:8000/health")
        return caught.value.fault

    assert asyncio.run(main()) is Fault.LOCAL


def test_an_engine_whose_handshake_fails_is_unreachable() -> None:
    async def no_tls(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def main() -> Fault:
        async with await asyncio.start_server(no_tls, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with make_http_client(TLS, timeout_s=5.0) as client:
                with pytest.raises(FetchError) as caught:
                    await fetch_status(client, f"https://127.0.0.1:{port}/health")
            return caught.value.fault

    assert asyncio.run(main()) is Fault.UNREACHABLE
