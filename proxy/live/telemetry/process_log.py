"""The process log: what happens to the proxy itself, one JSON object a line.

Fields: `time` (UTC, ISO 8601), `event`, `level`, `logger`, `message`, `exception` if there was one, and
what the call gave as `extra={"fields": {...}}`. `event` is the first clause of the message as a name, of
which there are few. Lines are plain ASCII without control characters.
"""

import json
import logging
import os
import re
import select
import stat
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

import msgspec
from msgspec import Struct

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.security import Secret

# One JSON object a line, as every log writes it.

_encode = msgspec.json.Encoder().encode
_DELETE = 0x7F


def json_line(fields: dict[str, object] | Struct) -> bytes:
    """Return an object as one line of ASCII without control characters, with its newline."""
    try:
        line = _encode(fields)
    except UnicodeEncodeError:  # A lone surrogate.
        line = b""
    if not line or not line.isascii() or _DELETE in line:
        # A number that is none is null here, too.
        text = json.dumps(msgspec.to_builtins(fields))
        finite = json.loads(text, parse_constant=lambda _: None)
        line = json.dumps(finite, separators=(",", ":"), allow_nan=False).encode("ascii")
    return line + b"\n"


LOGGER: Final = "balanceroute"
"""The logger above all of this package's."""

LEVELS: Final = ("debug", "info", "warning", "error")
"""The names of the levels, the most talkative first."""

MAX_MESSAGE = 8192
"""Characters of a message or a traceback that are written; the rest is cut off."""

_REDACTED = "[redacted]"
_MAX_EVENT = 64
# Where the first clause of a message ends; that of an administrator's order is the second.
_CLAUSE = re.compile(r"(?<!^admin): |; | \(")
_NO_NAME = re.compile(r"[^a-z0-9]+")


class JsonFormatter(logging.Formatter):
    """Formats a record as a line of JSON, without the secrets that it knows."""

    def __init__(self, secrets: Iterable[Secret] = ()) -> None:
        super().__init__()
        self._secrets: list[str] = []
        self.redact_too(secrets)

    def redact_too(self, secrets: Iterable[Secret]) -> None:
        """Black out these keys as well from now on."""
        texts = {secret.value.decode("latin-1") for secret in secrets}
        # Longest first: one may be part of another.
        self._secrets = sorted(texts.union(self._secrets), key=lambda text: (-len(text), text))

    def format(self, record: logging.LogRecord) -> str:
        message = self._clean(record.getMessage())
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "event": _event_of(str(message)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message,
        }
        if record.exc_info:
            fields["exception"] = self._clean(self.formatException(record.exc_info))
        extra = getattr(record, "fields", {})
        fields.update({name: self._clean(value) for name, value in extra.items()})
        return json_line(fields).decode("ascii").removesuffix("\n")

    def _clean(self, value: object) -> object:
        if (
            value is None
            or isinstance(value, int)
            or (isinstance(value, float) and isfinite(value))
        ):
            return value
        text = str(value)
        for secret in self._secrets:
            text = text.replace(secret, _REDACTED)
        return text[:MAX_MESSAGE]


def _event_of(message: str) -> str:
    clause = _CLAUSE.split(message, maxsplit=1)[0]
    return _NO_NAME.sub("_", clause.lower()).strip("_")[:_MAX_EVENT]


