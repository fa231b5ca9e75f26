"""Mooncake traces: one JSON object a line, with the ids of the prompt's prefix blocks.

`{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}`, with
the time in milliseconds. A block is 512 tokens; `hash_ids` may be left out. Other keys are ignored.

Others write the same keys with other units. Blocks of 8 to 256 tokens are told by their number, and read as
blocks of 512. Times that are more likely seconds are refused.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from balanceroute.traces.lines import (
    NS_PER_MS,
    NS_PER_S,
    MalformedLineError,
    TraceRequest,
    decode_object,
    hash_ids_from_json,
    keys_of,
    nanoseconds_from_json,
    required,
    tokens_from_json,
)

KEYS = ("timestamp", "input_length", "output_length")
BAILIAN_KEYS = frozenset({"chat_id", "parent_chat_id"})
BLOCK_TOKENS = 512
"""Of one of a request's `hash_ids`, whatever the trace has."""
_SMALLER_BLOCKS = (8, 16, 32, 64, 128, 256)
# More requests a second than a trace has: whole milliseconds, and those with fractions.
_MOST_A_SECOND, _MOST_WITH_FRACTIONS = 500, 100
_LEAST_REQUESTS = 20


def recognises(first_line: str) -> bool:
    """Return whether a file with this first line is a Mooncake trace, complete or not."""
    return not keys_of(first_line).isdisjoint(KEYS)


def parse(lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since the trace's own zero.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    first = next(lines)
    if not keys_of(first).isdisjoint(BAILIAN_KEYS):
        raise MalformedLineError(
            "a Bailian trace, with seconds and blocks of 16 tokens: --format bailian, or auto"
        )
    requests = list(requests_of(_again(first, lines), unit_ns=NS_PER_MS))
    return in_blocks(requests, _block_tokens(requests))


def _again(first: str, lines: Iterator[str]) -> Iterator[str]:
    yield first
    yield from lines


def requests_of(lines: Iterator[str], *, unit_ns: int) -> Iterator[TraceRequest]:
    """Yield the requests, with times in a unit and blocks of any size."""
    for line in lines:
        entry = decode_object(line)
        timestamp, input_length, output_length = (required(entry, key) for key in KEYS)
        yield TraceRequest(
            arrival_ns=nanoseconds_from_json("timestamp", timestamp, unit_ns=unit_ns),
            prompt_tokens=tokens_from_json("input_length", input_length),
            output_tokens=tokens_from_json("output_length", output_length),
            hash_ids=hash_ids_from_json("hash_ids", entry.get("hash_ids", [])),
        )


def in_blocks(requests: Iterable[TraceRequest], block_tokens: int) -> Iterator[TraceRequest]:
    """Yield requests with blocks of 512 tokens instead of smaller ones.

    A larger block has an id of its own for what it holds and all before it, so that equal ids stay equal
    prefixes; a prefix that ends within a block is lost.
    """
    if block_tokens == BLOCK_TOKENS:
        yield from requests
        return
    size = BLOCK_TOKENS // block_tokens
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for request in requests:
        ids, before = list[int](), -1
        for begin in range(0, len(request.hash_ids), size):
            block = before, request.hash_ids[begin : begin + size]
            before = known.setdefault(block, len(known))
            ids.append(before)
        yield replace(request, hash_ids=tuple(ids))


def _block_tokens(requests: Sequence[TraceRequest]) -> int:
    """Return the size of the blocks, by their number.

    Raises:
        MalformedLineError: They are more than blocks of 512 tokens, and not all of one size.
    """
    counts = [(one.prompt_tokens, len(one.hash_ids)) for one in requests if one.hash_ids]
    if all(count <= -(-tokens // BLOCK_TOKENS) for tokens, count in counts):
        return BLOCK_TOKENS
    # The last one may be there only if it is full.
    fitting = [
        size
        for size in _SMALLER_BLOCKS
        if all(tokens // size <= count <= -(-tokens // size) for tokens, count in counts)
    ]
    if len(fitting) != 1:
        raise MalformedLineError(
            "hash_ids are more than one for 512 tokens, and not of 8, 16, .. or 256 tokens: leave "
            "them out, or write them for blocks of 512"
        )
    return fitting[0]


def check_unit(requests: Sequence[TraceRequest], *, asked: bool) -> None:
    """Refuse times that are more likely seconds than milliseconds.

    Args:
        requests: As read.
        asked: Whether the user named the format, so that whole numbers are taken as said.

    Raises:
        MalformedLineError: As milliseconds they would be more requests than any trace has.
    """
    times_ns = [one.arrival_ns for one in requests]
    span_s = (max(times_ns, default=0) - min(times_ns, default=0)) / NS_PER_S
    if not span_s:
        return
    rate = (len(times_ns) - 1) / span_s
    if any(time_ns % NS_PER_MS for time_ns in times_ns):
        doubtful = rate > _MOST_WITH_FRACTIONS
    else:
        doubtful = rate > _MOST_A_SECOND and len(times_ns) >= _LEAST_REQUESTS and not asked
    if doubtful:
        raise MalformedLineError(
            f"timestamp in milliseconds would be {rate:,.0f} requests a second: for seconds, --columns "
            "arrival=timestamp,prompt=input_length,output=output_length"
            + ("" if asked else "; else --format mooncake")
        )
