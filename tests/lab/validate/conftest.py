"""Runs with known answers: an engine of a known step time, and a proxy that is late by a known time."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from balanceroute.engine_patch.writer import DUMMY, FIELDS, RECORD, UNKNOWN, header_line
from balanceroute.proxy.live.telemetry.process_log import json_line

MS = 1_000_000
START_NS = 1_795_000_000_000_000_000

WriteSteps = Callable[..., Path]
WriteLog = Callable[..., Path]


@pytest.fixture
def write_steps(tmp_path: Path) -> WriteSteps:
    """Write a trace: `loads` step by step, each of `step_ms`, one after the other."""

    def write(
        name: str,
        loads: Sequence[int],
        step_ms: Sequence[float],
        *,
        gaps_ms: Mapping[int, float] | None = None,
        prefill: Sequence[int] = (),
        begin_ns: int = START_NS,
        in_barrier: bool = False,
        header: Mapping[str, Any] | None = None,
    ) -> Path:
        records, now_ns = [], begin_ns
        for step, (load, duration_ms) in enumerate(zip(loads, step_ms, strict=True)):
            now_ns += round((gaps_ms or {}).get(step, 0.0) * MS)
            end_ns = now_ns + round(duration_ms * MS)
            record: dict[str, int] = {
                "step": step,
                "start_ns": now_ns,
                "end_ns": end_ns,
                "kv_tokens": load,
                "running": 1,
                "batch": int(load > 0),
                "scheduled_tokens": int(load > 0),
                "prefill_tokens": prefill[step] if prefill else 0,
                "wave": 0 if in_barrier else UNKNOWN,
                "wave_step": step if in_barrier else UNKNOWN,
                "flags": 0 if load else DUMMY,
            }
            records.append(RECORD.pack(*(record[field] for field, _ in FIELDS)))
            now_ns = end_ns
        folder = tmp_path / "steps"
        folder.mkdir(exist_ok=True)
        path = folder / f"{name}.steps"
        path.write_bytes(header_line(dict(header or {})) + b"".join(records))
        return path

    return write


@pytest.fixture
def write_log(tmp_path: Path) -> WriteLog:
    """Write a load log: at each time, in ns, each rank's loads started and bound."""

    def write(
        times_ns: NDArray[np.int64],
        started: Mapping[str, Sequence[float]],
        bound: Mapping[str, Sequence[float]] | None = None,
    ) -> Path:
        bound = started if bound is None else bound
        path = tmp_path / "loads.jsonl"
        with path.open("wb") as file:
            for number, time_ns in enumerate(times_ns.tolist()):
                loads = {
                    name: [int(started[name][number]), 1, int(bound[name][number]), 1]
                    for name in started
                }
                file.write(json_line({"time_s": time_ns / 1e9, "loads": loads}))
        return path

    return write
