"""Target URLs."""

import asyncio

import pytest
from tests.support.virtual.runner import run

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.replay.exchange import ReplayTarget, first_model, parse_target
from balanceroute.proxy.wire.http1.server import Reply, Server
from balanceroute.proxy.wire.messages import HttpRequest


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "prefix"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, False, ""),
        ("http://engine", "engine", 80, False, ""),
        ("https://engine", "engine", 443, True, ""),
        ("https://engine:8443/", "engine", 8443, True, ""),
        ("http://[::1]:8000", "::1", 8000, False, ""),
        ("http://engine:8000/v1", "engine", 8000, False, ""),
        ("http://engine:8000/v1/", "engine", 8000, False, ""),
        ("http://gateway/models/a/v1", "gateway", 80, False, "/models/a"),
        ("http://gateway/models/a", "gateway", 80, False, "/models/a"),
    ],
)
def test_a_url_is_read(url: str, host: str, port: int, tls: bool, prefix: str) -> None:
    target = parse_target("--target", url)
    assert target == ReplayTarget(url, host, port, tls, prefix)
    assert target.path("/v1/models") == f"{prefix}/v1/models".encode()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "engine:8000",
        "ftp://engine",
        "http://",
        "http://engine:port",
        "http://engine:99999",
        "http://[::1",
        "http://engine/?a=b",
        "http://engine/#a",
        "http://me:secret@engine/",
        "http://engine/a b",
        "http://engine/\r\nx: y",
        "http://engine/é",
    ],
)
def test_another_url_is_refused_with_the_flag(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^--target: ") as error:
        parse_target("--target", url)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "port", "host"),
    [
        ("http://127.0.0.1", 80, b"127.0.0.1"),
        ("http://127.0.0.1:80", 80, b"127.0.0.1"),
        ("http://127.0.0.1:8000/gateway", 8000, b"127.0.0.1:8000"),
        ("http://[::1]:8000", 8000, b"[::1]:8000"),
    ],
)
def test_a_server_is_asked_by_the_name_of_the_url(url: str, port: int, host: bytes) -> None:
    seen: list[HttpRequest] = []

    def answer(request: HttpRequest, reply: Reply) -> None:
        seen.append(request)
        reply.send(200, [], b'{"data": [{"id": "tiny"}]}')

    async def main(_: asyncio.AbstractEventLoop) -> str:
        target = parse_target("--target", url)
        server = Server(answer)
        await server.start(target.host, port)
        endpoint = target.connect()
        try:
            return await first_model(endpoint, target, [])
        finally:
            endpoint.close()
            server.close()
            await server.drain()

    assert run(main, seed=0) == "tiny"
    (request,) = seen
    assert request.header(b"host") == host
    assert request.path == parse_target("--target", url).path("/v1/models")


def test_https_is_spoken_to_an_https_url() -> None:
    async def main() -> str:
        endpoint = parse_target("--target", "https://engine").connect()
        endpoint.close()
        return endpoint.name

    assert asyncio.run(main()) == "https://engine:443"
