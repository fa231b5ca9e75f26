"""Make traces/public/servegen_reasoning.jsonl.gz from ServeGen's client data.

    git clone https://github.com/alibaba/ServeGen build/ServeGen
    python scripts/make_servegen_trace.py build/ServeGen traces/public/servegen_reasoning.jsonl.gz

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

import argparse
import ast
import csv
import json
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from balanceroute.traces import TraceRequest
from balanceroute.traces.formats import write_native

CLIENTS = "data/reason/deepseek-r1"
WINDOW_S = 600
LEAST_RATIO = 3.0
REQUESTS = 24_000
SEED = 13

Lengths = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Lengths, and the cumulated probability of each."""


def lengths_of(text: str) -> Lengths:
    """Return a distribution of ServeGen; no lengths if the client sent nothing then."""
    # ServeGen writes a Python dictionary in a JSON string.
    shares: dict[int, float] = ast.literal_eval(text)
    lengths = np.array(sorted(shares), np.int64)
    cumulated = np.cumsum([shares[length] for length in lengths.tolist()])
    return lengths, cumulated / cumulated[-1:]


def draw(known: Lengths, count: int, rng: np.random.Generator) -> list[int]:
    """Return `count` lengths, each at least 1."""
    lengths, cumulated = known
    drawn: list[int] = np.maximum(
        lengths[np.searchsorted(cumulated, rng.random(count))], 1
    ).tolist()
    return drawn


def of_client(directory: Path, client: int, rng: np.random.Generator) -> list[TraceRequest]:
    """Return the requests of one client, by arrival."""
    distributions = json.loads((directory / f"chunk-{client}-dataset.json").read_text("utf-8"))
    by_start = {
        int(start_s): (lengths_of(fields["input_tokens"]), lengths_of(fields["output_tokens"]))
        for start_s, fields in distributions.items()
    }
    requests: list[TraceRequest] = []
    with (directory / f"chunk-{client}-trace.csv").open(encoding="utf-8", newline="") as file:
        for start, rate, _, pattern, shape, scale in csv.reader(file):
            start_s = int(start)
            # The latest distributions in which the client sent anything.
            known = [
                pair
                for begin_s, pair in sorted(by_start.items())
                if begin_s <= start_s and all(len(lengths) for lengths, _ in pair)
            ]
            if not pattern or not known:
                continue
            count = int(np.ceil(float(rate) * WINDOW_S))
            if pattern == "Gamma":
                gaps = rng.gamma(float(shape), float(scale), count)
            else:
                gaps = float(scale) * rng.weibull(float(shape), count)
            # Stretched, the last one would come as the window ends: ServeGen leaves it out.
            times_s = start_s + np.cumsum(gaps)[:-1] * (WINDOW_S / gaps.sum())
            prompts, outputs = (draw(lengths, len(times_s), rng) for lengths in known[-1])
            requests += [
                TraceRequest(round(1e9 * time_s), prompt, output, (client,))
                for time_s, prompt, output in zip(times_s.tolist(), prompts, outputs, strict=True)
            ]
    return requests


def answers_are_long(requests: list[TraceRequest]) -> bool:
    """Return whether a client's mean output is `LEAST_RATIO` times its mean prompt."""
    prompt = fmean(request.prompt_tokens for request in requests)
    return fmean(request.output_tokens for request in requests) >= LEAST_RATIO * prompt


def main() -> int:
    """Write the trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a checkout of alibaba/ServeGen")
    parser.add_argument("out", type=Path, help="the trace to write")
    parser.add_argument("--all", action="store_true", help="keep every client")
    arguments = parser.parse_args()
    directory = arguments.source / CLIENTS
    clients = sorted(int(path.name.split("-")[1]) for path in directory.glob("*-trace.csv"))
    if not clients:
        parser.error(f"{directory} holds no client")
    rng = np.random.default_rng(SEED)
    by_client = [requests for client in clients if (requests := of_client(directory, client, rng))]
    chosen = [one for one in by_client if arguments.all or answers_are_long(one)]
    requests = [request for one in chosen for request in one]
    kept = (rng.random(len(requests)) < REQUESTS / len(requests)).tolist()
    requests = [request for request, keep in zip(requests, kept, strict=True) if keep]
    requests.sort(key=lambda request: request.arrival_ns)
    write_native(arguments.out, requests)
    print(f"{len(requests):,} requests of {len(chosen)} of {len(clients)} clients")
    return 0


if __name__ == "__main__":
    sys.exit(main())
