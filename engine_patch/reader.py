"""Reads step traces into numpy arrays."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from balanceroute.engine_patch.writer import FIELDS, FORMAT, MAX_HEADER_BYTES, RECORD, VERSION

STEP_DTYPE = np.dtype([(name, {"Q": "<u8", "I": "<u4"}[code]) for name, code in FIELDS])


class TraceFormatError(Exception):
    """A file is no step trace, or not one of this version; the message names it."""


@dataclass(frozen=True, slots=True)
class EngineTrace:
    path: Path  # The file.
    header: dict[str, object]  # Its first line (`identity`).
    steps: npt.NDArray[np.void]  # STEP_DTYPE[steps], in the order in which they ended.


def read_steps(path: Path) -> EngineTrace:
    """Read one file. A last record that is cut short is left out.

    Raises:
        TraceFormatError: It is no step trace, or of another version.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        line = file.readline(MAX_HEADER_BYTES)
        header = _header(path, line)
        records = (os.fstat(file.fileno()).st_size - len(line)) // RECORD.size
        body = file.read(records * RECORD.size)
    # An engine may be writing: only the bytes up to the size when it was read.
    whole = len(body) - len(body) % RECORD.size
    return EngineTrace(path, header, np.frombuffer(body[:whole], dtype=STEP_DTYPE))


def _header(path: Path, line: bytes) -> dict[str, object]:
    try:
        header = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceFormatError(f"{path}: no step trace: its first line is no {FORMAT} header")
    version = header.get("version")
    if version != VERSION:
        raise TraceFormatError(f"{path}: step trace of version {version!r}, not {VERSION}")
    size = header.get("record_bytes")
    if size != RECORD.size:
        raise TraceFormatError(f"{path}: records of {size!r} bytes, not {RECORD.size}")
    return header
