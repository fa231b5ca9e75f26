"""How commands ask: what they trust, follow and take, against servers that do as they like."""

import asyncio
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.support.certificate import CERT, KEY
from tests.support.played import in_real_time
from tests.support.virtual.runner import run

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.page_client import PageClient, UnansweredError, root_of

HEAD = b"HTTP/1.1 200 OK\r\n"
Answers = Callable[[bytes, asyncio.StreamWriter], Coroutine[Any, Any, None]]


def asked(answers: Answers, **options: Any) -> tuple[bytes, list[bytes]]:
    """Ask a server in virtual time; return the content, and the heads that it was sent."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                await answers(heads[-1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main(_: object) -> bytes:
        server = await asyncio.start_server(serve, "127.0.0.1", 9000)
        try:
            client = PageClient.of_flags(None, options.pop("token_file", None), timeout_s=5.0)
            async with client as pages:
                for _ in range(options.pop("before", 0)):
                    await pages.page("http://127.0.0.1:9000/first", **options)
                return await pages.page("http://127.0.0.1:9000/page", **options)
        finally:
            server.close()
            await asyncio.sleep(1.0)  # The server sees the end of the connection.

    return run(main, seed=1), heads


def test_a_question_carries_the_token_and_nothing_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Set-Cookie: a=b\r\nContent-Length: 2\r\n\r\nok")

    body, heads = asked(answer, token_file=token, before=1)
    assert body == b"ok"
    assert len(heads) == 2
    for head in heads:
        assert head.lower().count(b"authorization: bearer secret\r\n") == 1
        assert b"accept-encoding: identity\r\n" in head.lower()
        assert b"cookie" not in head.lower()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status: int, tmp_path: Path) -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        line = b"HTTP/1.1 %d Moved\r\nLocation: http://127.0.0.1:9000/else\r\n" % status
        writer.write(line + b"Content-Length: 0\r\n\r\n")

    with pytest.raises(UnansweredError, match=f"^status {status}: a redirect"):
        asked(answer)


async def never(_: bytes, writer: asyncio.StreamWriter) -> None:
    del writer


async def drop(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def drip(head: bytes, writer: asyncio.StreamWriter) -> None:
    del head
    writer.write(HEAD + b"Content-Length: 1000\r\n\r\n")
    for _ in range(1000):
        await asyncio.sleep(1.0)
        writer.write(b"x")


async def drip_head(_: bytes, writer: asyncio.StreamWriter) -> None:
    for number in range(1000):
        writer.write(HEAD if not number else b"a: b\r\n")
        await asyncio.sleep(1.0)


async def pour(head: bytes, writer: asyncio.StreamWriter) -> None:
    del head
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in range(100):
        writer.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")
        await asyncio.sleep(0.0)


async def pour_head(head: bytes, writer: asyncio.StreamWriter) -> None:
    del head
    writer.write(HEAD)
    for _ in range(100):
        writer.write(b"a: " + b"b" * 10_000 + b"\r\n")
        await asyncio.sleep(0.0)


async def cut(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"Content-Length: 10\r\n\r\nshort")
    writer.close()


async def packed(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx")


async def refused(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")


async def noise(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"\x15\x03\x03\x00\x02\x02\x28\r\n\r\n")


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (never, "no complete answer within 5 s"),
        (drip, "no complete answer within 5 s"),
        (drip_head, "no complete answer within 5 s"),
        (pour, "the answer is larger than 9999 bytes"),
        (pour_head, ""),
        (cut, ""),
        (drop, ""),
        (noise, ""),
        (packed, "the answer is compressed, which was not asked for"),
        (refused, "status 401"),
    ],
)
def test_what_is_no_answer_is_said_in_time(answers: Answers, reason: str) -> None:
    with pytest.raises(UnansweredError) as caught:
        asked(answers, max_bytes=9999)
    assert reason in str(caught.value)
    assert str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("http://u:secret@h:1", "has an @: a URL must not carry credentials"),
        *(
            (text, f"is {text!r}, must be http://host:port or https://host:port")
            for text in (
                *("h:1", "", "http://", "ftp://h", "http://h:0", "http://h:66000", "http://h:x"),
                *("http://h/?a", "http://h#a", "http://h /", "http://h\n", "http://[::1"),
            )
        ),
    ],
)
def test_what_is_no_url_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        root_of(text)
    assert str(caught.value) == reason


@pytest.mark.parametrize("text", ["http://h", "https://h:1/", "http://[::1]:9/a/b/", "http://h:1"])
def test_a_url_has_no_slash_at_its_end(text: str) -> None:
    assert root_of(text) == text.rstrip("/")


def of_tls(folder: Path, host: str = "127.0.0.1", *, trusted: bool) -> bytes:
    """Ask a TLS server on loopback, on a real socket; return what it answers."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_text(CERT)
    key.write_text(KEY)
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(HEAD + b"Content-Length: 3\r\n\r\ntls")
        writer.close()

    async def main() -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        # A refused certificate is no fault of the server's.
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        port = server.sockets[0].getsockname()[1]
        async with PageClient.of_flags(cert if trusted else None, timeout_s=9.0) as pages:
            try:
                return await pages.page(f"https://{host}:{port}/page")
            finally:
                server.close()
                assert len(heads) == (trusted and host == "127.0.0.1")  # Else nothing was told.

    return asyncio.run(main())


def test_a_certificate_is_verified(tmp_path: Path) -> None:
    assert of_tls(tmp_path, trusted=True) == b"tls"
    with pytest.raises(UnansweredError) as caught:
        of_tls(tmp_path, trusted=False)
    assert str(caught.value) == (
        "its certificate is not accepted: self-signed certificate (--ca-file names the authority to trust)"
    )


@in_real_time()
async def test_another_port_than_tls_is_said() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with PageClient.of_flags(None, timeout_s=9.0) as pages:
        try:
            with pytest.raises(UnansweredError, match="speaks no TLS: is it http://"):
                await pages.page(f"https://127.0.0.1:{port}/")
        finally:
            server.close()


def test_a_certificate_for_another_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda _, *others, **more: look_up("127.0.0.1", *others, **more)
    )
    with pytest.raises(UnansweredError) as caught:
        of_tls(tmp_path, "elsewhere.test", trusted=True)
    assert str(caught.value) == (
        "its certificate is not accepted: Hostname mismatch, certificate is not valid for "
        "'elsewhere.test'"
    )


@pytest.mark.parametrize("module", ["core", "live.serve", "cli.serve", "cli.drain", "cli.topology"])
def test_what_asks_nobody_yet_loads_no_httpx(module: str) -> None:
    program = f"import sys\nimport balanceroute.proxy.{module}\nassert 'httpx' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", program], check=True)
