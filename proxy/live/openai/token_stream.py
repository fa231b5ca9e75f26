"""The events of /inference/v1/generate: token ids instead of text (vLLM 0.32).

Each event lists the ids that it brings, so they are counted exactly, without a count of the engine's.
Its events name every member, `"usage":null` too.
"""

from typing import Any

from balanceroute.proxy.live.openai.completion_stream import GOING_ON, CompletionStream
from balanceroute.proxy.wire.http1.pump import GENERATE, EventForm

# The quote before it tells it from `prompt_token_ids`. Text is escaped, so it cannot hold this.
_IDS = b'"token_ids":['
_USAGE = b'"usage":{'


class TokenStream(CompletionStream):
    """Reads one stream; see `CompletionStream`."""

    __slots__ = ()

    @property
    def form(self) -> EventForm | None:
        """What others may take for token events in its place; None if they cannot."""
        return self._form(GENERATE, 0)

    def take_token(self, event: bytes) -> bytes:
        """Count a token event; nothing if it is none."""
        if event.find(GOING_ON) < 0 or event.find(_USAGE) >= 0:
            return b""
        self._events += ids_in(event)
        if self._ids is not None:
            self._ids.take(event)
        event += b"\n\n"
        if self._transcript is not None:
            self._transcript.keep(event)
        return event

    def _count(self, event: bytes) -> bytes:
        self._events += ids_in(event)
        return event

    def _tokens_of(self, choice: dict[str, Any]) -> int:
        ids = choice.get("token_ids")
        return len(ids) if isinstance(ids, list) else 0


def ids_in(event: bytes) -> int:
    """Return how many ids an event lists; 1 if it has no list."""
    begin = event.find(_IDS)
    if begin < 0:
        return 1
    begin += len(_IDS)
    end = event.find(b"]", begin)
    return event.count(b",", begin, end) + 1 if event[begin:end].strip() else 0
