"""Tables of `balanceroute simulate` commands."""

import argparse
import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.arguments import positive

from experiment import Columns, Figure, measured, simulated, tabulated
from reproduce.traces import (
    FIRST,
    LATER,
    PREFILL_BASE_MS,
    PREFILL_TOKEN_US,
    PREFILLERS,
    SHORT_SHARES,
    SIZES,
    derive,
)

PUBLIC = "traces/public"
DERIVED = "DERIVED"  # Stands for the folder that `derive` writes to.
MOONCAKE = f"--trace {PUBLIC}/mooncake_conversation.jsonl.gz"
AZURE_CONV, AZURE_CODE = (f"--trace {PUBLIC}/azure_2023_{one}.csv.gz" for one in ("conv", "code"))
SERVEGEN = f"--trace {PUBLIC}/servegen_reasoning.jsonl.gz --backlog 64"
ALL = "random,round-robin,power-of-two,jsq,least-kv,fifo,br-0-bypass,br-0,br-h"
EIGHT_RANKS = f"{MOONCAKE} --ranks 8 --batch 16"
SATURATED = f"{EIGHT_RANKS} --backlog 64 --segments 6"
TWO_PREFILLERS = "--prefill-servers 2 --prefill-us-per-token 5"
TRANSFERS = "--transfer-base-ms 2 --transfer-us-per-token 1"
LEASES = f"{MOONCAKE} --concurrency 192 {TWO_PREFILLERS} {TRANSFERS} --segments 6"
# Ranks with little memory, which compute a preempted request again themselves.
LITTLE = "--recompute-us-per-token 50 --kv-capacity"
MEMORY = f"{SERVEGEN} --skip 1500 --known 1500 --requests 5500 --ranks 4 --policy br-h --batch 64"
REASONING = f"{SERVEGEN} --segments 6 --policy"
# The rules of other routers. Those that use a client's length hint get the best one there can be.
RIVALS = {
    "": "--policy jsq,fifo,smg-least-load,br-0",
    "oracle hints": "--policy dynamo-kv,llmd-token-load --predictor oracle",
    "no hints": "--policy dynamo-kv --predictor none",
}
UNEQUAL = "--rank-speeds 1,0.6667"
# Some three times what the ranks can do.
OVERLOAD = (
    f"{AZURE_CONV} --rate 3 --requests 6000 --segments 2 --ranks 2 --batch 64 --policy br-0 "
    "--step-base-ms 47 --step-us-per-token 0.7 --prefill-servers 2 --prefill-us-per-token 25 "
    "--aimd post5"
)
FIRST_LIMITS = (4, 8, 16, 32, 64, 128, 256)

# Prefill choices with prefix caches. A load of 1 keeps the prefillers busy with what a cache of all
# would not have: at the traces' own speeds that is the work of so many of them.
PREFILL_RULES = ("random", "fewest-tokens", "sticky", "cache-aware", "lmetric", "prefix-aware")
MOONCAKE_WORK, TURNS_WORK = 1.40, 4.8
FAST = "--ranks 16 --batch 64 --step-base-ms 10 --step-us-per-token 0.02"
FLEET = f"--policy br-0 {FAST} --probe-limit none"
# Of the prefillers, the load, and the tokens that each can cache.
PREFIX_CASES = (
    *((prefillers, load, 10**9) for prefillers in (2, 4, 8) for load in (0.7, 0.9, 1.1)),
    (4, 0.9, 2_000_000),
)
TURN_CASES = tuple(
    (prefillers, load, 2_000_000)
    for prefillers, load in ((4, 0.7), (4, 0.9), (4, 1.1), (2, 0.9), (8, 0.9))
)

# The paper's routers: the baselines, BR-0 and BR-H survival, and BR-H with other predictions.
PAPER = {
    "survival, H = 80": "--policy random,round-robin,power-of-two,jsq,br-0,br-h --paper",
    "exact-match, H = 80": "--policy br-h --paper --predictor exact-match",
    "oracle, H = 40": "--policy br-h --paper --predictor oracle --horizon 40",
    "oracle, H = 80": "--policy br-h --paper --predictor oracle",
}
PAPER_CASES = {
    "paper-8": SATURATED,
    "paper-azure": f"--trace {DERIVED}/long_answers.jsonl --batch 64 --backlog 256 --segments 2",
    "paper-4": f"{MOONCAKE} --ranks 4 --batch 16 --backlog 32 --segments 12",
    "paper-16": f"{MOONCAKE} --ranks 16 --batch 16 --backlog 128 --segments 3",
}

