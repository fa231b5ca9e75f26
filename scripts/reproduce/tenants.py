"""Tenants: shares and refusals of two live, and what one that is hostile does to another in virtual time."""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvloop
from tests.support.arguments import positive
from tests.support.chaos.clients import Client, ClientPhase, Departure, Leaving, Visit
from tests.support.chaos.log_capture import log_kept
from tests.support.chaos.requests import COMPLETIONS, ClientRequest
from tests.support.chaos.world import World, WorldSettings
from tests.support.soak.proxy_process import ProxyProcess
from tests.support.virtual.addresses import Link
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.lab.replay.driver import replay
from balanceroute.proxy.lab.replay.figures import RequestSample
from balanceroute.proxy.lab.replay.requests import PlannedRequest, ReplaySettings
from experiment import emulated, proxy_before, right, table_head, table_row

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
    """How long the phases are, and how fast the engines."""

    phase_s: float  # Length of a phase.
    step_ms: float  # Time of a decode step.
    target_s: float  # Of the p99 time to first token.
    seed: int  # Of arrivals and lengths.
    out: Path  # Where to write.

    @property
    def capacity(self) -> float:
        """Requests per second that the ranks can do, with full batches."""
        return RANKS * BATCH / (1e-3 * self.step_ms * sum(OUTPUT_TOKENS) / 2)

    def window(self, phase: int) -> tuple[float, float]:
        """Return the seconds in which a phase is measured."""
        return (phase + SETTLING) * self.phase_s, (phase + 1) * self.phase_s

    def phase_of(self, request: PlannedRequest) -> int:
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


# What each tenant got in each phase, and where that is wrong.

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
    """What was measured."""

    start_unix_s: float  # When the run began, in seconds since 1970.
    samples: Mapping[str, Sequence[RequestSample]]  # What happened to each tenant's requests.
    tokens: Sequence[Held]  # Output tokens of each answer.
    kv: Sequence[Held]  # KV-token-seconds of each answer on its rank.


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
    """Return the status of a refusal with a time to come again; None for anything else."""
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
    """Return the claims that do not hold."""
    found = []
    both, alone = list(PHASES)[:2]
    for row in rows:
        shares = {"output tokens": row.token_share, "KV-token-seconds": row.kv_share}
        for name, value in shares.items():
            claim = f"{row.phase}: {row.tenant} has {cell(value, 1)} % of the {name}"
            if (row.phase, row.tenant) == (both, "gold") and (
                value is None or abs(value - DUE) > SHARE_POINTS
            ):
                found.append(f"{claim}, due are {DUE:.1f}")
            if (row.phase, row.tenant) == (alone, "silver") and (value is None or value < ALONE):
                found.append(f"{claim}, due are {ALONE:g} at least")
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


PREFILLERS = 2
QUEUE_LIMIT = 30  # Of a tenant: the rest is refused with 429.
LIMITS = (4, 16)  # Of requests in flight per rank.


async def send(setup: Setup, proxy: ProxyProcess) -> Run:
    """Send the requests of both tenants, and wait for every answer; the log is not read yet."""
    url = f"http://{proxy.host}:{proxy.port}"
    unix_ns = time.time_ns() - time.perf_counter_ns()
    results = await asyncio.gather(
        *(
            replay(
                ReplaySettings(url, api_key=name, request_ids=name, seed=setup.seed),
                setup.requests(tenant),
                clock_ns=time.perf_counter_ns,
            )
            for tenant, name in enumerate(WEIGHTS)
        )
    )
    start_ns = min(one.start_ns for one in results)
    samples = {name: one.samples for name, one in zip(WEIGHTS, results, strict=True)}
    tokens = [
        Held(
            name, one.output_tokens, *((at - start_ns) / 1e9 for at in (one.first_ns, one.last_ns))
        )
        for name, sent in samples.items()
        for one in sent
        if one.finished
    ]
    return Run((start_ns + unix_ns) / 1e9, samples, tokens, [])


