"""What `serve` and `up` print when they serve."""

import errno
import shlex
import sys
from pathlib import Path

import pytest

from balanceroute.proxy.live.listeners import not_bound
from balanceroute.proxy.live.serve import announce
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


@pytest.mark.parametrize(("host", "reached"), [("::", "[::1]"), ("fd00::1", "[fd00::1]")])
def test_an_ipv6_address_is_in_brackets(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    host: str,
    reached: str,
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    told = said(capsys, monkeypatch, host=host, admin_host=host, admin_token_file=str(token))
    assert told[0] == f"listening on http://[{host}]:8000, admin on http://[{host}]:9000"
    assert f" http://{reached}:8000/v1/completions " in told[1]
    assert f" http://{reached}:9000/admin/instances " in told[3]


def test_a_terminal_gets_commands_that_can_be_pasted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing said what to do next."""
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


@pytest.mark.parametrize(
    ("host", "number", "reason"),
    [
        ("::", errno.EAFNOSUPPORT, "this machine has no IPv6; 0.0.0.0 is every interface of IPv4"),
        (
            "fd00::1",
            errno.EADDRNOTAVAIL,
            "this machine has no such IPv6 address: Cannot assign requested address",
        ),
        ("10.0.0.1", errno.EADDRNOTAVAIL, "Cannot assign requested address"),
        ("::", errno.EADDRINUSE, "Address already in use"),
    ],
)
def test_an_address_that_cannot_be_bound_is_an_error_of_one_line(
    host: str, number: int, reason: str
) -> None:
    error = not_bound("--host {} --port {}", host, 80, OSError(number, "text of a loop"))
    assert str(error) == f"--host {host} --port 80: {reason}"
