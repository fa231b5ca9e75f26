"""Rerun every experiment of docs/results.md, and write its tables as Markdown, as docs/appendix has them.

    python scripts/reproduce_results.py OUT_DIR [NAME ..]

Each experiment is a plain `balanceroute simulate` command, printed before it runs; its JSON goes to
OUT_DIR/NAME.json and all tables go to OUT_DIR/tables.md, also the means over several cuts of a trace.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from math import log
from pathlib import Path
from typing import Any

from balanceroute.proxy.lab.sim.report import figure
from balanceroute.proxy.lab.sim.workload import playable
from balanceroute.traces import TraceRequest, read_trace, write_native

sys.path.insert(0, str(Path(__file__).parent / "table_runs"))

from conversations import (
    CONVERSATIONS,
    PREFILL_BASE_MS,
    PREFILL_TOKEN_US,
    TURN_CACHE_TOKENS,
    TURN_CASES,
    conversations,
    turns_rate,
)
from simulated import simulated

TRACES = Path("traces/public")
MOONCAKE = f"--trace {TRACES}/mooncake_conversation.jsonl.gz"
BASELINES = "random,round-robin,power-of-two,jsq,least-kv,fifo"
ALL = f"{BASELINES},br-0-bypass,br-0,br-h"
LEASES = (
    f"{MOONCAKE} --concurrency 192 --prefill-servers 2 --prefill-us-per-token 5 "
    "--transfer-base-ms 2 --transfer-us-per-token 1 --segments 6"
)
MANY = LEASES.replace("192", "256")
SLOW = LEASES.replace("token 5 ", "token 25 ")
SATURATED = f"{MOONCAKE} --ranks 8 --batch 16 --backlog 64 --segments 6"
DERIVED = "DERIVED"  # Stands for the folder that `derive` writes to.
# Ranks and slots, each with 12 turnovers in two segments.
SIZES = ((32, 64), (72, 64), (144, 64), (320, 128))


def cuts(name: str, command: str, variants: Mapping[str, str]) -> dict[str, str]:
    """Return a command for other numbers of segments than 6, with each variant's options."""
    return {
        f"{name}_{segments}{suffix}": f"{command} --segments {segments} {options}"
        for segments in (4, 5, 7, 8)
        for suffix, options in variants.items()
    }


# The rules of other routers. Those that use a client's length hint get the best one there can be.
RIVALS = {
    "": "--policy jsq,fifo,smg-least-load,br-0",
    "_hints": "--policy dynamo-kv,llmd-token-load --predictor oracle",
    "_no_hints": "--policy dynamo-kv --predictor none",
}
RIVAL_CUTS = (4, 5, 6, 7, 8)

UNEQUAL = "--rank-speeds 1,0.6667"
# What the scheduler knows of it.
KNOWLEDGE = {"": "", "_learned": "--learn-speeds", "_unknown": "--speeds-unknown"}

SERVEGEN = f"--trace {TRACES}/servegen_reasoning.jsonl.gz --backlog 64"
REASONING = f"{SERVEGEN} --segments 6"
# Ranks with little memory, which compute a preempted request again themselves.
MEMORY = f"{SERVEGEN} --skip 1500 --known 1500 --requests 5500 --ranks 4 --policy br-h"
LITTLE = "--recompute-us-per-token 50 --kv-capacity"
AZURE_LONG = f"--trace {TRACES}/azure_2023_conv.csv.gz --output-scale 40 --backlog 64 --segments 6"

# Prefill choices with prefix caches. A load of 1 keeps the prefillers busy with what a cache of all
# would not have: at the trace's own speed that is the work of 1.40 of them.
PREFILL_RULES = ("random", "fewest-tokens", "sticky", "cache-aware", "lmetric", "prefix-aware")
PREFILL_WORK = 1.40
FLEET = "--policy br-0 --ranks 16 --batch 64 --step-base-ms 10 --step-us-per-token 0.02"
PREFIXES = f"{MOONCAKE} --segments 2 {FLEET} --probe-limit none"
TURNS = f"--trace {DERIVED}/conversations.jsonl {FLEET} --probe-limit none"
# Of the prefillers, the load, and the tokens that each can cache.
PREFIX_CASES = (
    *((prefillers, load, 10**9) for prefillers in (2, 4, 8) for load in (0.7, 0.9, 1.1)),
    (4, 0.9, 2_000_000),
)


