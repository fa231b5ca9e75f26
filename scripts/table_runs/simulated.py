"""Runs `balanceroute simulate` for the scripts that print tables."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from balanceroute.proxy.__main__ import main as balanceroute


def simulated(command: str, path: Path) -> dict[str, Any]:
    """Run a command and return its report, which `path` has too; exit if it fails."""
    print(f"$ balanceroute simulate {command}", file=sys.stderr, flush=True)
    if balanceroute(["simulate", *shlex.split(command), "--json", str(path)]) != 0:
        sys.exit(f"failed: {command}")
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report
