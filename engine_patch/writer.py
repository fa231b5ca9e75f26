"""A trace's file, written by a thread: an engine's step never waits for a disk.

Records go into a queue that a daemon thread empties into the file once a second, so that a killed
engine loses at most a second of them. The queue is bounded: if it is full, because the disk hangs,
records are dropped, and the step numbers show the gap.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from struct import Struct
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


# The step trace's file format: one line of JSON, then records of a fixed size.
#
# The line has the format and its version, the engine (`identity`), and the length of a record in
# bytes. Records follow without padding, little-endian, in the order in which the steps ended. A
# record that is cut short by a kill is no record. Versions differ in the records' fields.
#
# Fields of a record, version 1:
#
#     step              u64  Number of the step among those of this file, from 0. A gap is a loss.
#     start_ns          u64  Before the scheduler was asked for the batch; Unix time.
#     end_ns            u64  After the scheduler took the model's output; Unix time.
#     kv_tokens         u64  KV tokens of the batch, including those that this step computes: the
#                            sum over its requests of prompt tokens and tokens emitted before.
#     running           u32  Requests that the scheduler holds as running.
#     batch             u32  Requests in the batch.
#     scheduled_tokens  u32  Tokens that this step computes.
#     prefill_tokens    u32  Those of requests that compute more than a token and its drafts.
#     wave              u32  vLLM's wave of a data-parallel group, and
#     wave_step         u32  the step in it: equal on all ranks for one step of the barrier.
#                            UNKNOWN if there is no barrier.
#     flags             u32  Sum of the flags below.
#
# With asynchronous scheduling a step starts while the one before still runs, so that steps
# overlap: a step's own time is from the end of the one before, or from its start if that is
# later.

FORMAT: Final = "balanceroute-steps"
VERSION: Final = 1
SUFFIX: Final = ".steps"

FIELDS: Final = (
    ("step", "Q"),
    ("start_ns", "Q"),
    ("end_ns", "Q"),
    ("kv_tokens", "Q"),
    ("running", "I"),
    ("batch", "I"),
    ("scheduled_tokens", "I"),
    ("prefill_tokens", "I"),
    ("wave", "I"),
    ("wave_step", "I"),
    ("flags", "I"),
)
"""Names and struct codes of a record's fields, in order."""

RECORD: Final = Struct("<" + "".join(code for _, code in FIELDS))

UNKNOWN: Final = 0xFFFF_FFFF
"""A wave of an engine that has none."""

DUMMY: Final = 1
"""Flag: the rank had nothing to compute and only took part in the barrier."""

MAX_HEADER_BYTES: Final = 1 << 16


def header_line(identity: dict[str, object]) -> bytes:
    header = {"format": FORMAT, "version": VERSION, "record_bytes": RECORD.size, **identity}
    return json.dumps(header, separators=(",", ":")).encode("ascii") + b"\n"
