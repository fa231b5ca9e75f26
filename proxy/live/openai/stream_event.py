"""One event of a stream, parsed."""

import json
from typing import Any

import msgspec
from msgspec import Struct

from balanceroute.proxy.wire.sse import event_data

# What an engine says again, and the client has.


class RepeatedText(Struct, eq=False):
    """What comes first in an answer, and is left out."""

    left: str = ""  # What of the text has yet to come.
    tokens: int = 0  # Of how many tokens the log-probabilities have.

    @property
    def over(self) -> bool:
        """Whether all of it has come."""
        return not self.left and not self.tokens

    def trim(self, text: str) -> str | None:
        """Return what of the next text is new; None if it is not what the client has."""
        both = min(len(text), len(self.left))
        if text[:both] != self.left[:both]:
            return None
        self.left = self.left[both:]
        return text[both:]


# Decoding what engines write.

_decode = msgspec.json.Decoder().decode


def decode(data: bytes) -> Any:
    """Return the value of some JSON, with NaN and lone surrogates as Python's own servers write them.

    Strict JSON costs a quarter of what `json` takes.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(data)


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