def run_live(setup: Setup) -> Run:
    """Start engines and proxy, send, and end them."""
    tenants = setup.out / "tenants.toml"
    rows = (_table(name, {"weight": n, "queue_limit": QUEUE_LIMIT}) for name, n in WEIGHTS.items())
    tenants.write_text("".join(rows), encoding="utf-8")
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
    tenant got in each phase, and writes `qos.json`. Exits 1 if the shares are not the
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
    report = {"config": asdict(setup), "rows": [asdict(row) for row in rows], "failures": found}
    text = json.dumps(report, indent=2, default=str)
    (setup.out / "qos.json").write_text(f"{text}\n", encoding="utf-8")
    return 1 if found else 0


# How tenants share the ranks, and what one that is hostile does to another.

ENGINES = EmulationSettings(
    prefillers=2, ranks=4, batch_limit=16, prefill_base_ns=5_000_000, mean_output_tokens=20.0
)
RATE = 20.0
HOSTILE_LIMITS = {
    "requests_per_minute": 600,
    "request_burst": 10,
    "tokens_per_minute": 30_000,
    "token_burst": 1_000,
    "concurrency": 4,
    "queue_limit": 2,
}


class Case(NamedTuple):
    """Whether the hostile tenant comes, whether it has limits, and whether starts are shared."""

    attacked: bool
    limited: bool
    shared: bool


CASES = {
    "alone": Case(False, True, True),
    "limits and shares": Case(True, True, True),
    "shares": Case(True, False, True),
    "neither": Case(True, False, False),
}
_WARM_UP_S = 3.0
_END_S = 200.0
_BOUND = 1.1
# Of many refusals the log has only how many they were.
_LEFT_OUT = "refused requests were left out of the log"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the steady tenant's requests, and of the other's."""

    ttft_s: tuple[float, float]  # p50 and p99 of the steady tenant.
    steady: Counter[str]  # Its requests by outcome.
    hostile: Counter[str]  # The other's.


def measure(case: str, *, requests: int, attacks: int, seed: int = 0) -> Outcome:
    """Return what comes of one of `CASES`."""
    visits, limit_s = _drawn(case, requests, attacks, seed), requests / RATE + _END_S
    settings = WorldSettings(ENGINES, _flags(case), _tenants(case))
    worlds: list[World] = []

    async def play(loop: VirtualLoop) -> None:
        world = World(settings, loop, random.Random(seed))
        worlds.append(world)
        await world.start()
        await asyncio.sleep(_WARM_UP_S)
        begin_s = loop.time()

        async def come(visit: Visit) -> None:
            await asyncio.sleep(begin_s + visit.start_s - loop.time())
            loop.network.rule("127.0.0.1", world.port, lambda: visit.link or Link())
            await Client(visit, on_left=lambda _: None).run("127.0.0.1", world.port)

        _, late = await asyncio.wait(map(loop.create_task, map(come, visits)), timeout=limit_s)
        for task in late:  # Those that never read.
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await world.close()

    with log_kept() as log:
        run(play, seed=seed, limit_s=100_000.0)
    by_tenant = {"steady": Counter[str](), "hostile": Counter[str]()}
    waits: list[float] = []
    for one in worlds[0].ended:
        by_tenant[one.tenant]["none" if one.outcome is None else one.outcome.value] += 1
        if one.tenant == "steady" and one.first_token_ns is not None:
            waits.append((one.first_token_ns - one.arrived_ns) / 1e9)
    by_tenant["hostile"]["rejected"] += sum(
        vars(one)["fields"]["count"] for one in log.records if one.msg == _LEFT_OUT
    )
    p50, p99 = np.percentile(waits, [50, 99]).tolist()
    return Outcome((p50, p99), by_tenant["steady"], +by_tenant["hostile"])


def _drawn(case: str, requests: int, attacks: int, seed: int) -> list[Visit]:
    rng, span_s = random.Random(seed), requests / RATE
    visits = [_visit(rng, "steady", number, span_s) for number in range(requests)]
    hostile = [_attack(rng, requests + number, span_s) for number in range(attacks)]
    return visits + (hostile if CASES[case].attacked else [])


def _tenants(case: str) -> str:
    return _table("steady", {}) + _table("hostile", HOSTILE_LIMITS if CASES[case].limited else {})


def _flags(case: str) -> dict[str, object]:
    return {"probe_limit": 2, "fair_queue": "prompt-tokens" if CASES[case].shared else "none"}


def _table(name: str, members: dict[str, int]) -> str:
    """Return a tenant of a tenants' file, whose key is its name."""
    lines = [f"{member} = {value}" for member, value in members.items()]
    digest = sha256(name.encode()).hexdigest()
    return "\n".join(["[[tenant]]", f'name = "{name}"', f'key_sha256 = "{digest}"', *lines, "", ""])


