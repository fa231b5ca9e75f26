"""Print what it brings that ranks compute short prompts, by the share of short prompts, as Markdown.

    python scripts/local_prefill_table.py OUT_DIR [--load U]

Prompts are short (50 to 1,000 tokens) or long (3,000 to 13,000), all equally likely, outputs 200 tokens on
average, arrivals random. Their rate makes the work of all prompts U of what the prefillers can do.
Each row is a `balanceroute simulate` command on a trace in OUT_DIR: no rank computes a prompt, ranks
compute all short ones, or those that delay all requests less so.
"""

import argparse
import random
import sys
from pathlib import Path

from balanceroute.proxy.lab.sim.report import figure
from balanceroute.traces import TraceRequest, write_native

sys.path.insert(0, str(Path(__file__).parent / "table_runs"))

from simulated import simulated

PREFILLERS, BASE_MS, TOKEN_US = 4, 20.0, 50.0
COMMAND = (
    f"--policy br-0 --ranks 8 --batch 64 --step-base-ms 10 --step-us-per-token 0.02 "
    f"--prefill-servers {PREFILLERS} --prefill-base-ms {BASE_MS} --prefill-us-per-token {TOKEN_US} "
    "--probe-limit none --transfer-base-ms 2 --transfer-us-per-token 1 --segments 4"
)
RULES = {
    "none": "",
    "all short": "--local-prefill-tokens 1000 --local-prefill-always",
    "where it pays": "--local-prefill-tokens 1000",
}
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
REQUESTS = 12_000
# Heading, figure, digits, scale.
COLUMNS = (
    ("latency s, mean", "latency_s_mean", 2, 1),
    ("TTFT p50 s", "ttft_s_p50", 2, 1),
    ("TTFT p95 s", "ttft_s_p95", 2, 1),
    ("TPOT p50 ms", "tpot_ms_p50", 1, 1),
    ("TPOT p95 ms", "tpot_ms_p95", 1, 1),
    ("output tokens/s", "output_tokens_per_s", 0, 1),
)


def mixed(short: float, load: float) -> list[TraceRequest]:
    """Return requests of which a share has short prompts."""
    rng = random.Random(f"{short} short")
    prompts = [
        rng.randint(50, 1_000) if rng.random() < short else rng.randint(3_000, 13_000)
        for _ in range(REQUESTS)
    ]
    work_ms = sum(BASE_MS + TOKEN_US * prompt / 1e3 for prompt in prompts)
    gap_ns = 1e6 * work_ms / REQUESTS / PREFILLERS / load
    now_ns, requests = 0.0, []
    for prompt in prompts:
        now_ns += rng.expovariate(1.0 / gap_ns)
        output = 1 + min(2_000, int(rng.expovariate(1 / 200)))
        requests.append(TraceRequest(int(now_ns), prompt, output))
    return requests


def main() -> int:
    """Simulate every share under every rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--load", type=float, default=0.9, metavar="U")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    headings = ("short", "ranks compute", *(heading for heading, *_ in COLUMNS))
    lines = [f"| {' | '.join(headings)} |", f"| ---: | --- |{' ---: |' * len(COLUMNS)}"]
    for share in SHARES:
        trace = arguments.out / f"short_{share:g}.jsonl"
        write_native(trace, mixed(share, arguments.load))
        for rule, options in RULES.items():
            path = arguments.out / f"short_{share:g}_{rule.replace(' ', '_')}.json"
            (row,) = simulated(f"--trace {trace} {COMMAND} {options}".strip(), path)["results"]
            cells = [
                figure(scale * row[name], scale * row["stderr"][name], digits)
                for _, name, digits, scale in COLUMNS
            ]
            lines.append(f"| {share:.0%} | {rule} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    (arguments.out / "table.md").write_text(f"{table}\n", encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
