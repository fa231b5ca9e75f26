"""Why a request failed: a kind to count by, and a message to read."""

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from balanceroute.proxy.wire.messages import WireError, WireFault

TIMEOUT = "timeout"
ERROR_EVENT = "error event"
SHORT_STREAM = "short stream"
MALFORMED_EVENT = "malformed event"
UNREAD_FLEET = "fleet figures"

_KINDS = {
    WireFault.CONNECT: "connect",
    WireFault.NO_ADDRESS: "no address",
    WireFault.CONNECT_TIMEOUT: "connect timeout",
    WireFault.RESET: "reset",
    WireFault.STALE: "reset",
    WireFault.PROTOCOL: "protocol",
    WireFault.TOO_LARGE: "too large",
    WireFault.TIMEOUT: TIMEOUT,
    WireFault.TOO_LATE: "too late",
}
_SHOWN_CHARACTERS = 200


class Fault(NamedTuple):
    """One failure."""

    kind: str
    message: str


class FaultCount(NamedTuple):
    """How often a kind of failure happened, and the first one's message."""

    kind: str
    requests: int
    example: str


def count_faults(faults: Iterable[Fault]) -> list[FaultCount]:
    """Return the kinds of failure, the most frequent first."""
    examples: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for kind, message in faults:
        examples.setdefault(kind, message)
        counts[kind] += 1
    return [FaultCount(kind, count, examples[kind]) for kind, count in counts.most_common()]


def from_wire(error: WireError) -> Fault:
    """Return the failure for an error of the connection."""
    return Fault(_KINDS[error.kind], shown(str(error)))


def from_status(status: int, body: bytes) -> Fault:
    """Return the failure for a status other than 200, with the message of its body."""
    text = body.decode(errors="replace")
    # A server between the two may not answer in JSON.
    with suppress(ValueError, RecursionError):
        text = error_message(json.loads(text)) or text
    return Fault(f"http {status}", shown(text))


def error_message(chunk: object) -> str | None:
    """Return the message of an OpenAI error object; None if the JSON value is none."""
    error = chunk.get("error") if isinstance(chunk, dict) else None
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else json.dumps(error)


def shown(text: str) -> str:
    """Return a text on one line, shortened."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"
