"""The writer's thread: a flush a second, one at the end, and never a wait for the engine."""

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.engine_patch import writer as writer_module
from balanceroute.engine_patch.reader import STEP_DTYPE, TraceFormatError, read_steps
from balanceroute.engine_patch.writer import FIELDS, FLUSH_S, RECORD, StepWriter, header_line

HEADER = b"header\n"
LONG_S = 10.0  # Never waited for: what is tested ends long before.


class Ticks:
    """Stands for the writer's clock: each pause lasts until the test lets it end."""

    def __init__(self) -> None:
        self.asked_s: SimpleQueue[float] = SimpleQueue()
        self._go: SimpleQueue[bool] = SimpleQueue()

    def __call__(self, seconds: float) -> bool:
        self.asked_s.put(seconds)
        return self._go.get(timeout=LONG_S)

    def paused(self) -> float:
        """Wait until the thread pauses; return for how long it means to."""
        return self.asked_s.get(timeout=LONG_S)

    def go(self, *, ended: bool = False) -> None:
        self._go.put(ended)


def no_fault(error: OSError) -> None:
    raise AssertionError(error)


def test_records_are_flushed_every_second(tmp_path: Path) -> None:
    path, ticks = tmp_path / "a", Ticks()
    writer = StepWriter(path, HEADER, on_fault=no_fault, pause=ticks)
    assert ticks.paused() == FLUSH_S == 1.0
    writer.add(b"one,")
    writer.add(b"two,")
    assert path.read_bytes() == HEADER
    ticks.go()
    ticks.paused()
    assert path.read_bytes() == HEADER + b"one,two,"
    writer.add(b"three,")
    ticks.go()
    ticks.paused()
    assert path.read_bytes() == HEADER + b"one,two,three,"
    ticks.go(ended=True)
    writer.close()


def test_close_writes_what_waits_and_may_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "a"
    writer = StepWriter(path, HEADER, on_fault=no_fault)
    writer.add(b"one,")
    writer.close()
    assert path.read_bytes() == HEADER + b"one,"
    writer.add(b"late,")
    writer.close()
    assert path.read_bytes() == HEADER + b"one,"


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"another engine's")
    with pytest.raises(FileExistsError):
        StepWriter(path, HEADER, on_fault=no_fault)
    assert path.read_bytes() == b"another engine's"


def test_records_that_find_the_queue_full_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "MAX_WAITING", 2)
    path, ticks = tmp_path / "a", Ticks()
    writer = StepWriter(path, HEADER, on_fault=no_fault, pause=ticks)
    for record in (b"1", b"2", b"3"):
        writer.add(record)
    ticks.paused()
    ticks.go()
    ticks.paused()
    writer.add(b"4")
    writer.close()
    ticks.go(ended=True)
    assert path.read_bytes() == HEADER + b"124"


def small_writes(write: Callable[[int, memoryview], int]) -> Callable[[int, memoryview], int]:
    return lambda file, text: write(file, text[:3])


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", small_writes(os.write))
    writer = StepWriter(tmp_path / "a", HEADER, on_fault=no_fault)
    writer.add(b"0123456789")
    writer.close()
    assert (tmp_path / "a").read_bytes() == HEADER + b"0123456789"


def test_a_full_disk_is_told_once_and_ends_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults: list[OSError] = []
    failed = threading.Event()

    def fault(error: OSError) -> None:
        faults.append(error)
        failed.set()

    path, ticks = tmp_path / "a", Ticks()
    writer = StepWriter(path, HEADER, on_fault=fault, pause=ticks)
    writer.add(b"lost")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        ticks.paused()
        ticks.go()
        assert failed.wait(LONG_S)
    writer.add(b"after the gap")
    writer.close()
    assert path.read_bytes() == HEADER
    assert len(faults) == 1


# The file format: what is written is what is read, and nothing else is taken for it.


U64, U32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
VALUES = st.tuples(*(U64 if code == "Q" else U32 for _, code in FIELDS))


def test_the_layout_of_version_1() -> None:
    # Files outlive the code that wrote them: a change here is a new version.
    assert RECORD.format == "<QQQQIIIIIII"
    assert RECORD.size == STEP_DTYPE.itemsize == 60
    assert [name for name, _ in FIELDS] == [
        "step",
        "start_ns",
        "end_ns",
        "kv_tokens",
        "running",
        "batch",
        "scheduled_tokens",
        "prefill_tokens",
        "wave",
        "wave_step",
        "flags",
    ]


@given(records=st.lists(VALUES, max_size=5), cut=st.integers(0, RECORD.size - 1))
def test_what_is_written_is_read_without_a_cut_record(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[int, ...]], cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "a.steps"
    whole = b"".join(RECORD.pack(*record) for record in records)
    path.write_bytes(header_line({"dp_rank": 1, "model": "é"}) + whole + bytes(cut))
    trace = read_steps(path)
    assert trace.header["dp_rank"] == 1
    assert trace.header["model"] == "é"
    assert [tuple(int(x) for x in step) for step in trace.steps.tolist()] == records


def test_a_header_is_one_line_of_ascii() -> None:
    line = header_line({"model": "a\nb\u2028é"})
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert line.isascii()


def header(**changed: Any) -> bytes:
    return json.dumps(json.loads(header_line({})) | changed).encode() + b"\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "no step trace"),
        (b"\x00\x01\x02" * 50_000, "no step trace"),
        (b"arrival_s,prompt_tokens\n1,2\n", "no step trace"),
        (b"[1]\n", "no step trace"),
        (header_line({})[:-1], "no step trace"),
        (header(format="other"), "no step trace"),
        (header(version=2), "version 2, not 1"),
        (header(version="1"), "version '1', not 1"),
        (header(record_bytes=64), "records of 64 bytes, not 60"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: bytes, reason: str) -> None:
    path = tmp_path / "x.steps"
    path.write_bytes(text)
    with pytest.raises(TraceFormatError) as caught:
        read_steps(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)
