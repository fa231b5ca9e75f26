"""Traces that experiments read and the repository does not hold, and how one that it holds was drawn."""

import argparse
import ast
import csv
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from balanceroute.traces import TraceRequest, write_native
from experiment import AZURE_CONV, MOONCAKE, requests_of

BLOCK_TOKENS = 512
FIRST, LATER = "first turns", "later turns"
# Ranks and slots, each with 12 turnovers in two segments.
SIZES = ((32, 64), (72, 64), (144, 64), (320, 128))
LONG_ANSWER = 350  # Tokens.
SHORT_SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
# Of the prefillers before which short prompts come, and what share of their time all prompts take.
PREFILLERS, PREFILL_BASE_MS, PREFILL_TOKEN_US, SHORT_LOAD = 4, 20.0, 50.0, 0.9


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


def labelled(requests: Sequence[TraceRequest], shared_blocks: int) -> list[TraceRequest]:
    """Return the requests, with what turn each is as its tenant.

    A later turn begins as an earlier request does, beyond the blocks that conversations may share.
    """
    seen: set[int] = set()
    turns = []
    for request in requests:
        beginning = request.hash_ids[: shared_blocks + 1]
        later = len(beginning) > shared_blocks and seen.issuperset(beginning)
        seen.update(request.hash_ids)
        turns.append(replace(request, tenant=LATER if later else FIRST))
    return turns


def mixed(short: float, requests: int = 12_000) -> list[TraceRequest]:
    """Return requests of which a share has short prompts of 50 to 1,000 tokens, the rest 3,000 to 13,000."""
    rng = random.Random(f"{short} short")
    prompts = [
        rng.randint(50, 1_000) if rng.random() < short else rng.randint(3_000, 13_000)
        for _ in range(requests)
    ]
    work_ms = sum(PREFILL_BASE_MS + PREFILL_TOKEN_US * prompt / 1e3 for prompt in prompts)
    gap_ns = 1e6 * work_ms / requests / PREFILLERS / SHORT_LOAD
    now_ns, found = 0.0, []
    for prompt in prompts:
        now_ns += rng.expovariate(1.0 / gap_ns)
        output = 1 + min(2_000, int(rng.expovariate(1 / 200)))
        found.append(TraceRequest(int(now_ns), prompt, output))
    return found


def bootstrapped(requests: Sequence[TraceRequest], size: int) -> list[TraceRequest]:
    """Return `size` requests, a second apart: blocks of 40 in a row, drawn at random."""
    rng = random.Random(0)
    drawn: list[TraceRequest] = []
    while len(drawn) < size:
        start = rng.randrange(len(requests) - 40)
        drawn += requests[start : start + 40]
    return [
        replace(request, arrival_ns=second * 10**9, hash_ids=())
        for second, request in enumerate(drawn[:size])
    ]


def _fleet(ranks: int, slots: int) -> list[TraceRequest]:
    return bootstrapped(requests_of(MOONCAKE), 12 * ranks * slots)


# How each is made, by file.
DERIVATIONS: Mapping[str, Callable[[], list[TraceRequest]]] = {
    "conversations.jsonl": lambda: conversations(1_500),
    "conversations_by_turn.jsonl": lambda: labelled(conversations(1_020, 1.0), 4),
    "mooncake_by_turn.jsonl": lambda: labelled(requests_of(MOONCAKE), 1),
    "long_answers.jsonl": lambda: [
        one for one in requests_of(AZURE_CONV) if one.output_tokens >= LONG_ANSWER
    ],
    **{f"short_{share:g}.jsonl": partial(mixed, share) for share in SHORT_SHARES},
    **{
        f"bootstrapped_{ranks}x{slots}.jsonl": partial(_fleet, ranks, slots)
        for ranks, slots in SIZES
    },
}


def derive(folder: Path, commands: Iterable[str]) -> None:
    """Write to a folder the traces that some of the commands read from it."""
    words = {word for command in commands for word in command.split()}
    for name, make in DERIVATIONS.items():
        if str(folder / name) in words:
            folder.mkdir(parents=True, exist_ok=True)
            write_native(folder / name, make())


CLIENTS = "data/reason/deepseek-r1"
WINDOW_S = 600
LEAST_RATIO = 3.0
KEPT = 24_000
SEED = 13

