"""What each tenant got in each phase, and what is not as it must be."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from phases import PHASES, WEIGHTS, Setup

from balanceroute.proxy.lab.replay.figures import RequestSample

DUE = 100 * WEIGHTS["gold"] / sum(WEIGHTS.values())
"""The share of `gold` by weight, in percent."""
SHARE_POINTS, ALONE = 10.0, 95.0


class Held(NamedTuple):
    """What a request had, evenly over a time: seconds since the start."""

    tenant: str
    amount: float
    begin_s: float
    end_s: float

    def within(self, begin_s: float, end_s: float) -> float:
        """Return the part of the amount in a window."""
        overlap_s = min(end_s, self.end_s) - max(begin_s, self.begin_s)
        return self.amount * max(0.0, overlap_s) / max(1e-9, self.end_s - self.begin_s)


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured.

    Attributes:
        start_unix_s: When the run began, in seconds since 1970.
        samples: What happened to each tenant's requests.
        tokens: Output tokens of each answer.
        kv: KV-token-seconds of each answer on its rank.
        states: Seconds since the start, and the state of the limit on requests in flight.
    """

    start_unix_s: float
    samples: Mapping[str, Sequence[RequestSample]]
    tokens: Sequence[Held]
    kv: Sequence[Held]
    states: Sequence[tuple[float, Mapping[str, float | None]]]


@dataclass(frozen=True, slots=True)
class Row:
    """What a tenant got in a phase; without a share if nothing was served."""

    phase: str
    tenant: str
    token_share: float | None
    kv_share: float | None
    asked: int
    served: int
    refused_429: int
    refused_503: int
    lost: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    goodput: float


def share(held: Iterable[Held], tenant: str, window: tuple[float, float]) -> float | None:
    """Return a tenant's share of what all hold in a window, in percent."""
    parts = dict.fromkeys(WEIGHTS, 0.0)
    for one in held:
        parts[one.tenant] += one.within(*window)
    total = sum(parts.values())
    return 100 * parts[tenant] / total if total else None


def refusal(sample: RequestSample) -> str | None:
    """Return the status of a refusal that tells when to come again; None for anything else."""
    kind = "" if sample.fault is None else sample.fault.kind
    return kind[5:] if kind in ("http 429", "http 503") and sample.retry_after else None


def row_of(setup: Setup, run: Run, phase: int, tenant: str) -> Row:
    """Measure a tenant in a phase: counts of the whole phase, the rest without its beginning."""
    window = begin_s, end_s = setup.window(phase)
    mine = [one for one in run.samples[tenant] if setup.phase_of(one.request) == phase]
    steady = [one for one in mine if one.finished and one.request.arrival_ns >= 1e9 * begin_s]
    ttft_s = [one.ttft_ns / 1e9 for one in steady if one.ttft_ns is not None]
    p50, p99 = np.percentile(ttft_s, [50, 99]).tolist() if ttft_s else (None, None)
    refused = [refusal(one) for one in mine]
    served = sum(one.finished for one in mine)
    return Row(
        phase=list(PHASES)[phase],
        tenant=tenant,
        token_share=share(run.tokens, tenant, window),
        kv_share=share(run.kv, tenant, window),
        asked=len(mine),
        served=served,
        refused_429=refused.count("429"),
        refused_503=refused.count("503"),
        lost=len(mine) - served - refused.count("429") - refused.count("503"),
        ttft_p50_s=p50,
        ttft_p99_s=p99,
        goodput=sum(one <= setup.target_s for one in ttft_s) / (end_s - begin_s),
    )


def failures(rows: Sequence[Row]) -> list[str]:
    """Return what is not as it must be."""
    found = []
    both, alone = list(PHASES)[:2]
    for row in rows:
        shares = {"output tokens": row.token_share, "KV-token-seconds": row.kv_share}
        for name, value in shares.items():
            told = f"{row.phase}: {row.tenant} has {cell(value, 1)} % of the {name}"
            if (row.phase, row.tenant) == (both, "gold") and (
                value is None or abs(value - DUE) > SHARE_POINTS
            ):
                found.append(f"{told}, due are {DUE:.1f}")
            if (row.phase, row.tenant) == (alone, "silver") and (value is None or value < ALONE):
                found.append(f"{told}, due are {ALONE:g} at least")
        if row.lost:
            found.append(f"{row.phase}: {row.lost} requests of {row.tenant} are lost")
    return found


def cell(value: float | None, digits: int) -> str:
    """Return a figure as text."""
    return "-" if value is None else f"{value:,.{digits}f}"


def table(rows: Iterable[Row]) -> str:
    """Return the rows as Markdown."""
    head = (
        "phase | tenant | output tokens | KV-token-s | asked | served | 429 | 503 | "
        "TTFT p50 s | p99 s | in time per s"
    )
    lines = [f"| {head} |", "| --- | --- |" + " ---: |" * 9]
    for row in rows:
        shares = [f"{cell(one, 1)} %" for one in (row.token_share, row.kv_share)]
        counts = [cell(n, 0) for n in (row.asked, row.served, row.refused_429, row.refused_503)]
        times = [cell(row.ttft_p50_s, 2), cell(row.ttft_p99_s, 2), cell(row.goodput, 1)]
        lines.append(f"| {' | '.join([row.phase, row.tenant, *shares, *counts, *times])} |")
    return "\n".join(lines)


def kv_held(log: Path, start_unix_s: float) -> list[Held]:
    """Read from the request log what every answer held on its rank."""
    held = []
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if entry.get("outcome") != "ok" or not entry["rank"]:
            continue
        begin_s = entry["arrival_s"] - start_unix_s
        end_s = begin_s + entry["duration_s"]
        begin_s += entry["queue_s"] + entry["prefill_s"] + entry["pool_s"]
        # Half of the answer is there on average.
        tokens = entry["prompt_tokens"] + entry["output_tokens"] / 2
        held.append(Held(entry["tenant"], tokens * (end_s - begin_s), begin_s, end_s))
    return held
