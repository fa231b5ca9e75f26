"""The events of an answer that goes on at `/v1/completions`, as the client's stream goes on.

A chat's are written as the chat's own. Text that the client has already comes again where the ids of
the tokens did not tell how far it goes (`token_ids.py`), and is left out.

Such events are parsed: a stream comes here only after an engine failed in its midst.
"""

import json
from typing import Any

from balanceroute.proxy.live.openai.api_error import error_event
from balanceroute.proxy.live.openai.completion_stream import CompletionStream
from balanceroute.proxy.live.openai.stream_event import choices_of, parsed
from balanceroute.proxy.live.openai.token_ids import TokenIds
from balanceroute.proxy.wire.sse import EventScanner

_OTHERWISE = error_event(409, "the answer goes on otherwise than it had begun")


class ContinuationStream(CompletionStream):
    """Reads a stream of completions for a client who has the beginning of the answer.

    Args:
        sequences: As for `CompletionStream`, like the options.
        head: Of a chat's first event, all that stood before the choices; empty for a completion.
        ids: Keeps the ids, and knows what the client has.
    """

    __slots__ = ("_head", "_known")

    def __init__(self, sequences: int, *, head: bytes, ids: TokenIds, **options: Any) -> None:
        super().__init__(sequences, ids=ids, **options)
        self._head = head
        self._known = ids

    @property
    def plain(self) -> bool:
        """Whether events go on as they are."""
        return not self._head and not self._known.overlap and super().plain

    def read(self, event: bytes) -> bytes:
        """Return what of any event is the client's; empty if nothing is."""
        return self._continue(super().read(event))

    def flush(self) -> bytes:
        """Return the end held, if it waits for a total that does not come; else nothing."""
        return self._continue(super().flush())

    def _continue(self, events: bytes) -> bytes:
        if not events or not (self._head or self._known.overlap):
            return events
        return b"".join(map(self._write, EventScanner().feed(events)))

    def _write(self, event: bytes) -> bytes:
        message = parsed(event)
        if message is None or "choices" not in message:
            return event  # [DONE], a comment, an error.
        choices = choices_of(message)
        for choice in choices:
            text = self._known.trim(choice.get("text") or "")
            if text is None:
                self._known.lost = self.over = True
                self._opening.error = _OTHERWISE
                return b""
            choice["text"] = text
        if choices and not any(one["text"] or one.get("finish_reason") for one in choices):
            return b""
        if not self._head:
            return b"data: %b\n\n" % _dump(message)
        members = {
            name: message[name] for name in ("usage", "system_fingerprint") if name in message
        }
        if choices and isinstance(members.get("usage"), dict):
            # What a chat tells with each token, and a completion does not.
            members["usage"].setdefault("completion_tokens_details", None)
        ending = _dump({"choices": list(map(_as_delta, choices))} | members)
        return self._head + ending[1:] + b"\n\n"


def _as_delta(choice: dict[str, Any]) -> dict[str, Any]:
    delta = {
        "index": choice.get("index"),
        "delta": {"content": choice["text"]} if choice["text"] else {},
        "logprobs": None,
        "finish_reason": choice.get("finish_reason"),
    }
    if delta["finish_reason"] is not None:
        delta["stop_reason"] = choice.get("stop_reason")
    return delta | {"token_ids": None}


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
