"""Reading a trace file of any known format.

Rules:
- A file is read line by line, as UTF-8 (a byte order mark and CRLF are fine), through gzip if its
  first bytes say so, whatever its name.
- No value is guessed: the first malformed line ends the reading with a `TraceError` that names file,
  line and reason. Blank lines are skipped, and counted.
- Formats raise `MalformedLineError`; `text_lines` turns it into a `TraceError`.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Protocol

from balanceroute.traces import azure, bailian, burstgpt, mooncake, native
from balanceroute.traces import columns as own_columns
from balanceroute.traces.lines import (
    ONE_A_LINE,
    MalformedLineError,
    TraceError,
    TraceRequest,
    has_no_header,
    keys_of,
    shown,
    text_lines,
)
from balanceroute.traces.shipped import open_trace

_log = logging.getLogger(__name__)


class _Format(Protocol):
    """The interface of a format's module."""

    def recognises(self, first_line: str) -> bool: ...

    def parse(self, lines: Iterator[str]) -> Iterator[TraceRequest]: ...


_FORMATS: dict[str, _Format] = {
    "azure": azure,
    "bailian": bailian,
    "mooncake": mooncake,
    "burstgpt": burstgpt,
    "jsonl": native,
}

_BATCH_KEYS = frozenset({"custom_id", "body"})

FORMATS = tuple(_FORMATS)
"""The names of the known formats; `jsonl` is the native one."""


def read_trace(
    path: str | PathLike[str],
    format: str = "auto",  # noqa: A002 - as on the command line.
    *,
    columns: Mapping[str, str] | None = None,
) -> list[TraceRequest]:
    """Read a trace: requests by arrival, the first at 0, equal arrivals in the order of the file.

    Args:
        path: The file; the name of a shipped trace, such as `azure_2023_conv`; or `-`, standard input.
        format: One of `FORMATS`, or `auto` to detect it by the first line.
        columns: For a table of no known format, the names of its columns by field
            (`balanceroute.traces.columns`); None for a known format.

    Raises:
        TraceError: The file cannot be read, has no request or a malformed line, or its format is
            unknown.
    """
    if format != "auto" and format not in _FORMATS:
        raise TraceError(
            Path(path), 0, f"unknown format {format!r}: expected auto, {', '.join(FORMATS)}"
        )
    with text_lines(Path(path), open_trace) as lines:
        first_line = _first(Path(path), lines)
        every = chain((first_line,), lines)
        if columns is not None:
            requests = list(own_columns.parse(every, columns))
        else:
            name = _recognised(first_line) if format == "auto" else format
            requests = list(_FORMATS[name].parse(every))
            if name == "bailian":
                _log.warning(
                    "%s: a Bailian trace: timestamps are read as seconds, and blocks as 16 tokens; "
                    "--columns reads other units",
                    path,
                )
            if name == "mooncake":
                mooncake.check_unit(requests, asked=format != "auto")
        if not requests:
            raise MalformedLineError("the trace holds no request")
    requests.sort(key=lambda request: request.arrival_ns)
    start_ns = requests[0].arrival_ns
    return [replace(request, arrival_ns=request.arrival_ns - start_ns) for request in requests]


def detect_format(path: str | PathLike[str]) -> str:
    """Return the format of a trace by its first line: the columns of the header, or the keys.

    Returns:
        One of `FORMATS`.

    Raises:
        TraceError: The file cannot be read, or its format is unknown.
    """
    with text_lines(Path(path)) as lines:
        return _recognised(_first(Path(path), lines))


def _first(path: Path, lines: Iterator[str]) -> str:
    first_line = next(lines, None)
    if first_line is None:
        raise TraceError(path, 0, "the file is empty")
    return first_line


def _recognised(first_line: str) -> str:
    for name, candidate in _FORMATS.items():
        if candidate.recognises(first_line):
            return name
    raise MalformedLineError(
        _foreign(first_line)
        or f"unknown trace format: the file begins with {shown(first_line)}; known: "
        f"{', '.join(FORMATS)} (--help shows them), or any table whose columns --columns names"
    )


def _foreign(first_line: str) -> str | None:
    """Return what makes a file of no known format readable, as far as its first line tells."""
    if keys_of(first_line) >= _BATCH_KEYS:
        return "an OpenAI batch has no arrivals and no lengths of answers, so it is no trace"
    if first_line.lstrip().startswith("["):
        return f"the file begins with {shown(first_line)}, {ONE_A_LINE}"
    if has_no_header(first_line):
        return (
            f"no header, but {shown(first_line)}: write the names of the columns above it, and "
            "say with --columns which is which"
        )
    return None
