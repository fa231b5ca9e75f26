"""What experiments and benchmarks have in common: traces, simulations, engines with a proxy, tables in Markdown."""

import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

from tests.support.soak.proxy_process import ProxyProcess, running_proxy

from balanceroute.proxy.__main__ import main as balanceroute
from balanceroute.proxy.lab.emulate.process import emulated_engines
from balanceroute.proxy.lab.sim.report import figure
from balanceroute.proxy.lab.sim.workload import playable
from balanceroute.traces import TraceRequest, read_trace

ROOT = Path(__file__).parents[1]
PUBLIC = ROOT / "traces" / "public"
MOONCAKE, AZURE_CONV, AZURE_CODE, SERVEGEN = (
    PUBLIC / name
    for name in (
        "mooncake_conversation.jsonl.gz",
        "azure_2023_conv.csv.gz",
        "azure_2023_code.csv.gz",
        "servegen_reasoning.jsonl.gz",
    )
)
S = 1_000_000_000
"""A second in ns."""
UNLIMITED = 10**9


def requests_of(trace: Path) -> list[TraceRequest]:
    """Return the requests of a trace that can be played."""
    return playable(read_trace(trace))


def simulated(command: str, path: Path) -> dict[str, Any]:
    """Run `balanceroute simulate` and return its report, which `path` has too; exit if it fails."""
    print(f"$ balanceroute simulate {command}", file=sys.stderr, flush=True)
    if balanceroute(["simulate", *shlex.split(command), "--json", str(path)]) != 0:
        sys.exit(f"failed: {command}")
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


Figure = Callable[[dict[str, Any]], str]
"""What a table shows of a row of a report."""
Columns = Sequence[tuple[str, Figure]]
"""The headings of a table, and what stands below each."""


def measured(name: str, digits: int, scale: float = 1.0) -> Figure:
    """Return what shows a figure with its standard error, if it has one."""
    return lambda row: figure(scale * row[name], scale * (row["stderr"][name] or 0.0), digits)


def tabulated(
    labels: Sequence[str],
    columns: Columns,
    rows: Iterable[tuple[Sequence[object], dict[str, Any]]],
) -> str:
    """Return a table: what each row is called, and its figures."""
    lines = [table_head(*labels, *right([heading for heading, _ in columns]))]
    lines += [table_row(*names, *(show(row) for _, show in columns)) for names, row in rows]
    return "\n".join(lines)


@contextmanager
def emulated(command: Sequence[str]) -> Iterator[dict[str, list[str]]]:
    """Run emulated engines by the flags of `balanceroute emulate`; yield their URLs by role."""
    program = [sys.executable, "-m", "balanceroute.proxy", "emulate", "--json-ready", "--port=0"]
    with emulated_engines([*program, "--exit-with-stdin", *command]) as given:
        yield {role: list(cast("list[str]", urls)) for role, urls in given.items()}


@contextmanager
def proxy_before(
    urls: dict[str, list[str]], flags: Sequence[str], folder: Path
) -> Iterator[ProxyProcess]:
    """Run the proxy on free ports before engines; its log is whole once it has ended."""
    words = ["--port=0", "--admin-port=0", *flags]
    for role in ("prefill", "decode"):
        words += [f"--{role}", *urls[role]]
    # Of several ranks behind one port a URL names the rank, too.
    engines = [url.partition("@")[0] for role in ("prefill", "decode") for url in urls[role]]
    with running_proxy(words, engines=engines, folder=folder) as proxy:
        yield proxy


def spread(values: Sequence[float], digits: int) -> str:
    """Return a mean with its standard error; a single value has none that is known."""
    mean = f"{fmean(values):,.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ±{stdev(values) / len(values) ** 0.5:,.{digits}f}"


def table_row(*cells: object) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def table_head(*headings: str) -> str:
    """Return the first two lines of a table. A heading that ends with a colon stands to the right."""
    marks = ("---:" if heading.endswith(":") else "---" for heading in headings)
    return f"{table_row(*(heading.removesuffix(':') for heading in headings))}\n{table_row(*marks)}"


def right(headings: Sequence[str]) -> list[str]:
    """Return headings that stand to the right."""
    return [f"{heading}:" for heading in headings]
