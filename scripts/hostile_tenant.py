"""Measures how far a hostile tenant moves another tenant's time to first token.

    scripts/hostile_tenant.py --requests 1200 --attacks 10000
    scripts/hostile_tenant.py --live

The whole proxy serves a steady tenant of 20 requests a second before emulated engines. A hostile one sends
tiny requests, prompts of 60,000 characters, streams that it never reads, and leaves a tenth of them at
random. Once it has limits and a share, once a share alone, and once neither. In virtual time the proxy's
own CPU costs nothing: what is measured is who waits for whom at the engines. With `--live` engines, proxy
and clients are processes with real sockets; the machine's other work is then in the figures, so the two
cases that are compared, alone and with limits and shares, take turns, `--rounds` times.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import NamedTuple, cast

import numpy as np
import uvloop

from balanceroute.proxy.lab.emulate.process import emulated_engines
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.testing.arguments import positive
from balanceroute.proxy.testing.chaos.clients import Client, ClientPhase, Departure, Leaving, Visit
from balanceroute.proxy.testing.chaos.log_keeper import log_kept
from balanceroute.proxy.testing.chaos.requests import COMPLETIONS, ClientRequest
from balanceroute.proxy.testing.chaos.world import World, WorldSettings
from balanceroute.proxy.testing.soak.proxy_process import running_proxy
from balanceroute.proxy.testing.virtual.addresses import Link
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run

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

    async def main(loop: VirtualLoop) -> None:
        world.append(World(settings, loop, random.Random(seed)))
        await world[0].start()
        await asyncio.sleep(_WARM_UP_S)
        port = world[0].port

        def before(visit: Visit) -> None:
            loop.network.rule("127.0.0.1", port, lambda: visit.link or Link())

        await _come(visits, "127.0.0.1", port, limit_s=span_s + _END_S, before=before)
        await world[0].close()

    with log_kept() as log:
        run(main, seed=seed, limit_s=100_000.0)
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
    emulate = f"emulate --json-ready --exit-with-stdin --port 0 --prefillers {ENGINES.prefillers} "
    emulate += f"--ranks {ENGINES.ranks} --batch {ENGINES.batch_limit} "
    emulate += f"--prefill-base-ms {ENGINES.prefill_base_ns / 1e6}"
    with emulated_engines([sys.executable, "-m", "balanceroute.proxy", *emulate.split()]) as given:
        urls = {role: cast("list[str]", addresses) for role, addresses in given.items()}
        flags = ["--port", "0", "--admin-port", "0", "--tenants", str(tenants)]
        for name, value in _flags(case).items():
            flags += [f"--{name.replace('_', '-')}", str(value)]
        flags += ["--prefill", *urls["prefill"], "--decode", *urls["decode"]]
        engines = urls["prefill"] + urls["decode"]
        with (
            running_proxy(flags, engines=engines, folder=folder) as proxy,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(_come(visits, proxy.host, proxy.port, limit_s=limit_s))
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


def main() -> int:
    """Print a row for each case; return 1 if limits and shares do not protect the steady tenant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=positive, default=1200, metavar="N", help="of the steady one"
    )
    parser.add_argument(
        "--attacks", type=positive, default=10_000, metavar="N", help="of the other"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--live", action="store_true", help="with processes and real sockets")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="of --live")
    arguments = parser.parse_args()
    print("| hostile tenant has | TTFT p50 s | p99 s | p99 against alone | steady | hostile |")
    print("| --- | ---: | ---: | ---: | --- | --- |")
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
        row = f"| {case} | {p50:.3f} | {p99:.3f} | {ratios[case]:.2f} | {' | '.join(outcomes)} |"
        print(row, flush=True)
    return ratios


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    # So that the other processes end with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
