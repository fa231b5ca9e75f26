"""The writer's thread: a flush a second, one at the end, and never a wait for the engine."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import pytest

from balanceroute.engine_patch import writer as writer_module
from balanceroute.engine_patch.writer import FLUSH_S, StepWriter

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
