"""Checks the proxy with what others wrote: `python scripts/checks NAME ..`; `--list` tells the names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from commands import main

COMMANDS = {
    "balance": "checks.balance",
    "clients": "checks.clients",
    "engines": "checks.engines",
    "gateway": "checks.gateway",
    "http3": "checks.http3",
    "ray": "checks.clients",
    "suites": "checks.suites",
}

if __name__ == "__main__":
    sys.exit(main("checks", COMMANDS))
