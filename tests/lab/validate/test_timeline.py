"""Steps as a load over time."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from balanceroute.engine_patch.reader import STEP_DTYPE, EngineTrace, read_steps
from balanceroute.engine_patch.writer import UNKNOWN
from balanceroute.proxy.lab.validate.traces import timeline_of

if TYPE_CHECKING:
    from tests.lab.validate.conftest import WriteSteps

MS = 1_000_000


def trace_of(*steps: tuple[int, int, int]) -> EngineTrace:
    """Return a trace of steps of (start, end, KV tokens), in ms."""
    table = np.zeros(len(steps), STEP_DTYPE)
    for row, (start, end, kv_tokens) in zip(table, steps, strict=True):
        row["start_ns"], row["end_ns"], row["kv_tokens"] = start * MS, end * MS, kv_tokens
    table["wave"] = UNKNOWN
    return EngineTrace(Path("x"), {}, table)


def loads_at(trace: EngineTrace, *times_ms: float) -> list[float]:
    times = (np.array(times_ms) * MS).astype(np.int64)
    return [float(load) for load in timeline_of(trace).loads_at(times)]


def test_a_step_has_its_load_until_it_ends() -> None:
    trace = trace_of((100, 110, 5), (112, 125, 7))
    assert loads_at(trace, 100, 105, 110) == [5, 5, 5]
    # Between two steps the next one's tokens are already there.
    assert loads_at(trace, 111, 112, 125) == [7, 7, 7]


def test_outside_of_the_trace_the_load_is_unknown() -> None:
    assert np.isnan(loads_at(trace_of((100, 110, 5)), 99.9, 110.1)).all()


def test_an_engine_with_nothing_to_do_has_no_load() -> None:
    trace = trace_of((100, 110, 5), (200, 210, 7))
    assert loads_at(trace, 110, 111, 199, 200) == [5, 0, 0, 7]


def test_steps_that_overlap_follow_each_other() -> None:
    # Asynchronous scheduling: the second was scheduled while the first ran.
    timeline = timeline_of(trace_of((100, 120, 5), (102, 140, 6), (122, 160, 7)))
    assert (timeline.begin_ns // MS).tolist() == [100, 120, 140]
    assert (timeline.cycle_ns // MS).tolist() == [20, 20, 20]
    assert timeline.loads_at(np.array([119, 121]) * MS).tolist() == [5, 6]


def test_a_cycle_has_the_engines_own_work_and_not_its_rest() -> None:
    timeline = timeline_of(trace_of((100, 120, 5), (123, 140, 6), (500, 520, 7)))
    assert (timeline.cycle_ns // MS).tolist() == [20, 20, 20]


def test_steps_are_put_in_the_order_of_their_ends() -> None:
    timeline = timeline_of(trace_of((120, 140, 6), (100, 120, 5)))
    assert timeline.kv_tokens.tolist() == [5, 6]


def test_the_place_in_a_barrier_is_the_wave_and_its_step(write_steps: "WriteSteps") -> None:
    inside = write_steps("in", [3, 0], [10, 10], in_barrier=True)
    outside = write_steps("out", [3, 4], [10, 10])
    timeline = timeline_of(read_steps(inside))
    assert timeline.place.tolist() == [0, 1]
    assert timeline.dummy.tolist() == [False, True]
    assert timeline_of(read_steps(outside)).place.tolist() == [-1, -1]
