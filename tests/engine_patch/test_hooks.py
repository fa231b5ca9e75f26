"""The hooks on a stand-in for vLLM's V1 engine core: the same names and order of calls, no model."""

import json
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from balanceroute.engine_patch import hooks
from balanceroute.engine_patch.hooks import UnsupportedEngineError, install
from balanceroute.engine_patch.reader import EngineTrace, read_steps
from balanceroute.engine_patch.writer import DUMMY, UNKNOWN, StepWriter

MS = 1_000_000


@dataclass
class Request:
    """A request, as the stand-in keeps it."""

    request_id: str
    prompt_tokens: int
    computed_tokens: int = 0
    """Tokens in the KV cache; more than none if a prefiller sent them."""
    drafts: int = 0
    """Draft tokens that each step computes with it."""


@dataclass
class NewRequest:
    """A request's first batch."""

    req_id: str
    num_computed_tokens: int


@dataclass
class CachedRequests:
    """The requests of a batch that had one before."""

    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    """A batch."""

    scheduled_new_reqs: list[NewRequest]
    scheduled_cached_reqs: CachedRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]


class Clock:
    """A clock that advances on request."""

    def __init__(self, now_ns: int = 1_000_000_000_000) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


class Scheduler:
    """A step takes whole prompts up to `chunk` tokens, then a token of each request."""

    def __init__(self, clock: Clock, *, chunk: int = 1000) -> None:
        self._clock = clock
        self._chunk = chunk
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.schedule_ns = 0
        self.calls: list[str] = []

    def has_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        del throttle_prefills
        self.calls.append("schedule")
        self._clock.now_ns += self.schedule_ns
        new = list(self.waiting)
        self.waiting.clear()
        tokens: dict[str, int] = {}
        cached = CachedRequests()
        for request in (*self.running, *new):
            rest = request.prompt_tokens - request.computed_tokens
            tokens[request.request_id] = min(rest, self._chunk) if rest > 1 else 1 + request.drafts
        for request in self.running:
            cached.req_ids.append(request.request_id)
            cached.num_computed_tokens.append(request.computed_tokens)
        output = SchedulerOutput(
            [NewRequest(request.request_id, request.computed_tokens) for request in new],
            cached,
            tokens,
            sum(tokens.values()),
            {r.request_id: [-1] * r.drafts for r in (*self.running, *new) if r.drafts},
        )
        self.running += new
        for request in self.running:
            request.computed_tokens += tokens[request.request_id]
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: object
    ) -> dict[int, object]:
        self.calls.append("update_from_output")
        return {0: (scheduler_output, model_runner_output)}