class ProcessLogHandler(logging.Handler):
    """Hands formatted records to a sink that does not block."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(self.format(record).encode("ascii") + b"\n")
        except Exception:
            # What a message does wrong must not end the request that logged it.
            self.handleError(record)


def set_up_process_log(
    write: Callable[[bytes], object],
    *,
    level: str,
    secrets: Iterable[Secret] = (),
) -> None:
    """Send the package's log to a sink, as JSON, and nowhere else.

    Args:
        write: Takes one line with its newline, and does not block.
        level: One of `LEVELS`.
        secrets: Keys to black out wherever they appear.

    Raises:
        ConfigError: The level is unknown.
    """
    set_log_level(level)
    handler = ProcessLogHandler(write)
    handler.setFormatter(JsonFormatter(secrets))
    logger = logging.getLogger(LOGGER)
    logger.handlers = [handler]
    logger.propagate = False


def redact_too(secrets: Iterable[Secret]) -> None:
    """Black out these keys as well from now on."""
    for handler in logging.getLogger(LOGGER).handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.redact_too(secrets)


def set_log_level(level: str) -> None:
    """Change how much is logged. Raises ConfigError: the level is unknown."""
    if level not in LEVELS:
        raise ConfigError(f"the log level is {level!r}: expected {', '.join(LEVELS)}")
    logging.getLogger(LOGGER).setLevel(level.upper())


def log_level(*, other_than: str) -> str:
    """Return the level that was set last; empty if it is `other_than`, or if none was set."""
    level = logging.getLogger(LOGGER).level
    name = logging.getLevelName(level).lower() if level else other_than
    return "" if name == other_than else name


# A log file, or a standard stream, behind a thread: the event loop never waits for a disk or a
# pipe.
#
# Lines go into a bounded queue that one daemon thread empties; it alone touches the file. It
# gathers lines for `_GATHER_S` before it writes: waking it for every line costs system calls and
# makes it compete with the event loop for the interpreter. A process that is killed loses those
# lines. A line that finds the queue full, or that the file does not take, is dropped and counted.
# When a full disk cuts a line, the thread writes its rest first when there is room again. If other
# data follows the cut line by then, as several processes write one log, or if another process was
# killed in the middle of a line, it writes a newline first: no line is joined to the piece of
# another.

_BATCH_LINES = 1024
_GATHER_S = 0.05
_COMPLAINT_S = 60.0
_FILE_MODE = 0o640


class _Order:
    """An order to the thread, which it gets between lines."""


_REOPEN = _Order()
_CLOSE = _Order()


class LineWriter:
    """Writes lines to a file or to an open descriptor. Call its methods from one thread.

    Args:
        sink: The file to append to, or a descriptor such as standard output's, which stays open.
        complain: Called by the thread with a message about dropped lines, at most once a minute
            and at the end.

    Raises:
        ConfigError: The file cannot be opened.
    """

    def __init__(
        self,
        sink: Path | int,
        *,
        capacity: int = 16_384,
        complain: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._path = sink if isinstance(sink, Path) else None
        self.fault = ""  # What the file failed with last; empty if it took everything since.
        self._capacity = capacity
        self._queue: SimpleQueue[bytes | _Order] = SimpleQueue()
        self._refused = 0  # Counted by the caller.
        self._lost = 0  # Counted by the thread.
        self._cut = b""  # The rest of a line that is already in the file in part.
        self._end = (
            0  # The size of the file when it was last seen to end with a line, or with our part.
        )
        self._reopens = False  # The file is to be opened anew.
        self._hurry = threading.Event()  # Nothing more is to be gathered.
        self._closing = False
        self._complain = complain
        self._clock = clock
        self._reason = ""  # What the file failed with since the last complaint.
        self._reported = 0  # Of the lines dropped.
        self._reported_s = -_COMPLAINT_S
        try:
            self._file = _open(sink) if isinstance(sink, Path) else sink
        except OSError as error:
            raise ConfigError(f"the log {sink} cannot be opened: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name=f"log {sink}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        return self._refused + self._lost

    def write(self, line: bytes) -> None:
        """Take one line, newline included, unless too many wait; never blocks."""
        waiting = self._queue.qsize()
        if self._closing or waiting >= self._capacity:
            self._refused += 1
            return
        self._queue.put(line)
        if waiting == _BATCH_LINES:
            self._hurry.set()

    def reopen(self) -> None:
        """Open the file anew after it was moved away; lines already taken go to the old one.

        If that fails, the thread goes on with the old file, and tries again before it writes more.
        """
        if not self._closing:
            self._give(_REOPEN)

    def close(self, *, timeout_s: float) -> bool:
        """Write the waiting lines and close the file.

        Returns:
            Whether it was done in time; if not, the thread dies with the process.
        """
        if not self._closing:
            self._closing = True
            self._give(_CLOSE)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _give(self, order: _Order) -> None:
        self._queue.put(order)
        self._hurry.set()

    def _run(self) -> None:
        order: _Order | None = None
        while order is not _CLOSE:
            lines, order = self._next_batch()
            if self._reopens and self._path is not None:
                self._reopen(self._path)
            self._write_batch(lines)
            now_s = self._clock()
            if now_s >= self._reported_s + _COMPLAINT_S:
                self._report_dropped(now_s)
            if order is _REOPEN and self._path is not None:
                self._reopen(self._path)
        self._lost += self._cut != b""
        self._report_dropped(self._clock())
        if self._path is not None:
            os.close(self._file)

    def _report_dropped(self, now_s: float) -> None:
        """Say how many lines were dropped since it was said last, if any were."""
        count = self.dropped - self._reported
        if count:
            self._reported += count
            self._reported_s = now_s
            reason = self.fault or self._reason or "they come faster than they are written"
            self._reason = ""
            self._complain(f"{count} lines of the log {self._sink} were dropped: {reason}")

    def _next_batch(self) -> tuple[list[bytes], _Order | None]:
        """Wait for lines; return them, and the order that stands behind them, if any."""
        lines: list[bytes] = []
        item = self._queue.get()
        if self._queue.qsize() < _BATCH_LINES:
            self._hurry.wait(_GATHER_S)
        # Before the queue is emptied: what sets it later has put something that is still in it.
        self._hurry.clear()
        while isinstance(item, bytes):
            lines.append(item)
            if len(lines) == _BATCH_LINES:
                return lines, None
            try:
                item = self._queue.get_nowait()
            except Empty:
                return lines, None
        return lines, item

    def _write_batch(self, lines: list[bytes]) -> None:
        """Write lines, behind the rest of the one that was cut, and count those that got lost."""
        before = self._mended() if lines or self._cut else b""
        first = before + self._cut
        written = self._written(first + b"".join(lines))
        self._end += written
        if written < len(first):
            self._cut = self._cut[max(0, written - len(before)) :]
            self._lost += len(lines)
            return
        written -= len(first)
        self._cut = b""
        for number, line in enumerate(lines):
            if written < len(line):
                self._cut = line[written:] if written else b""
                self._lost += len(lines) - number - bool(written)
                return
            written -= len(line)

    def _mended(self) -> bytes:
        """Return what has to be written before a line can be."""
        if self._path is None:
            return b""
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_size == self._end:
            return b""
        # Another process has written to it, or cut it.
        self._end = status.st_size
        self._lost += self._cut != b""
        self._cut = b""
        return b"" if _ends_with_line(self._path, status) else b"\n"

    def _written(self, text: bytes) -> int:
        """Write as much as the file takes, waiting where it asks for that; return how much."""
        done = 0
        try:
            while done < len(text):
                try:
                    done += os.write(self._file, memoryview(text)[done:])
                except BlockingIOError:
                    # A pipe that is full and does not block: ours to wait for.
                    poll = select.poll()
                    poll.register(self._file, select.POLLOUT)
                    poll.poll()
        except OSError as error:
            self.fault = self._reason = error.strerror or type(error).__name__
        else:
            if text:
                self.fault = ""
        return done

    def _reopen(self, path: Path) -> None:
        try:
            file = _open(path)
        except OSError as error:
            self.fault = f"cannot be opened: {error.strerror}"
            if not self._reopens:
                self._complain(
                    f"the log {path} {self.fault}; its lines go to the old file till then"
                )
            self._reopens = True
            return
        self._reopens = False
        os.close(self._file)
        self._file, self._end = file, 0
        # The cut line belongs to the old file.
        self._lost += self._cut != b""
        self._cut = b""


def _ends_with_line(path: Path, status: os.stat_result) -> bool:
    """Return whether a file ends with a whole line, or may; `status` is that of the open one."""
    if not status.st_size:
        return True
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return True
    try:
        if not os.path.samestat(os.fstat(file), status):  # It was moved away.
            return True
        return os.pread(file, 1, status.st_size - 1) in (b"\n", b"")
    except OSError:
        return True
    finally:
        os.close(file)


def _open(path: Path) -> int:
    # Not to block: opening a named pipe would wait for someone to read it.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
    return os.open(path, flags, _FILE_MODE)
