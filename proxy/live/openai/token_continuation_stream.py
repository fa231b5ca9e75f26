"""The events of an answer of token ids of which the client has the beginning.

The first id comes again where a prefiller had told it, and is left out. Spans of weight versions, which the
last event tells, count from the first id of the whole answer: which version computed the ids of an engine
that failed, nobody tells, so no span has them. What is one engine's knowledge of the whole answer
(`routed_experts`) cannot be put together, and ends the stream with an error.
"""

from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.live.openai.answer import ABORT
from balanceroute.proxy.live.openai.answer_events import dump_compact
from balanceroute.proxy.live.openai.api_error import error_event
from balanceroute.proxy.live.openai.continuation_stream import OTHERWISE
from balanceroute.proxy.live.openai.stream_event import choices_of, parsed
from balanceroute.proxy.live.openai.token_stream import TokenStream
from balanceroute.proxy.wire.sse import whole_events

EXPERTS = error_event(409, "routed_experts of an answer that two engines gave cannot be told")
# Of the first event, of which the client has them.
_ONCE = ("prompt_token_ids", "mm_placeholders")


class TokenContinuation(TokenStream):
    """Reads a stream for a client who has the beginning of the answer.

    Args:
        sequences: As for `CompletionStream`, like the options.
        before: Ids that earlier ranks gave.
        again: The id that the client has, and that comes again; None if none does.
    """

    __slots__ = ("_again", "_before", "_goes_on")

    def __init__(
        self, sequences: int, *, before: int, again: int | None = None, **options: Any
    ) -> None:
        super().__init__(sequences, **options)
        self._before = before
        self._again = again
        self._goes_on = False  # Something new has come.

    @property
    def plain(self) -> bool:
        """Whether events go on as they are."""
        return self._goes_on and super().plain

    def read(self, event: bytes) -> bytes:
        """Return what of any event is the client's; empty if nothing is."""
        events = super().read(event)
        if events:
            events = b"".join(map(self._write, whole_events(events)))
        self._goes_on |= bool(events)
        return events

    @property
    def _may_be_mended(self) -> bool:
        return not self._goes_on or super()._may_be_mended

    def _write(self, event: bytes) -> bytes:
        message = parsed(event)
        choices = [] if message is None else choices_of(message)
        if message is None or not choices:
            return event
        changed = False
        for choice in choices:
            if self._again is not None:
                ids = choice.get("token_ids")
                if not ids and choice.get("finish_reason") == ABORT and self._may_abort():
                    self._again = None  # It was told to end, with what the client has.
                    continue
                if not isinstance(ids, list) or ids[:1] != [self._again]:
                    self.differs = True
                    return self._stop(OTHERWISE)
                self._again, changed = None, True
                choice["token_ids"] = ids[1:]
            if choice.get("routed_experts") is not None and self._before:
                return self._stop(EXPERTS)
            changed |= self._shift(choice)
        if not changed:
            return event
        for name in _ONCE:
            message.pop(name, None)
        if not any(choice.get("token_ids") or choice.get("finish_reason") for choice in choices):
            return b""
        return b"data: %b\n\n" % dump_compact(message)

    def _shift(self, choice: Mapping[str, Any]) -> bool:
        """Count the spans of weight versions on; return whether there are any."""
        spans = choice.get("weight_versions")
        if not isinstance(spans, list) or not self._before:
            return False
        for span in spans:
            if isinstance(span, dict):
                for name in ("start", "end"):
                    if type(span.get(name)) is int:
                        span[name] += self._before
        return True

    def _stop(self, error: bytes) -> bytes:
        self.over = True
        self._opening.error = error
        return b""
