"""What each tenant and class got of a run: shares, goodput, latencies and refusals.

The simulator and the live replay measure in different ways, and report the same figures. A request
belongs to the measured time if it arrived in it, whenever it ended, so that requests that are never
served count too. A share is of what the ranks did in that time, also for requests that arrived before it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from statistics import fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table


class ServiceGroup(NamedTuple):
    """A tenant's requests of one class."""

    tenant: str
    level: int


@dataclass(frozen=True, slots=True)
class ServiceTargets:
    """The targets of a good request."""

    ttft_s: float = inf  # The longest time to the first token.
    tpot_s: float = inf  # The longest mean time between tokens.

    def met_by(self, outcome: "ServiceOutcome") -> bool:
        """Return whether a request was answered in full and in time."""
        return (
            outcome.finished
            and outcome.ttft_s is not None
            and outcome.ttft_s <= self.ttft_s
            and (outcome.tpot_s is None or outcome.tpot_s <= self.tpot_s)
        )


@dataclass(frozen=True, slots=True)
class ServiceOutcome:
    """The outcome of a request that arrived in the measured time."""

    group: ServiceGroup
    finished: bool  # Whether it was answered in full.
    refused: bool  # Whether it was not let in.
    ttft_s: float | None  # Time to its first token; None if there was none.
    tpot_s: float | None  # Mean time between its tokens; None unless it finished with two or more.


@dataclass(slots=True)
class GivenService:
    """The service of a group by the ranks in the measured time."""

    requests: float = 0.0  # Requests that finished.
    tokens: float = 0.0  # Prompt tokens of the requests that joined a batch, and output tokens.
    kv_token_s: float = 0.0  # KV tokens that were held, times the seconds.


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """The figures of one group; None if there was nothing to measure."""

    requests: float  # Requests that arrived.
    refused: float  # Those that were not let in.
    unserved: float  # Those that were let in and not answered in full: they expired or failed.
    goodput: float | None  # Share of the requests that met the targets.
    share_requests: float | None  # Share of the requests that finished.
    share_tokens: float | None  # Share of the prompt and output tokens.
    share_kv: float | None  # Share of the KV-token-seconds on the ranks.
    ttft_s_p50: float | None
    ttft_s_p95: float | None
    ttft_s_p99: float | None
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    tpot_ms_p99: float | None


_PLAIN_WIDTH = 250
_NAMES = tuple(field.name for field in fields(GroupFigures))
ByGroup = dict[ServiceGroup, GroupFigures]


def figures_of(
    outcomes: Sequence[ServiceOutcome],
    service: Mapping[ServiceGroup, GivenService],
    targets: ServiceTargets,
) -> ByGroup:
    """Return the figures of every group, in the order of tenant and class."""
    groups = sorted({outcome.group for outcome in outcomes} | service.keys())
    total = GivenService(
        *(
            sum(getattr(one, field.name) for one in service.values())
            for field in fields(GivenService)
        )
    )
    return {
        group: _figures(
            [outcome for outcome in outcomes if outcome.group == group],
            service.get(group, GivenService()),
            total,
            targets,
        )
        for group in groups
    }


def _figures(
    outcomes: Sequence[ServiceOutcome],
    service: GivenService,
    total: GivenService,
    targets: ServiceTargets,
) -> GroupFigures:
    refused = sum(outcome.refused for outcome in outcomes)
    finished = sum(outcome.finished for outcome in outcomes)
    ttft = percentiles([one.ttft_s for one in outcomes if one.ttft_s is not None])
    tpot = percentiles([1e3 * one.tpot_s for one in outcomes if one.tpot_s is not None])
    return GroupFigures(
        len(outcomes),
        refused,
        len(outcomes) - refused - finished,
        _share(sum(map(targets.met_by, outcomes)), len(outcomes)),
        _share(service.requests, total.requests),
        _share(service.tokens, total.tokens),
        _share(service.kv_token_s, total.kv_token_s),
        *ttft,
        *tpot,
    )


def mean_of(runs: Sequence[ByGroup]) -> ByGroup:
    found: ByGroup = {}
    for group in sorted({group for run in runs for group in run}):
        rows = [run[group] for run in runs if group in run]
        means = {}
        for name in _NAMES:
            known = [value for row in rows if (value := getattr(row, name)) is not None]
            means[name] = fmean(known) if known else None
        found[group] = GroupFigures(**means)  # type: ignore[arg-type]  # Counts are never None.
    return found


def as_rows(figures: ByGroup) -> list[dict[str, object]]:
    return [
        {"tenant": group.tenant, "class": group.level} | asdict(row)
        for group, row in figures.items()
    ]


def make_table(runs: Mapping[str, ByGroup], targets: ServiceTargets) -> Table:
    table = Table(
        title=f"Tenants and classes; good: {_shown(targets)}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("policy", "tenant"):
        table.add_column(heading, no_wrap=True)
    for heading in (
        *("class", "requests", "refused", "unserved", "good\n%"),
        *("share of\nrequests %", "\ntokens %", "\nKV %"),
        *("TTFT s\np50", "\np95", "\np99", "TPOT ms\np50", "\np95", "\np99"),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for run, figures in runs.items():
        for group, row in figures.items():
            table.add_row(
                escape(run),
                escape(group.tenant) or "-",
                str(group.level),
                *(f"{count:,.0f}" for count in (row.requests, row.refused, row.unserved)),
                *(
                    cell(share, 1, 100.0)
                    for share in (row.goodput, row.share_requests, row.share_tokens, row.share_kv)
                ),
                *(cell(value, 2) for value in (row.ttft_s_p50, row.ttft_s_p95, row.ttft_s_p99)),
                *(cell(value, 1) for value in (row.tpot_ms_p50, row.tpot_ms_p95, row.tpot_ms_p99)),
            )
    return table


def _shown(targets: ServiceTargets) -> str:
    limits = [
        f"{name} up to {scale * limit:g} {unit}"
        for name, limit, scale, unit in (
            ("TTFT", targets.ttft_s, 1.0, "s"),
            ("TPOT", targets.tpot_s, 1e3, "ms"),
        )
        if limit < inf
    ]
    return ", ".join(limits) or "answered in full"


def percentiles(
    values: Sequence[float] | NDArray[np.int64], unit: float = 1.0
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return the 50th, 95th and 99th percentile in a unit; None of nothing."""
    if len(values) == 0:
        return None, None, None
    p50, p95, p99 = np.percentile(values, [50, 95, 99]) / unit
    return float(p50), float(p95), float(p99)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def cell(value: float | None, digits: int, scale: float = 1.0) -> str:
    return "-" if value is None else f"{scale * value:,.{digits}f}"


def wide_console() -> Console:
    """Return standard output, wide enough for the tables where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def print_whole(make: Callable[[bool], Table]) -> None:
    """Print a table, or the narrow one that `make(True)` gives where the terminal has no room for it.

    Wrapped lines still show every figure; truncated cells do not.
    """
    console = wide_console()
    table = make(False)
    if _columns(console, table) > console.width:
        table = make(True)
    console.width = max(console.width, _columns(console, table))
    console.print(table)


def _columns(console: Console, table: Table) -> int:
    """Return how wide the table itself is, its title and caption aside."""
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum
