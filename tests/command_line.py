"""Runs the command line in this process, as tests of its commands do, and serves what these ask."""

import json
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from balanceroute.proxy.__main__ import main


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line that a command line which must fail says."""
    try:
        status: object = main(arguments)
    except SystemExit as exit_:  # argparse.
        status = exit_.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("balanceroute")
    return str(line)


def report(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a command line that must work; return its JSON."""
    path = folder / "report.json"

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert main([*arguments, "--json", str(path)]) == 0
    loaded: dict[str, Any] = json.loads(path.read_text(), parse_constant=no_constant)
    return loaded


class Answering(BaseHTTPRequestHandler):
    """Answers as a test has it answer, and prints nothing."""

    def answer(self, body: bytes) -> None:
        """Answer a GET or a POST, whose body is this."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("content-length", 0))))

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answered_by(pages: type[Answering], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve pages on loopback; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), pages)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def unwrapped(text: str) -> str:
    """Return a text whose lines may be broken anywhere as one line."""
    return " ".join(text.split())
