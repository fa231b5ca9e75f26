"""What clients notice of a busy scheduler: gaps in their streams, with one process and with relays.

    python scripts/bench_isolation.py [--workers 2] [--streams 64] [--repeats 5]

Streams run for some seconds while the scheduler process stands still for 20 ms of every 100 ms, as if it
were computing (SIGSTOP and SIGCONT); and while it does not. What a single process decides with, it relays
with too, so it stands still as a whole. Prints the 99th percentile of the gaps between the events of a
stream at the client, medians of the repeats.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from balanceroute.proxy.testing.arguments import positive

# Its parts stand in a folder.
sys.path.insert(0, str(Path(__file__).parent / "proxy_bench"))

from processes import scheduler_of
from targets import ROOT, Target, engine, targets

_STEP_MS = 20.0
_BUSY_S = 0.020
_PERIOD_S = 0.100
_FLAGS = ["--batch", "2048", "--pool-limit", "4096"]


@contextmanager
def busy(pid: int) -> Iterator[None]:
    """Have a process stand still for a part of the time."""
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.wait(_PERIOD_S - _BUSY_S):
            os.kill(pid, signal.SIGSTOP)
            over.wait(_BUSY_S)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def gaps(target: Target, streams: int, tokens: int) -> dict[str, Any]:
    """Run streams through a target; return the client's figures."""
    client = [sys.executable, str(ROOT / "scripts" / "bench_client.py")]
    client += ["--port", str(target.port), "--tokens", str(tokens)]
    client += ["--connections", str(streams), "--requests", str(streams)]
    result = subprocess.run(client, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


def measure(target: Target, streams: int, tokens: int) -> tuple[float, float, int]:
    """Return the 99th percentiles of the gaps while it is idle and while it is busy, in ms, and errors."""
    assert target.process is not None
    idle = gaps(target, streams, tokens)
    with busy(scheduler_of(target.process)):
        while_busy = gaps(target, streams, tokens)
    p99_ms = [figures["gap_us"]["p99"] / 1e3 for figures in (idle, while_busy)]
    return p99_ms[0], p99_ms[1], idle["errors"] + while_busy["errors"]


def main() -> int:
    """Run the benchmark; return 1 if anything was dropped or reordered."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=positive, default=2, metavar="N", help="relays")
    parser.add_argument("--streams", type=positive, default=64, metavar="N")
    parser.add_argument("--tokens", type=positive, default=300, metavar="N", help="of a stream")
    parser.add_argument("--repeats", type=positive, default=5, metavar="N")
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float, int]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-isolation-") as logs,
        engine(_STEP_MS) as behind,
        targets(
            behind, _FLAGS, Path(logs), against=None, routers=[], workers=[options.workers]
        ) as all_targets,
    ):
        for _ in range(options.repeats):
            for target in all_targets:
                if target.process is not None:
                    row = measure(target, options.streams, options.tokens)
                    found.setdefault(target.name, []).append(row)
    table = Table("", "p99 gap, ms", "while busy, ms", "grows by, ms", "errors")
    for name, rows in found.items():
        idle, while_busy, errors = zip(*rows, strict=True)
        grows = [more - less for less, more, _ in rows]
        shown = [f"{statistics.median(one):.1f}" for one in (idle, while_busy)]
        spread = f"{statistics.median(grows):.1f} ({min(grows):.1f} to {max(grows):.1f})"
        table.add_row(name, *shown, spread, str(sum(errors)))
    Console().print(table)
    return int(any(errors for rows in found.values() for *_, errors in rows))


if __name__ == "__main__":
    sys.exit(main())
