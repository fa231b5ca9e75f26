"""Captures what the package logs during a run, and shows nothing of it."""

import hashlib
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PACKAGE = "balanceroute"
_TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/\w+")


class LogCapture(logging.Handler):
    """Captures log records, and writes them into a journal if there is one.

    Attributes:
        explains: Returns whether a record was to be expected.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.journal: Journal | None = None
        self.explains: Callable[[logging.LogRecord], bool] = lambda _: False

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.records.append(record)
        if self.journal is not None:
            fields = getattr(record, "fields", "")
            # The folder of a run has another name each time.
            message = _TEMPORARY.sub("FOLDER", record.getMessage())
            self.journal.write("log", record.levelname, message, fields)

    def errors(self) -> list[str]:
        """Return the messages of the errors that were not expected, with their exceptions."""
        return [
            f"{record.getMessage()}: {record.exc_info and record.exc_info[1]!r}"
            for record in self.records
            if record.levelno >= logging.ERROR and not self.explains(record)
        ]


def violations_of(do: Callable[[LogCapture], object]) -> list[str]:
    """Do something; return what it raised, with its notes, and the errors that the package logged."""
    found = []
    with log_kept() as log:
        try:
            do(log)
        except Exception as error:
            notes = "; ".join(getattr(error, "__notes__", []))
            found.append(f"{type(error).__name__}: {error} ({notes})")
    return found + [f"logged: {line}" for line in log.errors()]


@contextmanager
def log_kept() -> Iterator[LogCapture]:
    """Keep what the package logs, and show nothing of it."""
    logger = logging.getLogger(_PACKAGE)
    capture = LogCapture()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(capture)
    try:
        yield capture
    finally:
        logger.removeHandler(capture)
        logger.propagate = propagates


# What happened in a run, a line each: a seed gives the same lines whenever and wherever it runs.


class Journal:
    """Lines with the time in virtual seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lines: list[str] = []
        self._clock = clock

    def write(self, *words: object) -> None:
        """Add a line."""
        self.lines.append(f"{self._clock():.6f} {' '.join(map(str, words))}")

    @property
    def digest(self) -> str:
        """Identifies the run: SHA-256 of all lines, in hexadecimal."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()