# Prefillers choose by their caches, and ranks pull what they lack of a prompt.
CACHED = (
    "--prefill-choice prefix-aware --prefix-cache 1000000000 --probe-limit none "
    "--transfer-base-ms 2 --transfer-us-per-token 1"
)
LOCAL = "--local-prefill-tokens 8192 --rank-prefix-cache 2000000"
AFFINITY = {"balance alone": "--policy br-0", "price 1": "--policy br-0 --prefix-affinity 1"}
RANKS_8 = f"--ranks 8 --batch 16 --prefill-servers 8 --prefill-us-per-token 5 {CACHED}"
# By trace, what speed is a load of 1, and the tokens that each rank keeps: balance alone makes 1,740
# tokens/s of a backlog of Mooncake's, of which the trace brings 1,146; and 1,940 of conversations, one of
# which begins each second.
AFFINITY_CASES = {"mooncake": (1_740 / 1_146, 2_000_000), "conversations": (1.0, 500_000)}
SHORT = (
    f"--policy br-0 --ranks 8 --batch 64 --step-base-ms 10 --step-us-per-token 0.02 "
    f"--prefill-servers {PREFILLERS} --prefill-base-ms {PREFILL_BASE_MS} "
    f"--prefill-us-per-token {PREFILL_TOKEN_US} --probe-limit none {TRANSFERS} --segments 4"
)
SHORT_RULES = {
    "none": "",
    "all short": "--local-prefill-tokens 1000 --local-prefill-always",
    "where it pays": "--local-prefill-tokens 1000",
}

COLUMNS = (
    ("imbalance tokens", measured("mean_imbalance_tokens", 0)),
    ("idle %", measured("idle_fraction", 1, 100)),
    ("output tokens/s", measured("output_tokens_per_s", 0)),
    ("TPOT p95 ms", measured("tpot_ms_p95", 1)),
    ("wait p50 s", measured("pool_wait_s_p50", 2)),
    ("wait p99 s", measured("pool_wait_s_p99", 2)),
    ("wait max s", measured("pool_wait_s_max", 1)),
)
POOL_COLUMNS = (
    *COLUMNS[1:3],
    ("first token p50 s", measured("prefilled_s_p50", 2)),
    ("p99 s", measured("prefilled_s_p99", 1)),
    ("second token p50 s", measured("ttft_s_p50", 1)),
    ("p99 s", measured("ttft_s_p99", 1)),
    ("max s", measured("ttft_s_max", 1)),
    ("again", measured("lease_lapses", 1)),
    ("held, k tokens", measured("held_tokens", 0, 1e-3)),
)
MEMORY_COLUMNS = (
    *COLUMNS[1:3],
    ("preemptions", measured("recomputes", 1)),
    ("wait p99 s", measured("pool_wait_s_p99", 0)),
)
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
SHORT_COLUMNS = (
    ("latency s, mean", measured("latency_s_mean", 2)),
    ("TTFT p50 s", measured("ttft_s_p50", 2)),
    ("TTFT p95 s", measured("ttft_s_p95", 2)),
    ("TPOT p50 ms", measured("tpot_ms_p50", 1)),
    ("TPOT p95 ms", measured("tpot_ms_p95", 1)),
    ("output tokens/s", measured("output_tokens_per_s", 0)),
)


def _of_turn(turn: str, name: str) -> Figure:
    """Return what shows a time of first or of later turns."""
    return lambda row: f"{ {one['tenant']: one for one in row['groups']}[turn][name]:.2f}"


LATER_COLUMNS = (
    ("later turns TTFT s, p50", _of_turn(LATER, "ttft_s_p50")),
    ("p95", _of_turn(LATER, "ttft_s_p95")),
    ("first turns TTFT s, p50", _of_turn(FIRST, "ttft_s_p50")),
    ("p95", _of_turn(FIRST, "ttft_s_p95")),
    ("latency s, mean", measured("latency_s_mean", 2)),
    ("TPOT ms, p95", measured("tpot_ms_p95", 1)),
    ("idle %", measured("idle_fraction", 1, 100)),
    ("by ranks %", lambda row: f"{100 * row['local_prefills'] / row['requests']:.0f}"),
)
AFFINITY_COLUMNS = (
    ("pulled %", measured("pulled_fraction", 1, 100)),
    ("idle %", measured("idle_fraction", 1, 100)),
    ("output tokens/s", measured("output_tokens_per_s", 0)),
    ("later turns TTFT s, p50", _of_turn(LATER, "ttft_s_p50")),
    ("p95", _of_turn(LATER, "ttft_s_p95")),
    ("TPOT ms, p95", measured("tpot_ms_p95", 1)),
    ("wait s, max", measured("pool_wait_s_max", 0)),
)