def _request(
    rng: random.Random, key: str, number: int, *, words: int, tokens: int
) -> ClientRequest:
    prompt = " ".join(f"w{rng.getrandbits(16)}" for _ in range(words))
    values = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(values).encode()
    return ClientRequest(number, COMPLETIONS, values, body, f"{key}-{number}", key=key)


def _visit(rng: random.Random, key: str, number: int, span_s: float) -> Visit:
    request = _request(rng, key, number, words=rng.randint(20, 400), tokens=rng.randint(5, 40))
    return Visit(rng.uniform(0.0, span_s), (request,), close=True)


def _attack(rng: random.Random, number: int, span_s: float) -> Visit:
    kind, start_s = rng.random(), rng.uniform(0.0, span_s)
    if kind < 0.02:
        huge = _request(rng, "hostile", number, words=10_000, tokens=1)
        return Visit(start_s, (huge,), close=True)
    if kind < 0.03:
        # It stops reading at once.
        unread = _request(rng, "hostile", number, words=1, tokens=500)
        link = Link(window_bytes=500, latency_s=0.0005)
        return Visit(start_s, (unread,), close=True, pauses=((0, 1e6),), link=link)
    leaves = Departure(ClientPhase.AFTER, Leaving.RESET, delay_s=rng.uniform(0.0, 0.5))
    tiny = _request(rng, "hostile", number, words=1, tokens=rng.randint(1, 20))
    return Visit(start_s, (tiny,), close=True, departure=leaves if rng.random() < 0.1 else None)


def hostile_tenant(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Measures how far a hostile tenant moves another tenant's time to first token.

    The whole proxy serves a steady tenant of 20 requests a second before emulated engines. A hostile one sends
    tiny requests, prompts of 60,000 characters, streams that it never reads, and leaves a tenth of them at
    random. Once it has limits and a share, once a share alone, and once neither. In virtual time the proxy's
    own CPU costs nothing: what is measured is who waits for whom at the engines.
    """
    parser.add_argument(
        "--requests", type=positive, default=1200, metavar="N", help="of the steady one"
    )
    parser.add_argument(
        "--attacks", type=positive, default=10_000, metavar="N", help="of the other"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args(words)
    names = ("hostile tenant has", "TTFT p50 s:", "p99 s:", "p99 against alone:", "steady")
    print(table_head(*names, "hostile"))
    ratios: dict[str, float] = {}
    alone = 0.0
    for case in CASES:
        found = measure(
            case, requests=arguments.requests, attacks=arguments.attacks, seed=arguments.seed
        )
        p50, p99 = found.ttft_s
        alone = alone or p99
        ratios[case] = p99 / alone
        outcomes = (_listed(found.steady), _listed(found.hostile) or "-")
        times = (f"{p50:.3f}", f"{p99:.3f}", f"{ratios[case]:.2f}")
        print(table_row(case, *times, *outcomes), flush=True)
    return 1 if ratios["limits and shares"] > _BOUND else 0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
