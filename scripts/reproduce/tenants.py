"""How tenants share the ranks, and what one that is hostile does to another."""

import argparse
import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import uvloop

from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.queueing import FAIR_COSTS
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.experiment import forecast_called
from balanceroute.proxy.lab.sim.recorder import ServiceLog
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.chaos.clients import Client, ClientPhase, Departure, Leaving, Visit
from balanceroute.proxy.testing.chaos.log_keeper import log_kept
from balanceroute.proxy.testing.chaos.requests import COMPLETIONS, ClientRequest
from balanceroute.proxy.testing.chaos.world import World, WorldSettings
from balanceroute.proxy.testing.virtual.addresses import Link
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run
from balanceroute.traces import TraceRequest
from experiment import PUBLIC, emulated, proxy_before, requests_of, table_head, table_row

if TYPE_CHECKING:
    from numpy.typing import NDArray


KNOWN = 2_000
BATCH, POOL_PER_RANK = 16, 2
# Of each rank: five minutes' work at least, whatever the weights.
REQUESTS = {"conv": 500, "code": 2_000}
WEIGHTS = [(1.0, 1.0), (2.0, 1.0), (5.0, 1.0)]
WINDOW_S, WARM_UP_S = 60, 60
# The machine and the prompts of `make qos`, and the least steps and requests of each tenant.
STEADY = SimulatedDeployment(4, 8, step_base_ns=50_000_000)
PROMPT_TOKENS = (200, 1000)
STEADY_STEPS, STEADY_REQUESTS, STEADY_WARM_UP_S = 60_000, 500, 20
WINDOWS_S = (1, 10, 60)

Draw = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class Load:
    """What one tenant sends: its weight, and how its prompts and outputs are drawn."""

    tenant: str
    weight: float
    prompt_tokens: Draw
    output_tokens: Draw
    count: int

    def requests(self, rng: random.Random) -> list[TraceRequest]:
        """Draw the requests, which all come at once."""
        return [
            TraceRequest(
                0,
                self.prompt_tokens(rng),
                self.output_tokens(rng),
                tenant=self.tenant,
                weight=self.weight,
            )
            for _ in range(self.count)
        ]


def between(least: int, most: int) -> Draw:
    """Return a draw of any number from `least` to `most`."""
    return lambda rng: rng.randint(least, most)


def tenant_requests(
    name: str, weight: float, count: int
) -> tuple[list[TraceRequest], list[TraceRequest]]:
    """Return the past of a tenant, for predictors, and `count` requests that all come at once."""
    requests = requests_of(PUBLIC / f"azure_2023_{name}.csv.gz")
    mine = [replace(one, arrival_ns=0, tenant=name, weight=weight) for one in requests]
    return mine[:KNOWN], list(islice(cycle(mine[KNOWN:]), count))


def held_by(
    tenant: str, deployment: SimulatedDeployment, workload: Workload, predictor_name: str
) -> "NDArray[np.float64]":
    """Run; return what a tenant and what all hold at each second, float64[2, seconds].

    Only while every tenant has more requests left than the ranks and the pool hold.
    """
    settings = PolicySettings()
    predictor = forecast_called(predictor_name)(workload, settings)
    ranks, batch = deployment.ranks, deployment.batch_limit
    inputs = PolicyInputs(ranks, batch, settings, random.Random(0), predictor)
    service, policy = ServiceLog(workload.requests), make_policy("br-h", inputs)
    Simulation(deployment, workload, policy, predictor, service=service).run()
    sent = np.array(
        [sum(one.tenant == group.tenant for one in workload.requests) for group in service.groups]
    )
    left = (sent - np.array([sample.requests for sample in service.samples])).min(axis=1)
    until = int(np.argmax(left < ranks * batch + (deployment.pool_limit or 0)))
    held = np.array([sample.kv_token_ns for sample in service.samples])[:until]
    mine = [group.tenant for group in service.groups].index(tenant)
    return np.stack([held[:, mine], held.sum(axis=1)])


def shares_in(held: "NDArray[np.float64]", window_s: int, warm_up_s: int) -> "NDArray[np.float64]":
    """Return the tenant's share in every window after the first seconds, float64[windows]."""
    begins = np.arange(warm_up_s, held.shape[1] - window_s)
    windows = held[:, begins + window_s] - held[:, begins]
    return np.asarray(windows[0] / windows[1])


