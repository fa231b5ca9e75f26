"""Azure LLM inference traces, 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`.

The 2023 traces write `2023-11-16 18:17:03.9799600`, without a zone and with seven digits, one more
than `datetime` holds; the 2024 traces write `2024-05-10 00:00:00.009930+00:00`. Both are read digit
by digit into integer nanoseconds; a time without a zone counts as UTC.
"""

import re
from collections.abc import Iterator
from datetime import date
from functools import lru_cache

from balanceroute.traces.lines import (
    MAX_ARRIVAL_NS,
    NS_PER_S,
    MalformedLineError,
    TraceRequest,
    columns_of,
    read_columns,
    shown,
    tokens_from_text,
)

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_TIMESTAMP = re.compile(
    r"(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})[ T]"
    r"(?P<hour>[01][0-9]|2[0-3]):(?P<minute>[0-5][0-9]):(?P<second>[0-5][0-9])"
    r"(?:\.(?P<fraction>[0-9]{1,9}))?"
    r"(?P<zone>Z|(?P<sign>[+-])(?P<zone_hour>[01][0-9]|2[0-3]):?(?P<zone_minute>[0-5][0-9]))?"
)


def recognises(first_line: str) -> bool:
    """Return whether a file with this first line is an Azure trace, complete or not."""
    # The name of the time column is common to several formats and does not identify one.
    return not columns_of(first_line).isdisjoint(name.lower() for name in COLUMNS[1:])


def parse(lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since 1970.

    Args:
        lines: The lines of the file, the header first; at least one.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    for timestamp, prompt_tokens, output_tokens in read_columns(lines, COLUMNS):
        yield TraceRequest(
            arrival_ns=timestamp_ns(timestamp),
            prompt_tokens=tokens_from_text("ContextTokens", prompt_tokens),
            output_tokens=tokens_from_text("GeneratedTokens", output_tokens),
        )


def timestamp_ns(text: str) -> int:
    """Read a date and time as nanoseconds since 1970, exactly.

    Raises:
        MalformedLineError: Not of the form above, no such date, or outside 1970..2262.
    """
    match = _TIMESTAMP.fullmatch(text)
    if match is None:
        raise MalformedLineError(f"TIMESTAMP is not a date and time: {shown(text)}")
    seconds = (
        _midnight_s(match["date"])
        + int(match["hour"]) * 3600
        + int(match["minute"]) * 60
        + int(match["second"])
    )
    if match["sign"] is not None:
        offset_s = int(match["zone_hour"]) * 3600 + int(match["zone_minute"]) * 60
        seconds -= offset_s if match["sign"] == "+" else -offset_s
    result_ns = seconds * NS_PER_S + int((match["fraction"] or "0").ljust(9, "0"))
    if not 0 <= result_ns <= MAX_ARRIVAL_NS:
        raise MalformedLineError(f"TIMESTAMP is out of range: {shown(text)}")
    return result_ns


@lru_cache(maxsize=64)  # A trace has millions of times on a few days.
def _midnight_s(text: str) -> int:
    """Seconds from 1970 to the midnight that begins a date such as 2023-11-16."""
    try:
        day = date.fromisoformat(text)
    except ValueError as error:
        raise MalformedLineError(f"TIMESTAMP names no date: {shown(text)}") from error
    return (day.toordinal() - date(1970, 1, 1).toordinal()) * 86_400
