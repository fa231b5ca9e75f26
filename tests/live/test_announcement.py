"""What `serve` and `up` print when they serve."""

import shlex
import sys
from pathlib import Path

import pytest

from balanceroute.proxy.live.announcement import announce
from balanceroute.proxy.live.settings.configure import make_config

FLAGS = {"prefill": ["http://p:1"], "decode": ["http://d:1"]}


def said(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    terminal: bool = True,
    **flags: object,
) -> list[str]:
    """Return the lines that are printed."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    announce(make_config(None, FLAGS | flags), 8000, 9000)
    return capsys.readouterr().out.splitlines()


def test_scripts_get_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(capsys, monkeypatch, terminal=False) == [
        "listening on http://127.0.0.1:8000, admin on http://127.0.0.1:9000"
    ]


def test_a_terminal_gets_commands_that_can_be_pasted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Finding usability-L14: nothing said what to do next."""
    plain = said(capsys, monkeypatch, host="0.0.0.0")  # noqa: S104 - what is listened on.
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    keyed = said(capsys, monkeypatch, api_key_file=str(keys), host="::1")
    assert plain[0].startswith("listening on http://0.0.0.0:8000, ")
    assert keyed[0].startswith("listening on http://")
    commands = [
        shlex.split(line.partition(": ")[2] or line.partition("?")[2]) for line in plain[1:]
    ]
    assert [words[0] for words in commands] == ["curl", "curl", "curl"]
    assert commands[0][1] == "http://127.0.0.1:8000/v1/completions"
    assert "http://127.0.0.1:8000/ready" in commands[1]
    assert commands[2][1] == "http://127.0.0.1:9000/admin/instances"
    assert 'curl http://[::1]:8000/v1/completions -H "Authorization: Bearer $KEY"' in keyed[1]
    assert "Authorization" not in plain[1]
