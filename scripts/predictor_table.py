"""Judge each kind of predictor on each public trace: the counterpart of the paper's Table 3.

    python scripts/predictor_table.py [--json OUT]

Each is trained on the requests that had ended when half of a trace had arrived, and judged on the
rest. The table is Markdown; differences to survival are told with their standard errors.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

from balanceroute.predictors import files
from balanceroute.predictors.evaluation import (
    GAINS,
    Cut,
    PredictorJudgement,
    Replay,
    cut_in_time,
    judge,
)
from balanceroute.predictors.past import past_requests
from balanceroute.proxy.testing.arguments import positive
from balanceroute.traces import read_trace

PUBLIC = Path("traces/public")
TRACES = tuple(
    PUBLIC / name
    for name in (
        "azure_2023_conv.csv.gz",
        "azure_2023_code.csv.gz",
        "mooncake_conversation.jsonl.gz",
    )
)
BASELINE = "survival"
COLUMNS = (
    "trace",
    "predictor",
    "AUC",
    "Brier",
    "calibration error",
    "MAE tokens",
    f"AUC better than {BASELINE} by",
    f"Brier better than {BASELINE} by",
    f"MAE better than {BASELINE} by",
)


def rows_of(
    trace: Path, kinds: Sequence[str], *, requests: int | None, horizon_steps: int, frozen: bool
) -> list[dict[str, Any]]:
    """Train and judge the kinds on one trace; return a row for each, of JSON's types."""
    cut = cut_in_time(past_requests(read_trace(trace)[:requests]), 0.5)
    replay = Replay(cut.after, horizon_steps=horizon_steps, from_s=cut.at_s)
    predictors, trained_s = {}, {}
    for kind in kinds:
        print(f"{trace.name}: {kind}", file=sys.stderr, flush=True)
        begin_s = time.perf_counter()
        predictors[kind] = files.train(kind, cut.before, horizon_steps=horizon_steps)
        trained_s[kind] = time.perf_counter() - begin_s
    judgements = judge(replay, predictors, baseline=BASELINE, learn=not frozen)
    return [
        {"trace": trace.name, "predictor": kind, "trained_s": round(trained_s[kind], 3)}
        | figures(cut, judgement)
        for kind, judgement in judgements.items()
    ]


def figures(cut: Cut, judgement: PredictorJudgement) -> dict[str, Any]:
    """Return a judgement as JSON; what is undefined is null."""
    told = asdict(judgement.scores) | {
        f"{name}_better_by{suffix}": value
        for name, gain in judgement.gains.items()
        for suffix, value in (("", gain.value), ("_stderr", gain.error))
    }
    sizes = {"train_requests": len(cut.before), "judged_requests": len(cut.after)}
    return sizes | {name: None if isnan(value) else value for name, value in told.items()}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"| --- | --- |{' ---: |' * (len(COLUMNS) - 2)}"]
    for row in rows:
        gains = (
            ""
            if row["predictor"] == BASELINE
            else shown_gain(row[f"{name}_better_by"], row[f"{name}_better_by_stderr"], digits)
            for name, digits in zip(GAINS, (4, 4, 2), strict=True)
        )
        scores = (
            "undefined" if row[name] is None else f"{row[name]:.{digits}f}"
            for name, digits in (("auc", 3), ("brier", 4), ("ece", 3), ("mae", 2))
        )
        names = (f"`{row['trace']}`", f"`{row['predictor']}`")
        lines.append(f"| {' | '.join((*names, *scores, *gains))} |")
    return "\n".join(lines)


def shown_gain(value: float | None, error: float | None, digits: int) -> str:
    """Return by how much a score is better, with its standard error."""
    if value is None:
        return "undefined"
    spread = "" if error is None else f" ±{error:.{digits}f}"
    return f"{value:+.{digits}f}{spread}".replace("-", "−")


def main() -> int:
    """Judge the chosen predictors on the chosen traces, all by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, action="append", metavar="FILE")
    parser.add_argument("--kinds", nargs="+", choices=files.KINDS, default=files.KINDS)
    parser.add_argument(
        "--requests", type=positive, metavar="N", help="only the first N of each trace"
    )
    parser.add_argument("--horizon", type=int, default=40, metavar="H")
    parser.add_argument("--frozen", action="store_true", help="nobody learns in the second half")
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    kinds = [BASELINE, *(kind for kind in arguments.kinds if kind != BASELINE)]
    rows: list[dict[str, Any]] = []
    for trace in arguments.trace or TRACES:
        rows += rows_of(
            trace,
            kinds,
            requests=arguments.requests,
            horizon_steps=arguments.horizon,
            frozen=arguments.frozen,
        )
    print(markdown(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2, allow_nan=False) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
