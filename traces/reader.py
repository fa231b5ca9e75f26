"""Reading a trace file of any known format.

Rules:
- A file is read line by line, as UTF-8 (a byte order mark and CRLF are fine), through gzip if its
  first bytes say so, whatever its name.
- Nothing is guessed and nothing skipped: the first malformed line ends the reading with a
  `TraceError` that names file, line and reason. Only blank lines at the end are let pass.
- Formats raise `MalformedLineError`; this file alone turns it into a `TraceError`.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Protocol

from balanceroute.traces import azure, burstgpt, mooncake, native
from balanceroute.traces.fields import MalformedLineError, shown
from balanceroute.traces.record import TraceError, TraceRequest

_GZIP_MAGIC = b"\x1f\x8b"


class _Format(Protocol):
    """What the module of a format offers."""

    def recognises(self, first_line: str) -> bool: ...

    def parse(self, lines: Iterator[str]) -> Iterator[TraceRequest]: ...


_FORMATS: dict[str, _Format] = {
    "azure": azure,
    "mooncake": mooncake,
    "burstgpt": burstgpt,
    "jsonl": native,
}

FORMATS = tuple(_FORMATS)
"""The names of the known formats; `jsonl` is the native one."""


def read_trace(
    path: str | PathLike[str],
    format: str = "auto",  # noqa: A002 - the word that users know from the command line.
) -> list[TraceRequest]:
    """Read a trace: requests by arrival, the first at 0, equal arrivals in the order of the file.

    Args:
        path: The file.
        format: One of `FORMATS`, or `auto` to tell by the first line.

    Raises:
        TraceError: The file cannot be read, holds no request or a malformed line, or its format is
            unknown.
    """
    if format != "auto" and format not in _FORMATS:
        raise TraceError(
            Path(path), 0, f"unknown format {format!r}: expected auto, {', '.join(FORMATS)}"
        )
    with _opened(Path(path)) as (first_line, following):
        name = _recognised(first_line) if format == "auto" else format
        requests = list(_FORMATS[name].parse(chain((first_line,), following)))
        if not requests:
            raise MalformedLineError("the trace holds no request")
    requests.sort(key=lambda request: request.arrival_ns)
    start_ns = requests[0].arrival_ns
    return [
        TraceRequest(
            arrival_ns=request.arrival_ns - start_ns,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            hash_ids=request.hash_ids,
        )
        for request in requests
    ]


def detect_format(path: str | PathLike[str]) -> str:
    """Tell the format of a trace by its first line: the columns of the header, or the keys.

    Returns:
        One of `FORMATS`.

    Raises:
        TraceError: The file cannot be read, or its format is unknown.
    """
    with _opened(Path(path)) as (first_line, _):
        return _recognised(first_line)


def _recognised(first_line: str) -> str:
    for name, candidate in _FORMATS.items():
        if candidate.recognises(first_line):
            return name
    raise MalformedLineError(f"unknown trace format: the file begins with {shown(first_line)}")


class _LineSource:
    """The lines of a file, without their ends, and the number of the line last read."""

    def __init__(self) -> None:
        self.line_number = 0

    def lines(self, stream: Iterable[bytes]) -> Iterator[str]:
        first_blank = 0
        for number, encoded in enumerate(stream, start=1):
            self.line_number = number
            try:
                line = encoded.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise MalformedLineError(
                    f"not valid UTF-8: byte 0x{error.object[error.start]:02x}"
                ) from error
            if not line.strip():
                first_blank = first_blank or number
                continue
            if first_blank:
                self.line_number = first_blank
                raise MalformedLineError("blank line before the end of the trace")
            yield line


@contextmanager
def _opened(path: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """Open a trace as its first line and an iterator of the others; map every fault to TraceError."""
    source = _LineSource()
    try:
        with path.open("rb") as file:
            # peek, not seek: a trace may come through a pipe.
            compressed = file.peek(2).startswith(_GZIP_MAGIC)
            lines = source.lines(gzip.GzipFile(fileobj=file) if compressed else file)
            first_line = next(lines, None)
            if first_line is None:
                raise TraceError(path, 0, "the file is empty")
            yield first_line, lines
    except MalformedLineError as error:
        raise TraceError(path, source.line_number, str(error)) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(path, source.line_number, reason) from error
