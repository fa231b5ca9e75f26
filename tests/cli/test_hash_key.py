"""`balanceroute hash-key`: the hashes of the keys on standard input, which are shown nowhere else."""

import io
from hashlib import sha256

import pytest

from balanceroute.proxy.__main__ import main


class _Input:
    def __init__(self, given: bytes) -> None:
        self.buffer = io.BytesIO(given)


def hashed(monkeypatch: pytest.MonkeyPatch, given: bytes) -> int:
    monkeypatch.setattr("sys.stdin", _Input(given))
    return main(["hash-key"])


@pytest.mark.parametrize("given", [b"sk-a", b"sk-a\n", b"sk-a\r\n"])
def test_a_key_is_hashed_without_its_line_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: bytes
) -> None:
    assert hashed(monkeypatch, given) == 0
    assert capsys.readouterr().out == sha256(b"sk-a").hexdigest() + "\n"


def test_each_line_is_a_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hashed(monkeypatch, b"sk-a\nsk-b\n") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [sha256(key).hexdigest() for key in (b"sk-a", b"sk-b")]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (b"", "standard input holds no key"),
        (b"sk-a\n\n", "line 2: a key has 1 to 1024 visible"),
        (b"sk secret\n", "line 1: a key has"),
    ],
)
def test_what_is_no_key_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: bytes,
    reason: str,
) -> None:
    assert hashed(monkeypatch, given) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert "secret" not in error


def test_a_key_on_the_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["hash-key", "sk-a"])
    assert "unrecognized arguments" in capsys.readouterr().err
