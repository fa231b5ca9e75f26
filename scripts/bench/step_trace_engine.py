"""The engine of `bench step-trace`: vLLM's own core, stepped with and without the hooks.

    python step_trace_engine.py MODEL FOLDER SECONDS REQUESTS

Runs in the engines' venv, in one process and without a server, so that a step is the engine core's
own and nothing else. The plugin installs the hooks as it does in `vllm serve`. Around and within
them are timers, in steps of both kinds, so that the kinds differ by the hooks alone.

Prints one line of JSON: `pairs` of blocks without and with hooks, each with the medians of the
step's time and of that between the timers; how many steps of each kind; and the CPU time of the writer's thread,
per step.
"""

import functools
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from vllm import SamplingParams  # type: ignore[import-not-found]
from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
from vllm.v1.engine import EngineCoreRequest  # type: ignore[import-not-found]
from vllm.v1.engine.core import EngineCore, EngineCoreProc  # type: ignore[import-not-found]
from vllm.v1.executor import Executor  # type: ignore[import-not-found]

from balanceroute.engine_patch.plugin import VARIABLE, register

BLOCK_STEPS = 20
WARM_STEPS = 4
PROMPT_TOKENS = (100, 400)
OUTPUT_TOKENS = 800
VOCABULARY = 2048


class Timer:
    """The time within some calls, summed."""

    def __init__(self) -> None:
        self.ns = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_ns = time.perf_counter_ns()
            result = call(*args, **kwargs)
            self.ns += time.perf_counter_ns() - start_ns
            return result

        return timed


class Core(EngineCoreProc):  # type: ignore[misc]
    """An engine core as in `vllm serve`, without its process and sockets."""

    def __init__(self, config: Any) -> None:
        self.output_queue: queue.Queue[object] = queue.Queue()
        EngineCore.__init__(self, config, Executor.get_class(config), log_stats=True)


class Bench:
    """One engine, whose hooks can be taken off and put back."""

    def __init__(self, model: str, folder: Path, requests: int) -> None:
        self._requests = requests
        self._random = random.Random(0)
        self._names: list[str] = []
        self._named = self._steps_left = 0
        self._outer, self._inner = Timer(), Timer()
        bare_step = self._inner.around(EngineCoreProc._process_engine_step)
        EngineCoreProc._process_engine_step = bare_step
        os.environ[VARIABLE] = str(folder)
        register()
        arguments = EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=2048,
            block_size=32,
            max_num_seqs=requests,
            enforce_eager=True,
            distributed_executor_backend="uni",
        )
        self._core = Core(arguments.create_engine_config())
        scheduler = self._core.scheduler
        # The hooks find the inner timers in place of the scheduler's methods, at the first step.
        bare = {
            name: self._inner.around(getattr(scheduler, name))
            for name in ("schedule", "update_from_output")
        }
        for name, call in bare.items():
            setattr(scheduler, name, call)
        self._core._process_engine_step()
        # What to set where, without hooks and with. In this order to take them off, so that no
        # batch of a hooked `schedule` misses its result; in the reverse one to put them back.
        self._switches = [
            (scheduler, name, self._outer.around(call), self._outer.around(vars(scheduler)[name]))
            for name, call in bare.items()
            if vars(scheduler)[name] is not call
        ]
        self._switches.append(
            (EngineCoreProc, "_process_engine_step", bare_step, EngineCoreProc._process_engine_step)
        )
        if len(self._switches) != 3 or self._switches[2][2] is self._switches[2][3]:
            raise SystemExit("the plugin did not hook this engine")

    def run(self, seconds: float) -> dict[str, object]:
        """Step, pair of blocks by pair of blocks, and return what was measured."""
        (writer,) = (each for each in threading.enumerate() if each.name == "balanceroute steps")
        assert writer.ident is not None
        writer_clock = time.pthread_getcpuclockid(writer.ident)
        pairs: list[list[dict[str, float]]] = []
        writer_ns = -time.clock_gettime_ns(writer_clock)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            if self._steps_left < 2 * (BLOCK_STEPS + 2 * WARM_STEPS):
                self._fill()
            blocks = {
                hooked: self._block(hooked) for hooked in self._random.sample((False, True), 2)
            }
            pairs.append([blocks[False], blocks[True]])
        writer_ns += time.clock_gettime_ns(writer_clock)
        # That of the steps between blocks too, so rather too much.
        steps = len(pairs) * BLOCK_STEPS
        return {"pairs": pairs, "steps": steps, "writer_us": writer_ns / 1000 / steps}

    def _fill(self) -> None:
        """Replace all requests by new ones, and step until each decodes."""
        core = self._core
        core.abort_requests(self._names)
        while core.scheduler.has_requests() or core.batch_queue:
            core._process_engine_step()
        self._names = [f"chatcmpl-{self._named + i:032x}" for i in range(self._requests)]
        self._named += self._requests
        for name in self._names:
            length = self._random.randint(*PROMPT_TOKENS)
            request = EngineCoreRequest(
                request_id=name,
                prompt_token_ids=[self._random.randrange(3, VOCABULARY) for _ in range(length)],
                mm_features=None,
                sampling_params=SamplingParams(
                    temperature=0.0, max_tokens=2 * OUTPUT_TOKENS, ignore_eos=True
                ),
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            core.add_request(*core.preprocess_add_request(request))
        scheduler = core.scheduler
        while scheduler.waiting or any(
            each.num_computed_tokens < each.num_prompt_tokens for each in scheduler.running
        ):
            core._process_engine_step()
        self._steps_left = OUTPUT_TOKENS

    def _block(self, hooked: bool) -> dict[str, float]:
        """Measure some steps of one kind."""
        core = self._core
        for holder, name, without, with_hook in self._switches[:: -1 if hooked else 1]:
            setattr(holder, name, with_hook if hooked else without)
            if name == "schedule":
                # Until batches in flight have their results.
                for _ in range(WARM_STEPS):
                    core._process_engine_step()
        for _ in range(WARM_STEPS):
            core._process_engine_step()
        steps_ns: list[int] = []
        between_ns: list[int] = []
        for _ in range(BLOCK_STEPS):
            before_ns = self._outer.ns - self._inner.ns
            start_ns = time.perf_counter_ns()
            core._process_engine_step()
            steps_ns.append(time.perf_counter_ns() - start_ns)
            between_ns.append(steps_ns[-1] + self._outer.ns - self._inner.ns - before_ns)
        while not core.output_queue.empty():
            core.output_queue.get()
        self._steps_left -= BLOCK_STEPS + 2 * WARM_STEPS
        return {"step_us": median(steps_ns) / 1000, "timers_us": median(between_ns) / 1000}


def main() -> None:
    """Measure and print."""
    model, folder, seconds, requests = sys.argv[1:]
    bench = Bench(model, Path(folder), int(requests))
    print(json.dumps(bench.run(float(seconds))))


if __name__ == "__main__":
    main()
