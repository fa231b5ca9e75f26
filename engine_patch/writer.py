"""A trace's file, written by a thread: an engine's step never waits for a disk.

Records go into a queue that a daemon thread empties into the file once a second, so that a killed
engine loses at most a second of them. The queue is bounded: if it is full, because the disk hangs,
records are dropped, and the step numbers show the gap.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

FLUSH_S: Final = 1.0
MAX_WAITING: Final = 1 << 16
"""Records that may wait; minutes of them, about 4 MB."""

_CLOSE_S: Final = 2.0
_FILE_MODE: Final = 0o640


class StepWriter:
    """Appends records to a new file. `add` from one thread; `close` from any."""

    def __init__(
        self,
        path: Path,
        header: bytes,
        *,
        on_fault: Callable[[OSError], object],
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        """Create the file and start the thread.

        Args:
            path: The file; it must not exist.
            header: The file's first line.
            on_fault: Called once, in the thread, when a write fails. The caller stops adding.
            pause: Waits for a number of seconds, or until the trace has ended; returns whether it
                has. For tests; by default it waits for `close`.

        Raises:
            OSError: The file cannot be created.
        """
        self._waiting: deque[bytes] = deque()
        self._on_fault = on_fault
        self._closing = threading.Event()
        self._pause = pause or self._closing.wait
        self._busy = threading.Lock()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(path, flags, _FILE_MODE)
        try:
            _write(file, header)
        except OSError:
            os.close(file)
            raise
        self._file: int | None = file
        self._thread = threading.Thread(target=self._run, name="balanceroute steps", daemon=True)
        self._thread.start()

    def add(self, record: bytes) -> None:
        """Queue a record; never blocks."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(record)

    def close(self) -> None:
        """Write the queued records and close the file; may be repeated.

        A disk that hangs delays an engine's exit by at most two seconds.
        """
        self._closing.set()
        if self._busy.acquire(timeout=_CLOSE_S):
            try:
                self._flush()
                if self._file is not None:
                    os.close(self._file)
                    self._file = None
            finally:
                self._busy.release()

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._pause(FLUSH_S)
            with self._busy:
                self._flush()
                ended = ended or self._file is None

    def _flush(self) -> None:
        """Write the queued records. The caller holds `_busy`."""
        # Only as many as there are now: the engine may add faster than the disk writes.
        records = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if self._file is None or not records:
            return
        try:
            _write(self._file, b"".join(records))
        except OSError as error:
            # A record may be incomplete now, and later ones would be read as its rest.
            os.close(self._file)
            self._file = None
            self._on_fault(error)


def _write(file: int, text: bytes) -> None:
    rest = memoryview(text)
    while rest:
        rest = rest[os.write(file, rest) :]
