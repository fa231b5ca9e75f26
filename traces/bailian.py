"""Alibaba's Bailian traces: Mooncake's keys and more, but other units.

`{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132,
"type": "text", "turn": 2, "hash_ids": [1089, 1090, ..]}`, with the time in seconds, and blocks of 16
tokens. `parent_chat_id` is the chat that a request continues, -1 for none. Published as
alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import NoneType

from balanceroute.traces.lines import NS_PER_S, TraceRequest, decode_object, keys_of
from balanceroute.traces.mooncake import BAILIAN_KEYS, KEYS, in_blocks, requests_of

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
    chats: list[str] = []
    requests = requests_of(_noting_chats(lines, chats), unit_ns=NS_PER_S)
    for number, request in enumerate(in_blocks(requests, _BLOCK_TOKENS)):
        yield replace(request, session=chats[number])


def _noting_chats(lines: Iterator[str], chats: list[str]) -> Iterator[str]:
    """Pass lines on, and note the first chat of each one's conversation."""
    firsts: dict[object, str] = {}
    for line in lines:
        entry = decode_object(line)
        chat, parent = entry.get("chat_id"), entry.get("parent_chat_id")
        if type(chat) is int and type(parent) in (int, NoneType):
            chats.append(firsts.get(parent, str(chat)))
            firsts[chat] = chats[-1]
        else:
            chats.append("")
        yield line
