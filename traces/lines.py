"""Requests of a trace, and the lines and fields of its file, read strictly.

Every format reads its fields through these functions, so all of them accept the same numbers and
give the same reasons. They raise `MalformedLineError`; the reader adds file and line.
"""

import csv
import gzip
import json
import re
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal
from io import BufferedReader
from pathlib import Path

from balanceroute.proxy.core.errors import BalanceRouteError

# One request of a trace, and the error of a trace that cannot be read.
#
# A record has what the engine needs, independent of the file's format: the arrival in nanoseconds
# and lengths in tokens. Bounds keep every sum over a trace within 64 bits.

MAX_ARRIVAL_NS = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_LEVEL = 2**31 - 1
LEAST_WEIGHT, MOST_WEIGHT = 1e-3, 1e6


class TraceError(BalanceRouteError, ValueError):
    """A trace that cannot be read.

    Attributes:
        line: The line with the error, counted from 1; 0 if the file as a whole has it.
    """

    def __init__(self, path: Path, line: int, reason: str) -> None:
        super().__init__(path, line, reason)
        self.path = path
        self.line = line
        self.reason = reason

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{place}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TraceRequest:
    arrival_ns: int  # When the request arrives, in nanoseconds from the start of the trace.
    prompt_tokens: int
    output_tokens: int  # Length of the answer; 0 marks a request that failed when it was recorded.
    # One id per prefix block of the prompt, equal ids for equal prefixes; empty if the trace does
    # not record them.
    hash_ids: tuple[int, ...] = ()
    # The limit that the client set; None if it set none, or the trace does not record it.
    max_tokens: int | None = None
    tenant: str = ""  # Whose it is; empty if the trace does not say.
    level: int = 0  # Its class of service; lower goes first, and 0 is the usual one.
    # How long after its arrival its first token is due; None for never.
    deadline_ns: int | None = None
    weight: float = 1.0  # The share of its tenant.
    session: str = ""  # The conversation that it is a turn of; empty if the trace does not say.

    def __post_init__(self) -> None:
        """Check types and ranges, so that an invalid record cannot exist.

        Raises:
            TypeError: A field has another type than it must.
            ValueError: A field is out of its bounds.
        """
        for name, value, least, largest in (
            ("arrival_ns", self.arrival_ns, 0, MAX_ARRIVAL_NS),
            ("prompt_tokens", self.prompt_tokens, 0, MAX_TOKENS),
            ("output_tokens", self.output_tokens, 0, MAX_TOKENS),
            ("max_tokens", 0 if self.max_tokens is None else self.max_tokens, 0, MAX_TOKENS),
            ("level", self.level, -MAX_LEVEL, MAX_LEVEL),
            ("deadline_ns", 0 if self.deadline_ns is None else self.deadline_ns, 0, MAX_ARRIVAL_NS),
        ):
            # Not isinstance, for which a bool is an int.
            if type(value) is not int:
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
            if not least <= value <= largest:
                raise ValueError(f"{name} must be in {least}..{largest}, not {value}")
        if type(self.tenant) is not str or type(self.session) is not str:
            raise TypeError("tenant and session must be texts")
        if type(self.weight) is not float:
            raise TypeError("weight must be a float")
        if not LEAST_WEIGHT <= self.weight <= MOST_WEIGHT:
            raise ValueError(f"weight must be in {LEAST_WEIGHT}..{MOST_WEIGHT}, not {self.weight}")
        if type(self.hash_ids) is not tuple or any(type(item) is not int for item in self.hash_ids):
            raise TypeError("hash_ids must be a tuple of integers")


NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

# Digits alone: int() and Decimal() also take underscores, padding and other scripts' digits.
# A table of pandas with an empty cell writes its integers as 470.0.
_INTEGER = re.compile(r"([+-]?[0-9]+)(?:\.0*)?")
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,6})?")
# Longer than any number in range, and below the length at which int() itself refuses.
_MAX_CHARACTERS = 100
_LATEST_EPOCH_MS = 10**13
# Wide enough that only the rounding to whole nanoseconds rounds, whatever the caller's context.
# No traps: a product that overflows becomes infinite, and so out of range.
_EXACT = Context(prec=2 * _MAX_CHARACTERS, traps=[])


class MalformedLineError(ValueError):
    """A line that does not follow its format; the message is the reason."""


def shown(value: object) -> str:
    """Return a shortened `repr`, so that the reason stays readable for any line."""
    return reprlib.repr(value)


def tokens_from_text(name: str, text: str) -> int:
    """Read a count of tokens from a CSV cell.

    Raises:
        MalformedLineError: Not an integer, negative, or over `MAX_TOKENS`.
    """
    return _bounded_tokens(name, _integer(name, text))