class AscendScheduler(Scheduler):
    """As vllm-ascend's RecomputeScheduler: methods of its own."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        return super().schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: object
    ) -> dict[int, object]:
        return super().update_from_output(scheduler_output, model_runner_output)


class EngineCoreProc:
    """`queue_size` batches in flight: 1 is vLLM without, 2 with asynchronous scheduling."""

    def __init__(
        self, scheduler: Scheduler, clock: Clock, *, queue_size: int = 1, dp_rank: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                data_parallel_index=dp_rank,
                data_parallel_size=1,
                data_parallel_master_ip="10.0.0.1",
                data_parallel_master_port=29500,
            ),
            kv_transfer_config=SimpleNamespace(engine_id="e-1", kv_role="kv_consumer"),
            model_config=SimpleNamespace(model="tiny"),
        )
        self.clock = clock
        self.model_ns = 10_000_000
        self.outputs: list[dict[int, object]] = []
        self._queue: deque[tuple[SchedulerOutput, int]] = deque()
        self._queue_size = queue_size

    def has_work(self) -> bool:
        return self.scheduler.has_requests() or bool(self._queue)

    def _process_engine_step(self) -> bool:
        executed = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule(False)
            executed = output.total_num_scheduled_tokens > 0
            # The device takes batches one after the other.
            free_ns = max([self.clock.now_ns, *(done for _, done in self._queue)])
            self._queue.append((output, free_ns + self.model_ns))
            if executed and len(self._queue) < self._queue_size:
                return True
        elif not self._queue:
            return False
        output, done_ns = self._queue.popleft()
        self.clock.now_ns = max(self.clock.now_ns, done_ns)
        self.outputs.append(self.scheduler.update_from_output(output, "tokens"))
        return executed

    def execute_dummy_batch(self) -> None:
        self.clock.now_ns += self.model_ns


class DPEngineCoreProc(EngineCoreProc):
    """In lock step with others: idle steps are dummy batches."""

    def __init__(
        self, scheduler: Scheduler, clock: Clock, *, queue_size: int = 1, dp_rank: int = 0
    ) -> None:
        super().__init__(scheduler, clock, queue_size=queue_size, dp_rank=dp_rank)
        self.vllm_config.parallel_config.data_parallel_size = 2
        self.current_wave = 3
        self.step_counter = 0

    def loop_once(self) -> None:
        if not self._process_engine_step():
            self.execute_dummy_batch()
        self.step_counter += 1


@pytest.fixture
def core() -> Iterator[type[EngineCoreProc]]:
    """Give the class, and take the hook off afterwards."""
    step = EngineCoreProc._process_engine_step
    yield EngineCoreProc
    EngineCoreProc._process_engine_step = step  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StepWriter]]:
    """Collect the writers that hooks make, with flushes only on close; close what is left."""
    made: list[StepWriter] = []

    def make(*args: Any, **kwargs: Any) -> StepWriter:
        made.append(StepWriter(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(hooks, "StepWriter", make)
    yield made
    for writer in made:
        writer.close()


@dataclass
class Rig:
    """The hook is installed."""

    core: type[EngineCoreProc]
    folder: Path
    writers: list[StepWriter]
    clock: Clock

    def trace(self) -> EngineTrace:
        """End the only trace and read it."""
        (writer,) = self.writers
        writer.close()
        (path,) = self.folder.glob("*.steps")
        return read_steps(path)


@pytest.fixture
def rig(core: type[EngineCoreProc], tmp_path: Path, writers: list[StepWriter]) -> Rig:
    clock = Clock()
    install(core, tmp_path, clock=clock)
    return Rig(core, tmp_path, writers, clock)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("scheduler_class", [Scheduler, AscendScheduler])
def test_every_step_is_recorded(rig: Rig, scheduler_class: type[Scheduler]) -> None:
    scheduler = scheduler_class(rig.clock)
    scheduler.waiting += [Request("a", 100), Request("b", 7, computed_tokens=6)]
    engine = rig.core(scheduler, rig.clock)
    for _ in range(3):
        engine._process_engine_step()
        rig.clock.now_ns += MS  # What the engine does between steps.
    steps = rig.trace().steps
    assert steps["step"].tolist() == [0, 1, 2]
    start = 1_000_000_000_000
    assert steps["start_ns"].tolist() == [start, start + 11 * MS, start + 22 * MS]
    assert steps["end_ns"].tolist() == [start + 10 * MS, start + 21 * MS, start + 32 * MS]
    # Prompt and tokens emitted before: 100 + 7, then a token more of each at every step.
    assert steps["kv_tokens"].tolist() == [107, 109, 111]
    assert steps["batch"].tolist() == [2, 2, 2]
    assert steps["running"].tolist() == [2, 2, 2]
    assert steps["scheduled_tokens"].tolist() == [101, 2, 2]
    assert steps["prefill_tokens"].tolist() == [100, 0, 0]
    assert not steps["flags"].any()
    assert set(steps["wave"].tolist()) == set(steps["wave_step"].tolist()) == {UNKNOWN}


def test_a_prompt_in_chunks_is_prefill_until_it_is_done(rig: Rig) -> None:
    scheduler = Scheduler(rig.clock, chunk=60)
    scheduler.waiting.append(Request("a", 100))
    engine = rig.core(scheduler, rig.clock)
    for _ in range(3):
        engine._process_engine_step()
    steps = rig.trace().steps
    assert steps["prefill_tokens"].tolist() == [60, 40, 0]
    assert steps["kv_tokens"].tolist() == [60, 100, 101]


def test_drafts_are_no_prefill(rig: Rig) -> None:
    scheduler = Scheduler(rig.clock)
    scheduler.waiting += [Request("a", 10, computed_tokens=9, drafts=3), Request("b", 5)]
    rig.core(scheduler, rig.clock)._process_engine_step()
    steps = rig.trace().steps
    assert steps["scheduled_tokens"].tolist() == [1 + 3 + 5]
    assert steps["prefill_tokens"].tolist() == [5]


def test_with_asynchronous_scheduling_each_batch_gets_its_own_result(rig: Rig) -> None:
    scheduler = Scheduler(rig.clock)
    scheduler.schedule_ns = MS
    scheduler.waiting.append(Request("a", 50, computed_tokens=49))
    engine = rig.core(scheduler, rig.clock, queue_size=2)
    for _ in range(4):
        engine._process_engine_step()
    scheduler.running.clear()
    engine._process_engine_step()
    assert scheduler.calls[:4] == ["schedule", "schedule", "update_from_output", "schedule"]
    steps = rig.trace().steps
    assert steps["step"].tolist() == [0, 1, 2, 3]
    assert steps["kv_tokens"].tolist() == [50, 51, 52, 53]
    start = 1_000_000_000_000
    # Batch n + 1 is made while n runs, and ends 10 ms after it.
    assert ((steps["start_ns"] - start) / MS).tolist() == [0, 1, 11, 21]
    assert ((steps["end_ns"] - start) / MS).tolist() == [11, 21, 31, 41]


def test_ranks_of_a_barrier_record_their_place_in_it(rig: Rig) -> None:
    scheduler = Scheduler(rig.clock)
    engine = DPEngineCoreProc(scheduler, rig.clock, dp_rank=1)
    engine.loop_once()
    scheduler.waiting.append(Request("a", 50))
    engine.loop_once()
    scheduler.running.clear()
    engine.loop_once()
    trace = rig.trace()
    assert trace.steps["flags"].tolist() == [DUMMY, 0, DUMMY]
    assert trace.steps["kv_tokens"].tolist() == [0, 50, 0]
    assert trace.steps["wave"].tolist() == [3, 3, 3]
    assert trace.steps["wave_step"].tolist() == [0, 1, 2]
    assert np.diff(trace.steps["end_ns"]).tolist() == [10 * MS, 10 * MS]
    assert trace.header["barrier"] is True
    assert (trace.header["dp_rank"], trace.header["dp_size"]) == (1, 2)
    assert trace.header["dp_group"] == "10.0.0.1:29500"


def test_the_header_says_whose_steps_these_are(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/vllm", "serve", "m", "--port", "8101"])
    rig.core(Scheduler(rig.clock), rig.clock)._process_engine_step()
    header = rig.trace().header
    assert header["port"] == 8101
    assert header["engine_id"] == "e-1"
    assert header["kv_role"] == "kv_consumer"
    assert header["model"] == "tiny"
    assert header["scheduler"] == f"{Scheduler.__module__}.Scheduler"
    assert header["barrier"] is False
    assert header["dp_group"] is None
    assert header["started_ns"] == 1_000_000_000_000


def test_an_engine_that_tells_nothing_of_itself_is_traced_too(rig: Rig) -> None:
    engine = rig.core(Scheduler(rig.clock), rig.clock)
    engine.vllm_config = SimpleNamespace()
    engine.scheduler.waiting.append(Request("a", 5))
    engine._process_engine_step()
    trace = rig.trace()
    assert len(trace.steps) == 1
    assert trace.header["dp_rank"] is None
    assert trace.path.name.startswith("dpx-")


def test_the_engines_own_calls_are_unchanged(core: type[EngineCoreProc], tmp_path: Path) -> None:
    clock = Clock()
    plain, hooked = core(Scheduler(clock), clock), core(Scheduler(clock), clock)
    for engine in (plain, hooked):
        engine.scheduler.waiting.append(Request("a", 5))
    plain._process_engine_step()
    install(core, tmp_path, clock=clock)
    assert hooked._process_engine_step() is True
    assert hooked.scheduler.calls == plain.scheduler.calls
    assert hooked.outputs == plain.outputs


def test_installing_twice_hooks_once(core: type[EngineCoreProc], tmp_path: Path) -> None:
    install(core, tmp_path)
    step = core._process_engine_step
    install(core, tmp_path)
    assert core._process_engine_step is step


def test_two_engines_of_one_process_have_a_file_each(rig: Rig) -> None:
    for rank in (0, 1):
        rig.core(Scheduler(rig.clock), rig.clock, dp_rank=rank)._process_engine_step()
    assert len(rig.writers) == 2
    ranks = [json.loads(p.read_bytes().split(b"\n")[0])["dp_rank"] for p in rig.folder.iterdir()]
    assert sorted(ranks) == [0, 1]


class Failing(Scheduler):
    """An engine whose step fails by itself."""

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: object
    ) -> dict[int, object]:
        super().update_from_output(scheduler_output, model_runner_output)
        raise ZeroDivisionError


def test_the_engines_own_exceptions_go_through_and_leave_no_record(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = Failing(rig.clock)
    scheduler.waiting.append(Request("a", 5))
    with pytest.raises(ZeroDivisionError):
        rig.core(scheduler, rig.clock)._process_engine_step()
    assert scheduler.calls == ["schedule", "update_from_output"]
    assert not len(rig.trace().steps)
    assert not warnings(caplog)


class NothingCached(Scheduler):
    """A version whose output lacks what the hook of `schedule` reads."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        output.scheduled_cached_reqs = None  # type: ignore[assignment]
        return output


