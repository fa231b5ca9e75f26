"""The output of `balanceroute replay`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from balanceroute.proxy.lab.replay.driver import ReplayResult
from balanceroute.proxy.lab.replay.figures import STEADY_STATE, FaultCount, RequestSample
from balanceroute.proxy.lab.service_levels import (
    ServiceTargets,
    as_rows,
    cell,
    print_whole,
    wide_console,
)
from balanceroute.proxy.lab.service_levels import make_table as make_groups_table


def as_json(config: Mapping[str, object], label: str, result: ReplayResult) -> str:
    """Return the report as JSON text, in the form of the simulator's."""
    row: dict[str, object] = {"policy": label} | asdict(result.figures)
    if result.fleet is not None:
        row |= asdict(result.fleet)
    if result.groups:
        row["groups"] = as_rows(result.groups)
    row["faults"] = [fault._asdict() for fault in result.faults]
    report = {"config": dict(config), "results": [row]}
    return json.dumps(report, indent=2, allow_nan=False) + "\n"


def requests_as_json(result: ReplayResult, *, time_scale: float) -> str:
    rows = [
        json.dumps(_row(sample, result.start_ns, time_scale), allow_nan=False)
        for sample in result.samples
    ]
    return "[\n" + ",\n".join(rows) + "\n]\n"


def print_report(
    label: str,
    result: ReplayResult,
    *,
    title: str,
    notes: Sequence[str],
    targets: ServiceTargets | None = None,
) -> None:
    """Print the figures to standard output, and the kinds of failure if there are any.

    With `targets` also those of each tenant and class.
    """
    console = wide_console()
    console.print(escape(title), highlight=False, soft_wrap=True)
    console.print(make_table(label, result))
    for note in (*_remarks(result), *notes):
        console.print(escape(note), highlight=False, soft_wrap=True)
    if targets is not None:
        groups = make_groups_table({label: result.groups}, targets)
        print_whole(lambda _: groups)
    if result.faults:
        console.print(make_fault_table(result.faults))


def make_table(label: str, result: ReplayResult) -> Table:
    figures = result.figures
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(escape(label), no_wrap=True)
    for heading in ("", "p50", "p95", "p99"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("output tokens/s", cell(figures.output_tokens_per_s, 1))
    table.add_row("requests/s", cell(figures.requests_per_s, 2))
    table.add_row("sent requests/s", cell(figures.request_rate, 2))
    spreads = {
        "TTFT ms": (figures.ttft_ms_p50, figures.ttft_ms_p95, figures.ttft_ms_p99),
        "second token ms": (figures.ttst_ms_p50, figures.ttst_ms_p95, figures.ttst_ms_p99),
        "TPOT ms": (figures.tpot_ms_p50, figures.tpot_ms_p95, None),
        "ITL ms": (figures.itl_ms_p50, figures.itl_ms_p95, figures.itl_ms_p99),
    }
    for name, values in spreads.items():
        table.add_row(name, "", *(cell(value, 1) for value in values))
    e2e = (figures.e2e_s_p50, figures.e2e_s_p95, figures.e2e_s_p99)
    table.add_row("end to end s", "", *(cell(value, 2) for value in e2e))
    if result.fleet is not None:
        table.add_row("imbalance tokens", cell(result.fleet.mean_imbalance_tokens, 0))
        table.add_row("idle %", cell(100 * result.fleet.idle_fraction, 1))
        table.add_row("engines' tokens/s", cell(result.fleet.tokens_per_s, 1))
        table.add_row("decode steps", cell(result.fleet.steps, 0))
        table.add_row("steps late ms", cell(1e3 * result.fleet.mean_late_s, 1))
    table.add_row("finished", cell(figures.requests, 0))
    table.add_row("duration s", cell(figures.duration_s, 1))
    table.add_row("errors", cell(figures.errors, 0))
    return table


def make_fault_table(faults: Sequence[FaultCount]) -> Table:
    """Return how often each kind of failure happened, with an example."""
    table = Table(title="Failures", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("kind", no_wrap=True)
    table.add_column("requests", justify="right", no_wrap=True)
    table.add_column("the first one's message", overflow="fold")
    for fault in faults:
        table.add_row(escape(fault.kind), f"{fault.requests:,}", escape(fault.example))
    return table


def _remarks(result: ReplayResult) -> list[str]:
    """Return the notes on the figures."""
    figures = result.figures
    measured = "Steady state: " if figures.window == STEADY_STATE else "Measured: "
    asked = (
        f"Of {figures.finished:,} finished requests: {figures.prompt_tokens_asked:,} prompt tokens "
        f"asked, {cell(figures.prompt_tokens, 0)} by the engines' count; "
        f"{figures.output_tokens_asked:,} output tokens asked, {figures.output_tokens:,} received."
    )
    remarks = [f"{measured}{figures.window}.", asked]
    if figures.wrong_lengths:
        remarks.append(f"{figures.wrong_lengths:,} answers are not as long as asked.")
    if figures.uneven_events:
        remarks.append(
            f"{figures.uneven_events:,} answers have not one event per token: "
            "ITL is between events."
        )
    late_ms = figures.send_late_ms_p99
    if late_ms is not None:
        remarks.append(f"Requests were sent up to {late_ms:,.1f} ms late (p99).")
    if result.interrupted:
        remarks.append(
            f"Interrupted after {len(result.samples):,} requests were sent; "
            f"{figures.cancelled:,} were given up."
        )
    elif figures.cancelled:
        remarks.append(f"{figures.cancelled:,} requests still ran when the last one was sent.")
    return remarks


def _row(sample: RequestSample, start_ns: int, time_scale: float) -> dict[str, object]:
    def seconds(time_ns: float | None) -> float | None:
        return None if time_ns is None else round(time_ns * time_scale / 1e9, 9)

    request = sample.request
    return {
        "number": request.number,
        "tenant": request.tenant,
        "class": request.level,
        "due_s": seconds(sample.due_ns - start_ns),
        "sent_s": seconds(sample.sent_ns - start_ns),
        "ttft_s": seconds(sample.ttft_ns),
        "ttst_s": seconds(sample.ttst_ns),
        "tpot_s": seconds(sample.tpot_ns),
        "e2e_s": seconds(sample.e2e_ns),
        "prompt_tokens_asked": request.prompt_tokens,
        "prompt_tokens": sample.prompt_tokens,
        "output_tokens_asked": request.answer_tokens,
        "output_tokens": sample.output_tokens if sample.finished else None,
        "token_events": sample.events,
        "cancelled": sample.cancelled,
        "fault": None if sample.fault is None else sample.fault._asdict(),
        "retry_after": sample.retry_after,
    }
