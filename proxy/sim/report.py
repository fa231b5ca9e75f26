"""What `balanceroute simulate` prints and writes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from balanceroute.proxy.sim.experiment import METRICS, PolicyResult

# Wide enough for the table where there is no terminal to ask.
_PLAIN_WIDTH = 250

STEADY_STATE = "from a tenth of the requests finished to the last arrival"


def as_json(config: Mapping[str, object], results: Sequence[PolicyResult]) -> str:
    """Return the report as JSON text; figures are means over the segments."""
    rows = [
        {"policy": result.policy}
        | {name: result.mean[name] for name in METRICS}
        | {"stderr": {name: result.stderr[name] for name in METRICS}}
        for result in results
    ]
    return json.dumps({"config": dict(config), "results": rows}, indent=2, allow_nan=False) + "\n"


def write_json(path: Path, config: Mapping[str, object], results: Sequence[PolicyResult]) -> None:
    """Write the report to `path`."""
    path.write_text(as_json(config, results), encoding="utf-8")


def print_table(results: Sequence[PolicyResult], *, title: str, caption: str) -> None:
    """Print one row per policy to standard output."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    console.print(make_table(results, title=title, caption=caption))


def make_table(results: Sequence[PolicyResult], *, title: str, caption: str) -> Table:
    """Return the table; `x` compares output with the first policy's."""
    table = Table(
        title=escape(title), caption=caption, title_justify="left", caption_justify="left"
    )
    table.add_column("policy", no_wrap=True)
    for heading in (
        "imbalance\ntokens",
        "idle\n%",
        "output\ntokens/s",
        "\nx",
        "TPOT ms\np50",
        "TPOT ms\np95",
        "wait s\np50",
        "wait s\np99",
        "wait s\nmax",
        "dispatch µs\np50 / p99",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    base = results[0].mean["output_tokens_per_s"]
    for result in results:
        mean = result.mean
        table.add_row(
            result.policy,
            _figure(result, "mean_imbalance_tokens", 0),
            _figure(result, "idle_fraction", 1, scale=100),
            _figure(result, "output_tokens_per_s", 0),
            f"{mean['output_tokens_per_s'] / base:.2f}",
            _figure(result, "tpot_ms_p50", 1),
            _figure(result, "tpot_ms_p95", 1),
            _figure(result, "pool_wait_s_p50", 2),
            _figure(result, "pool_wait_s_p99", 2),
            f"{mean['pool_wait_s_max']:.1f}",
            f"{mean['dispatch_us_p50']:.0f} / {mean['dispatch_us_p99']:.0f}",
        )
    return table


def _figure(result: PolicyResult, name: str, digits: int, *, scale: float = 1.0) -> str:
    mean, error = scale * result.mean[name], scale * result.stderr[name]
    if error == 0.0:
        return f"{mean:,.{digits}f}"
    return f"{mean:,.{digits}f} ±{error:,.{digits}f}"
