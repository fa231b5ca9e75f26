"""What the step trace costs an engine: the hooks' time per step, on a stand-in for vLLM's scheduler.

    python scripts/bench_step_trace.py [--steps N] [--json OUT]

Each row times `schedule`, `update_from_output` and the engine's step with and without the hooks, on
decode batches that are made beforehand, so that the difference is the hooks' own: CPU time of the
engine's thread, the median of several rounds. The records go to a file, as in an engine.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from balanceroute.engine_patch.hooks import install

BATCHES = (16, 256)
ROUNDS = 7


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="steps of a round [%(default)s]")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        install(HookedEngine, Path(folder))
        costs = {requests: overhead_us(requests, chosen.steps) for requests in BATCHES}
    for requests, cost in costs.items():
        print(f"{requests:4} requests: {cost:6.2f} µs per step")
    if chosen.json is not None:
        rows = [{"requests": requests, "us_per_step": cost} for requests, cost in costs.items()]
        chosen.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
