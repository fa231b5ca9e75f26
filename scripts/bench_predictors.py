"""What each predictor costs.

    python scripts/bench_predictors.py [--rounds N] [--json OUT]

Each has learned from the first requests of a public trace and is asked about later ones, in the middle
of their lives: all active ones at once as at a refresh, and one at age 0 as at an admission. The rest
is what it costs to be told of a request, and to be saved and loaded. One core; medians, and the range
from the 10th to the 90th percentile.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from itertools import count, cycle
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from balanceroute.predictors import PastRequest, Savable, load, save
from balanceroute.predictors.files import KINDS, train
from balanceroute.predictors.past import past_requests
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.testing.arguments import positive
from balanceroute.traces import read_trace

TRACE = Path(__file__).parents[1] / "traces" / "public" / "mooncake_conversation.jsonl.gz"
LEARNED = 8_000
ACTIVE = 1_000
HORIZON, REFRESH_TOKENS = 40, 20
# Of the dear ones a hundredth of the rounds suffices.
SLOW = {"save", "load"}


def trained(past: list[PastRequest]) -> dict[str, Savable]:
    """Return every predictor that can be made here, by name."""
    without = set[str]() if find_spec("lightgbm") else {"gbdt"}
    return {name: train(name, past) for name in KINDS if name not in without}


def operations(
    predictor: Savable, active: list[PastRequest], path: Path
) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name; every call is one round."""
    rng = np.random.default_rng(0)
    requests = [RequestId(number) for number in range(len(active))]
    for request, one in zip(requests, active, strict=True):
        predictor.begin(request, one.features)
    ages = np.array([rng.integers(one.output_tokens) for one in active])
    # Begun and ended one after the other, beside those that stay.
    begun = zip((RequestId(number) for number in count(len(active))), cycle(active), strict=False)
    ended = zip((RequestId(number) for number in count(len(active))), cycle(active), strict=False)
    asked, newborn = cycle(requests), np.zeros(1, np.int64)

    def begin() -> None:
        request, one = next(begun)
        predictor.begin(request, one.features)

    def observe() -> None:
        request, one = next(ended)
        predictor.observe(request, one.output_tokens)

    return {
        "refresh": lambda: predictor.survival(requests, ages, HORIZON + REFRESH_TOKENS),
        "admission": lambda: predictor.survival([next(asked)], newborn, HORIZON),
        "begin": begin,
        "observe": observe,
        "save": lambda: save(path, predictor),
        "load": lambda: load(path),
    }


def timed(operation: Callable[[], object], rounds: int) -> list[float]:
    """Return the 10th, 50th and 90th percentile of what a call costs, in µs."""
    operation()
    samples = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        operation()
        samples.append((time.perf_counter_ns() - begin) / 1e3)
    return [float(figure) for figure in np.percentile(samples, [10, 50, 90])]


def main() -> None:
    """Time every predictor and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=1_000, help="timed calls of each")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    past = past_requests(read_trace(TRACE))
    active = past[LEARNED : LEARNED + ACTIVE]
    rows: dict[str, dict[str, list[float]]] = {}
    sizes: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, predictor in trained(past[:LEARNED]).items():
            path = Path(folder) / f"{name}.json"
            rows[name] = {
                what: timed(operation, max(3, arguments.rounds // (100 if what in SLOW else 1)))
                for what, operation in operations(predictor, active, path).items()
            }
            sizes[name] = sum(file.stat().st_size for file in path.parent.glob(f"{name}.*"))
    table = Table(title=f"µs, median (10th to 90th percentile); {ACTIVE:,} requests active")
    table.add_column("predictor", no_wrap=True)
    headings = ("refresh of all", "one at admission", "begin", "observe", "save", "load", "KiB")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, figures in rows.items():
        cells = (
            f"{median:,.0f} ({low:,.0f} to {high:,.0f})" if median >= 10
            else f"{median:.1f} ({low:.1f} to {high:.1f})"
            for low, median, high in figures.values()
        )  # fmt: skip
        table.add_row(name, *cells, f"{sizes[name] / 1024:,.0f}")
    Console(width=180).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
