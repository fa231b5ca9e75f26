"""Reading a trace file of any known format.

Rules:
- A file is read line by line, as UTF-8 (a byte order mark and CRLF are fine), through gzip if its
  first bytes say so, whatever its name.
- No value is guessed: the first malformed line ends the reading with a `TraceError` that names file,
  line and reason. Blank lines are skipped, and counted.
- Formats raise `MalformedLineError`; `text_lines` turns it into a `TraceError`.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from io import BufferedReader
from itertools import chain
from os import PathLike
from pathlib import Path

from balanceroute.traces import formats
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

# Where a trace is read from: a file, a shipped trace by its name, or standard input.

STDIN = Path("-")
_SUFFIXES = (".csv.gz", ".jsonl.gz")


def shipped_traces() -> dict[str, Path]:
    """Return the files of `public/` by name, such as `azure_2023_conv`."""
    folder = Path(__file__).parent / "public"
    return {
        path.name.removesuffix(suffix): path
        for suffix in _SUFFIXES
        for path in sorted(folder.glob(f"*{suffix}"))
    }


def open_trace(path: Path) -> AbstractContextManager[BufferedReader]:
    """Open a file; `-` is standard input, and a bare name that is no file may be a shipped trace.

    Raises:
        OSError: It cannot be opened.
    """
    if path == STDIN:
        stdin = sys.stdin.buffer
        assert isinstance(stdin, BufferedReader)
        return nullcontext(stdin)
    if path.name == str(path) and not path.suffix and not path.exists():
        shipped = shipped_traces()
        if path.name not in shipped:
            known = ", ".join(sorted(shipped))
            raise FileNotFoundError(f"no such file, and no shipped trace; known: {known}")
        path = shipped[path.name]
    return path.open("rb")


_log = logging.getLogger(__name__)


_FORMATS: dict[
    str, tuple[Callable[[str], bool], Callable[[Iterator[str]], Iterator[TraceRequest]]]
] = {
    "azure": (formats.recognises_azure, formats.parse_azure),
    "bailian": (formats.recognises_bailian, formats.parse_bailian),
    "mooncake": (formats.recognises_mooncake, formats.parse_mooncake),
    "burstgpt": (formats.recognises_burstgpt, formats.parse_burstgpt),
    "jsonl": (formats.recognises_native, formats.parse_native),
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
            (`formats.FIELDS`); None for a known format.

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
            requests = list(formats.parse_named(every, columns))
        else:
            name = _recognised(first_line) if format == "auto" else format
            requests = list(_FORMATS[name][1](every))
            if name == "bailian":
                _log.warning(
                    "%s: a Bailian trace: timestamps are read as seconds, and blocks as 16 tokens; "
                    "--columns reads other units",
                    path,
                )
            if name == "mooncake":
                formats.check_unit(requests, asked=format != "auto")
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
    for name, (recognises, _) in _FORMATS.items():
        if recognises(first_line):
            return name
    raise MalformedLineError(
        _foreign(first_line)
        or f"unknown trace format: the file begins with {shown(first_line)}; known: "
        f"{', '.join(FORMATS)} (--help shows them), or any table whose columns --columns names"
    )


def _foreign(first_line: str) -> str | None:
    """Return how to make a file of no known format readable, judged by its first line."""
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
