"""The hooks: wrappers around methods of vLLM's V1 engine core that see every step.

    EngineCoreProc._process_engine_step   on the class, to hook each engine at its first step
    scheduler.schedule                    on that engine's own scheduler: a step starts
    scheduler.update_from_output          likewise: the step has ended
    engine.execute_dummy_batch            on the engine: a step with nothing to compute

Plugins are loaded inside the engine core's constructor, too late to wrap that. Wrapping instances
covers every scheduler class: vLLM's two, and those of vllm-ascend (RecomputeScheduler,
BalanceScheduler, the DyntraLB, profiling and batch-job ones, and their asynchronous twins), which
override `schedule` and `update_from_output` of the same V1 scheduler and return its
SchedulerOutput. vllm-ascend's engine cores (BalanceDPEngineCoreProc, DyntraLBDPEngineCoreProc) come
from vLLM's and leave `_process_engine_step` and `execute_dummy_batch` alone.

A batch is paired with its result by the identity of the SchedulerOutput: with asynchronous
scheduling the next batch is made before the result of the last one is there.

The code of every step is flat, with few look-ups. The engine calls it once every few milliseconds, with
cold processor caches: each further call or object then costs a microsecond.
"""

import atexit
import functools
import inspect
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from balanceroute.engine_patch.writer import DUMMY, RECORD, SUFFIX, UNKNOWN, StepWriter, header_line

# The engine of a trace, from the engine's configuration as far as it is present.
#
# Fields, each null if the engine does not have it:
#
#     dp_rank         Index among the data-parallel ranks of the deployment.
#     dp_size         Ranks that step in lock step with this one, itself included.
#     barrier         Whether there are such ranks (a mixture of experts served data-parallel).
#     dp_group        Address of the group's coordinator: equal on the ranks of one barrier.
#     port            HTTP port of the API server, from its command line.
#     engine, engine_version, scheduler   Software, and the class of the scheduler.
#     engine_id, kv_role                  As the KV transfer knows this engine.
#     model, host, pid
#     started_ns      Unix time of the first step.

_DEFAULT_PORT = 8000  # vLLM's.


def identity(engine: Any, *, started_ns: int, argv: Sequence[str]) -> dict[str, object]:
    """Return the fields of an engine.

    Args:
        engine: vLLM's engine core; read only with `getattr`.
        started_ns: Unix time of its first step.
    """
    config = getattr(engine, "vllm_config", None)
    parallel = getattr(config, "parallel_config", None)
    transfer = getattr(config, "kv_transfer_config", None)
    barrier = hasattr(engine, "step_counter") and hasattr(engine, "current_wave")
    return {
        "dp_rank": _number(getattr(parallel, "data_parallel_index", None)),
        "dp_size": _number(getattr(parallel, "data_parallel_size", None)),
        "barrier": barrier,
        "dp_group": _dp_group(parallel) if barrier else None,
        "port": http_port(argv),
        "engine": "vllm",
        "engine_version": _text(getattr(sys.modules.get("vllm"), "__version__", None)),
        "scheduler": _class_name(getattr(engine, "scheduler", None)),
        "engine_id": _text(getattr(transfer, "engine_id", None)),
        "kv_role": _text(getattr(transfer, "kv_role", None)),
        "model": _text(getattr(getattr(config, "model_config", None), "model", None)),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started_ns": started_ns,
    }


def http_port(argv: Sequence[str]) -> int | None:
    """Return the port of vLLM's API server from its command line; None if that does not determine it."""
    port: str | None = None
    for place, word in enumerate(argv):
        if word == "--port":
            port = "".join(argv[place + 1 : place + 2])
        elif word.startswith("--port="):
            port = word.removeprefix("--port=")
    if port is not None:
        return int(port) if port.isascii() and port.isdigit() else None
    serves = "serve" in argv[1:2] or any(word.endswith("api_server.py") for word in argv[:1])
    elsewhere = any(word.split("=")[0] in {"--config", "--headless", "--uds"} for word in argv)
    return _DEFAULT_PORT if serves and not elsewhere else None


def _dp_group(parallel: Any) -> str | None:
    host = getattr(parallel, "data_parallel_master_ip", None)
    port = getattr(parallel, "data_parallel_master_port", None)
    return None if host is None or port is None else f"{host}:{port}"


