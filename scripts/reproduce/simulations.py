"""Tables of `balanceroute simulate` commands, what follows from their reports, and the traces that they read."""

import argparse
import ast
import csv
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import log
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.events import Action, Admit, Event, RequestId, StepCompleted
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.policies.two_stage import TwoStage
from balanceroute.proxy.lab.pictures import INK, empty_figure, write_pictures
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment, Simulation
from balanceroute.proxy.lab.sim.workload import split
from balanceroute.traces import TraceRequest, write_native
from experiment import AZURE_CONV as AZURE_CONV_TRACE
from experiment import MOONCAKE as MOONCAKE_TRACE
from experiment import Columns, measured, requests_of, simulated, table_head, table_row, tabulated
from reproduce.turns import (
    CONVERSATIONS,
    PREFILL_BASE_MS,
    PREFILL_TOKEN_US,
    TURN_CACHE_TOKENS,
    TURN_CASES,
    conversations,
    turns_rate,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PUBLIC = Path("traces/public")
MOONCAKE = f"--trace {PUBLIC}/mooncake_conversation.jsonl.gz"
BASELINES = "random,round-robin,power-of-two,jsq,least-kv,fifo"
ALL = f"{BASELINES},br-0-bypass,br-0,br-h"
LEASES = (
    f"{MOONCAKE} --concurrency 192 --prefill-servers 2 --prefill-us-per-token 5 "
    "--transfer-base-ms 2 --transfer-us-per-token 1 --segments 6"
)
MANY = LEASES.replace("192", "256")
SLOW = LEASES.replace("token 5 ", "token 25 ")
EIGHT_RANKS = f"{MOONCAKE} --ranks 8 --batch 16"
SATURATED = f"{EIGHT_RANKS} --backlog 64 --segments 6"
AZURE_CONV, AZURE_CODE = (f"--trace {PUBLIC}/azure_2023_{one}.csv.gz" for one in ("conv", "code"))
RATES = (0.6, 0.8, 1.0, 1.2, 1.4, 1.6)
DERIVED = "DERIVED"  # Stands for the folder that `derive` writes to.
# Ranks and slots, each with 12 turnovers in two segments.
SIZES = ((32, 64), (72, 64), (144, 64), (320, 128))


def variants(
    name: str, command: str, options: Mapping[str, str] | Iterable[float]
) -> dict[str, str]:
    """Return a command with each of some options, by name and suffix; numbers are their own suffixes."""
    if not isinstance(options, Mapping):
        options = {str(one): str(one) for one in options}
    return {f"{name}{suffix}": f"{command} {words}" for suffix, words in options.items()}


def cuts(
    name: str,
    command: str,
    options: Mapping[str, str],
    segments: Iterable[int] = (4, 5, 7, 8),
) -> dict[str, str]:
    """Return a command for some numbers of segments, with each of the options."""
    return {
        key: words
        for number in segments
        for key, words in variants(
            f"{name}_{number}", f"{command} --segments {number}", options
        ).items()
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

SERVEGEN = f"--trace {PUBLIC}/servegen_reasoning.jsonl.gz --backlog 64"
REASONING = f"{SERVEGEN} --segments 6"
# Ranks with little memory, which compute a preempted request again themselves.
MEMORY = f"{SERVEGEN} --skip 1500 --known 1500 --requests 5500 --ranks 4 --policy br-h"
LITTLE = "--recompute-us-per-token 50 --kv-capacity"
AZURE_LONG = f"{AZURE_CONV} --output-scale 40 --backlog 64 --segments 6"

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


# The paper's routers: the baselines, BR-0 and BR-H survival, and BR-H with other predictions.
PAPER = {
    "": "--policy random,round-robin,power-of-two,jsq,br-0,br-h --paper",
    "_exact-match": "--policy br-h --paper --predictor exact-match",
    "_oracle_40": "--policy br-h --paper --predictor oracle --horizon 40",
    "_oracle": "--policy br-h --paper --predictor oracle",
}
PAPER_CASES = {
    "Mooncake, G = 8": ("paper_8", SATURATED),
    "Azure, G = 8": (
        "paper_azure",
        f"--trace {DERIVED}/long_answers.jsonl --batch 64 --backlog 256 --segments 2",
    ),
    "Mooncake, G = 4": ("paper_4", f"{MOONCAKE} --ranks 4 --batch 16 --backlog 32 --segments 12"),
    "Mooncake, G = 16": (
        "paper_16",
        f"{MOONCAKE} --ranks 16 --batch 16 --backlog 128 --segments 3",
    ),
}
LONG_ANSWER = 350  # Tokens.
# What the limit on requests in flight begins with. Some three times what the ranks can do.
FIRST_LIMITS = (4, 8, 16, 32, 64, 128, 256)
OVERLOAD = (
    f"{AZURE_CONV} --rate 3 --requests 6000 --segments 2 --ranks 2 --batch 64 --policy br-0 "
    "--step-base-ms 47 --step-us-per-token 0.7 --prefill-servers 2 --prefill-us-per-token 25 "
    "--aimd post5"
)


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
        "paper_rate_1.0": f"{MOONCAKE} --rate 1 --segments 6 --policy jsq,br-0,br-h --paper",
        "kv_capacity": f"{SATURATED} --kv-capacity 260000",
        "azure_conv": f"{AZURE_CONV} --backlog 64 --segments 6",
        "azure_code": f"{AZURE_CODE} --backlog 64 --segments 6",
        "azure_conv_batch_128": f"{AZURE_CONV} --batch 128 --backlog 512 --segments 2",
        "azure_code_batch_128": f"{AZURE_CODE} --batch 128 --backlog 512 --segments 2",
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
    | variants(
        "leases_pool_", f"{LEASES} --lease-s 30 --policy br-0 --pool-limit", (12, 18, 36, 48, 64)
    )
    | variants(
        "memory",
        f"{SATURATED} --policy fifo,br-h {LITTLE} 120000",
        {"": "", "_0.999": "--kv-peak-quantile 0.999"},
    )
    | variants(
        "memory_reasoning",
        f"{MEMORY} --batch 64 {LITTLE} 60000",
        {"": ""}
        | {f"_{one}": f"--kv-peak-quantile {one}" for one in (0.5, 0.7, 0.9, 0.99)}
        | {"_0.99_oracle": "--kv-peak-quantile 0.99 --predictor oracle"},
    )
    | variants(
        "memory_reasoning_",
        f"{MEMORY} --batch",
        {"29_slots": "29", "25_slots": "25", "29_slots_oracle": "29 --predictor oracle"},
    )
    | {
        "long_outputs": f"{REASONING} --policy fifo,br-0,br-h",
        "long_outputs_azure": f"{AZURE_LONG} --policy fifo,br-h",
        "long_outputs_exact-match": f"{REASONING} --policy br-h --predictor exact-match",
    }
    | {
        f"long_outputs{suffix}_{predictor}": f"{command} --policy br-h --predictor {predictor}"
        for suffix, command in (("", REASONING), ("_azure", AZURE_LONG))
        for predictor in ("oracle", "thirds")
    }
    | {f"rate_{rate}": f"{EIGHT_RANKS} --rate {rate} --segments 6 --policy {ALL}" for rate in RATES}
    | cuts("rivals", f"{EIGHT_RANKS} --backlog 64", RIVALS, RIVAL_CUTS)
    | {
        f"rivals_ranks_{ranks}{suffix}": f"{MOONCAKE} --ranks {ranks} --batch 16 "
        f"--backlog {8 * ranks} --segments {segments} {options}"
        for ranks, segments in ((16, 3), (32, 2))
        for suffix, options in RIVALS.items()
    }
    | {
        f"rivals_rate_{rate}{suffix}": f"{EIGHT_RANKS} --rate {rate} --segments 6 "
        f"--prefill-servers 2 --prefill-us-per-token 5 --lease-s 30 {options}"
        for rate in RATES
        for suffix, options in RIVALS.items()
    }
    | variants(
        "engines_",
        f"{SATURATED} --policy jsq,fifo,br-0",
        {
            "speeds": UNEQUAL,
            "speeds_learned": f"{UNEQUAL} --learn-speeds",
            "batches": "--rank-batches 16,8",
            "speculative": "--tokens-per-step 3",
            "pausing": "--pause-above 0.1",
        },
    )
    | {
        f"unequal_{name}{suffix}": f"{command} --segments 3 --policy br-0 {UNEQUAL} {options}"
        for name, command in {
            "leases": f"{LEASES} --lease-s 30",
            "rate_1.0": f"{MOONCAKE} --rate 1 --prefill-servers 2 --prefill-us-per-token 5 --lease-s 30",
            "azure": f"{AZURE_CONV} --backlog 64",
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
        f"{EIGHT_RANKS} --backlog 64",
        {"": "--policy jsq,fifo,br-0,br-h", "_oracle": "--policy br-h --predictor oracle"},
    )
    | cuts(
        "azure_code",
        f"{AZURE_CODE} --backlog 64",
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
        key: words
        for name, command in PAPER_CASES.values()
        for key, words in variants(name, command, PAPER).items()
    }
    | {f"fixed_limit_{n}": f"{OVERLOAD} --aimd-min {n} --aimd-max {n}" for n in FIRST_LIMITS}
    | {
        f"first_limit_{n}": f"{OVERLOAD} --aimd-first {n} --aimd-min 4 --aimd-max 256"
        for n in FIRST_LIMITS
    }
    | variants("beta_", f"{SATURATED} --policy br-h --predictor oracle --beta", (1, 8, 24, 48, 96))
    | variants(
        "gamma_", f"{SATURATED} --policy br-h --predictor oracle --gamma", (0.5, 0.7, 0.9, 1.0)
    )
)

# Experiments that are cuts of one trace, and so have a common mean.
POOLS = {
    f"rivals{suffix}": [f"rivals_{segments}{suffix}" for segments in RIVAL_CUTS]
    for suffix in RIVALS
}

# Experiments that share a table: by its family and title, with a row for each of their results.
TABLES = (
    {
        f"prefixes: {prefillers} prefillers, load {load}, {cache:,} tokens cached": list(
            prefixes(prefillers, load, cache)
        )
        for prefillers, load, cache in PREFIX_CASES
    }
    | {
        f"turns: {prefillers} prefillers, load {load}": list(turns(prefillers, load))
        for prefillers, load in TURN_CASES
    }
    | {
        "first-limits: controller off": [f"fixed_limit_{limit}" for limit in FIRST_LIMITS],
        "first-limits: controller on": [f"first_limit_{limit}" for limit in FIRST_LIMITS],
        **{
            f"paper-tables: {title}": list(variants(name, command, PAPER))
            for title, (name, command) in PAPER_CASES.items()
        },
    }
)

# Names that stand for many experiments.
FAMILIES = {
    family: [one for name, members in TABLES.items() if name.startswith(family) for one in members]
    for family in ("prefixes", "turns", "first-limits", "paper-tables")
}

PREFIX_COLUMNS = (
    ("hits %", measured("prefix_hit_fraction", 1, 100)),
    ("computed M tokens", measured("prefill_tokens", 1, 1e-6)),
    ("busiest / mean", measured("prefiller_peak", 2)),
    ("TTFT p50 s", measured("ttft_s_p50", 2)),
    ("TTFT p99 s", measured("ttft_s_p99", 2)),
    ("idle %", measured("idle_fraction", 1, 100)),
)
LIMIT_COLUMNS = (
    ("TTFT p50 s", measured("ttft_s_p50", 2)),
    ("TTFT p99 s", measured("ttft_s_p99", 2)),
    ("answer mean s", measured("latency_s_mean", 1)),
    ("output tokens/s", measured("output_tokens_per_s", 0)),
    ("running", measured("mean_running", 0)),
    ("expired", measured("expired", 0)),
)
COLUMNS = (
    ("imbalance tokens", measured("mean_imbalance_tokens", 0)),
    ("idle %", measured("idle_fraction", 1, 100)),
    ("output tokens/s", measured("output_tokens_per_s", 0)),
    ("TPOT p95 ms", measured("tpot_ms_p95", 1)),
    ("wait p50 s", measured("pool_wait_s_p50", 2)),
    ("wait p99 s", measured("pool_wait_s_p99", 2)),
    ("wait max s", measured("pool_wait_s_max", 1)),
)


def by_policy(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows of reports as a table."""
    return tabulated(("policy",), COLUMNS, (((f"`{row['policy']}`",), row) for row in rows))


def pooled(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a report of the means over all segments of all reports, with their standard errors."""
    rows = []
    for same in zip(*(report["results"] for report in reports), strict=True):
        counts = [report["config"]["segments"] for report in reports]
        segments = sum(counts)
        row: dict[str, Any] = {"policy": same[0]["policy"], "stderr": {}}
        for name in same[0]["stderr"]:
            row[name] = sum(n * one[name] for n, one in zip(counts, same, strict=True)) / segments
            squares = sum(
                n * (n - 1) * one["stderr"][name] ** 2 + n * (one[name] - row[name]) ** 2
                for n, one in zip(counts, same, strict=True)
            )
            row["stderr"][name] = (squares / (segments - 1) / segments) ** 0.5
        rows.append(row)
    return {"results": rows}


def choice_label(config: Mapping[str, Any], _row: Mapping[str, Any]) -> str:
    """Return what a row of prefill choices is called."""
    one = config["prefill_servers"] == 1
    return f"`{'one fast prefiller' if one else config['prefill_choice']}`"


def router_label(config: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Return what a row of the paper's tables is called."""
    predicts = f" {config['predictor']}, H = {config['horizon']}"
    return f"`{row['policy']}`{predicts if row['policy'] == 'br-h' else ''}"


# Of each family: the heading of the first column, what stands in it, and the others.
ROWS: Mapping[str, tuple[str, Callable[..., object], Columns]] = {
    **dict.fromkeys(("prefixes", "turns"), ("prefill choice", choice_label, PREFIX_COLUMNS)),
    "first-limits": (
        "first limit",
        lambda config, _row: config["aimd_first"] or config["aimd_max"],
        LIMIT_COLUMNS,
    ),
    "paper-tables": ("router", router_label, COLUMNS),
}


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


def _fleet(ranks: int, slots: int) -> list[TraceRequest]:
    return bootstrapped(requests_of(MOONCAKE_TRACE), 12 * ranks * slots)


# How the traces that are not public are made, by file.
DERIVATIONS: Mapping[str, Callable[[], list[TraceRequest]]] = {
    "repaired.jsonl": lambda: repaired(requests_of(MOONCAKE_TRACE)),
    "conversations.jsonl": lambda: conversations(CONVERSATIONS),
    "long_answers.jsonl": lambda: [
        one for one in requests_of(AZURE_CONV_TRACE) if one.output_tokens >= LONG_ANSWER
    ],
} | {f"bootstrapped_{ranks}x{slots}.jsonl": partial(_fleet, ranks, slots) for ranks, slots in SIZES}


def derive(folder: Path, commands: Iterable[str]) -> None:
    """Write the traces that are not public and that some of the commands read."""
    words = {word for command in commands for word in command.split()}
    for name, make in DERIVATIONS.items():
        if f"{DERIVED}/{name}" in words:
            folder.mkdir(exist_ok=True)
            write_native(folder / name, make())


def simulations(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Rerun every experiment of docs/results.md, and write its tables as Markdown, as docs/appendix has them.

    Each experiment is a plain `balanceroute simulate` command, printed before it runs; its JSON goes to
    OUT_DIR/NAME.json and all tables go to OUT_DIR/tables.md, also the means over several cuts of a trace.
    """
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join((*FAMILIES, *EXPERIMENTS))}"
    )
    arguments = parser.parse_args(words)
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
            f"## {name}\n\n    balanceroute simulate {command}\n\n{by_policy(report['results'])}\n"
        )
    for name, members in POOLS.items():
        if reports.keys() >= set(members):
            table = by_policy(pooled([reports[member] for member in members])["results"])
            sections.append(f"## {name}: {', '.join(members)}\n\n{table}\n")
    for name, members in TABLES.items():
        if reports.keys() >= set(members):
            heading, label, columns = ROWS[name.partition(":")[0]]
            rows = (
                ((label(reports[member]["config"], row),), row)
                for member in members
                for row in reports[member]["results"]
            )
            table = tabulated((heading,), columns, rows)
            sections.append(f"## {name}\n\n{table}\n")
    (arguments.out / "tables.md").write_text("\n".join(sections), encoding="utf-8")
    return 0


SHARES = (1.0, 137 / 300)


def energy_of(row: dict[str, Any], base_ms: float, share: float) -> float:
    """Return the energy per output token of one policy, in P x seconds of one rank, less the factor G.

    Args:
        row: Its figures.
        base_ms: a.
        share: s.
    """
    step_ms = 1e3 * row["mean_running"] / row["output_tokens_per_s"]
    waiting = row["idle_fraction"] * (1.0 - base_ms / step_ms)
    return float((1.0 - (1.0 - share) * waiting) / row["output_tokens_per_s"])


def energy(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Energy per output token of the policies of one simulation, as a ratio to the first, as Markdown.

    The power model has two levels: a rank draws P while it computes, and s P while it waits for the others
    at the barrier. Each of G ranks waits for the share w = idle x (1 - a / T) of a step of T = a + b max L,
    so an output token takes

        G P (1 - (1 - s) w) / (output tokens per second).

    s is between two measurements: an accelerator that polls while it waits draws what it draws in a kernel
    (s = 1); and the H200 draws 137 to 300 W in decode, depending on the batch and the model
    (https://arxiv.org/abs/2605.11999), so that s = 137 / 300 is a rank that waits as if it had next to
    nothing to do.
    """
    parser.add_argument("report", type=Path, metavar="JSON", help="of `balanceroute simulate`")
    parser.add_argument("policies", nargs="*", metavar="POLICY", help="the first is 1; all if none")
    arguments = parser.parse_args(words)
    report = json.loads(arguments.report.read_text(encoding="utf-8"))
    rows = {row["policy"]: row for row in report["results"]}
    base_ms = report["config"]["step_base_ms"]
    names = arguments.policies or list(rows)
    print(table_head("policy", *(f"s = {share:.2f}:" for share in SHARES)))
    for name in names:
        ratios = [
            energy_of(rows[name], base_ms, share) / energy_of(rows[names[0]], base_ms, share)
            for share in SHARES
        ]
        print(table_row(f"`{name}`", *(f"{ratio:.2f}" for ratio in ratios)))


CLIENTS = "data/reason/deepseek-r1"
WINDOW_S = 600
LEAST_RATIO = 3.0
KEPT = 24_000
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
    chosen = [one for one in by_client if answers_are_long(one)]
    requests = [request for one in chosen for request in one]
    kept = (rng.random(len(requests)) < KEPT / len(requests)).tolist()
    requests = [request for request, keep in zip(requests, kept, strict=True) if keep]
    requests.sort(key=lambda request: request.arrival_ns)
    write_native(arguments.out, requests)
    print(f"{len(requests):,} requests of {len(chosen)} of {len(clients)} clients")
    return 0


# What a reservation does, as a picture.

RANKS, BATCH, BACKLOG, SEGMENTS = 8, 16, 64, 6
MARGIN_STEPS = 40
_RESERVED, _OTHERS, _WAIT = "#0067a5", "#c3c8ce", "#f6cf9b"


@dataclass(slots=True)
class Recording:
    """What the picture needs of every step."""

    loads: list[list[int]] = field(default_factory=list)  # KV tokens by rank.
    # The request of each reserved rank.
    reserved: list[dict[int, RequestId]] = field(default_factory=list)
    # The step before which each request was admitted.
    admitted: dict[RequestId, int] = field(default_factory=dict)


def record() -> tuple[Recording, list[int]]:
    """Simulate; return the recording and the prompt tokens of every request."""
    requests = requests_of(MOONCAKE_TRACE)
    workload = split(requests, segments=SEGMENTS, backlog=BACKLOG)[0]
    parts = PolicyInputs(RANKS, BATCH, PolicySettings(), random.Random(0), NoPrediction())
    policy = make_policy("br-0", parts)
    assert isinstance(policy, TwoStage)
    recording = Recording()

    def observe(event: Event, actions: Sequence[Action], _now_ns: int) -> None:
        if isinstance(event, StepCompleted):
            recording.loads.append(simulation.scheduler.ledger.loads.tolist())
            recording.reserved.append(dict(policy.reserved))
        for action in actions:
            if isinstance(action, Admit):
                recording.admitted[action.request] = len(recording.loads)

    simulation = Simulation(
        SimulatedDeployment(RANKS, BATCH), workload, policy, NoPrediction(), observer=observe
    )
    simulation.run()
    return recording, [request.prompt_tokens for request in workload.requests]


def most_room(recording: Recording) -> tuple[int, int, int, RequestId]:
    """Return the first and the last step of the reservation that made most room; rank and request."""
    began: dict[tuple[int, RequestId], int] = {}
    for step, reserved in enumerate(recording.reserved):
        for pair in reserved.items():
            began.setdefault(pair, step)

    found = [
        (first, recording.admitted[request] - 1, rank, request)
        for (rank, request), first in began.items()
        if recording.admitted[request] > first + MARGIN_STEPS
    ]
    return max(
        found, key=lambda one: recording.loads[one[0]][one[2]] - recording.loads[one[1]][one[2]]
    )


def draw_reservation(recording: Recording, prompts: list[int]) -> "Figure":
    """Return the figure."""
    first, last, rank, request = most_room(recording)
    begin, end = max(0, first - MARGIN_STEPS), last + 2 * MARGIN_STEPS
    loads = np.array(recording.loads[begin:end]) / 1e3
    steps = np.arange(begin, begin + len(loads)) - first
    envelope = loads.max(axis=1)
    title = "A reservation: one rank makes room, instead of all waiting"
    about = [
        f"Mooncake conversation, {RANKS} ranks x {BATCH}, saturated, BR-0: the one that makes most room"
    ]
    figure = empty_figure(8.0, 4.2, title, about)
    panel = figure.add_subplot()
    for other in range(RANKS):
        if other != rank:
            panel.plot(steps, loads[:, other], color=_OTHERS, lw=0.9)
    inside = (steps >= 0) & (steps <= last - first + 1)
    panel.fill_between(
        steps, loads[:, rank], envelope, where=inside, color=_WAIT, lw=0, label="room being made"
    )
    panel.plot(steps, envelope, color=INK, lw=1.1, label="envelope: the heaviest rank")
    panel.plot(steps, loads[:, rank], color=_RESERVED, lw=1.8, label=f"rank {rank}, reserved")
    panel.plot([], [], color=_OTHERS, lw=0.9, label="the other ranks")
    for step, text in (
        (0, "reserved:\nonly the smallest\nentries from here"),
        (last - first + 1, f"admitted:\n{prompts[request]:,} tokens"),
    ):
        panel.axvline(step, color=INK, lw=0.8, ls=(0, (2, 2)))
        panel.annotate(
            text,
            (step, 0.04),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            fontsize="small",
            textcoords="offset points",
        )
    panel.set(xlabel="decode steps since the reservation", ylabel="KV tokens (thousands)")
    panel.set(xlim=(steps[0], steps[-1]), ylim=(0, 1.05 * envelope.max()))
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    return figure


def reservation(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Draw what a reservation does, from a simulation: docs/img/reservation.png.

    A segment of the Mooncake conversation trace, saturated, under BR-0. Of all reservations the picture
    shows the one that makes most room: the loads of the ranks from a little before it begins until a little
    after its request was admitted.
    """
    parser.add_argument("out", type=Path, metavar="OUT.png")
    out: Path = parser.parse_args(words).out
    recording, prompts = record()
    write_pictures({out.stem: lambda: draw_reservation(recording, prompts)}, out.parent)
