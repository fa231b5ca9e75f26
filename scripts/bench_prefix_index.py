"""Measures the index of prompt blocks: memory, and the time of a decision about a long prompt.

    python scripts/bench_prefix_index.py [--instances 16] [--blocks 1048576]

The prompt has 128k tokens in blocks of 16 as vLLM's. Every prefiller knows a beginning of its own
length of it, in indices that are full.
"""

import argparse
import random
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TypeVar

import numpy as np

from balanceroute.proxy.core.events import PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.prefill.base import PrefillRequest
from balanceroute.proxy.core.prefill.block_index import block_keys
from balanceroute.proxy.core.prefill.prefix_memory import PrefixMemory

PROMPT_TOKENS = 131_072
BLOCK_TOKENS = 16
Result = TypeVar("Result")
# As many as a prompt has, so that filling takes seconds.
_BATCH = PROMPT_TOKENS // BLOCK_TOKENS


def filled(instances: int, blocks: int, prompt: tuple[int, ...]) -> PrefixMemory:
    """Return a memory in which each instance knows `blocks` blocks, some of them the prompt's."""
    memory = PrefixMemory(blocks)
    rng = np.random.default_rng(0)
    for instance in range(instances):
        index = memory._indices[PrefillerId(instance)]
        for _ in range(0, blocks, _BATCH):
            index.add(block_keys(tuple(rng.integers(0, 1 << 63, _BATCH).tolist())))
        known = len(prompt) * (instance + 1) // (instances + 1)
        index.add(block_keys(prompt[:known]))
    return memory


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=1 << 20)
    arguments = parser.parse_args()
    rng = random.Random(1)
    prompt = tuple(rng.getrandbits(63) for _ in range(PROMPT_TOKENS // BLOCK_TOKENS))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = filled(arguments.instances, arguments.blocks, prompt)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    ticket = Ticket(PROMPT_TOKENS, blocks=prompt, block_tokens=BLOCK_TOKENS)
    request = PrefillRequest(RequestId(0), ticket, PROMPT_TOKENS, 0)
    candidates = [PrefillerId(instance) for instance in range(arguments.instances)]
    times: dict[str, list[float]] = {"hash keys": [], "look up": [], "note": []}
    for _ in range(200):
        keys, at = timed(lambda: block_keys(prompt).tolist())
        times["hash keys"].append(at)
        _, at = timed(partial(look_up, memory, candidates, keys))
        times["look up"].append(at)
        _, at = timed(lambda: memory.add(request, candidates[0]))
        times["note"].append(at)
    found = memory.expect(request, candidates)
    print(f"{arguments.instances} instances x {arguments.blocks:,} blocks: {used:,.0f} MiB")
    print(f"longest prefix found: {max(one.cached_tokens for one in found.values()):,} tokens")
    for name, samples in times.items():
        print(f"{name:10} {1e3 * median(samples):.3f} ms, p99 {1e3 * sorted(samples)[-3]:.3f} ms")
    return 0


def look_up(memory: PrefixMemory, candidates: list[PrefillerId], keys: list[int]) -> None:
    """Find out what each instance knows of a prompt."""
    for prefiller in candidates:
        memory._indices[prefiller].leading(keys)


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return what some work returns, and its seconds."""
    begin = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begin


if __name__ == "__main__":
    sys.exit(main())
