"""The output of `balanceroute simulate`."""

import json
from collections.abc import Callable, Mapping, Sequence

from rich.box import HEAVY_HEAD, SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from balanceroute.proxy.lab.service_levels import ServiceTargets, as_rows, print_whole
from balanceroute.proxy.lab.service_levels import make_table as make_groups_table
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.experiment import METRICS, PolicyResult
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

STEADY_STATE = "from a tenth of the requests finished to the last arrival"


def as_json(config: Mapping[str, object], results: Sequence[PolicyResult]) -> str:
    """Return the report as JSON text; figures are means over the segments.

    A single segment has no standard errors: null.
    """
    rows = [
        {"policy": result.policy}
        | {name: result.mean[name] for name in METRICS}
        | {
            "stderr": {
                name: result.stderr[name] if result.segments > 1 else None for name in METRICS
            }
        }
        | ({"groups": as_rows(result.groups)} if result.groups else {})
        for result in results
    ]
    return json.dumps({"config": dict(config), "results": rows}, indent=2, allow_nan=False) + "\n"


def print_table(
    results: Sequence[PolicyResult],
    *,
    title: str,
    caption: str,
    targets: ServiceTargets | None = None,
) -> None:
    """Print one row per policy to standard output, fewer figures where the terminal is narrow.

    With `targets` also one per tenant and class.
    """
    print_whole(
        lambda narrow: make_table(
            results,
            title=title,
            caption=caption + " Wider terminals show more, --json everything." * narrow,
            narrow=narrow,
        )
    )
    if targets is not None:
        groups = make_groups_table({one.policy: one.groups for one in results}, targets)
        print_whole(lambda _: groups)


def make_table(
    results: Sequence[PolicyResult], *, title: str, caption: str, narrow: bool = False
) -> Table:
    """Return the table; `x` is the output over that of the first policy.

    A narrow one has no standard errors and omits figures that follow from those shown.
    """
    base = results[0].mean["output_tokens_per_s"]

    def cell(result: PolicyResult, name: str, digits: int, scale: float = 1.0) -> str:
        error = 0.0 if narrow else scale * result.stderr[name]
        return figure(scale * result.mean[name], error, digits)

    columns: list[tuple[str, bool, Callable[[PolicyResult], str]]] = [
        ("imbalance\ntokens", True, lambda r: cell(r, "mean_imbalance_tokens", 0)),
        ("idle\n%", True, lambda r: cell(r, "idle_fraction", 1, 100)),
        ("slots\nin use", False, lambda r: cell(r, "mean_running", 1)),
        ("output\ntokens/s", True, lambda r: cell(r, "output_tokens_per_s", 0)),
        (f"x\n{results[0].policy}", True, lambda r: f"{r.mean['output_tokens_per_s'] / base:.2f}"),
        ("TPOT ms\np50", False, lambda r: cell(r, "tpot_ms_p50", 1)),
        ("TPOT ms\np95", True, lambda r: cell(r, "tpot_ms_p95", 1)),
        ("wait s\np50", True, lambda r: cell(r, "pool_wait_s_p50", 2)),
        ("wait s\np99", True, lambda r: cell(r, "pool_wait_s_p99", 2)),
        ("wait s\nmax", True, lambda r: f"{r.mean['pool_wait_s_max']:.1f}"),
        (
            "dispatch µs\np50 / p99",
            False,
            lambda r: f"{r.mean['dispatch_us_p50']:.0f} / {r.mean['dispatch_us_p99']:.0f}",
        ),
    ]
    shown = [column for column in columns if column[1] or not narrow]
    table = Table(
        title=escape(title),
        caption=caption,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD if narrow else HEAVY_HEAD,
        pad_edge=not narrow,
        collapse_padding=narrow,
    )
    table.add_column("policy", no_wrap=True)
    for heading, _, _ in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(result.policy, *(show(result) for _, _, show in shown))
    return table


def figure(mean: float, error: float, digits: int) -> str:
    """Return a mean with its standard error, or alone if there is none."""
    if error == 0.0:
        return f"{mean:,.{digits}f}"
    return f"{mean:,.{digits}f} ±{error:,.{digits}f}"


# Hints on a comparison: that the policies could not differ, or that it will not end.

# Below this share of the slots in use requests hardly ever share a rank.
_NEARLY_EMPTY = 0.1
# Each token is a decode step; no model's answers are as long.
_UNENDING_TOKENS = 1_000_000


def hints(
    results: Sequence[PolicyResult], deployment: SimulatedDeployment, workloads: Sequence[Workload]
) -> list[str]:
    """Return a sentence for each reason why the policies could not differ."""
    found: list[str] = []
    slots = sum(deployment.engines.batches_of(deployment.ranks, deployment.batch_limit))
    share = max(result.mean["mean_running"] for result in results) / slots
    if share < _NEARLY_EMPTY:
        found.append(
            f"The ranks' slots were {100 * share:.1f} % full: with so few requests at a time policies "
            "can hardly differ; try --backlog 64 or a higher --rate."
        )
    capacity = deployment.rank_kv_tokens
    if capacity is not None:
        prompts = [request.prompt_tokens for workload in workloads for request in workload.requests]
        too_long = sum(tokens > capacity for tokens in prompts)
        if 2 * too_long > len(prompts):
            found.append(
                f"{too_long:,} of {len(prompts):,} prompts exceed a rank's KV capacity of {capacity:,} "
                "tokens, so each of these has a rank to itself."
            )
    return found


def unending(requests: Sequence[TraceRequest]) -> str | None:
    """Return a warning if some answers take more steps than a simulation can run."""
    long = [
        request.output_tokens for request in requests if request.output_tokens > _UNENDING_TOKENS
    ]
    if not long:
        return None
    return (
        f"{len(long):,} answers of more than {_UNENDING_TOKENS:,} tokens, the longest {max(long):,}: "
        "each token is a step to simulate"
    )
