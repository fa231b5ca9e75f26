"""Measures what something costs: `python scripts/bench NAME ..`; `--list` tells the names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from commands import main

COMMANDS = {
    "bodies": "bench.serving",
    "dispatch": "bench.decisions",
    "proxy": "bench.proxy",
}

if __name__ == "__main__":
    sys.exit(main("bench", COMMANDS))