def prefixes(prefillers: int, load: float, cache: int) -> dict[str, str]:
    """Return the commands of one case, by name."""
    rate = round(load * prefillers / PREFILL_WORK, 3)
    return {
        f"prefixes_{prefillers}_{load}_{cache}_{rule}": f"{PREFIXES} --rate {rate} "
        f"--prefill-servers {prefillers} --prefix-cache {cache} --prefill-choice {rule}"
        for rule in PREFILL_RULES
    }


def turns(prefillers: int, load: float, cache: int = TURN_CACHE_TOKENS) -> dict[str, str]:
    """Return the commands of conversations, by name; the last is one fast prefiller with all caches."""
    name = f"turns_{prefillers}_{load}"
    command = f"{TURNS} --rate {turns_rate(prefillers, load)}"
    rules = {
        f"{name}_{rule}": f"{command} --prefill-servers {prefillers} --prefix-cache {cache} "
        f"--prefill-choice {rule}"
        for rule in PREFILL_RULES
    }
    one = f"--prefill-servers 1 --prefix-cache {10**9} --prefill-choice fewest-tokens"
    times = (
        f"--prefill-base-ms {PREFILL_BASE_MS / prefillers:g} "
        f"--prefill-us-per-token {PREFILL_TOKEN_US / prefillers:g}"
    )
    return rules | {f"{name}_one": f"{command} {one} {times}"}


