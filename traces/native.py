"""The native format: one JSON object a line, and the only one that is also written.

`{"arrival_s": 1.500000000, "prompt_tokens": 6955, "output_tokens": 52, "hash_ids": [46, 47]}`, with
the time in seconds and `hash_ids` optional, as are `max_tokens`, the limit that the client set,
`tenant`, `class`, an integer of which the lowest goes first, `deadline_s`, how long after the
arrival the first token is due, and `session`, the conversation. null is the same as no key. Other keys are ignored. The proxy's request log is such a file; lines of its process log in
between are skipped. A request of several choices counts as one answer of all their tokens. Times are
written with nine digits, so that a trace that is written and read again is equal to the nanosecond.
"""

import gzip
import json
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path

from balanceroute.traces.lines import (
    NS_PER_S,
    TraceRequest,
    decode_object,
    hash_ids_from_json,
    keys_of,
    level_from_json,
    name_from_json,
    nanoseconds_from_json,
    required,
    tokens_from_json,
)

KEYS = ("arrival_s", "prompt_tokens", "output_tokens")
_OF_THE_PROCESS = frozenset({"time", "level", "logger", "message"})


def recognises(first_line: str) -> bool:
    """Return whether a file with this first line is a native trace, complete or not."""
    keys = keys_of(first_line)
    return not keys.isdisjoint(KEYS) or keys >= _OF_THE_PROCESS


def is_of_the_process(entry: dict[str, object]) -> bool:
    """Return whether a line of the proxy's log belongs to its process log: it has no request."""
    return "arrival_s" not in entry and entry.keys() >= _OF_THE_PROCESS


def parse(lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since the trace's own zero.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    for line in lines:
        entry = decode_object(line)
        if is_of_the_process(entry):
            continue
        arrival_s, prompt_tokens, output_tokens = (required(entry, key) for key in KEYS)
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
