"""The table of all turns."""

import platform
from statistics import median
from typing import Any

from loads import Load
from rich.console import Console
from rich.table import Table
from targets import DIRECT, OURS

Rows = list[dict[str, Any]]
_HEADINGS = (
    *("proxy\nCPU µs", "balanceroute /\nthis", "engine\nCPU µs", "client\nCPU µs"),
    *("p50 ms", "p99 ms", "balanceroute /\nthis", "events/s", "of direct", "RSS MB", "errors"),
)


def report(rows: Rows, plan: list[Load], *, policy: str, ranks: int, slots: int) -> None:
    """Print the table."""
    table = Table(
        title=f"balanceroute ({policy}, Python {platform.python_version()}) and others, the same "
        f"engine, in turns; {ranks} decode {'rank' if ranks == 1 else 'ranks'} of {slots:,} slots",
        caption="Medians of the turns; ratios are taken within a turn: median (least to most). CPU "
        "time is of one event, or of one request. p50 and p99 are an event's transit from engine to "
        "client under load of streams, else the time to the (first) answer. Of direct: events per "
        "second, to those that the client takes from the engine itself.",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("load", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for load in plan:
        of_load = [row for row in rows if row["load"] == load.name]
        names = list(dict.fromkeys(row["target"] for row in of_load if row["turn"] == 0))
        for name in names:
            cells = _cells(of_load, load, name)
            first = load.name if name == names[0] else ""
            table.add_row(first, name, *cells, end_section=name == names[-1])
    console = Console()
    console.width = max(console.width, 220)
    console.print(table)


def _cells(rows: Rows, load: Load, name: str) -> list[str]:
    mine = [row for row in rows if row["target"] == name]
    streams = load.unit == "events"
    other = name not in (OURS, DIRECT)
    return [
        _median(mine, "proxy_us", 1),
        _ratios(rows, "proxy_us", OURS, name) if other else "",
        _median(mine, "engine_us", 1),
        _median(mine, "client_us", 1),
        _median(mine, "p50_us", 2, 1e-3),
        _median(mine, "p99_us", 2, 1e-3),
        _ratios(rows, "p99_us", OURS, name) if other else "",
        _median(mine, "events_per_s", 0) if streams else "",
        _ratios(rows, "events_per_s", name, DIRECT) if streams and name != DIRECT else "",
        _median(mine, "rss_mb", 0),
        str(sum(row["errors"] for row in mine)),
    ]


def _median(rows: Rows, key: str, digits: int, scale: float = 1.0) -> str:
    values = [row[key] for row in rows if key in row]
    return f"{median(values) * scale:,.{digits}f}" if values else ""


def _ratios(rows: Rows, key: str, one: str, other: str) -> str:
    by_turn: dict[int, dict[str, float]] = {}
    for row in rows:
        if key in row:
            by_turn.setdefault(row["turn"], {})[row["target"]] = row[key]
    ratios = [pair[one] / pair[other] for pair in by_turn.values() if pair.get(other)]
    if not ratios:
        return ""
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