def _class_name(value: Any) -> str | None:
    return None if value is None else f"{type(value).__module__}.{type(value).__qualname__}"


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


# Under vLLM's own logger, whose handlers print it.
_log = logging.getLogger("vllm.balanceroute")
_TRACE = "_balanceroute_step_trace"
# Batches without a result yet. vLLM has at most a few; more means that it dropped some.
_MAX_PENDING = 64


class UnsupportedEngineError(Exception):
    """This engine lacks something that the hooks need."""


def install(engine_class: Any, folder: Path, *, clock: Callable[[], int] = time.time_ns) -> None:
    """Hook every engine of a class at its first step. Repeated calls change nothing.

    Args:
        engine_class: vLLM's EngineCoreProc.
        folder: The folder for traces; it must exist.

    Raises:
        UnsupportedEngineError: The class has no such step.
    """
    step = _require(engine_class, "_process_engine_step")
    if hasattr(step, _TRACE):
        return
    parameters = list(inspect.signature(step).parameters)
    if parameters[:1] != ["self"]:
        raise UnsupportedEngineError(f"_process_engine_step takes {parameters}, not self")

    @functools.wraps(step)
    def process_engine_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, _TRACE):
            _attach(self, folder, clock)
        return step(self, *args, **kwargs)

    setattr(process_engine_step, _TRACE, True)
    engine_class._process_engine_step = process_engine_step


def _attach(engine: Any, folder: Path, clock: Callable[[], int]) -> None:
    """Hook one engine, or warn; never raises."""
    trace: StepTrace | None = None
    try:
        # First, so that a failure does not repeat at every step.
        setattr(engine, _TRACE, None)
        trace = StepTrace(engine, clock)
        trace.open(folder)
    except Exception as error:
        if trace is None:
            _warn(error)
        else:
            trace.disable(error)


