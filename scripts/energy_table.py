"""Energy per output token of the policies of one simulation, as a ratio to the first, as Markdown.

    python scripts/energy_table.py build/results/saturated.json [POLICY ..]

The power model has two levels: a rank draws P while it computes, and s P while it waits for the others
at the barrier. Each of G ranks waits for the share w = idle x (1 - a / T) of a step of T = a + b max L,
so an output token takes

    G P (1 - (1 - s) w) / (output tokens per second).

s is between two measurements: an accelerator that polls while it waits draws what it draws in a kernel
(s = 1); and the H200 draws 137 to 300 W in decode, depending on the batch and the model
(https://arxiv.org/abs/2605.11999), so that s = 137 / 300 is a rank that waits as if it had next to
nothing to do.
"""

import argparse
import json
from pathlib import Path
from typing import Any

SHARES = (1.0, 137 / 300)


def energy(row: dict[str, Any], base_ms: float, share: float) -> float:
    """Return the energy per output token of one policy, in P x seconds of one rank, less the factor G.

    Args:
        row: Its figures.
        base_ms: a.
        share: s.
    """
    step_ms = 1e3 * row["mean_running"] / row["output_tokens_per_s"]
    waiting = row["idle_fraction"] * (1.0 - base_ms / step_ms)
    return float((1.0 - (1.0 - share) * waiting) / row["output_tokens_per_s"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path, metavar="JSON", help="of `balanceroute simulate`")
    parser.add_argument("policies", nargs="*", metavar="POLICY", help="the first is 1; all if none")
    arguments = parser.parse_args()
    report = json.loads(arguments.report.read_text(encoding="utf-8"))
    rows = {row["policy"]: row for row in report["results"]}
    base_ms = report["config"]["step_base_ms"]
    names = arguments.policies or list(rows)
    print(f"| policy | {' | '.join(f's = {share:.2f}' for share in SHARES)} |")
    print(f"| --- |{' ---: |' * len(SHARES)}")
    for name in names:
        ratios = [
            energy(rows[name], base_ms, share) / energy(rows[names[0]], base_ms, share)
            for share in SHARES
        ]
        print(f"| `{name}` | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")


if __name__ == "__main__":
    main()