def tokens_from_json(name: str, value: object) -> int:
    """Read a count of tokens from a JSON value.

    Raises:
        MalformedLineError: Not an integer (a bool is none), negative, or over `MAX_TOKENS`.
    """
    return _bounded_tokens(name, _json_integer(name, value))


def nanoseconds_from_text(name: str, text: str, *, unit_ns: int) -> int:
    """Read a time from a CSV cell, rounded to a whole nanosecond.

    Args:
        unit_ns: Nanoseconds in the unit of the cell.

    Raises:
        MalformedLineError: Not a finite number, negative, or over `MAX_ARRIVAL_NS`.
    """
    if len(text) > _MAX_CHARACTERS or _NUMBER.fullmatch(text) is None:
        raise MalformedLineError(f"{name} is not a finite number: {shown(text)}")
    return _whole_nanoseconds(name, Decimal(text), unit_ns)


def nanoseconds_from_json(name: str, value: object, *, unit_ns: int) -> int:
    """Read a time from a JSON value decoded with exact decimals, rounded to a whole nanosecond.

    Args:
        unit_ns: Nanoseconds in the unit of the value.

    Raises:
        MalformedLineError: Not a finite number, negative, or over `MAX_ARRIVAL_NS`.
    """
    if type(value) is not int and not (isinstance(value, Decimal) and value.is_finite()):
        raise MalformedLineError(f"{name} is not a finite number: {_shown_json(value)}")
    return _whole_nanoseconds(name, Decimal(value), unit_ns)


def level_from_text(name: str, text: str) -> int:
    """Read a class of service from a CSV cell.

    Raises:
        MalformedLineError: Not an integer, or beyond `MAX_LEVEL`.
    """
    return _bounded_level(name, _integer(name, text))


def level_from_json(name: str, value: object) -> int:
    """Read a class of service from a JSON value.

    Raises:
        MalformedLineError: Not an integer, or beyond `MAX_LEVEL`.
    """
    return _bounded_level(name, _json_integer(name, value))


def name_from_json(name: str, value: object) -> str:
    """Read a name from a JSON value.

    Raises:
        MalformedLineError: Not a string.
    """
    if not isinstance(value, str):
        raise MalformedLineError(f"{name} is not a string: {_shown_json(value)}")
    return value


def hash_ids_from_json(name: str, value: object) -> tuple[int, ...]:
    """Read the ids of the prefix blocks from a JSON value.

    Raises:
        MalformedLineError: Not a list of integers.
    """
    if not isinstance(value, list):
        raise MalformedLineError(f"{name} is not a list: {_shown_json(value)}")
    for item in value:
        if type(item) is not int:
            raise MalformedLineError(f"{name} holds a non-integer: {_shown_json(item)}")
    return tuple(value)


def _integer(name: str, text: str) -> int:
    match = _INTEGER.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
    if match is None:
        raise MalformedLineError(f"{name} is not an integer: {shown(text)}")
    return int(match[1])


def _json_integer(name: str, value: object) -> int:
    if type(value) is int:
        return value
    # Compared before it is converted: 1e999999 is an integer of a million digits.
    if isinstance(value, Decimal) and abs(value) <= MAX_ARRIVAL_NS and value == int(value):
        return int(value)
    raise MalformedLineError(f"{name} is not an integer: {_shown_json(value)}")


def _bounded_tokens(name: str, tokens: int) -> int:
    if tokens < 0:
        raise MalformedLineError(f"{name} is negative: {shown(tokens)}")
    if tokens > MAX_TOKENS:
        raise MalformedLineError(f"{name} is over {MAX_TOKENS}: {shown(tokens)}")
    return tokens


def _bounded_level(name: str, level: int) -> int:
    if abs(level) > MAX_LEVEL:
        raise MalformedLineError(f"{name} is beyond {MAX_LEVEL}: {shown(level)}")
    return level


def _whole_nanoseconds(name: str, value: Decimal, unit_ns: int) -> int:
    if value < 0:
        raise MalformedLineError(f"{name} is negative: {shown(str(value))}")
    exact_ns = _EXACT.multiply(value, unit_ns)
    # Before int(): a short text such as 1e999999 is an integer of a million digits.
    if exact_ns > MAX_ARRIVAL_NS:
        hint = ""
        if unit_ns == NS_PER_S and value < _LATEST_EPOCH_MS:
            hint = ", as seconds; if it is in milliseconds since 1970, divide it by 1,000"
        raise MalformedLineError(f"{name} is out of range: {shown(str(value))}{hint}")
    return int(exact_ns.to_integral_value(ROUND_HALF_EVEN))