EXPERIMENTS = (
    {
        "saturated": f"{SATURATED} --policy {ALL}",
        "saturated_oracle": f"{SATURATED} --policy br-h --predictor oracle",
        "saturated_none": f"{SATURATED} --policy br-h --predictor none",
        "window_16": f"{SATURATED} --policy br-0,br-h --window 16",
        "window_8": f"{SATURATED} --policy br-0,br-h --window 8",
        "no_patience": f"{SATURATED} --policy br-0,br-h --patience inf",
        "deadline_30": f"{SATURATED} --policy br-0,br-h --deadline 30",
        "point": f"{SATURATED} --policy br-h --projection point",
        "point_oracle": f"{SATURATED} --policy br-h --projection point --predictor oracle",
        "paper": f"{SATURATED} --policy jsq,br-0,br-h --paper",
        "paper_oracle": f"{SATURATED} --policy br-h --paper --predictor oracle",
        "paper_rate_1.0": f"{MOONCAKE} --rate 1 --segments 6 --policy jsq,br-0,br-h --paper",
        "kv_capacity": f"{SATURATED} --kv-capacity 260000",
        "azure_conv": f"--trace {TRACES}/azure_2023_conv.csv.gz --backlog 64 --segments 6",
        "azure_code": f"--trace {TRACES}/azure_2023_code.csv.gz --backlog 64 --segments 6",
        "azure_conv_batch_128": f"--trace {TRACES}/azure_2023_conv.csv.gz --batch 128 "
        "--backlog 512 --segments 2",
        "azure_code_batch_128": f"--trace {TRACES}/azure_2023_code.csv.gz --batch 128 "
        "--backlog 512 --segments 2",
        "leases": f"{LEASES} --lease-s 30 --policy jsq,fifo,br-0,br-h",
        "leases_forced": f"{LEASES} --lease-s 30 --pool-limit 64 --deadline 18.75 --policy br-0,br-h",
        "leases_none": f"{LEASES} --policy jsq,fifo,br-0,br-h",
        "deep_pool": f"{LEASES} --lease-s 30 --policy br-0 --pool-limit 65",
        "deep_pool_256": f"{MANY} --lease-s 30 --policy br-0",
        "deep_pool_256_65": f"{MANY} --lease-s 30 --policy br-0 --pool-limit 65",
        "deep_pool_256_96": f"{MANY} --lease-s 30 --policy br-0 --pool-limit 96",
        "leases_slow": f"{SLOW} --lease-s 30 --policy br-0",
        "leases_slow_forced": f"{SLOW} --lease-s 30 --pool-limit 64 --deadline 18.75 --policy br-0",
        "leases_15": f"{LEASES} --lease-s 15 --policy br-0",
        "leases_60": f"{LEASES} --lease-s 60 --policy br-0",
        "prefill_rate_1.0": f"{MOONCAKE} --rate 1 --segments 6 --prefill-servers 10",
        "prefill_rate_1.3": f"{MOONCAKE} --rate 1.3 --segments 6 --prefill-servers 12",
    }
    | {
        f"leases_pool_{limit}": f"{LEASES} --lease-s 30 --policy br-0 --pool-limit {limit}"
        for limit in (12, 18, 36, 48, 64)
    }
    | {
        f"memory{suffix}": f"{SATURATED} --policy fifo,br-h {LITTLE} 120000 {options}"
        for suffix, options in {"": "", "_0.999": "--kv-peak-quantile 0.999"}.items()
    }
    | {
        f"memory_reasoning{suffix}": f"{MEMORY} --batch 64 {LITTLE} 60000 {options}"
        for suffix, options in {
            "": "",
            "_0.5": "--kv-peak-quantile 0.5",
            "_0.7": "--kv-peak-quantile 0.7",
            "_0.9": "--kv-peak-quantile 0.9",
            "_0.99": "--kv-peak-quantile 0.99",
            "_0.99_oracle": "--kv-peak-quantile 0.99 --predictor oracle",
        }.items()
    }
    | {
        f"memory_reasoning_{name}": f"{MEMORY} --batch {options}"
        for name, options in {
            "29_slots": "29",
            "25_slots": "25",
            "29_slots_oracle": "29 --predictor oracle",
        }.items()
    }
    | {
        "long_outputs": f"{REASONING} --policy fifo,br-0,br-h",
        "long_outputs_azure": f"{AZURE_LONG} --policy fifo,br-h",
    }
    | {
        "long_outputs_exact-match": f"{REASONING} --policy br-h --predictor exact-match",
    }
    | {
        f"long_outputs{suffix}_{predictor}": f"{command} --policy br-h --predictor {predictor}"
        for suffix, command in (("", REASONING), ("_azure", AZURE_LONG))
        for predictor in ("oracle", "thirds")
    }
    | {
        f"rate_{rate}": f"{MOONCAKE} --ranks 8 --batch 16 --rate {rate} --segments 6 --policy {ALL}"
        for rate in (0.6, 0.8, 1.0, 1.2, 1.4, 1.6)
    }
    | {
        f"rivals_{segments}{suffix}": f"{MOONCAKE} --ranks 8 --batch 16 --backlog 64 "
        f"--segments {segments} {options}"
        for segments in RIVAL_CUTS
        for suffix, options in RIVALS.items()
    }
    | {
        f"rivals_ranks_{ranks}{suffix}": f"{MOONCAKE} --ranks {ranks} --batch 16 "
        f"--backlog {8 * ranks} --segments {segments} {options}"
        for ranks, segments in ((16, 3), (32, 2))
        for suffix, options in RIVALS.items()
    }
    | {
        f"rivals_rate_{rate}{suffix}": f"{MOONCAKE} --ranks 8 --batch 16 --rate {rate} --segments 6 "
        f"--prefill-servers 2 --prefill-us-per-token 5 --lease-s 30 {options}"
        for rate in (0.6, 0.8, 1.0, 1.2, 1.4, 1.6)
        for suffix, options in RIVALS.items()
    }
    | {
        f"engines_{name}": f"{SATURATED} --policy jsq,fifo,br-0 {options}"
        for name, options in {
            "speeds": "--rank-speeds 1,0.6667",
            "speeds_learned": "--rank-speeds 1,0.6667 --learn-speeds",
            "batches": "--rank-batches 16,8",
            "speculative": "--tokens-per-step 3",
            "pausing": "--pause-above 0.1",
        }.items()
    }
    | {
        f"unequal_{name}{suffix}": f"{command} --segments 3 --policy br-0 {UNEQUAL} {options}"
        for name, command in {
            "leases": f"{LEASES} --lease-s 30",
            "rate_1.0": f"{MOONCAKE} --rate 1 --prefill-servers 2 --prefill-us-per-token 5 --lease-s 30",
            "azure": f"--trace {TRACES}/azure_2023_conv.csv.gz --backlog 64",
        }.items()
        for suffix, options in KNOWLEDGE.items()
    }
    | {
        f"ranks_{ranks}": f"{MOONCAKE} --ranks {ranks} --batch 16 --backlog {8 * ranks} "
        f"--segments {segments}"
        for ranks, segments in ((4, 12), (8, 6), (16, 3), (32, 2))
    }
    | cuts(
        "segments",
        f"{MOONCAKE} --ranks 8 --batch 16 --backlog 64",
        {"": "--policy jsq,fifo,br-0,br-h", "_oracle": "--policy br-h --predictor oracle"},
    )
    | cuts(
        "azure_code",
        f"--trace {TRACES}/azure_2023_code.csv.gz --backlog 64",
        {
            "": "--policy br-0,br-h",
            "_oracle": "--policy br-h --predictor oracle",
            "_none": "--policy br-h --predictor none",
        },
    )
    | {
        "repaired": f"--trace {DERIVED}/repaired.jsonl --backlog 64 --segments 6 "
        "--policy jsq,fifo,br-0,br-h"
    }
    | {
        f"scale_{ranks}x{slots}": f"--trace {DERIVED}/bootstrapped_{ranks}x{slots}.jsonl "
        f"--ranks {ranks} --batch {slots} --backlog {8 * ranks} --segments 2 --policy fifo,br-0"
        for ranks, slots in SIZES
    }
    | {name: command for case in PREFIX_CASES for name, command in prefixes(*case).items()}
    | {name: command for case in TURN_CASES for name, command in turns(*case).items()}
    | {
        f"beta_{beta}": f"{SATURATED} --policy br-h --predictor oracle --beta {beta}"
        for beta in (1, 8, 24, 48, 96)
    }
    | {
        f"gamma_{gamma}": f"{SATURATED} --policy br-h --predictor oracle --gamma {gamma}"
        for gamma in (0.5, 0.7, 0.9, 1.0)
    }
)

