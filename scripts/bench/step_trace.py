"""What the step trace costs an engine."""

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from balanceroute.engine_patch.reader import read_steps
from checks.fleet import MODELS, ROOT, VARIABLES, VENV
from experiment import right, table_head, table_row

ENGINE = Path(__file__).with_name("step_trace_engine.py")
PYTHON = VENV / "bin" / "python"
MODEL = MODELS / "tiny-dense"
START_S = 180.0
RESAMPLES = 2000


def step_trace(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """What the step trace costs an engine: vLLM's own engine core, with a tiny model on the CPU.

    In the venv and with the model that `make test-vllm` makes. Blocks of steps with and without the hooks take
    turns.

        step     without the hooks, the median
        hooks    between timers around and within the hooks, less the same without hooks; the median
        writer   CPU time of the thread that writes the file
        share    hooks and writer, of the step, with the 95 % interval over the pairs of blocks
        with / without   the step's median in one block over that in the other; the same interval
    """
    parser.add_argument("--requests", default="16,64", metavar="N,..")
    parser.add_argument("--seconds", type=float, default=45.0, help="for each of them")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    chosen = parser.parse_args(words)
    if not (PYTHON.exists() and MODEL.exists()):
        raise SystemExit(f"no engine in {PYTHON.parents[1]}: `make test-vllm` installs it (6 GB)")
    sizes = [int(size) for size in chosen.requests.split(",")]
    rows = [summary(requests, run_engine(requests, chosen.seconds)) for requests in sizes]
    names = ("requests", "steps", "step", "hooks", "writer", "share", "with / without")
    print(table_head(*right(names)))
    for row in rows:
        share, low, high = (100 * row[f"share{end}"] for end in ("", "_low", "_high"))
        times = (f"{row[name]:.1f} µs" for name in ("step_us", "hooks_us", "writer_us"))
        ratio = f"{row['ratio']:.3f} ({row['ratio_low']:.3f}-{row['ratio_high']:.3f})"
        counts = (f"{row['requests']:.0f}", f"{row['steps']:.0f}")
        print(table_row(*counts, *times, f"{share:.2f} % ({low:.2f}-{high:.2f})", ratio))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=2) + "\n")


def run_engine(requests: int, seconds: float) -> dict[str, Any]:
    """Run step_trace_engine.py and return what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        steps, log = Path(folder, "steps"), Path(folder, "log")
        # This package, whichever the venv has.
        environment = os.environ | VARIABLES | {"PYTHONPATH": str(ROOT / ".src")}
        environment["VLLM_CPU_KVCACHE_SPACE"] = "2"
        command = [str(word) for word in (PYTHON, "-P", ENGINE, MODEL, steps, seconds, requests)]
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        try:
            printed, _ = process.communicate(timeout=START_S + 2 * seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            raise SystemExit(f"the engine failed:\n{log.read_text(errors='replace')[-3000:]}")
        measured: dict[str, Any] = json.loads(printed.splitlines()[-1])
        (trace,) = steps.glob("*.steps")
        if len(read_steps(trace).steps) < measured["steps"]:
            raise SystemExit("the trace lacks steps")
    return measured


def summary(requests: int, measured: Mapping[str, Any]) -> dict[str, float]:
    """Return a row of the table: times in microseconds, shares and ratios as fractions."""
    pairs = measured["pairs"]
    step_us = median(without["step_us"] for without, _ in pairs)
    added_us = [hooked["timers_us"] - without["timers_us"] for without, hooked in pairs]
    ratios = [hooked["step_us"] / without["step_us"] for without, hooked in pairs]
    writer_us = measured["writer_us"]
    hooks_low_us, hooks_high_us = interval(added_us)
    ratio_low, ratio_high = interval(ratios)
    return {
        "requests": requests,
        "steps": measured["steps"],
        "step_us": step_us,
        "hooks_us": median(added_us),
        "writer_us": writer_us,
        "share": (median(added_us) + writer_us) / step_us,
        "share_low": (hooks_low_us + writer_us) / step_us,
        "share_high": (hooks_high_us + writer_us) / step_us,
        "ratio": median(ratios),
        "ratio_low": ratio_low,
        "ratio_high": ratio_high,
    }


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap's 95 % interval of a median."""
    source = random.Random(0)
    drawn = sorted(median(source.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return drawn[RESAMPLES // 40], drawn[-RESAMPLES // 40 - 1]
