"""Two tenants of weights 2 and 1, live before emulated engines: shares, refusals and recovery."""

import argparse
import asyncio
import hashlib
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import httpx
import numpy as np
import uvloop

from balanceroute.proxy.lab.pictures import empty_figure, write_pictures
from balanceroute.proxy.lab.replay.driver import replay
from balanceroute.proxy.lab.replay.figures import RequestSample
from balanceroute.proxy.lab.replay.requests import PlannedRequest, ReplaySettings
from balanceroute.proxy.testing.soak.proxy_process import ProxyProcess
from experiment import emulated, proxy_before, right, table_head, table_row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


WEIGHTS = {"gold": 2, "silver": 1}
# What each tenant asks for, as a multiple of what the engines can do.
PHASES = {
    "both backlogged": (1.0, 1.0),
    "gold left": (0.0, 1.5),
    "overload": (3.0, 3.0),
    "recovery": (0.3, 0.3),
}
RANKS, BATCH = 4, 8
PROMPT_TOKENS, OUTPUT_TOKENS = (200, 1000), (20, 60)
# The begin of a phase still sees requests of the one before.
SETTLING = 0.2


@dataclass(frozen=True, slots=True)
class Setup:
    """How long the phases are, and how fast the engines.

    Attributes:
        phase_s: Length of a phase.
        step_ms: Time of a decode step.
        target_s: Of the p99 time to first token.
        seed: Of arrivals and lengths.
        out: Where to write.
    """

    phase_s: float
    step_ms: float
    target_s: float
    seed: int
    out: Path

    @property
    def capacity(self) -> float:
        """Requests per second that the ranks can do, with full batches."""
        return RANKS * BATCH / (1e-3 * self.step_ms * sum(OUTPUT_TOKENS) / 2)

    def window(self, phase: int) -> tuple[float, float]:
        """Return the seconds in which a phase is measured."""
        return (phase + SETTLING) * self.phase_s, (phase + 1) * self.phase_s

    def phase_of(self, request: PlannedRequest) -> int:
        """Return the phase in which a request is due."""
        # The time is rounded to a nanosecond.
        return int((request.arrival_ns + 1) / 1e9 / self.phase_s)

    def requests(self, tenant: int) -> list[PlannedRequest]:
        """Draw a tenant's requests of all phases; the first is due at 0."""
        rng = random.Random(f"{self.seed}/{tenant}")
        chosen: list[PlannedRequest] = []
        for phase, asked in enumerate(PHASES.values()):
            at_s = phase * self.phase_s
            while asked[tenant] and at_s < (phase + 1) * self.phase_s:
                lengths = rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)
                # The prompt's words follow from the number: no prompt twice.
                number = len(WEIGHTS) * len(chosen) + tenant
                chosen.append(PlannedRequest(number, round(1e9 * at_s), *lengths))
                at_s += rng.expovariate(asked[tenant] * self.capacity)
        return chosen


# What each tenant got in each phase, and what is not as it must be.

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
    figures = ("output tokens", "KV-token-s", "asked", "served", "429", "503")
    times = ("TTFT p50 s", "p99 s", "in time per s")
    lines = [table_head("phase", "tenant", *right([*figures, *times]))]
    for row in rows:
        shares = [f"{cell(one, 1)} %" for one in (row.token_share, row.kv_share)]
        counts = [cell(n, 0) for n in (row.asked, row.served, row.refused_429, row.refused_503)]
        waits = [cell(row.ttft_p50_s, 2), cell(row.ttft_p99_s, 2), cell(row.goodput, 1)]
        lines.append(table_row(row.phase, row.tenant, *shares, *counts, *waits))
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


# The picture: shares, the limit on requests in flight and the time to first token over time.

COLOURS = ("#0067a5", "#e08a1e")


def draw(setup: Setup, run: Run, title: str) -> "Figure":
    """Return the shares, the limit and the time to first token over time."""
    figure = empty_figure(9.0, 6.6, "Two tenants, 2 to 1", [title])
    shares, limit, ttft = figure.subplots(3, sharex=True)
    end_s = len(PHASES) * setup.phase_s
    edges = np.arange(0.0, end_s, setup.phase_s / 35)
    middles = (edges[:-1] + edges[1:]) / 2
    windows = list(pairwise(edges.tolist()))
    bands = [[share(run.tokens, name, one) or 0.0 for one in windows] for name in WEIGHTS]
    shares.stackplot(middles, bands, labels=list(WEIGHTS), colors=COLOURS, step="mid")
    shares.plot([0, setup.phase_s], [DUE, DUE], color="black", linestyle=":", label="due")
    shares.set_ylabel("output tokens, %")
    times_s = [at_s for at_s, _ in run.states]
    values = [[state[name] for _, state in run.states] for name in ("limit_per_rank", "in_flight")]
    most = [RANKS * (value or 0) for value in values[0]]
    limit.step(times_s, most, color="black", where="post", label="limit")
    limit.plot(times_s, [value or 0 for value in values[1]], color="#858b94", label="in flight")
    limit.set_ylabel("requests in flight")
    p99 = [np.nan if (p := state["ttft_p99_s"]) is None else p for _, state in run.states]
    ttft.step(times_s, p99, color="black", where="post", label="p99")
    ttft.axhline(setup.target_s, color="#858b94", linestyle=":", label="target")
    ttft.set_ylabel("time to first token, s")
    ttft.set_xlabel("seconds")
    for chart in (shares, limit, ttft):
        chart.set_xlim(0, end_s)
        chart.set_ylim(bottom=0)
        chart.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        for phase in range(1, len(PHASES)):
            chart.axvline(phase * setup.phase_s, color="#b4b9c0", linewidth=0.8)
    for phase, name in enumerate(PHASES):
        shares.text((phase + 0.5) * setup.phase_s, 104, name, ha="center")
    return figure


