"""Alibaba's Bailian traces: Mooncake's keys and more, but other units.

`{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
"type": "text", "turn": 2, "hash_ids": [1089, 1090, ..]}`, with the time in seconds, and blocks of 16
tokens. Published as alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from collections.abc import Iterator

from balanceroute.traces.fields import NS_PER_S
from balanceroute.traces.json_lines import keys_of
from balanceroute.traces.mooncake import BAILIAN_KEYS, KEYS, in_blocks, requests_of
from balanceroute.traces.record import TraceRequest

_BLOCK_TOKENS = 16


def recognises(first_line: str) -> bool:
    """Return whether a file with this first line is a Bailian trace, complete or not."""
    keys = keys_of(first_line)
    return not (keys.isdisjoint(KEYS) or keys.isdisjoint(BAILIAN_KEYS))


def parse(lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since the trace's own zero, and blocks of 512 tokens.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    return in_blocks(requests_of(lines, unit_ns=NS_PER_S), _BLOCK_TOKENS)
