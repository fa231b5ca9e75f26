"""The command: faults of the user's input are one line."""

import socket

import pytest

from balanceroute.proxy.__main__ import main


def test_an_engine_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # Bound, and nobody listens.
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert main(["audit", "--decode", f"http://127.0.0.1:{port}", "--minutes", "0.1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(port) in line


def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--decode", "10.0.0.1"]) == 2
    assert "--decode is '10.0.0.1', must be http://host:port" in capsys.readouterr().err
