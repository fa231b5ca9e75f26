"""The process log: JSON lines, no secrets, and no message that can break it."""

import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security import as_secret
from balanceroute.proxy.live.telemetry import process_log
from balanceroute.proxy.live.telemetry.process_log import (
    LOGGER,
    LineWriter,
    set_log_level,
    set_up_process_log,
)

logger = logging.getLogger(f"{LOGGER}.tests")


@pytest.fixture
def lines() -> Iterator[list[bytes]]:
    root = logging.getLogger(LOGGER)
    before = (root.handlers, root.level, root.propagate)
    written: list[bytes] = []
    secrets = [as_secret(b"sk-123"), as_secret(b"sk-12345")]
    set_up_process_log(written.append, level="info", secrets=secrets)
    yield written
    root.handlers, root.level, root.propagate = before
    root.setLevel(before[1])


def test_a_message_is_one_line_of_json(lines: list[bytes]) -> None:
    logger.warning("lost %s", "an engine", extra={"fields": {"rank": 3, "role": "decode"}})
    (line,) = lines
    assert line.endswith(b"\n")
    fields = json.loads(line)
    time = fields.pop("time")
    assert time.endswith("+00:00")
    assert fields == {
        "event": "lost_an_engine",
        "level": "warning",
        "logger": "balanceroute.tests",
        "message": "lost an engine",
        "rank": 3,
        "role": "decode",
    }


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ("serving", "serving"),
        ("KV cache events lost", "kv_cache_events_lost"),
        ("a decision failed; service goes on", "a_decision_failed"),
        ("paused as before: no prefill starts until POST /resume", "paused_as_before"),
        ("admin: added an instance", "admin_added_an_instance"),
        ("admin: refused: no token", "admin_refused"),
        ("a" * 100, "a" * 64),
        ("\n\x7f", ""),
    ],
)
def test_the_event_is_the_first_clause_as_a_name(
    message: str, event: str, lines: list[bytes]
) -> None:
    logger.info(message)
    assert json.loads(lines[0])["event"] == event


def test_control_characters_are_escaped(lines: list[bytes]) -> None:
    logger.info("a\n\x1b[2J\x7f", extra={"fields": {"peer": "b\r\n"}})
    assert all(0x20 <= byte < 0x7F for byte in lines[0][:-1])
    assert json.loads(lines[0])["message"] == "a\n\x1b[2J\x7f"


def test_secrets_are_blacked_out_everywhere(lines: list[bytes]) -> None:
    try:
        int("Bearer sk-12345")
    except ValueError:
        logger.exception("engine said sk-123!", extra={"fields": {"header": b"sk-12345"}})
    assert b"sk-" not in lines[0]
    fields = json.loads(lines[0])
    assert fields["message"] == "engine said [redacted]!"
    # The longer secret as a whole, not what is left of it.
    assert "'Bearer [redacted]'" in fields["exception"]


def test_levels_choose_what_is_logged(lines: list[bytes]) -> None:
    logger.debug("unseen")
    set_log_level("debug")
    logger.debug("seen")
    set_log_level("error")
    logger.warning("unseen")
    assert [json.loads(line)["message"] for line in lines] == ["seen"]


def test_an_unknown_level_is_refused_and_changes_nothing(lines: list[bytes]) -> None:
    with pytest.raises(ConfigError, match="'loud': expected debug, info, warning, error"):
        set_log_level("loud")
    logger.info("seen")
    assert len(lines) == 1


def test_values_that_json_lacks_become_text(lines: list[bytes]) -> None:
    logger.info("m", extra={"fields": {"limit": float("inf"), "none": None, "share": 0.5}})
    fields = json.loads(lines[0])
    assert (fields["limit"], fields["none"], fields["share"]) == ("inf", None, 0.5)


