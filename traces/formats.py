"""The known formats of trace files.

The native format is one JSON object a line, and the only one that is also written:

`{"arrival_s": 1.500000000, "prompt_tokens": 6955, "output_tokens": 52, "hash_ids": [46, 47]}`, with
the time in seconds and `hash_ids` optional, as are `max_tokens`, the limit that the client set,
`tenant`, `class`, an integer of which the lowest goes first, `deadline_s`, how long after the
arrival the first token is due, and `session`, the conversation. null is the same as no key. Other keys are ignored. The proxy's request log is such a file; lines of its process log in
between are skipped. A request of several choices counts as one answer of all their tokens. Times are
written with nine digits, so that a trace that is written and read again is equal to the nanosecond.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import lru_cache, partial
from itertools import chain
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from balanceroute.traces.lines import (
    MAX_ARRIVAL_NS,
    NS_PER_MS,
    NS_PER_S,
    MalformedLineError,
    TraceRequest,
    columns_of,
    decode_object,
    hash_ids_from_json,
    keys_of,
    level_from_json,
    level_from_text,
    name_from_json,
    nanoseconds_from_json,
    nanoseconds_from_text,
    read_columns,
    required,
    shown,
    tokens_from_json,
    tokens_from_text,
)

NATIVE_KEYS = ("arrival_s", "prompt_tokens", "output_tokens")

_OF_THE_PROCESS = frozenset({"time", "level", "logger", "message"})


def recognises_native(first_line: str) -> bool:
    """Return whether a file with this first line is a native trace, complete or not."""
    keys = keys_of(first_line)
    return not keys.isdisjoint(NATIVE_KEYS) or keys >= _OF_THE_PROCESS


def is_of_the_process(entry: dict[str, object]) -> bool:
    """Return whether a line of the proxy's log belongs to its process log: it has no request."""
    return "arrival_s" not in entry and entry.keys() >= _OF_THE_PROCESS