class NegativeTokens(Scheduler):
    """A version with numbers that fit no record, as the hook of `update_from_output` finds out."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        output.scheduled_cached_reqs.num_computed_tokens.append(-1000)
        return output


@pytest.mark.parametrize("scheduler_class", [NothingCached, NegativeTokens])
def test_a_hook_that_fails_warns_once_and_the_engine_goes_on_without_hooks(
    rig: Rig, caplog: pytest.LogCaptureFixture, scheduler_class: type[Scheduler]
) -> None:
    scheduler = scheduler_class(rig.clock)
    scheduler.waiting.append(Request("a", 5))
    engine = rig.core(scheduler, rig.clock)
    for _ in range(3):
        assert engine._process_engine_step() is True
    assert scheduler.calls == ["schedule", "update_from_output"] * 3
    assert len(engine.outputs) == 3
    assert len(warnings(caplog)) == 1
    assert not {"schedule", "update_from_output"} & set(vars(scheduler))
    assert "execute_dummy_batch" not in vars(engine)
    assert not len(rig.trace().steps)


def test_a_dummy_batch_that_cannot_be_recorded_runs_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    engine = DPEngineCoreProc(Scheduler(rig.clock), rig.clock)
    engine.loop_once()
    engine.current_wave = -1
    before_ns = rig.clock.now_ns
    engine.loop_once()
    assert rig.clock.now_ns - before_ns == engine.model_ns
    assert len(warnings(caplog)) == 1
    engine.loop_once()
    assert len(warnings(caplog)) == 1


def test_a_hook_that_someone_wrapped_stays_and_passes_on(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = NegativeTokens(rig.clock)
    engine = rig.core(scheduler, rig.clock)
    engine._process_engine_step()
    ours = scheduler.schedule
    seen: list[SchedulerOutput] = []

    def theirs(*args: Any) -> SchedulerOutput:
        seen.append(ours(*args))
        return seen[-1]

    scheduler.schedule = theirs  # type: ignore[method-assign,assignment]
    scheduler.waiting.append(Request("a", 5))
    for _ in range(3):
        engine._process_engine_step()
    assert len(seen) == 3
    assert scheduler.schedule is theirs
    assert len(warnings(caplog)) == 1


class NoUpdate(Scheduler):
    """A version without that method."""

    update_from_output = None  # type: ignore[assignment]


class RenamedParameter(Scheduler):
    """A version with other parameters."""

    def update_from_output(self, output: Any, result: object) -> dict[int, object]:
        return super().update_from_output(output, result)


class Asynchronous(Scheduler):
    """A version of coroutines."""

    async def schedule(self) -> SchedulerOutput:  # type: ignore[override]
        return super().schedule()


class Slotted:
    """A scheduler that takes no attributes, and runs nothing."""

    __slots__ = ()
    running: tuple[Request, ...] = ()

    def has_requests(self) -> bool:
        return False

    def schedule(self) -> None: ...

    def update_from_output(self, scheduler_output: object, result: object) -> None: ...


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [
        (NoUpdate(Clock()), "NoUpdate.update_from_output is no ordinary method"),
        (RenamedParameter(Clock()), "update_from_output takes ['output', 'result']"),
        (Asynchronous(Clock()), "Asynchronous.schedule is no ordinary method"),
        (SimpleNamespace(has_requests=lambda: False), "SimpleNamespace has no running"),
        (Slotted(), "'Slotted' object"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_engine_of_another_shape_is_left_alone_with_one_warning(
    core: type[EngineCoreProc],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    scheduler: Any,
    reason: str,
) -> None:
    install(core, tmp_path)
    engine = core(scheduler, Clock())
    for _ in range(2):
        assert engine._process_engine_step() is False
    (warning,) = warnings(caplog)
    assert reason in warning
    assert "execute_dummy_batch" not in vars(engine)


def test_a_folder_that_takes_no_file_costs_the_trace_and_not_the_engine(
    core: type[EngineCoreProc], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    install(core, tmp_path / "missing", clock=clock)
    engine = core(Scheduler(clock), clock)
    engine.scheduler.waiting.append(Request("a", 5))
    for _ in range(2):
        assert engine._process_engine_step() is True
    (warning,) = warnings(caplog)
    assert "FileNotFoundError" in warning


def test_a_disk_that_takes_no_more_ends_the_trace(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = rig.core(Scheduler(rig.clock), rig.clock)
    engine.scheduler.waiting.append(Request("a", 5))
    engine._process_engine_step()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        rig.writers[0].close()
    assert engine._process_engine_step() is True
    (warning,) = warnings(caplog)
    assert "No space left on device" in warning
    assert "schedule" not in vars(engine.scheduler)


def test_batches_without_a_result_are_forgotten(rig: Rig) -> None:
    scheduler = Scheduler(rig.clock)
    scheduler.waiting.append(Request("a", 5))
    rig.core(scheduler, rig.clock)._process_engine_step()
    outputs = [scheduler.schedule() for _ in range(65)]
    scheduler.update_from_output(outputs[0], "late")
    scheduler.update_from_output(outputs[1], "late")
    assert rig.trace().steps["step"].tolist() == [0, 2]


class Stepless:
    """No engine."""


class StaticStep:
    """An engine core whose step is no method."""

    @staticmethod
    def _process_engine_step(engine: object) -> None: ...


@pytest.mark.parametrize(
    ("engine_class", "reason"),
    [(Stepless, "Stepless has no _process_engine_step"), (StaticStep, "takes ['engine']")],
)
def test_a_class_without_that_step_is_refused(
    tmp_path: Path, engine_class: type, reason: str
) -> None:
    with pytest.raises(UnsupportedEngineError) as caught:
        install(engine_class, tmp_path)
    assert reason in str(caught.value)
