"""`balanceroute drain`, against what answers as the admin listener does."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from balanceroute.proxy.__main__ import main

ROWS = [
    {"role": "prefill", "url": "http://p:8000"},
    {"role": "decode", "url": "http://d:8000"},
    {"role": "prefill", "url": "http://both:8000"},
    {"role": "decode", "url": "http://both:8000"},
]


class Listener:
    """Answers orders as it is told to.

    Attributes:
        status: Of the answer to an order.
        orders: The bodies of the orders.
        tokens: What was presented.
    """

    def __init__(self) -> None:
        self.status = 200
        self.orders: list[Any] = []
        self.tokens: list[str | None] = []

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, object]:
        if method == "GET":
            assert path == "/admin/instances"
            return 200, {"instances": ROWS}
        assert path == "/admin/instances/drain"
        self.orders.append(json.loads(body))
        if self.status == 200:
            return 200, {"instances": ROWS}
        return self.status, {"error": {"message": "3 requests are in flight on it still"}}


@pytest.fixture
def listener() -> Iterator[tuple[Listener, str]]:
    """Return a listener and its address."""
    told = Listener()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["content-length"])))

        def _answer(self, body: bytes) -> None:
            told.tokens.append(self.headers["authorization"])
            status, page = told.answer(self.command, self.path, body)
            data = json.dumps(page).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield told, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_role_is_what_the_proxy_says(
    listener: tuple[Listener, str], capsys: pytest.CaptureFixture[str]
) -> None:
    told, address = listener
    assert main(["drain", "http://D:8000/", "--admin", address]) == 0
    assert told.orders == [{"role": "decode", "url": "http://d:8000"}]
    assert told.tokens == [None, None]
    assert capsys.readouterr().out == "http://d:8000 (decode) gets nothing new\n"


def test_it_waits_with_the_token(
    listener: tuple[Listener, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    told, address = listener
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
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
