"""The events of /v1/messages and /v1/responses that say how a stream ends.

Their streams have no [DONE]: Anthropic's end with `message_stop`, those of the Responses API with
`response.completed`, `response.incomplete` or `response.failed`. vLLM 0.32 names each event in its
first line (`wrap_data_with_event`, `_convert_stream_to_sse_events`), so all others are told by that.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from balanceroute.proxy.wire.sse import event_data

_NAME = re.compile(rb"event: ?([^\r\n]+)")
_FINAL = frozenset(
    {b"message_stop", b"response.completed", b"response.incomplete", b"response.failed"}
)
_FAILED = frozenset({b"error", b"response.failed"})
_TELLING = _FINAL | _FAILED | {b"message_delta"}
_MAX_COUNT = 1 << 30


@dataclass(frozen=True, slots=True)
class Turn:
    """What an event says of its stream.

    Attributes:
        final: Whether the answer is complete with it.
        error: What went wrong; empty if nothing did.
        is_answer: Whether its data is an error as an answer without a stream would have it.
        output_tokens: The engine's count of the answer's tokens; None if it tells none.
    """

    final: bool
    error: str
    is_answer: bool
    output_tokens: int | None


def read_turn(event: bytes) -> Turn | None:
    """Return what an event says of its stream, None if it only goes on."""
    named = _NAME.match(event)
    if named is None or named[1] not in _TELLING:
        return None
    name = named[1]
    try:
        parsed = json.loads(event_data(event))
    except (ValueError, RecursionError):
        parsed = None
    message: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
    response = _object(message, "response")
    usage = _object(message, "usage") or _object(response, "usage")
    count = usage.get("output_tokens")
    error = ""
    if name in _FAILED:
        said = _object(message, "error") or _object(response, "error") or message
        error = str(said.get("message") or "error")
    return Turn(
        final=name in _FINAL,
        error=error,
        is_answer=bool(_object(message, "error")),
        output_tokens=count if type(count) is int and 0 <= count <= _MAX_COUNT else None,
    )


def _object(message: dict[str, Any], key: str) -> dict[str, Any]:
    value = message.get(key)
    return value if isinstance(value, dict) else {}
