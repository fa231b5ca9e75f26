"""Parsing a streamed answer: how many tokens each piece has, and whether the answer is complete.

Sans-IO: bytes in, counts out. A *token event* is an event whose choice carries output: text (even
an empty one, for a token may be half a character), reasoning or a tool call. An event that only
names the role, the last one of some servers that only gives the reason to finish, and the one with
the usage are none. Without speculative decoding and stream intervals a token event is one token;
what the engine counted itself is in `completion_tokens`.

An answer is complete if a choice has a finish reason and `[DONE]` arrived. Engines report a failure
after the head of the answer as an event `{"error": ...}`.

The streams of messages and responses have events with a `type`: of these, the pieces of text, of thoughts
and of calls are token events, and the last one ends the answer, without `[DONE]`.
"""

import json

from balanceroute.proxy.replay.faults import (
    ERROR_EVENT,
    MALFORMED_EVENT,
    SHORT_STREAM,
    Fault,
    error_message,
    shown,
)
from balanceroute.proxy.wire.sse import EventScanner, event_data

# The last events of messages and responses.
_LAST = frozenset({"message_stop", "response.completed", "response.incomplete", "response.failed"})
# Finish reasons of engines that failed to serve the request.
_GIVEN_UP = frozenset({"abort", "error", "failed", "cancelled"})
# A message tells what was cached of the prompt beside the rest.
_INPUT_TOKENS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class AnswerReader:
    """One answer.

    Attributes:
        fault: Why the answer failed; None so far.
        prompt_tokens: The engine's count; None before its usage arrived.
        completion_tokens: The engine's count; None before its usage arrived.
        finish_reason: The first choice's; None before it arrived.
    """

    __slots__ = (
        "_done",
        "_scanner",
        "completion_tokens",
        "fault",
        "finish_reason",
        "prompt_tokens",
    )

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.finish_reason: str | None = None
        self._scanner = EventScanner()
        self._done = False

    def feed(self, data: bytes) -> int:
        """Return how many token events a piece of the answer completes.

        Raises:
            WireError: An event is too large.
        """
        tokens = 0
        for event in self._scanner.feed(data):
            if _plainly_a_token(event):
                tokens += 1
            else:
                tokens += self._read(event)
        return tokens

    def end(self) -> Fault | None:
        """Note the end of the stream; return why the answer failed, None if it is complete."""
        parts = {"a finish_reason": self.finish_reason is not None, "[DONE]": self._done}
        missing = [part for part, came in parts.items() if not came]
        if missing:
            tail = self._scanner.tail.decode(errors="replace")
            rest = f", with {tail!r} left over" if tail else ""
            self._fail(SHORT_STREAM, f"the answer ended without {' and '.join(missing)}{rest}")
        return self.fault

    def _read(self, event: bytes) -> int:
        data = event_data(event)
        if not data:  # A comment that keeps the connection alive.
            return 0
        if data == b"[DONE]":
            self._done = True
            return 0
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            self._fail(MALFORMED_EVENT, f"not a JSON object: {data.decode(errors='replace')}")
            return 0
        message = error_message(chunk)
        if message is not None:
            self._fail(ERROR_EVENT, message)
            return 0
        kind = chunk.get("type")
        if isinstance(kind, str):
            return self._read_named(kind, chunk)
        self._read_usage(chunk.get("usage"))
        choices = chunk.get("choices")
        return self._read_choices(choices) if isinstance(choices, list) else 0

    def _read_named(self, kind: str, event: dict[str, object]) -> int:
        """Read an event of a message or of a response."""
        delta, response = event.get("delta"), event.get("response")
        usage = event.get("usage")
        if isinstance(response, dict):
            usage = response.get("usage")
        if isinstance(usage, dict):
            output = usage.get("output_tokens")
            told = [usage.get(name) for name in _INPUT_TOKENS]
            self.completion_tokens = output if isinstance(output, int) else None
            self.prompt_tokens = sum(one for one in told if isinstance(one, int))
        if kind == "message_delta" and isinstance(delta, dict):
            reason = delta.get("stop_reason")
            self.finish_reason = reason if isinstance(reason, str) else "abort"
        if kind in _LAST:
            self._done = True
            if isinstance(response, dict):
                self.finish_reason = str(response.get("status"))
            if self.finish_reason in _GIVEN_UP:
                self._fail(ERROR_EVENT, f"{kind} says {self.finish_reason}")
        if isinstance(delta, dict):
            return kind == "content_block_delta" and delta.get("type") != "signature_delta"
        return isinstance(delta, str)

    def _read_usage(self, usage: object) -> None:
        if isinstance(usage, dict):
            prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if isinstance(prompt, int):
                self.prompt_tokens = prompt
            if isinstance(completion, int):
                self.completion_tokens = completion

    def _read_choices(self, choices: list[object]) -> int:
        tokens = 0
        for choice in choices:
            if not isinstance(choice, dict):
                self._fail(MALFORMED_EVENT, f"a choice is not an object: {choice}")
                continue
            tokens += _has_output(choice)
            reason = choice.get("finish_reason")
            if isinstance(reason, str):
                self.finish_reason = reason
                if reason in _GIVEN_UP:
                    self._fail(ERROR_EVENT, f"finish_reason is {reason}")
        return tokens

    def _fail(self, kind: str, message: str) -> None:
        # The first failure is the cause of those that follow.
        if self.fault is None:
            self.fault = Fault(kind, shown(message))


def _plainly_a_token(event: bytes) -> bool:
    """Return whether an event is vLLM's usual token event, by a few searches instead of JSON.

    No text of the model can contain these keys: its quotation marks are escaped.
    """
    return (
        b'"finish_reason":null' in event
        and (b'"content":"' in event or b'"text":"' in event)
        and b'"role"' not in event
        and b'"usage":{' not in event
        and b'"error"' not in event
    )


def _has_output(choice: dict[str, object]) -> bool:
    if "text" in choice:
        return isinstance(choice["text"], str)
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return False
    parts = [
        delta[key]
        for key in ("content", "reasoning", "reasoning_content", "tool_calls")
        if delta.get(key) is not None
    ]
    # With the role an empty text only marks the beginning of the answer.
    return any(parts) if "role" in delta else bool(parts)
