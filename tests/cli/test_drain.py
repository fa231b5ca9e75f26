"""`balanceroute drain`, against what answers as the admin listener does."""

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.command_line import Answering, answered_by
from tests.support.certificate import CERT, KEY

from balanceroute.proxy.__main__ import main

ROWS = [
    {"role": "prefill", "url": "http://p:8000"},
    {"role": "decode", "url": "http://d:8000"},
    {"role": "prefill", "url": "http://both:8000"},
    {"role": "decode", "url": "http://both:8000"},
]


class Listener:
    """Answers orders as it is told to."""

    def __init__(self) -> None:
        self.status = 200  # Of the answer to an order.
        self.orders: list[Any] = []  # The bodies of the orders.
        self.tokens: list[str | None] = []  # What was presented.

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        if method == "GET":
            assert path == "/admin/instances"
            return 200, {"instances": ROWS}
        assert path == "/admin/instances/drain"
        self.orders.append(json.loads(body))
        if self.status == 200:
            return 200, {"instances": ROWS}
        return self.status, {"error": {"message": "3 requests are in flight on it still"}}


@contextmanager
def listening(tls: ssl.SSLContext | None = None) -> Iterator[tuple[Listener, str]]:
    """Yield a listener and its address."""
    told = Listener()

    class Handler(Answering):
        def answer(self, body: bytes) -> None:
            told.tokens.append(self.headers["authorization"])
            status, page = told.answer(self.command, self.path, body)
            data = json.dumps(page).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with answered_by(Handler, tls) as url:
        yield told, url


@pytest.fixture
def listener() -> Iterator[tuple[Listener, str]]:
    """Return a listener and its address."""
    with listening() as both:
        yield both


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(0o600)
    return path


def test_the_role_is_what_the_proxy_says(
    listener: tuple[Listener, str], capsys: pytest.CaptureFixture[str]
) -> None:
    told, address = listener
    assert main(["drain", "http://D:8000/", "--admin", address]) == 0
    assert told.orders == [{"role": "decode", "url": "http://d:8000"}]
    assert told.tokens == [None, None]
    assert capsys.readouterr().out == "http://d:8000 (decode) gets nothing new\n"


def test_it_waits_with_the_token(
    listener: tuple[Listener, str], capsys: pytest.CaptureFixture[str], token: Path
) -> None:
    told, address = listener
    words = ["http://both:8000", "--role", "prefill", "--token-file", str(token)]
    words += ["--admin", address, "--wait", "--timeout-s", "7", "--deadline-s", "0"]
    assert main(["drain", *words]) == 0
    (order,) = told.orders
    assert order == {
        "role": "prefill",
        "url": "http://both:8000",
        "wait_s": 7.0,
        "deadline_s": 0.0,
    }
    assert told.tokens == ["Bearer secret"]
    assert capsys.readouterr().out == "http://both:8000 (prefill) is drained\n"


@pytest.mark.parametrize(("answered", "status"), [(504, 1), (404, 2), (401, 2)])
def test_the_status_says_whether_it_is_drained(
    listener: tuple[Listener, str],
    capsys: pytest.CaptureFixture[str],
    answered: int,
    status: int,
) -> None:
    told, address = listener
    told.status = answered
    assert main(["drain", "http://p:8000", "--admin", address, "--wait"]) == status
    assert capsys.readouterr().err == "balanceroute: 3 requests are in flight on it still\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["p:8000"], "URL is 'p:8000': it must begin with http:// or https://"),
        (["http://x:1"], "there is no engine http://x:1"),
        (["http://both:8000"], "http://both:8000: give --role"),
    ],
)
def test_what_cannot_be_ordered_is_an_error_of_one_line(
    listener: tuple[Listener, str],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    _, address = listener
    assert main(["drain", *words, "--admin", address]) == 2
    assert capsys.readouterr().err == f"balanceroute: {reason}\n"


def test_a_proxy_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "http://p:8000", "--admin", "http://127.0.0.1:1"]) == 2
    assert "--admin http://127.0.0.1:1: " in capsys.readouterr().err


@pytest.fixture
def certified(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    """Return a certificate that nobody known has signed, and what serves it."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_text(CERT)
    key.write_text(KEY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context


def test_over_https_the_certificate_is_verified_before_the_token_is_told(
    certified: tuple[Path, ssl.SSLContext], token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, context = certified
    words = ["drain", "http://p:8000", "--token-file", str(token), "--ca-file", str(cert)]
    with listening(context) as (told, address):
        assert main([*words, "--admin", address]) == 0
        assert told.tokens == ["Bearer secret"] * 2
        told.tokens.clear()
        capsys.readouterr()
        assert main([*words[:4], "--admin", address]) == 2
        assert told.tokens == []
    assert capsys.readouterr().err == (
        f"balanceroute: --admin {address}: its certificate is not accepted: self-signed certificate "
        "(--ca-file names the authority to trust)\n"
    )


@pytest.mark.parametrize("role", [[], ["--role", "prefill"]])
def test_the_token_never_goes_in_clear_to_an_https_address(
    role: list[str], token: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[bytes] = []

    def hear(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            heard.append(connection.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=hear, args=(server,))
        thread.start()
        address = f"https://127.0.0.1:{server.getsockname()[1]}"
        words = ["drain", "http://p:8000", *role, "--token-file", str(token), "--admin", address]
        assert main(words) == 2
        thread.join()
    assert heard[0][:1] == b"\x16"  # A handshake.
    assert capsys.readouterr().err.startswith(f"balanceroute: --admin {address}: ")


@pytest.mark.parametrize("body", [b"[]", b"{}", b"<html>", b'{"instances": 3}', b'{"a": NaN}'])
def test_what_is_no_admin_listener_is_said(
    body: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(json, "dumps", lambda _: body.decode())
    with listening() as (_, address):
        assert main(["drain", "http://p:8000", "--admin", address]) == 2
    assert capsys.readouterr().err == (
        f"balanceroute: --admin {address}: status 200, and no answer of a proxy\n"
    )
