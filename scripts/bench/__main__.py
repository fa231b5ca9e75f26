"""Measures what something costs: `python scripts/bench NAME ..`; `--list` tells the names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from commands import main

COMMANDS = {
    "bodies": "bench.serving",
    "dispatch": "bench.decisions",
    "grants": "bench.decisions",
    "predictors": "bench.decisions",
    "prefix-index": "bench.decisions",
    "proxy": "bench.proxy",
    "step-trace": "bench.step_trace",
    "streams": "bench.proxy",
}

if __name__ == "__main__":
    sys.exit(main("bench", COMMANDS))
