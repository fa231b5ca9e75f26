"""Mooncake traces: one JSON object a line, with the ids of the prompt's prefix blocks.

`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}`, with
the time in milliseconds. A block is 512 tokens; `hash_ids` may be left out. Other keys are ignored.
"""

from collections.abc import Iterator

from balanceroute.traces.fields import (
    NS_PER_MS,
    hash_ids_from_json,
    nanoseconds_from_json,
    tokens_from_json,
)
from balanceroute.traces.json_lines import decode_object, keys_of, required
from balanceroute.traces.record import TraceRequest

KEYS = ("timestamp", "input_length", "output_length")


def recognises(first_line: str) -> bool:
    """Return whether a file with this first line is a Mooncake trace, complete or not."""
    return not keys_of(first_line).isdisjoint(KEYS)


def parse(lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since the trace's own zero.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    for line in lines:
        entry = decode_object(line)
        timestamp, input_length, output_length = (required(entry, key) for key in KEYS)
        yield TraceRequest(
            arrival_ns=nanoseconds_from_json("timestamp", timestamp, unit_ns=NS_PER_MS),
            prompt_tokens=tokens_from_json("input_length", input_length),
            output_tokens=tokens_from_json("output_length", output_length),
            hash_ids=hash_ids_from_json("hash_ids", entry.get("hash_ids", [])),
        )
