"""What the step trace costs an engine."""

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.support.arguments import positive

from balanceroute.engine_patch.hooks import install
from balanceroute.engine_patch.reader import read_steps
from checks.fleet import MODELS, ROOT, VARIABLES, VENV

BATCHES = (16, 256)
ROUNDS = 7

ENGINE = Path(__file__).with_name("step_trace_engine.py")
PYTHON = VENV / "bin" / "python"
MODEL = MODELS / "tiny-dense"
START_S = 180.0
RESAMPLES = 2000


class Scheduler:
    """Hands out the same batch again and again."""

    def __init__(self, requests: int) -> None:
        names = [f"chatcmpl-{number:032x}" for number in range(requests)]
        self.running = names
        self._output = SimpleNamespace(
            total_num_scheduled_tokens=requests,
            num_scheduled_tokens=dict.fromkeys(names, 1),
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                num_computed_tokens=[10_000 + number for number in range(requests)]
            ),
            scheduled_spec_decode_tokens={},
        )

    def schedule(self) -> SimpleNamespace:
        return self._output

    def update_from_output(self, scheduler_output: SimpleNamespace, result: object) -> None:
        del scheduler_output, result


class Engine:
    """The calls of one step, without a model."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler

    def _process_engine_step(self) -> bool:
        self.scheduler.update_from_output(self.scheduler.schedule(), None)
        return True

    def execute_dummy_batch(self) -> None: ...

    def run(self, steps: int) -> float:
        """Return the microseconds of this thread's CPU that one step takes."""
        start = time.thread_time()
        for _ in range(steps):
            self._process_engine_step()
        return (time.thread_time() - start) * 1e6 / steps


class HookedEngine(Engine):
    """One that is traced."""

    def _process_engine_step(self) -> bool:
        return super()._process_engine_step()


def overhead_us(requests: int, steps: int) -> float:
    """Return what the hooks add to a step of so many requests, the median of several rounds."""
    plain, hooked = Engine(Scheduler(requests)), HookedEngine(Scheduler(requests))
    differences: list[float] = []
    for _ in range(ROUNDS):
        without = plain.run(steps)
        differences.append(hooked.run(steps) - without)
    return median(differences)


def step_trace(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """What the step trace costs an engine: the hooks' time per step.

        python scripts/bench step-trace [--steps N] [--json OUT]
        python scripts/bench step-trace --engine [--requests N,..] [--seconds S] [--json OUT]

    The first is on a stand-in for vLLM's scheduler. Each row times `schedule`, `update_from_output` and
    the engine's step with and without the hooks, on decode batches that are made beforehand, so that the
    difference is the hooks' own: CPU time of the engine's thread, the median of several rounds. The
    records go to a file, as in an engine. Nothing happens between the steps, so that all is in the
    processor's caches.

    The second is on vLLM's own engine core, with a tiny model on the CPU, in the venv and with the model
    that `make test-vllm` makes. Blocks of steps with and without the hooks take turns.

        step     without the hooks, the median
        hooks    between timers around and within the hooks, less the same without hooks; the median
        writer   CPU time of the thread that writes the file
        share    hooks and writer, of the step, with the 95 % interval over the pairs of blocks
        with / without   the step's median in one block over that in the other; the same interval
    """
    parser.add_argument("--steps", type=positive, default=20_000, help="steps of a round")
    parser.add_argument("--engine", action="store_true", help="measure vLLM's own engine core")
    parser.add_argument("--requests", default="16,64", metavar="N,..", help="with --engine")
    parser.add_argument("--seconds", type=float, default=45.0, help="for each of them")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    chosen = parser.parse_args(words)
    if chosen.engine:
        sizes = [int(size) for size in chosen.requests.split(",")]
        rows = measure_engine(sizes, chosen.seconds)
    else:
        rows = measure_hooks(chosen.steps)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=2) + "\n")


def measure_hooks(steps: int) -> list[dict[str, float]]:
    """Print what the hooks cost on the stand-in."""
    with tempfile.TemporaryDirectory() as folder:
        install(HookedEngine, Path(folder))
        costs = {requests: overhead_us(requests, steps) for requests in BATCHES}
    for requests, cost in costs.items():
        print(f"{requests:4} requests: {cost:6.2f} µs per step")
    return [{"requests": requests, "us_per_step": cost} for requests, cost in costs.items()]


def measure_engine(sizes: Sequence[int], seconds: float) -> list[dict[str, float]]:
    """Print what they cost on the real engine."""
    if not (PYTHON.exists() and MODEL.exists()):
        raise SystemExit(f"no engine in {PYTHON.parents[1]}: `make test-vllm` installs it (6 GB)")
    rows = [summary(requests, run_engine(requests, seconds)) for requests in sizes]
    table = Table(title="The step trace in vLLM's engine core, a tiny model on the CPU")
    for heading in ("requests", "steps", "step", "hooks", "writer", "share", "with / without"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        share, low, high = (100 * row[f"share{end}"] for end in ("", "_low", "_high"))
        table.add_row(
            f"{row['requests']:.0f}",
            f"{row['steps']:.0f}",
            f"{row['step_us']:.0f} µs",
            f"{row['hooks_us']:.1f} µs",
            f"{row['writer_us']:.1f} µs",
            f"{share:.2f} % ({low:.2f}-{high:.2f})",
            f"{row['ratio']:.3f} ({row['ratio_low']:.3f}-{row['ratio_high']:.3f})",
        )
    Console(width=110).print(table)
    return rows


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