def test_a_broken_message_does_not_reach_its_caller(
    lines: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    logger.info("%d", "not a number")
    logger.info("next")
    assert len(lines) == 1


def test_nothing_is_written_twice(
    lines: list[bytes], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reached_root: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", reached_root.append)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    logger.error("once")
    assert len(lines) == 1
    assert reached_root == []
    captured = capsys.readouterr()
    assert not captured.out
    assert not captured.err


# The log's thread: whole lines, none of them in the way of the loop, whatever the file does.


LONG_S = 10.0  # Never waited for: what is tested ends long before.


@contextmanager
def full_pipe(*, blocking: bool) -> Iterator[tuple[int, int, int]]:
    """Give a pipe's two ends and the number of bytes in it, with room for no more."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    filling = 0
    with suppress(BlockingIOError):
        while True:
            filling += os.write(writer, b"." * 4096)
    os.set_blocking(writer, blocking)
    try:
        yield reader, writer, filling
    finally:
        os.close(reader)
        os.close(writer)


class Disk:
    """Stands for os.write on one file: takes `room` bytes, then says that the disk is full."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.refused = threading.Semaphore(0)
        self._write: Callable[[int, memoryview], int] = os.write

    def write(self, file: int, text: memoryview) -> int:
        if not self.room:
            self.refused.release()
            raise OSError(errno.ENOSPC, "No space left on device")
        part = text[: self.room]
        self.room -= len(part)
        return self._write(file, part)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """A disk that is full."""
    disk = Disk(room=0)
    monkeypatch.setattr(os, "write", disk.write)
    return disk


def test_lines_reach_the_file_in_order_and_append(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    lines = [f"line {number}\n".encode() for number in range(5000)]
    writer = LineWriter(path)
    for line in lines:
        writer.write(line)
    assert writer.close(timeout_s=LONG_S)
    assert path.read_bytes() == b"before\n" + b"".join(lines)
    assert writer.dropped == 0


def test_a_new_file_is_not_open_to_every_user(tmp_path: Path) -> None:
    assert LineWriter(tmp_path / "log").close(timeout_s=LONG_S)
    assert not (tmp_path / "log").stat().st_mode & stat.S_IRWXO


def test_a_file_that_cannot_be_opened_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/log cannot be opened: No such file"):
        LineWriter(tmp_path / "nowhere" / "log")


def test_a_named_pipe_that_nobody_reads_is_an_error_not_a_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigError, match="cannot be opened"):
        LineWriter(tmp_path / "fifo")


@pytest.mark.parametrize("blocking", [True, False])
def test_a_pipe_that_nobody_reads_costs_lines_not_time(*, blocking: bool) -> None:
    with full_pipe(blocking=blocking) as (reader, descriptor, filling):
        writer = LineWriter(descriptor, capacity=10)
        # More than one batch of the thread and the queue hold together.
        for number in range(3000):
            writer.write(b"%04d" % number + b"x" * 1019 + b"\n")
        assert writer.dropped > 0
        assert not writer.close(timeout_s=0.01)
        received = b""
        while len(received) < filling + 1024 * (3000 - writer.dropped):
            received += os.read(reader, 1 << 20)
        assert writer.close(timeout_s=LONG_S)
        lines = received[filling:].splitlines()
        numbers = [int(line[:4]) for line in lines]
        assert len(numbers) + writer.dropped == 3000
        assert numbers == sorted(numbers)
        assert {len(line) for line in lines} == {1023}


def test_a_closed_pipe_drops_and_counts() -> None:
    reader, descriptor = os.pipe()
    os.close(reader)
    writer = LineWriter(descriptor)
    for _ in range(5):
        writer.write(b"line\n")
    assert writer.close(timeout_s=LONG_S)
    os.close(descriptor)
    assert writer.dropped == 5
    assert writer.fault == "Broken pipe"


def test_a_full_disk_drops_whole_lines_and_mends_the_one_it_cut(tmp_path: Path, disk: Disk) -> None:
    disk.room = 13
    path = tmp_path / "log"
    writer = LineWriter(path)
    for number in range(5):
        writer.write(b"line %d\n" % number)
        # 7 bytes a line: the second is cut after 6, every later one finds no room.
        if number:
            disk.refused.acquire()
    assert path.read_bytes() == b"line 0\nline 1"
    disk.room = 1000
    writer.write(b"line 5\n")
    assert writer.close(timeout_s=LONG_S)
    assert path.read_bytes() == b"line 0\nline 1\nline 5\n"
    assert writer.dropped == 3
    assert writer.fault == ""


def test_no_line_is_joined_to_what_a_killed_process_left_of_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"whole": 1}\n{"outc')
    writer = LineWriter(path)
    writer.write(b'{"line": 2}\n')
    assert writer.close(timeout_s=LONG_S)
    assert path.read_bytes() == b'{"whole": 1}\n{"outc\n{"line": 2}\n'
    assert writer.dropped == 0


def test_no_line_is_joined_to_one_of_another_process_that_a_full_disk_cut(
    tmp_path: Path, disk: Disk
) -> None:
    disk.room = 5
    path = tmp_path / "log"
    first, second = LineWriter(path), LineWriter(path)
    first.write(b"first 1\n")
    disk.refused.acquire()
    disk.room = 1000
    second.write(b"second 1\n")
    assert second.close(timeout_s=LONG_S)
    first.write(b"first 2\n")
    assert first.close(timeout_s=LONG_S)
    # The rest of the line would stand behind another's: it is lost.
    assert path.read_bytes() == b"first\nsecond 1\nfirst 2\n"
    assert (first.dropped, second.dropped) == (1, 0)


@pytest.mark.parametrize("rotated", [False, True], ids=["emptied", "rotated"])
def test_the_rest_of_a_cut_line_does_not_begin_what_follows(
    tmp_path: Path, disk: Disk, *, rotated: bool
) -> None:
    disk.room = 3
    path = tmp_path / "log"
    writer = LineWriter(path)
    writer.write(b"line\n")
    disk.refused.acquire()
    if rotated:
        path.rename(tmp_path / "log.1")
        writer.reopen()
        disk.refused.acquire()  # The old file is offered the rest once more.
    else:
        os.truncate(path, 0)
    disk.room = 1000
    writer.write(b"new\n")
    assert writer.close(timeout_s=LONG_S)
    assert path.read_bytes() == b"new\n"
    assert writer.dropped == 1


def test_a_cut_line_that_is_never_mended_is_counted(tmp_path: Path, disk: Disk) -> None:
    disk.room = 3
    writer = LineWriter(tmp_path / "log")
    writer.write(b"line\n")
    assert writer.close(timeout_s=LONG_S)
    assert writer.dropped == 1


def test_lines_that_come_one_by_one_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write_all = os.write

    def write(file: int, text: memoryview) -> int:
        sizes.append(len(text))
        return write_all(file, text)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(process_log, "_GATHER_S", LONG_S)
    writer = LineWriter(tmp_path / "log")
    for number in range(100):
        writer.write(b"line %2d\n" % number)
    # It also ends the gathering.
    assert writer.close(timeout_s=LONG_S)
    assert sizes == [800]


def test_after_rotation_lines_go_to_the_new_file(tmp_path: Path) -> None:
    path, moved = tmp_path / "log", tmp_path / "log.1"
    writer = LineWriter(path)
    writer.write(b"old\n")
    path.rename(moved)
    writer.write(b"still old\n")
    writer.reopen()
    writer.write(b"new\n")
    assert writer.close(timeout_s=LONG_S)
    assert moved.read_bytes() == b"old\nstill old\n"
    assert path.read_bytes() == b"new\n"


def test_when_the_new_file_cannot_be_opened_the_old_one_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    path = folder / "log"
    writer = LineWriter(path)
    folder.rename(tmp_path / "moved")
    writer.reopen()
    writer.write(b"line\n")
    assert writer.close(timeout_s=LONG_S)
    assert (tmp_path / "moved" / "log").read_bytes() == b"line\n"
    assert writer.dropped == 0


def test_that_the_new_file_cannot_be_opened_is_told_once_and_it_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines went into the old file for good, without a word."""
    path, moved = tmp_path / "log", tmp_path / "log.1"
    told: list[str] = []
    asked = threading.Semaphore(0)

    def clock() -> float:
        asked.release()
        return 0.0

    def lacking(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    writer = LineWriter(path, complain=told.append, clock=clock)
    usual = process_log._open
    monkeypatch.setattr(process_log, "_open", lacking)
    path.rename(moved)
    for line in (b"1\n", b"2\n"):
        writer.reopen()
        writer.write(line)
        for _ in range(2):  # The order, and the line.
            assert asked.acquire(timeout=LONG_S)
    monkeypatch.setattr(process_log, "_open", usual)
    writer.write(b"3\n")
    assert writer.close(timeout_s=LONG_S)
    assert (moved.read_bytes(), path.read_bytes()) == (b"1\n2\n", b"3\n")
    assert told == [
        f"the log {path} cannot be opened: Too many open files; its lines go to the old file till then"
    ]
    assert writer.dropped == 0


def test_after_closing_lines_are_dropped_and_closing_again_is_harmless(tmp_path: Path) -> None:
    writer = LineWriter(tmp_path / "log")
    assert writer.close(timeout_s=LONG_S)
    writer.write(b"late\n")
    writer.reopen()
    assert writer.close(timeout_s=LONG_S)
    assert (tmp_path / "log").read_bytes() == b""
    assert writer.dropped == 1


def test_a_descriptor_stays_open() -> None:
    reader, descriptor = os.pipe()
    writer = LineWriter(descriptor)
    writer.reopen()
    writer.write(b"line\n")
    assert writer.close(timeout_s=LONG_S)
    os.write(descriptor, b"after\n")
    assert os.read(reader, 100) == b"line\nafter\n"
    os.close(reader)
    os.close(descriptor)


def test_dropped_lines_are_told_once_a_minute_and_at_the_end(tmp_path: Path, disk: Disk) -> None:
    now_s = 0.0
    told: list[str] = []
    asked = threading.Semaphore(0)

    def clock() -> float:
        asked.release()
        return now_s

    path = tmp_path / "log"
    writer = LineWriter(path, complain=told.append, clock=clock)

    def write(at_s: float) -> None:
        nonlocal now_s
        now_s = at_s
        writer.write(b"line\n")
        assert disk.refused.acquire(timeout=LONG_S)
        assert asked.acquire(timeout=LONG_S)  # The thread has looked at the time.

    write(0.0)
    write(30.0)
    write(59.0)
    write(61.0)
    write(62.0)
    assert writer.close(timeout_s=LONG_S)
    counts = [int(message.partition(" ")[0]) for message in told]
    assert counts == [1, 3, 1]
    for message in told:
        assert str(path) in message
        assert "No space left on device" in message


def test_why_lines_were_dropped_is_told_although_the_file_takes_some_again(
    tmp_path: Path, disk: Disk
) -> None:
    told: list[str] = []
    writer = LineWriter(tmp_path / "log", complain=told.append, clock=lambda: -1e9)
    writer.write(b"line\n")
    disk.refused.acquire()
    disk.room = 1000
    writer.write(b"line\n")
    assert writer.close(timeout_s=LONG_S)
    assert told == [f"1 lines of the log {tmp_path / 'log'} were dropped: No space left on device"]


def test_nothing_is_told_while_nothing_is_dropped(tmp_path: Path) -> None:
    told: list[str] = []
    writer = LineWriter(tmp_path / "log", complain=told.append)
    writer.write(b"line\n")
    assert writer.close(timeout_s=LONG_S)
    assert told == []