# Experiments that are cuts of one trace, and so have a common mean.
POOLS = {
    f"rivals{suffix}": [f"rivals_{segments}{suffix}" for segments in RIVAL_CUTS]
    for suffix in RIVALS
}

# Experiments that share a table, one row each.
TABLES = {
    f"prefixes: {prefillers} prefillers, load {load}, {cache:,} tokens cached": list(
        prefixes(prefillers, load, cache)
    )
    for prefillers, load, cache in PREFIX_CASES
} | {
    f"turns: {prefillers} prefillers, load {load}": list(turns(prefillers, load))
    for prefillers, load in TURN_CASES
}

# Names that stand for many experiments.
FAMILIES = {
    family: [one for name, members in TABLES.items() if name.startswith(family) for one in members]
    for family in ("prefixes", "turns")
}

# Heading, figure, digits, scale.
PREFIX_COLUMNS = (
    ("hits %", "prefix_hit_fraction", 1, 100),
    ("computed M tokens", "prefill_tokens", 1, 1e-6),
    ("busiest / mean", "prefiller_peak", 2, 1),
    ("TTFT p50 s", "ttft_s_p50", 2, 1),
    ("TTFT p99 s", "ttft_s_p99", 2, 1),
    ("idle %", "idle_fraction", 1, 100),
)
COLUMNS = (
    ("imbalance tokens", "mean_imbalance_tokens", 0, 1),
    ("idle %", "idle_fraction", 1, 100),
    ("output tokens/s", "output_tokens_per_s", 0, 1),
    ("TPOT p95 ms", "tpot_ms_p95", 1, 1),
    ("wait p50 s", "pool_wait_s_p50", 2, 1),
    ("wait p99 s", "pool_wait_s_p99", 2, 1),
    ("wait max s", "pool_wait_s_max", 1, 1),
)


