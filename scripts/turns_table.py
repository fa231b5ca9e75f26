"""Print what it brings that a conversation's next turn returns to the rank that has its beginning.

    python scripts/turns_table.py OUT_DIR prefill [--load U] [--rule TEXT] [--requests N] [--keep]
    python scripts/turns_table.py OUT_DIR mooncake [--load U] [--rule TEXT] [--requests N] [--keep]
    python scripts/turns_table.py OUT_DIR conversations [--load U] [--rule TEXT] [--requests N] [--keep] [--seed N]

Each row is a `balanceroute simulate` command. `prefill`: on the public Mooncake trace of conversations,
prefillers compute all prompts, chosen by their prefix caches, or ranks compute what they lack of them
where that delays all requests less. `mooncake`: prefillers compute all, and ranks pull what they lack, under the
balance alone, under rules of others that follow prefixes, and with a price of the tokens that need not be
pulled. `conversations`: the same on conversations that `table_runs/conversations.py` makes.

A request is a later turn if it begins with two blocks of an earlier one; of made conversations, which share
system prompts of four, with five.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from balanceroute.proxy.lab.sim.workload import playable
from balanceroute.proxy.testing.arguments import positive
from balanceroute.traces import TraceRequest, read_trace, write_native

sys.path.insert(0, str(Path(__file__).parent / "table_runs"))

from conversations import conversations
from simulated import simulated

TRACE = Path("traces/public/mooncake_conversation.jsonl.gz")
FIRST, LATER = "first turns", "later turns"
CACHED = (
    "--prefill-choice prefix-aware --prefix-cache 1000000000 --probe-limit none "
    "--transfer-base-ms 2 --transfer-us-per-token 1"
)


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        command: What all rows have in common.
        rules: The options of each.
        rate: Of the trace, at a load of 1.
        loads: Those of the table.
        requests: Of the trace.
        shared_blocks: Blocks that a first turn may share.
        headings: Of its columns.
    """

    command: str
    rules: dict[str, str]
    rate: float
    loads: tuple[float, ...]
    requests: int
    shared_blocks: int
    headings: tuple[str, ...]


AFFINITY = {
    "balance alone (BR-0)": "--policy br-0",
    "affinity alone (sticky)": "--policy turn_rules:sticky",
    "SMG (cache-aware)": "--policy turn_rules:cache_aware",
    "Dynamo (overlap + load)": "--policy turn_rules:overlap_and_load",
    "BR-0, price 1": "--policy br-0 --prefix-affinity 1",
    "BR-H": "--policy br-h",
    "BR-H, price 1": "--policy br-h --prefix-affinity 1",
}
AFFINITY_COLUMNS = (
    *("pulled %", "x", "idle %", "output tokens/s", "change %", "later turns TTFT s, p50", "p95"),
    *("TPOT ms, p95", "wait s, max", "hottest rank"),
)
RANKS_8 = f"--ranks 8 --batch 16 --prefill-servers 8 --prefill-us-per-token 5 {CACHED}"
TABLES = {
    # At the trace's own speed 4 prefillers have 1.4 times the work that they can do, cached prefixes left out.
    "prefill": Table(
        "--ranks 16 --batch 64 --step-base-ms 10 --step-us-per-token 0.02 "
        f"--prefill-servers 4 {CACHED}",
        {
            "none": "--policy br-0",
            "up to 8,192 tokens": "--policy br-0 --local-prefill-tokens 8192 "
            "--rank-prefix-cache 2000000",
            "and a price of 1": "--policy br-0 --local-prefill-tokens 8192 "
            "--rank-prefix-cache 2000000 --prefix-affinity 1",
        },
        4 / 1.40,
        (0.6, 0.8, 1.0),
        5_000,
        1,
        (
            *("later turns TTFT s, p50", "p95", "first turns TTFT s, p50", "p95"),
            *("latency s, mean", "TPOT ms, p50 / p95", "idle %", "by ranks %"),
        ),
    ),
    # Balance alone makes 1,740 tokens/s of a backlog, and the trace brings 1,146.
    "mooncake": Table(
        f"{RANKS_8} --rank-prefix-cache 2000000",
        AFFINITY,
        1_740 / 1_146,
        (0.6, 0.8, 1.0, 1.2),
        6_000,
        1,
        AFFINITY_COLUMNS,
    ),
    # 1,940 tokens/s, which is what one conversation that begins each second brings.
    "conversations": Table(
        f"{RANKS_8} --rank-prefix-cache 500000",
        AFFINITY,
        1.0,
        (0.6, 0.8, 1.0, 1.2),
        6_000,
        4,
        AFFINITY_COLUMNS,
    ),
}