Lengths = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Lengths, and the cumulated probability of each; none if the client sent nothing then."""


def _lengths(text: str) -> Lengths:
    # ServeGen writes a Python dictionary in a JSON string.
    shares: dict[int, float] = ast.literal_eval(text)
    lengths = np.array(sorted(shares), np.int64)
    cumulated = np.cumsum([shares[length] for length in lengths.tolist()])
    return lengths, cumulated / cumulated[-1:]


def of_client(directory: Path, client: int, rng: np.random.Generator) -> list[TraceRequest]:
    """Return the requests of one client, by arrival."""
    distributions = json.loads((directory / f"chunk-{client}-dataset.json").read_text("utf-8"))
    by_start = [
        (int(start_s), [_lengths(fields[name]) for name in ("input_tokens", "output_tokens")])
        for start_s, fields in sorted(distributions.items(), key=lambda one: int(one[0]))
    ]
    requests: list[TraceRequest] = []
    with (directory / f"chunk-{client}-trace.csv").open(encoding="utf-8", newline="") as file:
        for start, rate, _, pattern, shape, scale in csv.reader(file):
            start_s = int(start)
            # The latest distributions in which the client sent anything.
            known = [
                pair
                for begin_s, pair in by_start
                if begin_s <= start_s and all(len(lengths) for lengths, _ in pair)
            ]
            if not pattern or not known:
                continue
            number = int(np.ceil(float(rate) * WINDOW_S))
            if pattern == "Gamma":
                gaps = rng.gamma(float(shape), float(scale), number)
            else:
                gaps = float(scale) * rng.weibull(float(shape), number)
            # Stretched, the last one would come as the window ends: ServeGen leaves it out.
            times_s = start_s + np.cumsum(gaps)[:-1] * (WINDOW_S / gaps.sum())
            prompts, outputs = (
                np.maximum(
                    lengths[np.searchsorted(cumulated, rng.random(len(times_s)))], 1
                ).tolist()
                for lengths, cumulated in known[-1]
            )
            requests += [
                TraceRequest(round(1e9 * time_s), prompt, output, (client,))
                for time_s, prompt, output in zip(times_s.tolist(), prompts, outputs, strict=True)
            ]
    return requests


def _answers_are_long(requests: list[TraceRequest]) -> bool:
    prompt = fmean(request.prompt_tokens for request in requests)
    return fmean(request.output_tokens for request in requests) >= LEAST_RATIO * prompt


def servegen_trace(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Make traces/public/servegen_reasoning.jsonl.gz from ServeGen's client data.

        git clone https://github.com/alibaba/ServeGen build/ServeGen
        python scripts/reproduce servegen-trace build/ServeGen traces/public/servegen_reasoning.jsonl.gz

    ServeGen (alibaba/ServeGen at f891d11, Apache-2.0) publishes no requests but, for each of the 73 clients
    of a DeepSeek-R1 service, rates and arrival patterns per ten minutes, and distributions of the lengths
    per six hours. This draws a day as its `generate_workload` does, at the recorded rates: per client and
    ten minutes Gamma or Weibull gaps, stretched to the ten minutes, and lengths from the distributions of
    that time. Then it differs:

    * Prompts and outputs are drawn independently. ServeGen draws both with one random number, so that a
      client's longest prompt always has its longest output: a predictor would know too much.
    * Only clients whose mean output is `LEAST_RATIO` times their mean prompt remain (32 of 73).
    * Each request is kept with the same probability, so that `REQUESTS` remain on average.
    * `hash_ids` is the client's number: the requests of a client are taken to begin alike, as with a
      system prompt.

    The same source gives the same bytes.
    """
    parser.add_argument("source", type=Path, help="a checkout of alibaba/ServeGen")
    parser.add_argument("out", type=Path, help="the trace to write")
    arguments = parser.parse_args(words)
    directory = arguments.source / CLIENTS
    clients = sorted(int(path.name.split("-")[1]) for path in directory.glob("*-trace.csv"))
    if not clients:
        parser.error(f"{directory} holds no client")
    rng = np.random.default_rng(SEED)
    by_client = [requests for client in clients if (requests := of_client(directory, client, rng))]
    chosen = [one for one in by_client if _answers_are_long(one)]
    requests = [request for one in chosen for request in one]
    kept = (rng.random(len(requests)) < KEPT / len(requests)).tolist()
    requests = [request for request, keep in zip(requests, kept, strict=True) if keep]
    requests.sort(key=lambda request: request.arrival_ns)
    write_native(arguments.out, requests)
    print(f"{len(requests):,} requests of {len(chosen)} of {len(clients)} clients")
    return 0
