"""One event of a stream, parsed."""

from typing import Any

from balanceroute.proxy.live.openai.json_value import decode
from balanceroute.proxy.wire.sse import event_data

# The data of the event behind the last one.
DONE = b"[DONE]"


def parsed(event: bytes) -> dict[str, Any] | None:
    """Return the object that an event carries, if it carries one."""
    return decoded(event_data(event))


def decoded(data: bytes) -> dict[str, Any] | None:
    """Return the object that the data of an event is, if it is one."""
    if data[:1] != b"{" and not data.lstrip().startswith(b"{"):
        return None  # [DONE], a comment, a heartbeat: quicker than the exception for it.
    try:
        message = decode(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def choices_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a parsed event; none if they have another form."""
    choices = message.get("choices")
    if not isinstance(choices, list):
        return []
    return [choice for choice in choices if isinstance(choice, dict)]


def is_opening(choice: dict[str, Any]) -> bool:
    """Return whether a choice only says whose turn it is."""
    delta = choice.get("delta")
    if not isinstance(delta, dict) or "role" not in delta or choice.get("finish_reason"):
        return False
    return not any(value for name, value in delta.items() if name != "role")


def text_of(choice: dict[str, Any]) -> str | None:
    """Return the text of a choice; None if it says something that text cannot carry."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        text = delta.get("content") or ""
        more = any(value for name, value in delta.items() if name not in ("role", "content"))
    else:
        text, more = choice.get("text"), False
    return None if more or not isinstance(text, str) else text
