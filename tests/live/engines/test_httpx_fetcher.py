"""Exchanges that are cancelled leave nothing behind, neither open nor in the way of others."""

import asyncio
import random
import ssl

import httpx
import uvloop

from balanceroute.proxy.live.engines.http_client import make_http_client
from balanceroute.proxy.live.engines.httpx_fetcher import HttpxFetcher

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(OK)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def test_no_cancellation_blocks_a_connection_for_ever() -> None:
    rng = random.Random(3)

    async def main() -> None:
        listener = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        made: list[httpx.AsyncClient] = []

        def make_client() -> httpx.AsyncClient:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            made.append(make_http_client(context, timeout_s=2.0, max_connections=4))
            return made[-1]

        fetcher = HttpxFetcher(make_client)
        try:
            for _ in range(100):
                task = asyncio.create_task(fetcher.status(url))
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            assert await fetcher.body(url, max_bytes=10) == b"ok"
        finally:
            await fetcher.aclose()
            listener.close()
        assert all(client.is_closed for client in made)
        await listener.wait_closed()

    uvloop.run(main())


def test_a_client_with_a_cancelled_exchange_serves_its_others_to_their_end() -> None:
    async def main() -> None:
        waiting, go = asyncio.Event(), asyncio.Event()

        async def slowly(request: httpx.Request) -> httpx.Response:
            del request
            waiting.set()
            await go.wait()
            return httpx.Response(204, stream=httpx.ByteStream(b""))

        made: list[httpx.AsyncClient] = []

        def make_client() -> httpx.AsyncClient:
            made.append(httpx.AsyncClient(transport=httpx.MockTransport(slowly)))
            return made[-1]

        fetcher = HttpxFetcher(make_client)
        others = [asyncio.create_task(fetcher.status("http://a/")) for _ in range(2)]
        await waiting.wait()
        cancelled = asyncio.create_task(fetcher.status("http://a/"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        assert len(made) == 2
        assert not made[0].is_closed
        go.set()
        assert await asyncio.gather(*others) == [204, 204]
        assert await fetcher.status("http://a/") == 204
        await fetcher.aclose()
        assert [client.is_closed for client in made] == [True, True]

    asyncio.run(main())


def test_a_renewed_fetcher_lets_exchanges_end_and_begins_others_anew() -> None:
    async def main() -> None:
        waiting, go = asyncio.Event(), asyncio.Event()
        made: list[httpx.AsyncClient] = []

        async def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/slow":
                waiting.set()
                await go.wait()
            return httpx.Response(204, stream=httpx.ByteStream(b""))

        def make_client() -> httpx.AsyncClient:
            made.append(httpx.AsyncClient(transport=httpx.MockTransport(answer)))
            return made[-1]

        fetcher = HttpxFetcher(make_client)
        slow = asyncio.create_task(fetcher.status("http://e/slow"))
        await waiting.wait()
        fetcher.renew()
        assert await fetcher.status("http://e/") == 204
        assert [client.is_closed for client in made] == [False, False]
        go.set()
        assert await slow == 204
        fetcher.renew()
        await fetcher.aclose()
        assert [client.is_closed for client in made] == [True] * 3

    uvloop.run(main())