def labelled(requests: list[TraceRequest], shared_blocks: int) -> list[TraceRequest]:
    """Return the requests, with what turn each is as its tenant."""
    seen: set[int] = set()
    turns = []
    for request in requests:
        beginning = request.hash_ids[: shared_blocks + 1]
        later = len(beginning) > shared_blocks and seen.issuperset(beginning)
        seen.update(request.hash_ids)
        turns.append(replace(request, tenant=LATER if later else FIRST))
    return turns


def prefill_cells(row: dict[str, Any]) -> list[str]:
    """Return one row's figures, where ranks compute."""
    groups = {group["tenant"]: group for group in row["groups"]}
    times = [groups[turn][name] for turn in (LATER, FIRST) for name in ("ttft_s_p50", "ttft_s_p95")]
    return [
        *(f"{time:.2f}" for time in times),
        f"{row['latency_s_mean']:.2f}",
        f"{row['tpot_ms_p50']:.1f} / {row['tpot_ms_p95']:.1f}",
        f"{100 * row['idle_fraction']:.1f}",
        f"{100 * row['local_prefills'] / row['requests']:.0f}",
    ]


def affinity_cells(row: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Return one row's figures, where ranks pull; `base` is the row of the same policy's balance alone."""
    (later,) = (group for group in row["groups"] if group["tenant"] == LATER)
    output = row["output_tokens_per_s"]
    return [
        f"{100 * row['pulled_fraction']:.1f}",
        f"{row['pulled_fraction'] / base['pulled_fraction']:.2f}",
        f"{100 * row['idle_fraction']:.1f}",
        f"{output:,.0f}",
        f"{100 * (output / base['output_tokens_per_s'] - 1):+.2f}",
        f"{later['ttft_s_p50']:.2f}",
        f"{later['ttft_s_p95']:.2f}",
        f"{row['tpot_ms_p95']:.1f}",
        f"{row['pool_wait_s_max']:.0f}",
        f"{row['hottest_rank']:.2f}",
    ]


def main() -> int:
    """Simulate every load under every rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--load", type=float, metavar="U", help="this one alone")
    parser.add_argument("--rule", default="", metavar="TEXT", help="those with it in their names")
    parser.add_argument("--requests", type=positive, metavar="N")
    parser.add_argument("--seed", type=int, default=2, help="of the conversations that are made")
    parser.add_argument("--keep", action="store_true", help="use the figures that OUT_DIR has")
    arguments = parser.parse_args()
    table = TABLES[arguments.table]
    count = arguments.requests or table.requests
    arguments.out.mkdir(parents=True, exist_ok=True)
    made = arguments.table == "conversations"
    read = (
        conversations(count // 4 + 20, 1.0, arguments.seed) if made else playable(read_trace(TRACE))
    )
    trace = arguments.out / f"{arguments.table}.jsonl"
    write_native(trace, labelled(read[:count], table.shared_blocks))
    lines = [
        f"| {' | '.join(('load', 'rule', *table.headings))} |",
        f"| ---: | --- |{' ---: |' * len(table.headings)}",
    ]
    loads = table.loads if arguments.load is None else (arguments.load,)
    for load in loads:
        common = f"--trace {trace} --rate {round(load * table.rate, 3)} {table.command}"
        base: dict[str, Any] = {}
        for number, (rule, options) in enumerate(table.rules.items()):
            if arguments.rule not in rule:
                continue
            path = arguments.out / f"{arguments.table}_{load}_{number}.json"
            kept = arguments.keep and path.exists()
            report = (
                json.loads(path.read_bytes()) if kept else simulated(f"{common} {options}", path)
            )
            (row,) = report["results"]
            if not base or rule == "BR-H":
                base = row
            if arguments.table == "prefill":
                figures = prefill_cells(row)
            else:
                figures = affinity_cells(row, base)
            lines.append(f"| {load:g} | {rule} | {' | '.join(figures)} |")
    text = "\n".join(lines)
    (arguments.out / "table.md").write_text(f"{text}\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