def parse_native(lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since the trace's own zero.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    for line in lines:
        entry = decode_object(line)
        if is_of_the_process(entry):
            continue
        arrival_s, prompt_tokens, output_tokens = (required(entry, key) for key in NATIVE_KEYS)
        limit, deadline_s = entry.get("max_tokens"), entry.get("deadline_s")
        tenant, level, session = (entry.get(key) for key in ("tenant", "class", "session"))
        yield TraceRequest(
            arrival_ns=nanoseconds_from_json("arrival_s", arrival_s, unit_ns=NS_PER_S),
            prompt_tokens=tokens_from_json("prompt_tokens", prompt_tokens),
            output_tokens=tokens_from_json("output_tokens", output_tokens),
            hash_ids=hash_ids_from_json("hash_ids", entry.get("hash_ids", [])),
            max_tokens=None if limit is None else tokens_from_json("max_tokens", limit),
            tenant="" if tenant is None else name_from_json("tenant", tenant),
            level=0 if level is None else level_from_json("class", level),
            deadline_ns=None
            if deadline_s is None
            else nanoseconds_from_json("deadline_s", deadline_s, unit_ns=NS_PER_S),
            session="" if session is None else name_from_json("session", session),
        )


def write_native(path: str | PathLike[str], requests: Iterable[TraceRequest]) -> None:
    """Write requests in the native format, in the order given; compressed if the name ends in `.gz`.

    Weights are not written. Equal requests give equal bytes, compressed or not.

    Raises:
        OSError: The file cannot be written.
    """
    path = Path(path)
    with path.open("wb") as file:
        if path.suffix == ".gz":
            # No file name and no time in the gzip header: equal traces would differ in them.
            with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as compressed:
                compressed.writelines(map(_encoded, requests))
        else:
            file.writelines(map(_encoded, requests))


def _encoded(request: TraceRequest) -> bytes:
    fields = (
        f'"arrival_s": {_seconds(request.arrival_ns)}, '
        f'"prompt_tokens": {request.prompt_tokens}, "output_tokens": {request.output_tokens}'
    )
    if request.hash_ids:
        fields += f', "hash_ids": {json.dumps(request.hash_ids)}'
    if request.max_tokens is not None:
        fields += f', "max_tokens": {request.max_tokens}'
    if request.tenant:
        fields += f', "tenant": {json.dumps(request.tenant)}'
    if request.level:
        fields += f', "class": {request.level}'
    if request.deadline_ns is not None:
        fields += f', "deadline_s": {_seconds(request.deadline_ns)}'
    if request.session:
        fields += f', "session": {json.dumps(request.session)}'
    return f"{{{fields}}}\n".encode("ascii")


def _seconds(time_ns: int) -> str:
    # Not with json, which would write the time as a float: that loses nanoseconds after 97 days.
    seconds, fraction_ns = divmod(time_ns, NS_PER_S)
    return f"{seconds}.{fraction_ns:09d}"


# Azure LLM inference traces, 2023 and 2024: `TIMESTAMP,ContextTokens,GeneratedTokens`.
#
# The 2023 traces write `2023-11-16 18:17:03.9799600`, without a zone and with seven digits, one
# more than `datetime` holds; the 2024 traces write `2024-05-10 00:00:00.009930+00:00`. Both are
# read digit by digit into integer nanoseconds; a time without a zone counts as UTC.

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

_TIMESTAMP = re.compile(
    r"(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})[ T]"
    r"(?P<hour>[01][0-9]|2[0-3]):(?P<minute>[0-5][0-9]):(?P<second>[0-5][0-9])"
    r"(?:\.(?P<fraction>[0-9]{1,9}))?"
    r"(?P<zone>Z|(?P<sign>[+-])(?P<zone_hour>[01][0-9]|2[0-3]):?(?P<zone_minute>[0-5][0-9]))?"
)


def recognises_azure(first_line: str) -> bool:
    """Return whether a file with this first line is an Azure trace, complete or not."""
    # The name of the time column is common to several formats and does not identify one.
    return not columns_of(first_line).isdisjoint(name.lower() for name in AZURE_COLUMNS[1:])


def parse_azure(lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since 1970.

    Args:
        lines: The lines of the file, the header first; at least one.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    for timestamp, prompt_tokens, output_tokens in read_columns(lines, AZURE_COLUMNS):
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


# BurstGPT traces: `Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`.
#
# Newer files add the columns `Session ID` and `Elapsed time` and write the time with a fraction.
# Times are seconds from the midnight that begins the first day. Response tokens are 0 for a
# request that failed.

# The other columns have nothing that a scheduler may use, so a file may lack them.
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def recognises_burstgpt(first_line: str) -> bool:
    """Return whether a file with this first line is a BurstGPT trace, complete or not."""
    # The name of the time column is common to several formats and does not identify one.
    return not columns_of(first_line).isdisjoint(name.lower() for name in BURSTGPT_COLUMNS[1:])


def parse_burstgpt(lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since the first day's midnight.

    Args:
        lines: The lines of the file, the header first; at least one.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    for timestamp, prompt_tokens, output_tokens in read_columns(lines, BURSTGPT_COLUMNS):
        yield TraceRequest(
            arrival_ns=nanoseconds_from_text("Timestamp", timestamp, unit_ns=NS_PER_S),
            prompt_tokens=tokens_from_text("Request tokens", prompt_tokens),
            output_tokens=tokens_from_text("Response tokens", output_tokens),
        )


# Mooncake traces: one JSON object a line, with the ids of the prompt's prefix blocks.
#
# `{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}`,
# with the time in milliseconds. A block is 512 tokens; `hash_ids` may be left out. Other keys are
# ignored.
#
# Other writers use the same keys with other units. Blocks of 8 to 256 tokens show by their number, and are
# read as blocks of 512. Times that are more likely seconds are refused.

MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")

BAILIAN_KEYS = frozenset({"chat_id", "parent_chat_id"})
BLOCK_TOKENS = 512
"""Of one of a request's `hash_ids`, whatever the trace has."""
_SMALLER_BLOCKS = (8, 16, 32, 64, 128, 256)
# More requests a second than a trace has: whole milliseconds, and those with fractions.
_MOST_A_SECOND, _MOST_WITH_FRACTIONS = 500, 100
_LEAST_REQUESTS = 20


def recognises_mooncake(first_line: str) -> bool:
    """Return whether a file with this first line is a Mooncake trace, complete or not."""
    return not keys_of(first_line).isdisjoint(MOONCAKE_KEYS)


def parse_mooncake(lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since the trace's own zero.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    first = next(lines)
    if not keys_of(first).isdisjoint(BAILIAN_KEYS):
        raise MalformedLineError(
            "a Bailian trace, with seconds and blocks of 16 tokens: --format bailian, or auto"
        )
    requests = list(requests_of(chain((first,), lines), unit_ns=NS_PER_MS))
    return in_blocks(requests, _block_tokens(requests))


def requests_of(lines: Iterator[str], *, unit_ns: int) -> Iterator[TraceRequest]:
    """Yield the requests, with times in a unit and blocks of any size."""
    for line in lines:
        entry = decode_object(line)
        timestamp, input_length, output_length = (required(entry, key) for key in MOONCAKE_KEYS)
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
        asked: Whether the user named the format, so that whole numbers count as they are.

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


# Alibaba's Bailian traces: Mooncake's keys and more, but other units.
#
# `{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521,
# "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, 1090, ..]}`, with the time
# in seconds, and blocks of 16 tokens. `parent_chat_id` is the chat that a request continues, -1
# for none. Published as alibaba-edu/qwen-bailian-usagetraces-anon.

_BLOCK_TOKENS = 16


def recognises_bailian(first_line: str) -> bool:
    """Return whether a file with this first line is a Bailian trace, complete or not."""
    keys = keys_of(first_line)
    return not (keys.isdisjoint(MOONCAKE_KEYS) or keys.isdisjoint(BAILIAN_KEYS))


def parse_bailian(lines: Iterator[str]) -> Iterator[TraceRequest]:
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


# Traces with columns named by the user: `arrival=time,prompt=input_tokens,output=output_tokens`.
#
# A CSV file with a header or one JSON object a line. An arrival is a number of seconds, from any
# zero, or a date and time as Azure's traces have it. An empty cell or null, as of a request that failed,
# is an output of 0, and so may be its prompt. Also `limit` (the client's
# `max_tokens`), `tenant`, `class` (an integer) and `deadline` (seconds from the arrival) may be
# named; an empty cell or null is none.

FIELDS = ("arrival", "prompt", "output")
# Of a request that failed when it was recorded.
_NO_OUTPUT = (None, "", "0", 0)
OPTIONAL = ("limit", "tenant", "class", "deadline")
_Read = Callable[[str, Any], Any]


class _Cells(NamedTuple):
    """How the values of a file are read, by their columns' names."""

    nothing: object  # An empty cell, or null.
    seconds: _Read
    tokens: _Read
    name: _Read
    level: _Read


_FROM_JSON = _Cells(
    None,
    partial(nanoseconds_from_json, unit_ns=NS_PER_S),
    tokens_from_json,
    name_from_json,
    level_from_json,
)
_FROM_TEXT = _Cells(
    "",
    partial(nanoseconds_from_text, unit_ns=NS_PER_S),
    tokens_from_text,
    lambda _, cell: cell,
    level_from_text,
)


def read_names(text: str) -> dict[str, str]:
    """Return the columns by field, of a text such as `arrival=time,prompt=in,output=out`.

    Raises:
        ValueError: A field is unknown, missing or given twice, or a name is empty.
    """
    names: dict[str, str] = {}
    for part in text.split(","):
        field, mark, name = (word.strip() for word in part.partition("="))
        if field not in (*FIELDS, *OPTIONAL):
            raise ValueError(f"{field!r} is none of {', '.join((*FIELDS, *OPTIONAL))}")
        if not mark or not name or field in names:
            raise ValueError(f"{field} needs one column, as in {field}=NAME")
        names[field] = name
    missing = [field for field in FIELDS if field not in names]
    if missing:
        raise ValueError(f"{', '.join(missing)} is missing")
    return names


def parse_named(lines: Iterator[str], names: Mapping[str, str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since the file's own zero or since 1970.

    Args:
        lines: The lines of the file; at least one.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    first = next(lines)
    lines = chain((first,), lines)
    if first.lstrip().startswith("{"):
        for line in lines:
            entry = decode_object(line)
            values = {field: required(entry, name) for field, name in names.items()}
            yield _named(values, names, _FROM_JSON)
        return
    for cells in read_columns(lines, tuple(names.values())):
        yield _named(dict(zip(names, cells, strict=True)), names, _FROM_TEXT)


def _named(values: Mapping[str, object], names: Mapping[str, str], cells: _Cells) -> TraceRequest:
    arrival, nothing = values["arrival"], cells.nothing

    def optional(field: str, read: _Read, default: object) -> Any:
        value = values.get(field, nothing)
        return default if value == nothing else read(names[field], value)

    failed = values["prompt"] == nothing and values["output"] in _NO_OUTPUT
    is_date = isinstance(arrival, str) and (cells is _FROM_JSON or ":" in arrival)
    return TraceRequest(
        timestamp_ns(str(arrival)) if is_date else cells.seconds(names["arrival"], arrival),
        0 if failed else cells.tokens(names["prompt"], values["prompt"]),
        optional("output", cells.tokens, 0),
        max_tokens=optional("limit", cells.tokens, None),
        tenant=optional("tenant", cells.name, ""),
        level=optional("class", cells.level, 0),
        deadline_ns=optional("deadline", cells.seconds, None),
    )