def markdown(
    rows: Sequence[dict[str, Any]],
    columns: Sequence[tuple[str, str, int, float]] = COLUMNS,
    label: str = "policy",
) -> str:
    """Return rows of reports as a Markdown table, each mean with its standard error."""
    headings = (label, *(heading for heading, *_ in columns))
    lines = [f"| {' | '.join(headings)} |", f"| --- |{' ---: |' * len(columns)}"]
    for row in rows:
        cells = [
            figure(scale * row[name], scale * (row["stderr"][name] or 0.0), digits)
            for _, name, digits, scale in columns
        ]
        lines.append(f"| `{row[label]}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def pooled(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a report of the means over all segments of all reports, with their standard errors."""
    rows = []
    for same in zip(*(report["results"] for report in reports), strict=True):
        counts = [report["config"]["segments"] for report in reports]
        segments = sum(counts)
        row: dict[str, Any] = {"policy": same[0]["policy"], "stderr": {}}
        for _, name, _, _ in COLUMNS:
            row[name] = sum(n * one[name] for n, one in zip(counts, same, strict=True)) / segments
            squares = sum(
                n * (n - 1) * one["stderr"][name] ** 2 + n * (one[name] - row[name]) ** 2
                for n, one in zip(counts, same, strict=True)
            )
            row["stderr"][name] = (squares / (segments - 1) / segments) ** 0.5
        rows.append(row)
    return {"results": rows}


def choice_label(config: Mapping[str, Any]) -> str:
    """Return what a row of prefill choices is called."""
    one = config["prefill_servers"] == 1
    return "one fast prefiller" if one else str(config["prefill_choice"])


def repaired(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return the requests with each other's outputs: the larger a prompt, the shorter.

    The outputs in ascending order go to the prompts in descending order, after a random factor of
    e**0.5, and are scaled by 0.45.
    """
    rng = random.Random(1)
    order = sorted(
        range(len(requests)),
        key=lambda index: -log(requests[index].prompt_tokens) + rng.gauss(0.0, 0.5),
    )
    outputs = sorted(request.output_tokens for request in requests)
    paired = dict(zip(order, outputs, strict=True))
    return [
        replace(request, output_tokens=max(1, round(0.45 * paired[index])))
        for index, request in enumerate(requests)
    ]


def bootstrapped(requests: Sequence[TraceRequest], size: int) -> list[TraceRequest]:
    """Return `size` requests, a second apart: blocks of 40 in a row, drawn at random."""
    rng = random.Random(0)
    drawn: list[TraceRequest] = []
    while len(drawn) < size:
        start = rng.randrange(len(requests) - 40)
        drawn += requests[start : start + 40]
    return [
        replace(request, arrival_ns=second * 10**9, hash_ids=())
        for request, second in zip(drawn[:size], count(), strict=False)
    ]


def _mooncake() -> list[TraceRequest]:
    return playable(read_trace(TRACES / "mooncake_conversation.jsonl.gz"))


def _fleet(ranks: int, slots: int) -> list[TraceRequest]:
    return bootstrapped(_mooncake(), 12 * ranks * slots)


# How the traces that are not public are made, by file.
DERIVATIONS: Mapping[str, Callable[[], list[TraceRequest]]] = {
    "repaired.jsonl": lambda: repaired(_mooncake()),
    "conversations.jsonl": lambda: conversations(CONVERSATIONS),
} | {f"bootstrapped_{ranks}x{slots}.jsonl": partial(_fleet, ranks, slots) for ranks, slots in SIZES}


def derive(folder: Path, commands: Iterable[str]) -> None:
    """Write the traces that are not public and that some of the commands read."""
    words = {word for command in commands for word in command.split()}
    for name, make in DERIVATIONS.items():
        if f"{DERIVED}/{name}" in words:
            folder.mkdir(exist_ok=True)
            write_native(folder / name, make())


def main() -> int:
    """Run the chosen experiments, all by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join((*FAMILIES, *EXPERIMENTS))}"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(EXPERIMENTS) - set(FAMILIES)
    if unknown:
        parser.error(f"unknown experiments: {', '.join(sorted(unknown))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    sections: list[str] = []
    reports: dict[str, dict[str, Any]] = {}
    names = [one for name in arguments.names or EXPERIMENTS for one in FAMILIES.get(name, [name])]
    derive(arguments.out / "derived", [EXPERIMENTS[name] for name in names])
    for name in names:
        command = EXPERIMENTS[name].replace(DERIVED, str(arguments.out / "derived"))
        report = reports[name] = simulated(command, arguments.out / f"{name}.json")
        sections.append(
            f"## {name}\n\n    balanceroute simulate {command}\n\n{markdown(report['results'])}\n"
        )
    for name, members in POOLS.items():
        if reports.keys() >= set(members):
            table = markdown(pooled([reports[member] for member in members])["results"])
            sections.append(f"## {name}: {', '.join(members)}\n\n{table}\n")
    for name, members in TABLES.items():
        if reports.keys() >= set(members):
            rows = [
                reports[member]["results"][0]
                | {"prefill choice": choice_label(reports[member]["config"])}
                for member in members
            ]
            table = markdown(rows, PREFIX_COLUMNS, "prefill choice")
            sections.append(f"## {name}\n\n{table}\n")
    (arguments.out / "tables.md").write_text("\n".join(sections), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
