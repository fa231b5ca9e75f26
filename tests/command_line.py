"""Runs the command line in this process, as tests of its commands do."""

import json
from collections.abc import Sequence
from pathlib import Path
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


def unwrapped(text: str) -> str:
    """Return a text whose lines may be broken anywhere as one line."""
    return " ".join(text.split())
