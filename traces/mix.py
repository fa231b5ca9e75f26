"""Several traces as one: a TOML file that says whose requests each trace holds, and how they come.

    [[part]]
    trace = "azure_2023_conv.csv.gz"
    tenant = "chat"
    weight = 2.0
    rate = 1.5

`trace` is a path from the file's own folder; all other keys are optional. `format` is that of the
trace. `tenant`, `weight`, `class` (an integer; the lowest goes first) and `deadline_s` are those of all
its requests, in place of the trace's own. `skip` passes over the first requests, and `requests`
takes so many after them. The first one taken arrives at `start_s`, the times between them are divided
by `rate`, and none comes from `end_s` on.
"""

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from balanceroute.traces.formats import BLOCK_TOKENS
from balanceroute.traces.lines import (
    LEAST_WEIGHT,
    MAX_LEVEL,
    MOST_WEIGHT,
    NS_PER_S,
    TraceError,
    TraceRequest,
)
from balanceroute.traces.reader import FORMATS, read_trace

_KEYS = frozenset(
    {
        *("trace", "format", "skip", "requests"),
        *("tenant", "weight", "class", "deadline_s"),
        *("rate", "start_s", "end_s"),
    }
)
_MOST_S = 1e9
_Number = TypeVar("_Number", int, float)


def read_mix(path: Path) -> list[TraceRequest]:
    """Read the traces that a file names as one: by arrival, equal arrivals in the order of the file.

    Raises:
        TraceError: The file or a trace cannot be read, or a value makes no sense.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise TraceError(path, 0, error.strerror or str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TraceError(path, 0, f"not valid TOML: {error}") from error
    parts = table.pop("part", None)
    if table or not isinstance(parts, list) or not parts:
        raise TraceError(path, 0, "a mix has one or more tables [[part]], and nothing else")
    requests = [
        request
        for number, part in enumerate(parts, start=1)
        for request in _Part(path, number, part).read()
    ]
    if not requests:
        raise TraceError(path, 0, "the parts hold no request")
    # Stable, so that equal arrivals keep their order.
    return sorted(requests, key=lambda request: request.arrival_ns)


class _Part:
    """One table of the file; every fault names it and its key."""

    def __init__(self, path: Path, number: int, values: Any) -> None:
        self._path = path
        self._number = number
        self._values: dict[str, Any] = values if isinstance(values, dict) else {}
        unknown = sorted(self._values.keys() - _KEYS)
        if unknown:
            self._fail(unknown[0], f"is unknown; known: {', '.join(sorted(_KEYS))}")

    def read(self) -> list[TraceRequest]:
        name, rate = self._text("trace", ""), self._number_of("rate", 1.0, 1e-6, 1e6)
        if not name:
            self._fail("trace", "is missing")
        form = self._text("format", "auto")
        if form not in ("auto", *FORMATS):
            self._fail("format", f"must be one of auto, {', '.join(FORMATS)}")
        skip = self._number_of("skip", 0, 0, 10**9)
        count = self._number_of("requests", 10**9, 1, 10**9)
        start_ns = round(NS_PER_S * self._number_of("start_s", 0.0, 0.0, _MOST_S))
        end_ns = round(NS_PER_S * self._number_of("end_s", _MOST_S, 0.0, _MOST_S))
        taken = read_trace(self._path.parent / name, form)[skip : skip + count]
        changes = self._changes()
        arrivals_ns = [
            start_ns + round((request.arrival_ns - taken[0].arrival_ns) / rate) for request in taken
        ]
        return [
            replace(
                request,
                arrival_ns=arrival_ns,
                # Two parts may have the same names.
                session=request.session and f"{self._number}/{request.session}",
                **changes,
            )
            for request, arrival_ns in zip(taken, arrivals_ns, strict=True)
            if arrival_ns < end_ns
        ]

    def _changes(self) -> dict[str, Any]:
        changes: dict[str, Any] = {
            "weight": self._number_of("weight", 1.0, LEAST_WEIGHT, MOST_WEIGHT)
        }
        if "tenant" in self._values:
            changes["tenant"] = self._text("tenant", "")
        if "class" in self._values:
            changes["level"] = self._number_of("class", 0, -MAX_LEVEL, MAX_LEVEL)
        if "deadline_s" in self._values:
            deadline_s = self._number_of("deadline_s", 0.0, 1e-3, _MOST_S)
            changes["deadline_ns"] = round(NS_PER_S * deadline_s)
        return changes

    def _text(self, key: str, default: str) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            self._fail(key, f"must be a text, not {value!r}")
        return str(value)

    def _number_of(self, key: str, default: _Number, least: _Number, most: _Number) -> _Number:
        value = self._values.get(key, default)
        kind, name = type(default), "an integer" if type(default) is int else "a number"
        # A bool is no number, and an integer is a float's.
        if type(value) is int:
            value = kind(value)
        if type(value) is not kind or not least <= value <= most:
            self._fail(key, f"must be {name} from {least:g} to {most:g}, not {value!r}")
        return kind(value)

    def _fail(self, key: str, reason: str) -> None:
        raise TraceError(self._path, 0, f"part {self._number}: {key} {reason}")


# Which requests of a trace are turns of one conversation, by the blocks of their prompts.
#
# A further turn's prompt has the prompt and the answer of the turn before it: its first blocks
# are the full blocks of that prompt, and it is longer by the answer at least. Where several
# prompts end at the same full block, that is the end of something that conversations share, a
# system prompt for example, and ends no turn. Of what a request may continue it continues the
# longest.


def with_sessions(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Return the requests, each with the name of its conversation.

    Args:
        requests: By arrival. One that has a name keeps it, and continues no other.
    """
    # A block's id says all that comes before it, too.
    ends = [
        request.hash_ids[full - 1]
        if (full := min(request.prompt_tokens // BLOCK_TOKENS, len(request.hash_ids)))
        else None
        for request in requests
    ]
    prompts = Counter(ends)
    latest: dict[int, TraceRequest] = {}
    named: list[TraceRequest] = []
    for number, (request, end) in enumerate(zip(requests, ends, strict=True)):
        session = request.session
        if not session:
            before = (latest.get(block) for block in reversed(request.hash_ids))
            found = next((one for one in before if one and _continues(request, one)), None)
            session = str(number) if found is None else found.session
        named.append(replace(request, session=session))
        if end is not None and prompts[end] == 1:
            latest[end] = named[-1]
    return named


def _continues(request: TraceRequest, before: TraceRequest) -> bool:
    return before.prompt_tokens + before.output_tokens <= request.prompt_tokens
