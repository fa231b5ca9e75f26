"""Where a trace is read from: a file, a shipped trace by its name, or standard input."""

import sys
from contextlib import AbstractContextManager, nullcontext
from io import BufferedReader
from pathlib import Path

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
