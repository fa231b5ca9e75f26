"""Traces with columns named by the user: `arrival=time,prompt=input_tokens,output=output_tokens`.

A CSV file with a header or one JSON object a line. An arrival is a number of seconds, from any zero, or a date and
time as Azure's traces have it. Where no output is told, an empty cell or null as of a request that failed, it is 0, and
so may be its prompt. Also `limit` (the client's `max_tokens`), `tenant`, `class` (an integer) and
`deadline` (seconds from the arrival) may be named; an empty cell or null is none.
"""

from collections.abc import Iterator, Mapping
from itertools import chain

from balanceroute.traces.formats import timestamp_ns
from balanceroute.traces.lines import (
    NS_PER_S,
    MalformedLineError,
    TraceRequest,
    decode_object,
    level_from_json,
    level_from_text,
    name_from_json,
    nanoseconds_from_json,
    nanoseconds_from_text,
    read_columns,
    required,
    tokens_from_json,
    tokens_from_text,
)

FIELDS = ("arrival", "prompt", "output")
# Of a request that failed when it was recorded.
_NO_OUTPUT = (None, "", "0", 0)
OPTIONAL = ("limit", "tenant", "class", "deadline")


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


def parse(lines: Iterator[str], names: Mapping[str, str]) -> Iterator[TraceRequest]:
    """Yield the requests, with arrivals since the file's own zero or since 1970.

    Args:
        lines: The lines of the file; at least one.
        names: The columns by field.

    Raises:
        MalformedLineError: The line last taken from `lines` does not follow the format.
    """
    first = next(lines)
    lines = chain((first,), lines)
    if first.lstrip().startswith("{"):
        for line in lines:
            entry = decode_object(line)
            yield _from_json({field: required(entry, name) for field, name in names.items()}, names)
        return
    for cells in read_columns(lines, tuple(names.values())):
        yield _from_text(dict(zip(names, cells, strict=True)), names)


def _from_json(values: Mapping[str, object], names: Mapping[str, str]) -> TraceRequest:
    arrival, limit, tenant = values["arrival"], values.get("limit"), values.get("tenant")
    level, deadline = values.get("class"), values.get("deadline")
    return TraceRequest(
        timestamp_ns(arrival)
        if isinstance(arrival, str)
        else nanoseconds_from_json(names["arrival"], arrival, unit_ns=NS_PER_S),
        0
        if values["prompt"] is None and values["output"] in _NO_OUTPUT
        else tokens_from_json(names["prompt"], values["prompt"]),
        0 if values["output"] is None else tokens_from_json(names["output"], values["output"]),
        max_tokens=None if limit is None else tokens_from_json(names["limit"], limit),
        tenant="" if tenant is None else name_from_json(names["tenant"], tenant),
        level=0 if level is None else level_from_json(names["class"], level),
        deadline_ns=None
        if deadline is None
        else nanoseconds_from_json(names["deadline"], deadline, unit_ns=NS_PER_S),
    )


def _from_text(cells: Mapping[str, str], names: Mapping[str, str]) -> TraceRequest:
    limit, level, deadline = (cells.get(field) for field in ("limit", "class", "deadline"))
    try:
        arrival_ns = nanoseconds_from_text(names["arrival"], cells["arrival"], unit_ns=NS_PER_S)
    except MalformedLineError:
        if ":" not in cells["arrival"]:
            raise
        arrival_ns = timestamp_ns(cells["arrival"])
    return TraceRequest(
        arrival_ns,
        0
        if not cells["prompt"] and cells["output"] in _NO_OUTPUT
        else tokens_from_text(names["prompt"], cells["prompt"]),
        tokens_from_text(names["output"], cells["output"]) if cells["output"] else 0,
        max_tokens=tokens_from_text(names["limit"], limit) if limit else None,
        tenant=cells.get("tenant", ""),
        level=level_from_text(names["class"], level) if level else 0,
        deadline_ns=nanoseconds_from_text(names["deadline"], deadline, unit_ns=NS_PER_S)
        if deadline
        else None,
    )
