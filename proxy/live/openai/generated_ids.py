"""The ids of a stream of `/inference/v1/generate`, which are the answer itself.

Nothing has to be asked for or cut out, and as there is no text, none can be told twice: every id that came
counts.
"""

from typing import Any

from balanceroute.proxy.live.openai.stream_event import choices_of
from balanceroute.proxy.live.openai.token_ids import TokenIds
from balanceroute.proxy.wire.http1.pump import IDS

# The quote before it tells it from `prompt_token_ids`.
_IDS = b'"token_ids":['
_BRACKETS = b"[] \t\r\n"


class GeneratedIds(TokenIds):
    """The ids of one leg.

    Args:
        prompt: The JSON text of the list of the prompt's.
    """

    __slots__ = ()

    def __init__(self, prompt: bytes) -> None:
        super().__init__()
        self.prompt = prompt.strip(_BRACKETS)

    @property
    def begun(self) -> bool:
        """Whether any id came, or something that is none."""
        return self.lost or bool(self._kept)

    @property
    def form(self) -> int | None:
        """How others are to keep them."""
        return None if self.lost else IDS

    def is_plain(self, event: bytes) -> bool:
        """Take any token event that goes on."""
        del event
        return True

    def take(self, event: bytes) -> bytes:
        """Keep the ids of an event that goes on; return it as it is."""
        begin = event.find(_IDS)
        end = event.find(b"]", begin)
        if begin < 0 or end < 0:
            self.lost = True
            return event
        ids = event[begin + len(_IDS) : end]
        if ids:
            self._kept += b"," + ids
        return event

    def note(self, event: bytes, message: dict[str, Any]) -> None:
        """Take an event that was parsed: with a reason it ends the answer."""
        for choice in choices_of(message):
            if choice.get("finish_reason"):
                self.lost = True
            else:
                self.take(event)

    def hide(self, event: bytes, message: dict[str, Any]) -> bytes:
        """Return the event: its ids are the client's."""
        del message
        return event
