"""Measures the index of prompt blocks: memory, and the time of a decision about a long prompt.

    python scripts/bench_prefix_index.py [--instances 16] [--blocks 1048576]

The prompt has 128k tokens in blocks of 16 as vLLM's. Every prefiller knows a beginning of its own
length of it, in indices that are full: first of what each was sent, then of what each tells itself.
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
from numpy.typing import NDArray

from balanceroute.proxy.core.events import PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.prefill.base import PrefillRequest
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, Knowledge, token_hashes
from balanceroute.proxy.core.prefill.prefix_memory import PrefixMemory, block_keys
from balanceroute.proxy.testing.arguments import positive

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


def told(instances: int, blocks: int, prompt: NDArray[np.int64]) -> tuple[EngineBlocks, float]:
    """Return the same of what instances tell, and the time that storing a block takes."""
    index = EngineBlocks(BLOCK_TOKENS, blocks)
    rng = np.random.default_rng(0)
    spent = 0.0
    for instance in range(instances):
        prefiller, known = PrefillerId(instance), len(prompt) * (instance + 1) // (instances + 1)
        index.begin(prefiller, Knowledge.ALL)
        for number in range(blocks // _BATCH):
            tokens = rng.integers(0, 150_000, PROMPT_TOKENS)
            if number == 0:
                tokens[:known] = prompt[:known]
            names, ids = rng.integers(1, 1 << 62, _BATCH).tolist(), tokens.tolist()
            _, seconds = timed(partial(index.stored, prefiller, names, None, ids))
            spent += seconds
    return index, spent / instances / blocks


def print_told(instances: int, blocks: int) -> None:
    """Print the figures of what prefillers tell."""
    prompt = np.random.default_rng(1).integers(0, 150_000, PROMPT_TOKENS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index, block_s = told(instances, blocks, prompt)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"told: {used:,.0f} MiB more, {1e6 * block_s:.1f} us for a block")
    times: dict[str, list[float]] = {"hash ids": [], "look up": []}
    found = 0
    for _ in range(200):
        hashes, at = timed(partial(token_hashes, prompt, BLOCK_TOKENS))
        times["hash ids"].append(at)
        found, at = timed(partial(longest, index, instances, hashes))
        times["look up"].append(at)
    print(f"longest prefix told: {BLOCK_TOKENS * found:,} tokens")
    print_times(times)


def longest(index: EngineBlocks, instances: int, hashes: tuple[int, ...]) -> int:
    """Return how much of a prompt the instance has that has most of it."""
    return max(index.leading(PrefillerId(instance), hashes) for instance in range(instances))


def print_times(times: dict[str, list[float]]) -> None:
    """Print each median and its tail."""
    for name, samples in times.items():
        print(f"{name:10} {1e3 * median(samples):.3f} ms, p99 {1e3 * sorted(samples)[-3]:.3f} ms")


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=positive, default=16)
    parser.add_argument("--blocks", type=positive, default=1 << 20)
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
    print_times(times)
    print_told(arguments.instances, arguments.blocks)
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
