"""Print what it brings that a conversation's next turn returns to the rank that has its beginning.

    python scripts/turns_table.py OUT_DIR [--requests N]

Each row is a `balanceroute simulate` command on the public Mooncake trace of conversations: prefillers
compute all prompts, chosen by their prefix caches, or ranks compute what they lack of them where that
delays all requests less. A request is a later turn if it begins with two blocks of an earlier one.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from balanceroute.proxy.sim.workload import playable
from balanceroute.proxy.testing.arguments import positive
from balanceroute.traces import TraceRequest, read_trace, write_native

sys.path.insert(0, str(Path(__file__).parent / "table_runs"))

from simulated import simulated

TRACE = Path("traces/public/mooncake_conversation.jsonl.gz")
PREFILLERS = 4
# At the trace's own speed prefillers have this much work, cached prefixes left out.
WORK = 1.40
COMMAND = (
    f"--policy br-0 --ranks 16 --batch 64 --step-base-ms 10 --step-us-per-token 0.02 "
    f"--prefill-servers {PREFILLERS} --prefill-choice prefix-aware --prefix-cache 1000000000 "
    "--probe-limit none --transfer-base-ms 2 --transfer-us-per-token 1"
)
RULES = {
    "none": "",
    "up to 8,192 tokens": "--local-prefill-tokens 8192 --rank-prefix-cache 2000000",
}
LOADS = (0.6, 0.8, 1.0)
FIRST, LATER = "first turns", "later turns"


def labelled(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Return the requests, with what turn each is as its tenant."""
    seen: set[int] = set()
    turns = []
    for request in requests:
        later = len(request.hash_ids) > 1 and seen.issuperset(request.hash_ids[:2])
        seen.update(request.hash_ids)
        turns.append(replace(request, tenant=LATER if later else FIRST))
    return turns


def cells(row: dict[str, Any]) -> list[str]:
    """Return one row's figures."""
    groups = {group["tenant"]: group for group in row["groups"]}
    times = [groups[turn][name] for turn in (LATER, FIRST) for name in ("ttft_s_p50", "ttft_s_p95")]
    return [
        *(f"{time:.2f}" for time in times),
        f"{row['latency_s_mean']:.2f}",
        f"{row['tpot_ms_p50']:.1f} / {row['tpot_ms_p95']:.1f}",
        f"{100 * row['idle_fraction']:.1f}",
        f"{100 * row['local_prefills'] / row['requests']:.0f}",
    ]


def main() -> int:
    """Simulate every load under every rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--requests", type=positive, default=5_000, metavar="N")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    trace = arguments.out / "turns.jsonl"
    write_native(trace, labelled(playable(read_trace(TRACE))[: arguments.requests]))
    lines = [
        "| load | ranks compute | later turns TTFT s, p50 | p95 | first turns TTFT s, p50 | p95 "
        "| latency s, mean | TPOT ms, p50 / p95 | idle % | by ranks % |",
        "| ---: | --- |" + " ---: |" * 8,
    ]
    for load in LOADS:
        rate = round(load * PREFILLERS / WORK, 3)
        for rule, options in RULES.items():
            path = arguments.out / f"{load}_{'ranks' if options else 'none'}.json"
            command = f"--trace {trace} --rate {rate} {COMMAND} {options}"
            (row,) = simulated(command.strip(), path)["results"]
            lines.append(f"| {load:g} | {rule} | {' | '.join(cells(row))} |")
    table = "\n".join(lines)
    (arguments.out / "table.md").write_text(f"{table}\n", encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
