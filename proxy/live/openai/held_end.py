"""The last token of a stream, held until the total that the client did not ask for has come.

An engine that reports the total puts its fingerprint there, else into the event of the last token.
"""

import json
from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.live.openai.usage import is_total

_LINE_ENDS = b"\r\n"


class HeldEnd:
    """Holds the event that ends the sequence. Whatever event comes next releases it."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = b""

    def hold(self, event: bytes) -> None:
        """Keep the event that ends the sequence."""
        self._event = event

    def release(self, message: Mapping[str, Any] | None) -> tuple[bytes, bool]:
        """Return the event held, if any, and whether `message`, which follows, is the hidden total."""
        event, self._event = self._event, b""
        if message is None or not is_total(message):
            return event, False
        fingerprint = message.get("system_fingerprint")
        if fingerprint is not None:
            inside = event.rstrip(_LINE_ENDS)
            if inside.endswith(b"}"):
                member = f',"system_fingerprint":{json.dumps(fingerprint)}}}'
                event = inside[:-1] + member.encode() + event[len(inside) :]
        return event, True