@dataclass(frozen=True, slots=True)
class Table:
    """Commands whose results stand in one table."""

    commands: Mapping[str, str]  # By what their rows are called.
    columns: Columns = COLUMNS


def each(command: str, options: Mapping[str, str], before: str = "") -> dict[str, str]:
    """Return a command with each of some options, by their names."""
    return {f"{before}{name}": f"{command} {words}".strip() for name, words in options.items()}


def chosen(trace: str, work: float, prefillers: int, load: float, cache: int) -> Table:
    """Return the table of prefill choices for one case."""
    command = (
        f"{trace} {FLEET} --rate {round(load * prefillers / work, 3)} "
        f"--prefill-servers {prefillers} --prefix-cache {cache}"
    )
    rules = {f"`{rule}`": f"--prefill-choice {rule}" for rule in PREFILL_RULES}
    return Table(each(command, rules), PREFIX_COLUMNS)


TABLES: dict[str, Table] = {
    "saturated": Table(
        {
            "": f"{SATURATED} --policy {ALL}",
            "oracle": f"{SATURATED} --policy br-h --predictor oracle",
            "no prediction": f"{SATURATED} --policy br-h --predictor none",
            "deadline 30 s": f"{SATURATED} --policy br-0,br-h --deadline 30",
        }
    ),
    **{name: Table(each(command, PAPER)) for name, command in PAPER_CASES.items()},
    "loads": Table(
        {
            f"rate {rate}": f"{EIGHT_RANKS} --rate {rate} --segments 6 --policy {ALL}"
            for rate in (0.6, 0.8, 1.0, 1.2, 1.4, 1.6)
        }
    ),
    "prefill-servers": Table(
        {
            f"rate {rate}, {servers} servers": f"{MOONCAKE} --rate {rate} --segments 6 "
            f"--prefill-servers {servers}"
            for rate, servers in ((1, 10), (1.3, 12))
        }
    ),
    "leases": Table(
        {
            "leases of 30 s": f"{LEASES} --lease-s 30 --policy jsq,fifo,br-0,br-h",
            "pool limit 65": f"{LEASES} --lease-s 30 --policy br-0 --pool-limit 65",
            "no leases": f"{LEASES} --policy jsq,fifo,br-0,br-h",
        },
        POOL_COLUMNS,
    ),
    "memory": Table(
        each(
            f"{SATURATED} --policy fifo,br-h {LITTLE} 120000",
            {"Mooncake": "", "Mooncake, q = 0.999": "--kv-peak-quantile 0.999"},
        )
        | each(
            f"{MEMORY} {LITTLE} 60000",
            {"reasoning": "", "reasoning, q = 0.99": "--kv-peak-quantile 0.99"},
        ),
        MEMORY_COLUMNS,
    ),
    "routers": Table(
        each(SATURATED, RIVALS)
        | {
            name: command
            for rate in (1.0, 1.2, 1.6)
            for name, command in each(
                f"{EIGHT_RANKS} --rate {rate} --segments 6 {TWO_PREFILLERS} --lease-s 30",
                RIVALS,
                f"rate {rate} ",
            ).items()
        }
    ),
    "unlike-engines": Table(
        each(
            f"{SATURATED} --policy jsq,fifo,br-0",
            {
                "speeds 1 : 1.5": UNEQUAL,
                "speeds 1 : 1.5, learned": f"{UNEQUAL} --learn-speeds",
                "batch limits 16, 8": "--rank-batches 16,8",
                "3 tokens a step": "--tokens-per-step 3",
                "pausing": "--pause-above 0.1",
            },
        )
    ),
    "ranks": Table(
        {
            f"{ranks} ranks": f"{MOONCAKE} --ranks {ranks} --batch 16 --backlog {8 * ranks} "
            f"--segments {segments}"
            for ranks, segments in ((4, 12), (8, 6), (16, 3), (32, 2))
        }
        | {
            f"{ranks} x {slots}": f"--trace {DERIVED}/bootstrapped_{ranks}x{slots}.jsonl "
            f"--ranks {ranks} --batch {slots} --backlog {8 * ranks} --segments 2 --policy fifo,br-0"
            for ranks, slots in SIZES
        }
    ),
    "azure": Table(
        {
            "conversation": f"{AZURE_CONV} --backlog 64 --segments 6",
            "code": f"{AZURE_CODE} --backlog 64 --segments 6",
        }
    ),
    "long-outputs": Table(
        {"": f"{REASONING} fifo,br-0,br-h"}
        | {
            name: f"{REASONING} br-h --predictor {name}"
            for name in ("exact-match", "thirds", "oracle")
        }
    ),
    "first-limits": Table(
        {
            f"{kind} {n}": f"{OVERLOAD} {words}"
            for kind, line in (
                ("off,", "--aimd-min {} --aimd-max {}"),
                ("on, from", "--aimd-first {} --aimd-min 4 --aimd-max 256"),
            )
            for n in FIRST_LIMITS
            for words in (line.format(n, n),)
        },
        LIMIT_COLUMNS,
    ),
    **{
        f"prefixes-{prefillers}-{load}{'-small' if cache < 10**9 else ''}": chosen(
            f"{MOONCAKE} --segments 2", MOONCAKE_WORK, prefillers, load, cache
        )
        for prefillers, load, cache in PREFIX_CASES
    },
    **{
        f"turns-{prefillers}-{load}": chosen(
            f"--trace {DERIVED}/conversations.jsonl", TURNS_WORK, prefillers, load, cache
        )
        for prefillers, load, cache in TURN_CASES
    },
    "short-prompts": Table(
        {
            f"{share:.0%} short, {rule}": f"--trace {DERIVED}/short_{share:g}.jsonl {SHORT} {words}"
            for share in SHORT_SHARES
            for rule, words in SHORT_RULES.items()
        },
        SHORT_COLUMNS,
    ),
    "later-turns": Table(
        {
            f"load {load:g}, {rule}": f"--trace {DERIVED}/mooncake_by_turn.jsonl --requests 5000 "
            f"--rate {round(load * 4 / MOONCAKE_WORK, 3)} {FAST} --prefill-servers 4 {CACHED} "
            f"--policy br-0 {words}"
            for load in (0.6, 0.8, 1.0)
            for rule, words in (("prefillers alone", ""), ("ranks up to 8,192 tokens", LOCAL))
        },
        LATER_COLUMNS,
    ),
    **{
        f"affinity-{name}": Table(
            {
                f"load {load:g}, {rule}": f"--trace {DERIVED}/{name}_by_turn.jsonl --requests 4000 "
                f"--rate {round(load * rate, 3)} {RANKS_8} --rank-prefix-cache {kept} {words}"
                for load in (0.6, 0.8, 1.0, 1.2)
                for rule, words in AFFINITY.items()
            },
            AFFINITY_COLUMNS,
        )
        for name, (rate, kept) in AFFINITY_CASES.items()
    },
}


