"""BurstGPT traces: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`.

Newer files add the columns `Session ID` and `Elapsed time` and write the time with a fraction.
Times are seconds from the midnight that begins the first day. Response tokens are 0 for a request
that failed.
"""

from collections.abc import Iterator

from balanceroute.traces.lines import (
    NS_PER_S,
    TraceRequest,
    columns_of,
    nanoseconds_from_text,
    read_columns,
    tokens_from_text,
)

# The other columns have nothing that a scheduler may use, so a file may lack them.
COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def recognises(first_line: str) -> bool:
    """Return whether a file with this first line is a BurstGPT trace, complete or not."""
    # The name of the time column is common to several formats and does not identify one.
    return not columns_of(first_line).isdisjoint(name.lower() for name in COLUMNS[1:])


def parse(lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since the first day's midnight.

    Args:
        lines: The lines of the file, the header first; at least one.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    for timestamp, prompt_tokens, output_tokens in read_columns(lines, COLUMNS):
        yield TraceRequest(
            arrival_ns=nanoseconds_from_text("Timestamp", timestamp, unit_ns=NS_PER_S),
            prompt_tokens=tokens_from_text("Request tokens", prompt_tokens),
            output_tokens=tokens_from_text("Response tokens", output_tokens),
        )