def shares_of(
    cost: str, weights: tuple[float, float], ranks: int, predictor_name: str
) -> "NDArray[np.float64]":
    """Run the Azure traces; return the share of `conv` in every window, float64[windows]."""
    past, requests = list[TraceRequest](), list[TraceRequest]()
    for name, weight in zip(REQUESTS, weights, strict=True):
        before, now = tenant_requests(name, weight, ranks * REQUESTS[name])
        past += before
        requests += now
    deployment = SimulatedDeployment(
        ranks, BATCH, pool_limit=POOL_PER_RANK * ranks, fair_queue=cost
    )
    held = held_by("conv", deployment, Workload(requests, past), predictor_name)
    return shares_in(held, WINDOW_S, WARM_UP_S)


def steady_loads(outputs: tuple[int, int]) -> list[Load]:
    """Return two tenants of weights 2 and 1 with the same mix."""
    prompts, answers = between(*PROMPT_TOKENS), between(*outputs)
    count = max(STEADY_REQUESTS, STEADY_STEPS * 2 // sum(outputs))
    return [
        Load(name, weight, prompts, answers, count)
        for name, weight in (("gold", 2.0), ("silver", 1.0))
    ]


def steady_of(cost: str, pool: int, seed: int, loads: Iterable[Load]) -> "NDArray[np.float64]":
    """Run some loads; return what the first tenant and what all hold, see `held_by`."""
    loads, rng = list(loads), random.Random(seed)
    requests = [one for load in loads for one in load.requests(rng)]
    deployment = replace(STEADY, pool_limit=pool, fair_queue=cost)
    return held_by(loads[0].tenant, deployment, Workload(requests, []), "survival")


def weights_of(text: str) -> tuple[float, float]:
    """Read `A:B`."""
    one, _, other = text.partition(":")
    return float(one), float(other)


def range_of(text: str) -> tuple[int, int]:
    """Read `A-B`."""
    least, _, most = text.partition("-")
    return int(least), int(most)


def print_taken(arguments: argparse.Namespace) -> None:
    """Print the shares of tenants whose requests differ."""
    names = ("weights", "`--fair-queue`", "share of `conv`", "due", "largest deviation")
    print(table_head(*names, "relative"))
    for weights in arguments.weights:
        due = weights[0] / sum(weights)
        for cost in arguments.cost:
            shares = shares_of(cost, weights, arguments.ranks, arguments.predictor)
            off = float(np.abs(shares - due).max())
            cells = (f"{weights[0]:g}:{weights[1]:g}", f"`{cost}`", f"{100 * shares.mean():.1f} %")
            relative = f"{100 * off / min(due, 1 - due):.1f} %"
            found = (f"{100 * due:.1f} %", f"{100 * off:.1f} points", relative)
            print(table_row(*cells, *found), flush=True)


def print_steady(arguments: argparse.Namespace) -> None:
    """Print how steady the shares of tenants with the same mix are."""
    names = ("answers", "pool", "`--fair-queue`", "deviation in 1 s")
    print(table_head(*names, *(f"windows of {window_s} s" for window_s in WINDOWS_S)))
    for outputs in arguments.outputs:
        for pool in arguments.pool:
            for cost in arguments.cost:
                loads = steady_loads(outputs)
                held = [steady_of(cost, pool, seed, loads) for seed in range(arguments.seeds)]
                print(steady_row(outputs, pool, cost, held), flush=True)


def steady_row(
    outputs: tuple[int, int], pool: int, cost: str, held: "Sequence[NDArray[np.float64]]"
) -> str:
    """Return a row of the table, from the runs of all seeds."""
    shares = [[100 * shares_in(one, w, STEADY_WARM_UP_S) for one in held] for w in WINDOWS_S]
    deviation = max(float(one.std()) for one in shares[0])
    ranges = [
        f"{min(one.min() for one in runs):.0f} to {max(one.max() for one in runs):.0f} %"
        for runs in shares
    ]
    return table_row(
        f"{outputs[0]} to {outputs[1]}", pool, f"`{cost}`", f"{deviation:.1f}", *ranges
    )


def fair_shares(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """How evenly backlogged tenants share the decode ranks: by cost of the queue, and in windows of 1 to 60 s.

        python scripts/reproduce fair-shares taken [--ranks G] [--predictor NAME] [--weights A:B ..] [--cost NAME ..]
        python scripts/reproduce fair-shares steady [--pool N ..] [--outputs A-B ..] [--seeds N] [--cost NAME ..]

    All requests wait from the start, before BR-H in virtual time; the first seconds do not count, nor do
    those when a tenant has few requests left.

    `taken`: the tenants are the public Azure traces, `conv` (prompts of 1,000 tokens, answers of 200) and
    `code` (prompts of 2,000, answers of 30). The table has the mean share of `conv` in the KV-token-seconds
    that both hold on the ranks, and over all windows of 60 s the largest deviation of a share from that of
    the weights: in points, and relative to the share of the tenant that it is largest for.

    `steady`: `gold` of weight 2 and `silver` of weight 1 have the same mix, on the machine of `make qos`. The
    table has the share of `gold`, over all windows of 1, 10 and 60 s of all seeds: the largest standard
    deviation of a seed in windows of 1 s, the least share and the largest.
    """
    tables = parser.add_subparsers(dest="table", required=True)
    taken = tables.add_parser("taken", help="tenants whose requests differ")
    taken.add_argument("--ranks", type=positive, default=8, help="decode ranks")
    taken.add_argument("--predictor", default="exact-match")
    taken.add_argument("--weights", nargs="*", type=weights_of, default=WEIGHTS)
    steady = tables.add_parser("steady", help="tenants with the same mix, in short windows")
    steady.add_argument("--pool", nargs="*", type=positive, default=[8, 24])
    steady.add_argument("--outputs", nargs="*", type=range_of, default=[(20, 60), (200, 600)])
    steady.add_argument("--seeds", type=positive, default=5, help="0 to this less 1")
    for table in (taken, steady):
        table.add_argument("--cost", nargs="*", choices=FAIR_COSTS, default=FAIR_COSTS)
    arguments = parser.parse_args(words)
    {"taken": print_taken, "steady": print_steady}[arguments.table](arguments)


ENGINES = EmulationSettings(
    prefillers=2, ranks=4, batch_limit=16, prefill_base_ns=5_000_000, mean_output_tokens=20.0
)
RATE = 20.0
LIMITS = {
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
COMPARED = ("alone", "limits and shares")
_WARM_UP_S = 3.0
_END_S = 200.0
# Streams that are never read hold no engine for longer.
_LIVE_END_S = 20.0
_BOUND = 1.1
# Of many refusals the log has only how many they were.
_LEFT_OUT = "refused requests were left out of the log"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the steady tenant's requests, and of the other's.

    Attributes:
        ttft_s: p50 and p99 of the steady tenant.
        steady: Its requests by outcome.
        hostile: The other's.
    """

    ttft_s: tuple[float, float]
    steady: Counter[str]
    hostile: Counter[str]


def measure(case: str, *, requests: int, attacks: int, seed: int = 0) -> Outcome:
    """Return what comes of one of `CASES`."""
    visits, span_s = _drawn(case, requests, attacks, seed), requests / RATE
    settings = WorldSettings(ENGINES, _flags(case), _tenants(case))
    world: list[World] = []

    async def play(loop: VirtualLoop) -> None:
        world.append(World(settings, loop, random.Random(seed)))
        await world[0].start()
        await asyncio.sleep(_WARM_UP_S)
        port = world[0].port

        def before(visit: Visit) -> None:
            loop.network.rule("127.0.0.1", port, lambda: visit.link or Link())

        await _come(visits, "127.0.0.1", port, limit_s=span_s + _END_S, before=before)
        await world[0].close()

    with log_kept() as log:
        run(play, seed=seed, limit_s=100_000.0)
    ended = (
        (
            record.tenant,
            "none" if record.outcome is None else record.outcome.value,
            None
            if record.first_token_ns is None
            else (record.first_token_ns - record.arrived_ns) / 1e9,
        )
        for record in world[0].ended
    )
    return _outcome(
        ended, sum(vars(one)["fields"]["count"] for one in log.records if one.msg == _LEFT_OUT)
    )


def measure_live(case: str, *, requests: int, attacks: int, seed: int, folder: Path) -> Outcome:
    """Return what comes of one of `CASES` with real processes and sockets."""
    visits, limit_s = _drawn(case, requests, attacks, seed), requests / RATE + _LIVE_END_S
    tenants = folder / "tenants.toml"
    tenants.write_text(_tenants(case), encoding="utf-8")
    engines = f"--prefillers {ENGINES.prefillers} --ranks {ENGINES.ranks} "
    engines += f"--batch {ENGINES.batch_limit} --prefill-base-ms {ENGINES.prefill_base_ns / 1e6}"
    flags = [f"--tenants={tenants}"]
    flags += [f"--{name.replace('_', '-')}={value}" for name, value in _flags(case).items()]
    with emulated(engines.split()) as urls, proxy_before(urls, flags, folder) as proxy:
        uvloop.run(_come(visits, proxy.host, proxy.port, limit_s=limit_s))
    # The log is whole once the proxy has ended.
    lines = [json.loads(line) for line in proxy.log.read_text(encoding="utf-8").splitlines()]
    ended = (
        (line["tenant"], line["outcome"], line["ttft_s"]) for line in lines if "arrival_s" in line
    )
    return _outcome(ended, sum(line["count"] for line in lines if line.get("message") == _LEFT_OUT))


async def _come(
    visits: Iterable[Visit],
    host: str,
    port: int,
    *,
    limit_s: float,
    before: Callable[[Visit], None] = lambda _: None,
) -> None:
    """Let every visit come at its time, and end those that never read."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()

    async def come(visit: Visit) -> None:
        await asyncio.sleep(begin_s + visit.start_s - loop.time())
        before(visit)
        await Client(visit, on_left=lambda _: None).run(host, port)

    tasks = [loop.create_task(come(visit)) for visit in visits]
    _, late = await asyncio.wait(tasks, timeout=limit_s)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)


def _outcome(ended: Iterable[tuple[str, str, float | None]], left_out: int) -> Outcome:
    """Return what became of requests, of each its tenant, outcome and time to the first token.

    `left_out` are refused requests of the hostile tenant that are not in `ended`.
    """
    by_tenant = {"steady": Counter[str](), "hostile": Counter[str]()}
    waits: list[float] = []
    for tenant, outcome, ttft_s in ended:
        by_tenant[tenant][outcome] += 1
        if tenant == "steady" and ttft_s is not None:
            waits.append(ttft_s)
    by_tenant["hostile"]["rejected"] += left_out
    p50, p99 = (float(np.percentile(waits, percent)) for percent in (50, 99))
    return Outcome((p50, p99), by_tenant["steady"], +by_tenant["hostile"])


def _drawn(case: str, requests: int, attacks: int, seed: int) -> list[Visit]:
    rng, span_s = random.Random(seed), requests / RATE
    visits = [_visit(rng, "steady", number, span_s) for number in range(requests)]
    hostile = [_attack(rng, requests + number, span_s) for number in range(attacks)]
    return visits + (hostile if CASES[case].attacked else [])


def _tenants(case: str) -> str:
    return _table("steady", {}) + _table("hostile", LIMITS if CASES[case].limited else {})


def _flags(case: str) -> dict[str, object]:
    return {"probe_limit": 2, "fair_queue": "prompt-tokens" if CASES[case].shared else "none"}


def _table(name: str, members: dict[str, int]) -> str:
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

        scripts/reproduce hostile-tenant --requests 1200 --attacks 10000
        scripts/reproduce hostile-tenant --live

    The whole proxy serves a steady tenant of 20 requests a second before emulated engines. A hostile one sends
    tiny requests, prompts of 60,000 characters, streams that it never reads, and leaves a tenth of them at
    random. Once it has limits and a share, once a share alone, and once neither. In virtual time the proxy's
    own CPU costs nothing: what is measured is who waits for whom at the engines. With `--live` engines, proxy
    and clients are processes with real sockets; the machine's other work is then in the figures, so the two
    cases that are compared, alone and with limits and shares, take turns, `--rounds` times.
    """
    parser.add_argument(
        "--requests", type=positive, default=1200, metavar="N", help="of the steady one"
    )
    parser.add_argument(
        "--attacks", type=positive, default=10_000, metavar="N", help="of the other"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--live", action="store_true", help="with processes and real sockets")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="of --live")
    arguments = parser.parse_args(words)
    names = ("hostile tenant has", "TTFT p50 s:", "p99 s:", "p99 against alone:", "steady")
    print(table_head(*names, "hostile"))
    size = {"requests": arguments.requests, "attacks": arguments.attacks}
    if not arguments.live:
        ratios = _run(CASES, lambda case: measure(case, seed=arguments.seed, **size))
        return 1 if ratios["limits and shares"] > _BOUND else 0
    found: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(arguments.rounds):
            seed = arguments.seed + number
            ratios = _run(COMPARED, partial(measure_live, folder=Path(name), seed=seed, **size))
            found.append(ratios["limits and shares"])
    print(f"Median of the rounds: {median(found):.2f}")
    return 1 if median(found) > _BOUND else 0


def _run(cases: Iterable[str], measured: Callable[[str], Outcome]) -> dict[str, float]:
    """Print a row for each case, the first of which is alone; return each p99 over that one's."""
    ratios: dict[str, float] = {}
    alone = 0.0
    for case in cases:
        found = measured(case)
        p50, p99 = found.ttft_s
        alone = alone or p99
        ratios[case] = p99 / alone
        outcomes = (_listed(found.steady), _listed(found.hostile) or "-")
        times = (f"{p50:.3f}", f"{p99:.3f}", f"{ratios[case]:.2f}")
        print(table_row(case, *times, *outcomes), flush=True)
    return ratios


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
