"""Step traces and load logs as loads over time, and which trace is which rank's.

A step's own time begins when it started, or when the previous step ended if that is later: with
asynchronous scheduling steps overlap. The load of a step is that of its batch: the KV tokens that it
attends to. It holds from the end of the previous step, when that step's tokens were emitted.
"""

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from balanceroute.engine_patch.reader import EngineTrace, TraceFormatError, read_steps
from balanceroute.engine_patch.writer import DUMMY, SUFFIX, UNKNOWN
from balanceroute.proxy.core.errors import BalanceRouteError

CONTINUOUS_NS = 10_000_000
"""Between two steps that are farther apart than this, the engine was idle.

Closer ones are consecutive cycles: the time between them is the engine's own work.
"""


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of one engine, in the order in which they ended."""

    begin_ns: NDArray[np.int64]  # int64[steps], Unix time.
    end_ns: NDArray[np.int64]  # int64[steps].
    # int64[steps], from the end of the step before to its own end; from its own beginning if there
    # was nothing to do in between.
    cycle_ns: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]  # int64[steps].
    prefill_tokens: NDArray[np.int64]  # int64[steps].
    dummy: NDArray[np.bool_]  # bool[steps], whether the rank only took part in the barrier.
    # int64[steps], equal on all ranks of a barrier for the same step of it; -1 outside of one.
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


class ValidationError(BalanceRouteError):
    """A file cannot be used, or files do not fit together. The message says which and why."""


# Reads the load log (`balanceroute.proxy.live.control.state`): the proxy's load of each rank.

_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one rank, in the order of time."""

    times_ns: NDArray[np.int64]  # int64[samples], Unix time.
    # int64[samples], KV tokens of the requests that the proxy counts in its batch.
    started_tokens: NDArray[np.int64]
    bound_tokens: NDArray[np.int64]  # int64[samples], KV tokens of all requests sent to it.


