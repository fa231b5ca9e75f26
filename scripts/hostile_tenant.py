"""Measures how far a hostile tenant moves another tenant's time to first token, in virtual time.

    scripts/hostile_tenant.py --requests 1200 --attacks 10000

The whole proxy serves a steady tenant of 20 requests a second before emulated engines. A hostile one sends
tiny requests, prompts of 60,000 characters, streams that it never reads, and leaves a tenth of them at
random. Once it has limits and a share, once a share alone, and once neither. In virtual time the proxy's
own CPU costs nothing: what is measured is who waits for whom at the engines.
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from balanceroute.proxy.emulate.settings import EmulationSettings
from balanceroute.proxy.testing.chaos.clients import Client, Departure, Leaving, Phase, Visit
from balanceroute.proxy.testing.chaos.requests import COMPLETIONS, ClientRequest
from balanceroute.proxy.testing.chaos.world import World, WorldSettings
from balanceroute.proxy.testing.virtual.link import Link
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
CASES: dict[str, tuple[bool, bool, bool]] = {
    # The hostile tenant comes; it has limits; starts are shared.
    "alone": (False, True, True),
    "limits and shares": (True, True, True),
    "shares": (True, False, True),
    "neither": (True, False, False),
}
_WARM_UP_S = 3.0
_END_S = 200.0


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
    attacked, limited, shared = CASES[case]
    rng = random.Random(seed)
    span_s = requests / RATE
    visits = [_visit(rng, "steady", number, span_s) for number in range(requests)]
    hostile = [_attack(rng, requests + number, span_s) for number in range(attacks)]
    tenants = _table("steady", {}) + _table("hostile", LIMITS if limited else {})
    flags = {"probe_limit": 2, "fair_queue": "prompt-tokens" if shared else "none"}
    settings = WorldSettings(ENGINES, flags, tenants)
    world: list[World] = []

    async def main(loop: VirtualLoop) -> None:
        world.append(World(settings, loop, random.Random(seed)))
        await world[0].start()
        await asyncio.sleep(_WARM_UP_S)
        begin_s = loop.time()

        async def come(visit: Visit) -> None:
            await asyncio.sleep(begin_s + visit.start_s - loop.time())
            loop.network.rule("127.0.0.1", world[0].port, lambda: visit.link or Link())
            await Client(visit, on_left=lambda _: None).run("127.0.0.1", world[0].port)

        tasks = [loop.create_task(come(one)) for one in visits + (hostile if attacked else [])]
        _, late = await asyncio.wait(tasks, timeout=span_s + _END_S)
        for task in late:  # Those that never read.
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await world[0].close()

    run(main, seed=seed, limit_s=100_000.0)
    by_tenant = {"steady": Counter[str](), "hostile": Counter[str]()}
    waits = []
    for record in world[0].ended:
        assert record.outcome is not None
        by_tenant[record.tenant][record.outcome.value] += 1
        if record.tenant == "steady" and record.first_token_ns is not None:
            waits.append((record.first_token_ns - record.arrived_ns) / 1e9)
    p50, p99 = (float(np.percentile(waits, percent)) for percent in (50, 99))
    return Outcome((p50, p99), by_tenant["steady"], by_tenant["hostile"])


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
    leaves = Departure(Phase.AFTER, Leaving.RESET, delay_s=rng.uniform(0.0, 0.5))
    tiny = _request(rng, "hostile", number, words=1, tokens=rng.randint(1, 20))
    return Visit(start_s, (tiny,), close=True, departure=leaves if rng.random() < 0.1 else None)


def main() -> int:
    """Print a row for each case; return 1 if limits and shares do not protect the steady tenant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1200, metavar="N", help="of the steady one")
    parser.add_argument("--attacks", type=int, default=10_000, metavar="N", help="of the other")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    print("| hostile tenant has | TTFT p50 s | p99 s | p99 against alone | steady | hostile |")
    print("| --- | ---: | ---: | ---: | --- | --- |")
    alone = protected = 0.0
    for case in CASES:
        found = measure(
            case, requests=arguments.requests, attacks=arguments.attacks, seed=arguments.seed
        )
        p50, p99 = found.ttft_s
        if case == "alone":
            alone = p99
        elif case == "limits and shares":
            protected = p99
        outcomes = (_listed(found.steady), _listed(found.hostile) or "-")
        print(f"| {case} | {p50:.3f} | {p99:.3f} | {p99 / alone:.2f} | {' | '.join(outcomes)} |")
    return 1 if protected > 1.1 * alone else 0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


if __name__ == "__main__":
    sys.exit(main())