def _shown_json(value: object) -> str:
    # A Decimal is a JSON number with a fraction; its `repr` is not the text in the file.
    return str(value)[:40] if isinstance(value, Decimal) else shown(value)


# The lines of a text file from outside: UTF-8, with or without gzip, every error with its line.

_GZIP_MAGIC = b"\x1f\x8b"
# Other compressions, and the command that makes the file readable.
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


# Lines of JSON objects, decoded without loss: fractions stay decimal, NaN and infinity are
# errors.

ONE_A_LINE = "and a trace has one JSON object a line: jq -c '.[]' FILE, or jq -c . FILE"


def decode_object(line: str) -> dict[str, object]:
    """Decode one line that holds one JSON object.

    Raises:
        MalformedLineError: Not JSON, not an object, or a number is out of range.
    """
    try:
        value = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        if line.strip() in ("{", "[", "[{"):
            raise MalformedLineError(f"JSON over several lines, {ONE_A_LINE}") from error
        raise MalformedLineError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    except (ArithmeticError, RecursionError, ValueError) as error:
        if isinstance(error, MalformedLineError):
            raise
        # Numbers too long for int() or Decimal(), and nesting too deep for the decoder.
        raise MalformedLineError(f"not decodable JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise MalformedLineError(f"not a JSON object: {shown(line)}")
    return value


def required(entry: dict[str, object], key: str) -> object:
    """Return the value of a key.

    Raises:
        MalformedLineError: The object has no such key.
    """
    if key not in entry:
        raise MalformedLineError(f"missing key {key!r}")
    return entry[key]


def keys_of(line: str) -> frozenset[str]:
    """Return the keys of a line's object; none if the line does not open an object.

    Raises:
        MalformedLineError: The line opens an object and is not valid JSON.
    """
    return frozenset(decode_object(line)) if line.lstrip().startswith("{") else frozenset()


def _refuse_constant(name: str) -> object:
    # Python's decoder takes NaN, Infinity and -Infinity, which JSON does not have.
    raise MalformedLineError(f"not valid JSON: {name} is not a finite number")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise MalformedLineError(f"the key {shown(twice)} is there twice")
    return found


_DECODER = json.JSONDecoder(
    parse_float=Decimal,
    parse_constant=_refuse_constant,
    object_pairs_hook=_without_duplicates,
)


# Rows of a CSV file with a header: columns are found by name, in any order, and further ones are
# ignored.
#
# A row is one line: no trace quotes line breaks, and so a line number identifies a row. Cells are
# separated by commas, or by semicolons or tabs if the header has more of these.

_SEPARATORS = ",;\t"

_NUMBER_IN_TABLE = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?")


def separator_of(header: str) -> str:
    return max(_SEPARATORS, key=header.count)


def split_row(line: str, separator: str) -> list[str]:
    """Split one line into its cells.

    Raises:
        MalformedLineError: A quote is left open or stands inside a cell, or a cell is too long.
    """
    try:
        return next(csv.reader((line,), strict=True, delimiter=separator))
    except csv.Error as error:
        raise MalformedLineError(f"not valid CSV: {error}") from error


def columns_of(line: str) -> frozenset[str]:
    """Return the cells of a line as a set, in lower case; none if it is not a CSV line."""
    try:
        return frozenset(cell.strip().lower() for cell in split_row(line, separator_of(line)))
    except MalformedLineError:
        return frozenset()


def has_no_header(first_line: str) -> bool:
    """Return whether the first line of a table holds numbers, and no names."""
    cells = columns_of(first_line)
    return len(cells) > 1 and all(_NUMBER_IN_TABLE.fullmatch(cell) for cell in cells)


def read_columns(lines: Iterator[str], names: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the named cells of each row, in the order of `names`; case does not matter in a header.

    Raises:
        MalformedLineError: The header lacks a column or repeats it, or a row has too few or too many
            cells.
    """
    first_line = next(lines)
    if has_no_header(first_line):
        raise MalformedLineError(
            f"no header, but {shown(first_line)}: write the names of the columns above it"
        )
    separator = separator_of(first_line)
    header = split_row(first_line, separator)
    lower = [cell.strip().lower() for cell in header]
    for name in names:
        if name.lower() not in lower:
            raise MalformedLineError(f"missing column {name!r} in header {shown(first_line)}")
        if lower.count(name.lower()) > 1:
            raise MalformedLineError(f"column {name!r} occurs more than once in the header")
    positions = [lower.index(name.lower()) for name in names]
    for line in lines:
        row = split_row(line, separator)
        if len(row) < len(header):
            raise MalformedLineError(f"missing column {header[len(row)]!r}")
        if len(row) > len(header):
            raise MalformedLineError(f"{len(row)} cells in a table of {len(header)} columns")
        yield [row[position] for position in positions]