def read_load_log(path: Path) -> dict[str, Samples]:
    """Return the samples of every rank, by its name, in the order of their first lines.

    A last line without its end is left out: the proxy may be writing it.

    Raises:
        ValidationError: A line is no sample, or there is none.
        OSError: The file cannot be read.
    """
    rows: dict[str, array[int]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                try:
                    _samples_of(line, rows)
                except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                    reason = f"{path}:{number}: no sample of a load log"
                    raise ValidationError(reason) from error
    if not rows:
        raise ValidationError(f"{path}: a load log without samples")
    return {name: _samples(row) for name, row in rows.items()}


def _samples_of(line: bytes, rows: "dict[str, array[int]]") -> None:
    sample = json.loads(line)
    time_s = float(sample["time_s"])
    if not isfinite(time_s):
        raise ValueError(time_s)
    for name, load in sample["loads"].items():
        if len(load) != _COLUMNS or not all(type(number) is int for number in load):
            raise ValueError(load)
        started_tokens, _, bound_tokens, _ = load
        row = rows.setdefault(name, array("q"))
        row.extend((round(time_s * 1e9), started_tokens, bound_tokens))


def _samples(row: "array[int]") -> Samples:
    table = np.array(row, np.int64).reshape(-1, 3)
    # A wall clock may be set back.
    table = table[np.argsort(table[:, 0], kind="stable")]
    return Samples(*(np.ascontiguousarray(column) for column in table.T))


# Which step trace is which decode rank's.
#
# The proxy knows a rank by its URL, followed by "@rank" if several ranks share it. An engine
# knows the port of its API server, from its command line, and its data-parallel rank. So a trace
# belongs to a rank if port and rank agree, and the host too if several traces agree otherwise.
# With hybrid load balancing the number in a URL counts the ranks of that server alone, the
# engine's number all ranks of the group: the server's first rank is then 0 in the URL. If no
# engine knows its port, the data-parallel ranks alone decide, provided that each occurs once.
# What the operator assigned takes precedence.

_NAME = re.compile(r"https?://(?P<host>\[[^\]]*\]|[^:/@]*)(:(?P<port>\d+))?(@(?P<rank>\d+))?")


def read_traces(folder: Path) -> list[EngineTrace]:
    """Return the traces in a folder that have a step, by name.

    Raises:
        ValidationError: The folder has no trace, or one that cannot be used, or none has a step.
        OSError: A file cannot be read.
    """
    if not folder.is_dir():
        raise ValidationError(f"{folder}: not a directory")
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise ValidationError(f"{folder}: no step trace (*{SUFFIX}) in it")
    traces = [_read(path) for path in paths]
    filled = [trace for trace in traces if len(trace.steps)]
    if not filled:
        raise ValidationError(f"{folder}: {len(paths)} step traces, and no step in any of them")
    return filled


def match(
    traces: Sequence[EngineTrace],
    names: Sequence[str],
    *,
    given: Mapping[str, Path],
    span_ns: tuple[int, int],
) -> dict[str, EngineTrace]:
    """Return the traces of ranks, by the ranks' names; ranks without a trace are left out.

    Args:
        traces: With a step each.
        given: Paths of traces that the operator assigned to ranks.
        span_ns: When the proxy's first and last samples were taken. A trace outside of it is
            another run's.

    Raises:
        ValidationError: An assignment does not fit, a rank has two traces, or none has one.
    """
    found = {name: _given(name, path, traces, names) for name, path in given.items()}
    taken = {trace.path for trace in found.values()}
    if len(taken) < len(found):
        raise ValidationError("--map gives one trace to two ranks")
    free = [trace for trace in traces if trace.path not in taken and _may_decode(trace, span_ns)]
    for name in names:
        if name not in found:
            own = _own(name, free)
            if own is not None:
                _check_new(name, own, found)
                found[name] = own
    if not found:
        found = _by_rank_alone(names, free)
    if not found:
        known = ", ".join(sorted(trace.path.name for trace in traces))
        reason = f"no trace fits a rank: the proxy has {', '.join(names)}, the folder {known}"
        raise ValidationError(f"{reason}; give them with --map RANK=FILE")
    return {name: found[name] for name in names if name in found}


def _read(path: Path) -> EngineTrace:
    try:
        return read_steps(path)
    except TraceFormatError as error:
        raise ValidationError(str(error)) from error


def _given(
    name: str, path: Path, traces: Sequence[EngineTrace], names: Sequence[str]
) -> EngineTrace:
    if name not in names:
        raise ValidationError(f"--map: no rank is called {name!r}, but {', '.join(names)}")
    for trace in traces:
        if trace.path == path or trace.path.name == str(path):
            return trace
    trace = _read(path)
    if not len(trace.steps):
        raise ValidationError(f"--map: {path} has no step")
    return trace


def _may_decode(trace: EngineTrace, span_ns: tuple[int, int]) -> bool:
    begin_ns, end_ns = int(trace.steps["start_ns"].min()), int(trace.steps["end_ns"].max())
    if end_ns < span_ns[0] or begin_ns > span_ns[1]:
        return False
    return trace.header.get("kv_role") != "kv_producer"


def _own(name: str, traces: Sequence[EngineTrace]) -> EngineTrace | None:
    """Return the trace of a rank by port and data-parallel rank, if one has them."""
    address = _NAME.fullmatch(name)
    if address is None:
        return None
    port = int(address["port"] or (443 if name.startswith("https") else 80))
    rank = None if address["rank"] is None else int(address["rank"])
    of_port = [trace for trace in traces if trace.header.get("port") == port]
    of_host = [trace for trace in of_port if trace.header.get("host") == address["host"]]
    fitting = _of_rank(rank, of_host) or _of_rank(rank, of_port)
    if len(fitting) > 1:
        files = ", ".join(trace.path.name for trace in fitting)
        raise ValidationError(f"{name} fits several traces, {files}: choose with --map RANK=FILE")
    return fitting[0] if fitting else None


def _of_rank(rank: int | None, traces: Sequence[EngineTrace]) -> list[EngineTrace]:
    if rank is None or not traces:
        return list(traces)
    ranks = [trace.header.get("dp_rank") for trace in traces]
    first = min((number for number in ranks if isinstance(number, int)), default=0)
    return [trace for trace, number in zip(traces, ranks, strict=True) if number == rank] or [
        trace for trace, number in zip(traces, ranks, strict=True) if number == first + rank
    ]


def _check_new(name: str, trace: EngineTrace, found: Mapping[str, EngineTrace]) -> None:
    for other, taken in found.items():
        if taken is trace:
            reason = f"{trace.path.name} fits {other} and {name}"
            raise ValidationError(f"{reason}: choose with --map RANK=FILE")


def _by_rank_alone(names: Sequence[str], traces: Sequence[EngineTrace]) -> dict[str, EngineTrace]:
    by_rank = {trace.header.get("dp_rank"): trace for trace in traces}
    addresses = {name: _NAME.fullmatch(name) for name in names}
    ranks = [
        int(address["rank"])
        for address in addresses.values()
        if address is not None and address["rank"]
    ]
    any_port_known = any(trace.header.get("port") is not None for trace in traces)
    unique = len(by_rank) == len(traces) and len(set(ranks)) == len(ranks) == len(names)
    if any_port_known or not unique:
        return {}
    pairs = zip(names, ranks, strict=True)
    return {name: by_rank[rank] for name, rank in pairs if rank in by_rank}