PREFILLERS = 2
QUEUE_LIMIT = 30  # Of a tenant: the rest is refused with 429.
LIMITS = (4, 16)  # Of requests in flight per rank.
SAMPLE_S = 0.5


async def watch(url: str, into: list[tuple[int, Mapping[str, float | None]]]) -> None:
    """Read the state of the limit, until cancelled."""
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            state = (await client.get(f"{url}/admin/state")).json()
            into.append((time.perf_counter_ns(), state["state"]["budget"]))
            await asyncio.sleep(SAMPLE_S)


async def send(setup: Setup, proxy: ProxyProcess) -> Run:
    """Send the requests of both tenants, and wait for every answer; the log is not read yet."""
    states: list[tuple[int, Mapping[str, float | None]]] = []
    watching = asyncio.ensure_future(watch(f"http://{proxy.host}:{proxy.admin_port}", states))
    url = f"http://{proxy.host}:{proxy.port}"
    unix_ns = time.time_ns() - time.perf_counter_ns()
    results = await asyncio.gather(
        *(
            replay(
                ReplaySettings(url, api_key=key_of(name), request_ids=name, seed=setup.seed),
                setup.requests(tenant),
                clock_ns=time.perf_counter_ns,
            )
            for tenant, name in enumerate(WEIGHTS)
        )
    )
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    start_ns = min(one.start_ns for one in results)
    samples = {name: one.samples for name, one in zip(WEIGHTS, results, strict=True)}
    tokens = [
        Held(
            name, one.output_tokens, (one.first_ns - start_ns) / 1e9, (one.last_ns - start_ns) / 1e9
        )
        for name, sent in samples.items()
        for one in sent
        if one.finished
    ]
    seen = [((time_ns - start_ns) / 1e9, state) for time_ns, state in states]
    return Run((start_ns + unix_ns) / 1e9, samples, tokens, [], seen)


def key_of(tenant: str) -> str:
    """Return a tenant's API key."""
    return f"key-of-{tenant}"


def run_live(setup: Setup) -> Run:
    """Start engines and proxy, send, and end them."""
    tenants = setup.out / "tenants.toml"
    tenants.write_text(
        "\n".join(
            f'[[tenant]]\nname = "{name}"\nweight = {weight}\nqueue_limit = {QUEUE_LIMIT}\n'
            f'key_sha256 = ["{hashlib.sha256(key_of(name).encode()).hexdigest()}"]'
            for name, weight in WEIGHTS.items()
        ),
        encoding="utf-8",
    )
    engines = f"--prefillers {PREFILLERS} --ranks {RANKS} --batch {BATCH} "
    engines += f"--step-base-ms {setup.step_ms}"
    flags = f"--batch {BATCH} --fair-queue kv-token-seconds --aimd post5 "
    flags += f"--aimd-ttft-s {setup.target_s} --aimd-min {LIMITS[0]} --aimd-max {LIMITS[1]}"
    words = [*flags.split(), "--tenants", str(tenants)]
    with emulated(engines.split()) as urls, proxy_before(urls, words, setup.out) as proxy:
        run = uvloop.run(send(setup, proxy))
    # The log is whole once the proxy has ended.
    return replace(run, kv=kv_held(proxy.log, run.start_unix_s))


def read_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> Setup:
    """Return what the command line asks for."""
    parser.add_argument("--out", type=Path, default=Path("build/qos"), help="where to write")
    parser.add_argument("--phase-s", type=float, default=35.0, help="length of a phase")
    parser.add_argument("--step-ms", type=float, default=50.0, help="time of a decode step")
    parser.add_argument("--target-s", type=float, default=2.0, help="of the p99 TTFT")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and lengths")
    setup = Setup(**vars(parser.parse_args(words)))
    if not min(setup.phase_s, setup.step_ms, setup.target_s) > 0:
        parser.error("--phase-s, --step-ms and --target-s must be above 0")
    return setup


def qos(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Two tenants of weights 2 and 1, live before emulated engines: shares, refusals and recovery.

    Starts emulated engines and the proxy (`--tenants`, `--fair-queue kv-token-seconds`, `--aimd`), and
    sends each tenant's requests in open loop, drawn from a seed, through four phases. Prints what each
    tenant got in each phase, and writes `qos.json` and `qos.png`. Exits 1 if the shares are not the
    weights' in the first phase, if the tenant that stays in the second does not get everything, or if a
    request is lost: neither answered as a whole, nor refused with 429 or 503 and a Retry-After.
    """
    setup = read_flags(parser, words)
    setup.out.mkdir(parents=True, exist_ok=True)
    title = (
        f"{RANKS} ranks x batch {BATCH}, steps of {setup.step_ms:g} ms: about "
        f"{setup.capacity:.0f} requests per s; target of the p99 TTFT {setup.target_s:g} s"
    )
    print(f"{title}; {len(PHASES)} phases of {setup.phase_s:g} s\n", flush=True)
    run = run_live(setup)
    rows = [row_of(setup, run, phase, one) for phase in range(len(PHASES)) for one in WEIGHTS]
    found = failures(rows)
    print(table(rows))
    print(
        "\nShares, times and the first tokens within the target per second are measured without "
        f"the first {SETTLING * setup.phase_s:g} s of a phase. Refused: 429 and 503 with "
        "Retry-After.\n" + "\n".join(found or ["As it must be."])
    )
    told = asdict(setup) | {"out": str(setup.out)}
    report = {"config": told, "rows": [asdict(row) for row in rows], "failures": found}
    (setup.out / "qos.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    write_pictures({"qos": lambda: draw(setup, run, title)}, setup.out)
    return 1 if found else 0