class StepTrace:
    """The trace of one engine: its hooks and its file."""

    def __init__(self, engine: Any, clock: Callable[[], int]) -> None:
        """Check that an engine has all that the hooks need, without a change to it.

        Raises:
            UnsupportedEngineError: It lacks something.
        """
        self._engine = engine
        self._scheduler = _require(engine, "scheduler")
        self._clock = clock
        _require(self._scheduler, "running")
        _require(self._scheduler, "schedule", call=True)
        _require(engine, "execute_dummy_batch", call=True)
        update = _require(self._scheduler, "update_from_output", call=True)
        parameters = list(inspect.signature(update).parameters)
        if parameters[:1] != ["scheduler_output"]:
            message = f"update_from_output takes {parameters}, not a scheduler_output first"
            raise UnsupportedEngineError(message)
        self._in_barrier = hasattr(engine, "current_wave") and hasattr(engine, "step_counter")
        # A SchedulerOutput, kept alive until its result is there so that its identity stays its own;
        # and its record, before and after the time of its end.
        self._pending: deque[tuple[Any, tuple[int, int], tuple[int, ...]]]
        self._pending = deque(maxlen=_MAX_PENDING)
        self._steps = 0
        self._on = True
        self._hooks: list[tuple[Any, str, Any]] = []
        self._writer: StepWriter | None = None

    def open(self, folder: Path) -> None:
        """Create the file and wrap the engine's methods. After any exception call `disable`.

        Raises:
            OSError: The file cannot be created.
        """
        now_ns = self._clock()
        fields = identity(self._engine, started_ns=now_ns, argv=sys.argv)
        rank = "x" if fields["dp_rank"] is None else fields["dp_rank"]
        name = f"dp{rank}-{fields['host']}-{os.getpid()}-{now_ns // 1_000_000}{SUFFIX}"
        self._writer = StepWriter(folder / name, header_line(fields), on_fault=self.disable)
        # A process of multiprocessing that was forked runs the second one alone.
        atexit.register(self._writer.close)
        Finalize(None, self._writer.close, exitpriority=0)
        self._wrap(self._scheduler, "schedule", self._schedule)
        self._wrap(self._scheduler, "update_from_output", self._update)
        self._wrap(self._engine, "execute_dummy_batch", self._dummy)
        _log.info("balanceroute: engine steps go to %s", folder / name)

    def disable(self, error: Exception) -> None:
        """End the trace permanently, with one warning. The engine continues without hooks."""
        if not self._on:
            return
        self._on = False
        _warn(error)
        for holder, name, hook in self._hooks:
            # Unless other code has wrapped our hook since: then it stays and only calls the original.
            if getattr(holder, name, None) is hook:
                delattr(holder, name)
        self._hooks.clear()
        self._pending.clear()

    # The three hooks. Each calls the engine's own method first and exactly once.

    def _wrap(self, holder: Any, name: str, make: Callable[[Any], Any]) -> None:
        inner = getattr(holder, name)
        hook = functools.wraps(inner)(make(inner))
        setattr(holder, name, hook)
        self._hooks.append((holder, name, hook))

    def _schedule(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        clock, scheduled = self._clock, self._scheduled

        def schedule(*args: Any, **kwargs: Any) -> Any:
            start_ns = clock()
            output = inner(*args, **kwargs)
            if self._on:
                try:
                    scheduled(output, start_ns)
                except Exception as error:
                    self.disable(error)
            return output

        return schedule

    def _update(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        assert self._writer is not None
        clock, pending, pack, add = self._clock, self._pending, RECORD.pack, self._writer.add

        def update_from_output(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            result = inner(scheduler_output, *args, **kwargs)
            if self._on:
                try:
                    end_ns = clock()
                    for place, (output, before, after) in enumerate(pending):
                        if output is scheduler_output:
                            del pending[place]
                            add(pack(*before, end_ns, *after))
                            break
                except Exception as error:
                    self.disable(error)
            return result

        return update_from_output

    def _dummy(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        clock, idled = self._clock, self._idled

        def execute_dummy_batch(*args: Any, **kwargs: Any) -> Any:
            start_ns = clock()
            result = inner(*args, **kwargs)
            if self._on:
                try:
                    idled(start_ns, clock())
                except Exception as error:
                    self.disable(error)
            return result

        return execute_dummy_batch

    # What they record.

    def _scheduled(self, output: Any, start_ns: int) -> None:
        tokens = output.total_num_scheduled_tokens
        if not tokens:
            return
        batch = output.num_scheduled_tokens
        size = len(batch)
        # Both hold the tokens computed before this step. Summing lists that are there anyway costs
        # a tenth of asking every request.
        kv_tokens = tokens + sum(output.scheduled_cached_reqs.num_computed_tokens)
        for new in output.scheduled_new_reqs:
            kv_tokens += new.num_computed_tokens
        prefill_tokens = 0
        if tokens != size:
            drafts = output.scheduled_spec_decode_tokens
            for request, number in batch.items():
                if number > 1 and number > 1 + len(drafts.get(request, ())):
                    prefill_tokens += number
        wave = wave_step = UNKNOWN
        if self._in_barrier:
            wave, wave_step = self._engine.current_wave, self._engine.step_counter
        step, self._steps = self._steps, self._steps + 1
        running = len(self._scheduler.running)
        after = (kv_tokens, running, size, tokens, prefill_tokens, wave, wave_step, 0)
        self._pending.append((output, (step, start_ns), after))

    def _idled(self, start_ns: int, end_ns: int) -> None:
        assert self._writer is not None
        wave = wave_step = UNKNOWN
        if self._in_barrier:
            wave, wave_step = self._engine.current_wave, self._engine.step_counter
        step, self._steps = self._steps, self._steps + 1
        running = len(self._scheduler.running)
        self._writer.add(
            RECORD.pack(step, start_ns, end_ns, 0, running, 0, 0, 0, wave, wave_step, DUMMY)
        )


def _require(holder: Any, name: str, *, call: bool = False) -> Any:
    """Return an attribute, which must be there, and be an ordinary method if it is to be wrapped."""
    try:
        value = getattr(holder, name)
    except AttributeError:
        where = holder.__name__ if inspect.isclass(holder) else type(holder).__name__
        raise UnsupportedEngineError(f"{where} has no {name}") from None
    if call and (not callable(value) or inspect.iscoroutinefunction(value)):
        raise UnsupportedEngineError(f"{type(holder).__name__}.{name} is no ordinary method")
    return value


def _warn(error: Exception) -> None:
    reason = f"{type(error).__name__}: {error}"
    _log.warning("balanceroute: no trace of this engine's steps from now on: %s", reason)