def file_name(table: str, row: str) -> str:
    """Return the name of the file that has a command's report."""
    return re.sub(r"[^a-z0-9.]+", "_", f"{table} {row}".lower()).strip("_") + ".json"


def section(name: str, reports: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """Return a table with its commands, in Markdown."""
    table = TABLES[name]
    rows = (
        ((called, f"`{row['policy']}`"), row)
        for called, report in reports
        for row in report["results"]
    )
    commands = "".join(f"    balanceroute simulate {one}\n" for one in table.commands.values())
    return f"## {name}\n\n{commands}\n{tabulated(('', 'policy'), table.columns, rows)}\n"


def simulations(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Make the tables of simulations as Markdown, as docs/appendix has them.

    Each row is of a plain `balanceroute simulate` command, which is printed before it runs; its JSON goes to
    OUT_DIR, and all tables to OUT_DIR/tables.md. The same version gives the same tables on any machine.
    """
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(TABLES)}, with * for any part"
    )
    parser.add_argument("--jobs", type=positive, default=1, metavar="N", help="processes")
    arguments = parser.parse_args(words)
    asked = arguments.names or ["*"]
    if unknown := [one for one in asked if not fnmatch.filter(TABLES, one)]:
        parser.error(f"unknown tables: {', '.join(unknown)}")
    names = [name for name in TABLES if any(fnmatch.fnmatch(name, one) for one in asked)]
    derived = arguments.out / "derived"
    arguments.out.mkdir(parents=True, exist_ok=True)
    plan = [
        (name, row, command.replace(DERIVED, str(derived)))
        for name in names
        for row, command in TABLES[name].commands.items()
    ]
    derive(derived, [command for _, _, command in plan])
    with ProcessPoolExecutor(arguments.jobs) as pool:
        paths = [arguments.out / file_name(name, row) for name, row, _ in plan]
        reports = pool.map(simulated, [command for _, _, command in plan], paths)
        sections = [
            section(name, [(row, next(reports)) for row in TABLES[name].commands]) for name in names
        ]
    (arguments.out / "tables.md").write_text("\n".join(sections), encoding="utf-8")
    return 0
