"""The tables of live runs in docs/live.md and docs/appendix/predictors.md, as Markdown.

    python scripts/live_tables.py repeated      # docs/live.md, "Results": 22 minutes
    python scripts/live_tables.py policies      # docs/appendix/live.md: 9 minutes
    python scripts/live_tables.py predictors    # docs/appendix/predictors.md, "Live": 6 minutes

Runs scripts/demo.py, a policy or a predictor after the other, and prints a table of what it measured and
simulated. Nothing else should run on the machine: engines that are late by more than a step measure it.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from balanceroute.proxy.lab.replay.requests import ReplayApi, as_sent, plan, with_limits
from balanceroute.traces import read_trace, write_native

ROOT = Path(__file__).parents[1]
TRACE = ROOT / "traces" / "public" / "mooncake_conversation.jsonl.gz"
SKIP = 5000  # The demo's: what comes before is known to a trained predictor.
POLICIES = "jsq,least-kv,fifo,br-0,br-h"
# What single runs do not tell apart: these so often.
REPEATED, RUNS = "jsq,fifo,br-h", 5
PREDICTORS = ("none", "survival", "exact-match", "gbdt")
# Heading, where the figure is, scale, digits; beside it the simulation's, where there is one.
FIGURES: tuple[tuple[str, str, str | None, float, int], ...] = (
    ("idle % live", "idle_fraction", "idle_fraction", 100.0, 1),
    ("output tokens/s live", "tokens_per_s", "output_tokens_per_s", 1.0, 0),
    ("TPOT p95 ms", "tpot_ms_p95", None, 1.0, 1),
    ("TTFT p50 s", "ttft_ms_p50", None, 1e-3, 1),
    ("p99 s", "ttft_ms_p99", None, 1e-3, 1),
    ("second token p50 s", "ttst_ms_p50", None, 1e-3, 1),
    ("p99 s", "ttst_ms_p99", None, 1e-3, 1),
)
# Beside the policies, the one that gives clients the first token when the prefill ends.
EARLY = ("--policy", "br-h", "--first-token", "prefill")


def demo(out: Path, *flags: str) -> list[dict[str, Any]]:
    """Run the demo; return its rows."""
    command = [sys.executable, str(ROOT / "scripts" / "demo.py"), "--out", str(out), *flags]
    subprocess.run([*command, "--skip", str(SKIP), "--trace", str(TRACE)], check=True)
    rows: list[dict[str, Any]] = json.loads((out / "demo.json").read_text())["results"]
    return rows


def train_gbdt(out: Path) -> Path:
    """Train on the requests before the demo's, with the limits that their clients would have set."""
    # The seed and the API are those of scripts/demo.py.
    before = with_limits(plan(read_trace(TRACE), count=SKIP), seed=0, api=ReplayApi.COMPLETIONS)
    past, model = out / "before.jsonl", out / "gbdt.json"
    write_native(past, as_sent(before))
    words = ["train", "gbdt", "--trace", str(past), "--out", str(model)]
    subprocess.run([sys.executable, "-m", "balanceroute.proxy", *words], check=True)
    return model


def markdown(heading: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a table with a row for each name, of all its runs; the first one was simulated best."""
    headings = [heading]
    for title, _, simulated, _, _ in FIGURES:
        headings += [title] if simulated is None else [title, "simulated"]
    lines = [f"| {' | '.join(headings)} |", f"| --- |{' ---: |' * (len(headings) - 1)}"]
    for name, runs in rows.items():
        cells = [f"`{name}`"]
        for _, live, simulated, scale, digits in FIGURES:
            values = [scale * run["live"][live] for run in runs]
            error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            cells.append(cell(fmean(values), error, digits))
            if simulated is not None:
                mean, spread = (
                    scale * runs[0][kind][simulated] for kind in ("simulated", "spread")
                )
                cells.append(cell(mean, spread, digits))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(mean: float, plus_minus: float | None, digits: int) -> str:
    """Return a mean, and by how much it may be wrong, if that is known."""
    text = f"{mean:,.{digits}f}"
    return text if plus_minus is None else f"{text} ±{plus_minus:,.{digits}f}"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", choices=("repeated", "policies", "predictors"), help="which one")
    parser.add_argument("--out", type=Path, default=Path("build/live_tables"), help="for the runs")
    arguments = parser.parse_args()
    out: Path = arguments.out / arguments.table
    out.mkdir(parents=True, exist_ok=True)
    if arguments.table == "repeated":
        # The simulation is the same each time.
        simulations = ["10", *["1"] * (RUNS - 1)]
        runs = [
            demo(out / str(number), "--policy", REPEATED, "--simulations", count)
            for number, count in enumerate(simulations)
        ]
        table = markdown(
            "policy", {several[0]["policy"]: several for several in zip(*runs, strict=True)}
        )
    elif arguments.table == "policies":
        rows = {row["policy"]: [row] for row in demo(out, "--policy", POLICIES)}
        rows[" ".join(EARLY[1:])] = demo(out / "early", *EARLY)
        table = markdown("policy", rows)
    else:
        files = {"gbdt": str(train_gbdt(out))}
        rows = {}
        for name in PREDICTORS:
            flags = ("--policy", "br-h", "--predictor", files.get(name, name), "--simulations", "4")
            rows[name] = demo(out / name, *flags)
        table = markdown("`--predictor`", rows)
    (out / "table.md").write_text(f"{table}\n", encoding="utf-8")
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
