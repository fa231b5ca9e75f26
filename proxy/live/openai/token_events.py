"""A whole answer of /inference/v1/generate of one token, as the events of a stream.

vLLM 0.32's members, in its order. The choices of both forms have the same.
"""

from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.live.openai.answer_events import without_nulls

# Those of the first event, which are left out where they are null.
_ONCE = ("prompt_token_ids", "mm_placeholders")
# What the last event of a choice tells.
_AT_END = ("finish_reason", "stop_reason", "weight_versions")


def ended_token_events(message: Mapping[str, Any], *, include_usage: bool) -> list[dict[str, Any]]:
    """Return the events of an answer that its token ended."""
    events = [_event(message, message["choices"][0])]
    if include_usage and message.get("usage") is not None:
        usage = without_nulls(message["usage"])
        events.append(
            {**_head(message), "usage": usage, "output_mode": _mode(message), "choices": []}
        )
    return events


def first_token_event(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event of the token, as if more came behind it."""
    choice = message["choices"][0]
    return _event(message, choice | {name: None for name in _AT_END if name in choice})


def _event(message: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    once = {name: message[name] for name in _ONCE if message.get(name) is not None}
    body = {"output_mode": _mode(message), "choices": [choice]}
    return {**_head(message), "usage": None, **once, **body}


def _head(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"request_id": message.get("request_id", "")}


def _mode(message: Mapping[str, Any]) -> object:
    return message.get("output_mode", "tokens")
