"""A whole answer of /inference/v1/generate that one token ended, as the events of a stream.

vLLM 0.32's members, in its order. The choices of both forms have the same.
"""

from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.live.openai.answer_events import without_nulls

# Those of the first event, which are left out where they are null.
_ONCE = ("prompt_token_ids", "mm_placeholders")


def ended_token_events(message: Mapping[str, Any], *, include_usage: bool) -> list[dict[str, Any]]:
    """Return the events of the answer."""
    head, mode = {"request_id": message.get("request_id", "")}, message.get("output_mode", "tokens")
    once = {name: message[name] for name in _ONCE if message.get(name) is not None}
    body = {"output_mode": mode, "choices": [message["choices"][0]]}
    events = [{**head, "usage": None, **once, **body}]
    if include_usage:
        usage = without_nulls(message["usage"])
        events.append({**head, "usage": usage, "output_mode": mode, "choices": []})
    return events
