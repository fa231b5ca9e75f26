"""Conversations of many turns, as a trace, and the prefillers that serve them."""

import random
from itertools import count

from balanceroute.traces import TraceRequest

BLOCK_TOKENS = 512
PREFILL_BASE_MS, PREFILL_TOKEN_US = 20, 50
CONVERSATIONS = 1_500
# Prefillers and load.
TURN_CASES = ((4, 0.7), (4, 0.9), (4, 1.1), (2, 0.9), (8, 0.9))
TURN_CACHE_TOKENS = 2_000_000
# Once they have begun, at rate 1 they are the work of so many prefillers.
_WORK = 4.8


def turns_rate(prefillers: int, load: float) -> float:
    """Return by how much the conversations are sped up."""
    return round(load * prefillers / _WORK, 3)


def conversations(number: int, per_s: float = 9.0, seed: int = 2) -> list[TraceRequest]:
    """Return the turns of conversations: so many begin each second, and have 6.6 turns on average.

    Each begins with one of eight system prompts of four blocks. A turn adds 50 to 2,000 tokens and
    the answer before it, ten seconds after that.
    """
    rng, ids = random.Random(seed), count()
    systems = [[next(ids) for _ in range(4)] for _ in range(8)]
    requests: list[TraceRequest] = []
    start_s = 0.0
    for _ in range(number):
        start_s += rng.expovariate(per_s)
        at_s, blocks = start_s, list(rng.choice(systems))
        tokens, goes_on = BLOCK_TOKENS * len(blocks), True
        while goes_on:
            tokens += rng.randint(50, 2_000)
            output = 1 + min(1_500, int(rng.expovariate(1 / 300)))
            blocks += [next(ids) for _ in range(tokens // BLOCK_TOKENS - len(blocks))]
            requests.append(TraceRequest(round(1e9 * at_s), tokens, output, tuple(blocks)))
            tokens += output
            at_s += rng.expovariate(1 / 10) + 0.02 * output
            goes_on = rng.random() < 0.85 and tokens < 100_000
    return sorted(requests, key=lambda request: request.arrival_ns)
