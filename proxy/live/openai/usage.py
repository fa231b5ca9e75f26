"""Usage objects: read, and put right as of one engine that did the whole request.

Two engines share a request, so none knows all of its usage. A decode rank takes every token of a
transferred prompt for cached; only the prefiller knows how many were. And after a rank handed the
request back, the next one counts the tokens that it resumes from as prompt.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

USAGE = b'"usage":'
_CACHED_TOKENS = re.compile(rb'("cached_tokens":\s*)\d+')
_COUNTS = re.compile(rb'"(prompt_tokens|completion_tokens)":\s*(\d{1,9})\b')
_MAX_COUNT = 1 << 30
_TOTAL = ("prompt_tokens", "total_tokens", "completion_tokens")


class UsageRewrite:
    """What an engine cannot know of the usage that it reports.

    Args:
        cached_tokens: Cached tokens of the prefill leg; None leaves the engine's own.
        resumed_tokens: Tokens that earlier bindings emitted: subtracted from the prompt and added
            to the completion.

    Attributes:
        changes: Whether any usage object changes.
    """

    __slots__ = ("_cached_tokens", "_resumed_tokens", "changes")

    def __init__(self, cached_tokens: int | None = None, resumed_tokens: int = 0) -> None:
        self._cached_tokens = cached_tokens
        self._resumed_tokens = resumed_tokens
        self.changes = cached_tokens is not None or resumed_tokens > 0

    def correct_cached_tokens(self, count: int) -> None:
        """Take the cached tokens of a prefill that ended after the decode leg began."""
        self._cached_tokens = count
        self.changes = True

    def apply(self, event: bytes) -> bytes:
        """Return an event with its usage object rewritten, if it has one."""
        # The text of an answer is escaped JSON: it cannot hold the name with plain quotes.
        begin = event.find(USAGE) if self.changes else -1
        if begin < 0:
            return event
        head, usage = event[:begin], event[begin:]
        if self._cached_tokens is not None:
            usage = _with_cached(usage, self._cached_tokens)
        if self._resumed_tokens:
            usage = _COUNTS.sub(self._shift, usage)
        return head + usage

    def total(self, last: Mapping[str, Any]) -> bytes | None:
        """Return the event with the usage at the end, by the usage that the answer's last event tells.

        Returns:
            None if that tells none.
        """
        usage = last.get("usage")
        if not isinstance(usage, dict) or any(token_count(usage, one) is None for one in _TOTAL):
            return None
        told: dict[str, Any] = {name: usage[name] for name in _TOTAL}
        if self._cached_tokens is not None:
            told["prompt_tokens_details"] = {"cached_tokens": self._cached_tokens}
        told |= {name: value for name, value in usage.items() if value is not None}
        message = {**last, "choices": [], "usage": told}
        text = json.dumps(message, separators=(",", ":"), ensure_ascii=False)
        return self.apply(b"data: %b\n\n" % text.encode("utf-8", "replace"))

    def _shift(self, count: "re.Match[bytes]") -> bytes:
        by = -self._resumed_tokens if count[1] == b"prompt_tokens" else self._resumed_tokens
        return b'"%b":%d' % (count[1], max(0, int(count[2]) + by))


def with_cached_tokens(body: bytes, cached_tokens: int) -> bytes:
    """Return a whole answer with the cached tokens of the prefill leg in its usage object."""
    begin = body.rfind(USAGE)
    return body if begin < 0 else body[:begin] + _with_cached(body[begin:], cached_tokens)


def _with_cached(usage: bytes, cached_tokens: int) -> bytes:
    return _CACHED_TOKENS.sub(rb"\g<1>%d" % cached_tokens, usage)


def token_count(usage: object, name: str) -> int | None:
    """Return a count of a parsed usage object; None if there is none that can be true."""
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if type(count) is int and 0 <= count <= _MAX_COUNT else None


def asks_total(values: Mapping[str, Any]) -> bool:
    """Return whether a request asks for the usage at the end of its stream, given its members."""
    options = values.get("stream_options")
    return isinstance(options, dict) and bool(options.get("include_usage"))


def is_total(message: Mapping[str, Any]) -> bool:
    """Return whether an event is the one at the end that reports the usage."""
    return not message.get("choices") and isinstance(message.get("usage"), dict)


def continuous_usage_is_expensive(message: Mapping[str, Any]) -> bool:
    """Return whether the engine recounts the whole answer for each event.

    vLLM with a reasoning parser does (`count_reasoning_tokens`), and shows it from the first event.
    """
    usage = message.get("usage")
    return isinstance(usage, dict) and isinstance(usage.get("completion_tokens_details"), dict)
