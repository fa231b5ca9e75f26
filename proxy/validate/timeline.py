"""An engine's steps as its load over time.

A step's own time begins when it started, or when the previous step ended if that is later: with
asynchronous scheduling steps overlap. The load of a step is that of its batch: the KV tokens that it
attends to. It holds from the end of the previous step, when that step's tokens were emitted.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.engine_patch.records import DUMMY, UNKNOWN

if TYPE_CHECKING:
    from balanceroute.engine_patch.reader import EngineTrace

CONTINUOUS_NS = 10_000_000
"""Between two steps that are farther apart than this, the engine was idle.

Closer ones are consecutive cycles: the time between them is the engine's own work.
"""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of one engine, in the order in which they ended.

    Attributes:
        begin_ns: int64[steps], Unix time.
        end_ns: int64[steps].
        cycle_ns: int64[steps], from the end of the step before to its own end; from its own
            beginning if there was nothing to do in between.
        kv_tokens: int64[steps].
        prefill_tokens: int64[steps].
        dummy: bool[steps], whether the rank only took part in the barrier.
        place: int64[steps], equal on all ranks of a barrier for the same step of it; -1 outside
            of one.
    """

    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    cycle_ns: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]
    prefill_tokens: NDArray[np.int64]
    dummy: NDArray[np.bool_]
    place: NDArray[np.int64]

    def loads_at(self, times_ns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float64[times], the load at some times; NaN before the first and after the last step.

        Between two steps it is that of the next one, or 0 if the engine had nothing to do.
        """
        last = len(self.end_ns) - 1
        after = np.searchsorted(self.end_ns, times_ns, side="left")
        step = np.minimum(after, last)
        gap_ns = self.begin_ns - np.concatenate([self.begin_ns[:1], self.end_ns[:-1]])
        runs = (times_ns >= self.begin_ns[step]) | (gap_ns[step] <= CONTINUOUS_NS)
        loads = np.where(runs, self.kv_tokens[step], 0).astype(np.float64)
        loads[(after > last) | (times_ns < self.begin_ns[0])] = np.nan
        return loads

    def cut(self, steps: NDArray[np.bool_]) -> "Timeline":
        """Return some of the steps, with what each was on the whole timeline."""
        return Timeline(
            self.begin_ns[steps],
            self.end_ns[steps],
            self.cycle_ns[steps],
            self.kv_tokens[steps],
            self.prefill_tokens[steps],
            self.dummy[steps],
            self.place[steps],
        )


def timeline_of(trace: "EngineTrace") -> Timeline:
    """Return the timeline of a trace that has at least one step."""
    assert len(trace.steps)
    steps = trace.steps[np.argsort(trace.steps["end_ns"], kind="stable")]
    start_ns = steps["start_ns"].astype(np.int64)
    end_ns = steps["end_ns"].astype(np.int64)
    before_ns = np.concatenate([start_ns[:1], end_ns[:-1]])
    begin_ns = np.maximum(start_ns, before_ns)
    continuous = begin_ns - before_ns <= CONTINUOUS_NS
    wave = steps["wave"].astype(np.int64)
    place = np.where(wave == UNKNOWN, -1, (wave << 32) + steps["wave_step"].astype(np.int64))
    return Timeline(
        begin_ns=begin_ns,
        end_ns=end_ns,
        cycle_ns=end_ns - np.where(continuous, before_ns, begin_ns),
        kv_tokens=steps["kv_tokens"].astype(np.int64),
        prefill_tokens=steps["prefill_tokens"].astype(np.int64),
        dummy=(steps["flags"] & DUMMY) != 0,
        place=place,
    )
