"""The lines of a text file from outside: UTF-8, with or without gzip, every error with its line."""

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BufferedReader
from pathlib import Path

from balanceroute.traces.fields import MalformedLineError
from balanceroute.traces.record import TraceError

_GZIP_MAGIC = b"\x1f\x8b"
# Others, and what makes the file readable.
_OTHER_MAGIC = {
    b"\x28\xb5\x2f\xfd": "zstd: zstd -d FILE",
    b"\xfd7zXZ": "xz: xz -d FILE",
    b"BZh": "bzip2: bunzip2 FILE",
    b"PK\x03\x04": "zip: unzip FILE",
}


def _open_file(path: Path) -> BufferedReader:
    return path.open("rb")


@contextmanager
def text_lines(
    path: Path, opened: Callable[[Path], AbstractContextManager[BufferedReader]] = _open_file
) -> Iterator[Iterator[str]]:
    """Open a file as an iterator of its lines, without their ends and without blank lines.

    Within the context a `MalformedLineError` is turned into a `TraceError` that names file and line.

    Raises:
        TraceError: The file cannot be read, or is not UTF-8.
    """
    source = _LineSource()
    try:
        with opened(path) as file:
            # peek, not seek: the file may be a pipe.
            begin = file.peek(6)
            _refuse_other_archives(begin)
            compressed = begin.startswith(_GZIP_MAGIC)
            yield source.lines(gzip.GzipFile(fileobj=file) if compressed else file)
    except MalformedLineError as error:
        raise TraceError(path, source.line_number, str(error)) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TraceError(path, source.line_number, reason) from error


def _refuse_other_archives(begin: bytes) -> None:
    for magic, cure in _OTHER_MAGIC.items():
        if begin.startswith(magic):
            raise MalformedLineError(f"compressed with {cure}, or use gzip")


class _LineSource:
    """The lines, and the number of the line last read."""

    def __init__(self) -> None:
        self.line_number = 0

    def lines(self, stream: Iterable[bytes]) -> Iterator[str]:
        for number, encoded in enumerate(_split(stream), start=1):
            self.line_number = number
            try:
                line = encoded.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise MalformedLineError(
                    f"not valid UTF-8: byte 0x{error.object[error.start]:02x}"
                ) from error
            if line.strip():
                yield line


def _split(stream: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines, whether they end with LF, CRLF or CR alone."""
    for chunk in stream:
        line = chunk.rstrip(b"\r\n")
        if b"\r" in line:
            yield from line.split(b"\r")
        else:
            yield chunk
