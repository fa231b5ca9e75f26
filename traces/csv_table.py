"""Rows of a CSV file with a header: columns are found by name, in any order, and others are ignored.

A row is one line: no trace quotes line breaks, and so a line number identifies a row. Cells are separated
by commas, or by semicolons or tabs if the header has more of these.
"""

import csv
import re
from collections.abc import Iterator

from balanceroute.traces.fields import MalformedLineError, shown

_SEPARATORS = ",;\t"
_NUMBER = re.compile(r"[+-]?[0-9.]+(e[+-]?[0-9]+)?")


def separator_of(header: str) -> str:
    """Return what separates the cells of a table with this header."""
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
    return len(cells) > 1 and all(_NUMBER.fullmatch(cell) for cell in cells)


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
