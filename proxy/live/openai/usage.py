"""Usage objects: read, and put right as of one engine that did the whole request.

Two engines share a request, so none knows all of its usage. A decode rank takes every token of a
transferred prompt for cached; only the prefiller knows how many were, and how many it wrote to its
cache. And after a rank handed the request back, the next one counts the tokens that it resumes from as
prompt.

Chats and completions have the object in each event or in the last one, at its top. /v1/messages has it
in `message_start`, where it tells nothing cached, and in `message_delta`; its `input_tokens` are those
neither read from the cache nor written to it. /v1/responses has it in the response that its last event
holds, behind all that the client sent, tools with parameters of any name among it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

# The text of an answer is escaped JSON: it cannot hold the name with plain quotes.
USAGE = b'"usage"'
# As vLLM writes it, at the end of nearly every event.
_PLACE = b'],"usage":{'
# A string without an end goes to the end, so that no part of it is looked at twice.
_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+|[\[\]{}]', re.DOTALL)
_VALUE = re.compile(rb"\s*+:\s*+\{")
_CACHED_TOKENS = re.compile(rb'("cached_tokens(?:_per_turn)?"\s*+:\s*+\[?+)\d+')
_WRITTEN_TOKENS = re.compile(rb'("(?:created_cache|cache_write)_tokens"\s*+:\s*+)\d+')
_OF_MESSAGE = re.compile(
    rb'("(input|cache_read_input|cache_creation_input)_tokens"\s*+:\s*+)(\d{1,9})\b'
)
_COUNTS = re.compile(rb'("(prompt|completion)_tokens"\s*+:\s*+)(\d{1,9})\b')
_MAX_COUNT = 1 << 30
_TOTAL = ("prompt_tokens", "total_tokens", "completion_tokens")


class _Holder(Struct):
    usage: msgspec.Raw = msgspec.Raw()


class _Held(Struct):
    """Where usage stands in an answer or an event; the rest is passed over."""

    usage: msgspec.Raw = msgspec.Raw()
    response: _Holder | None = None
    message: _Holder | None = None


_decode_held = msgspec.json.Decoder(_Held).decode


class PromptUsage(Struct, frozen=True):
    """What the engine that computed a prompt tells of it.

    Attributes:
        cached_tokens: Found in its prefix cache.
        written_tokens: Put there; None if it does not tell.
    """

    cached_tokens: int
    written_tokens: int | None = None

    def apply(self, usage: bytes) -> bytes:
        """Return a usage object as of one engine."""
        usage = _CACHED_TOKENS.sub(rb"\g<1>%d" % self.cached_tokens, usage)
        if self.written_tokens is None:
            return usage
        return _WRITTEN_TOKENS.sub(rb"\g<1>%d" % self.written_tokens, usage)

    def apply_to_message(self, usage: bytes) -> bytes:
        """Return the same of Anthropic's, which counts apart what was cached."""
        told = {name: int(count) for _, name, count in _OF_MESSAGE.findall(usage)}
        if b"input" not in told or b"cache_read_input" not in told:
            return usage
        total = sum(told.values())
        told[b"cache_read_input"] = min(total, self.cached_tokens)
        if self.written_tokens is not None and b"cache_creation_input" in told:
            told[b"cache_creation_input"] = self.written_tokens
        apart = told[b"cache_read_input"] + told.get(b"cache_creation_input", 0)
        told[b"input"] = max(0, total - apart)
        return _OF_MESSAGE.sub(lambda one: b"%b%d" % (one[1], told[one[2]]), usage)

    def apply_within(self, data: bytes) -> bytes:
        """Return the JSON of a message, a response, or an event of theirs, with its usage put right."""
        if data.rfind(USAGE) < 0:
            return data
        try:
            held = _decode_held(data)
        except (ValueError, RecursionError):
            return data  # Nobody can tell where it stands.
        holder = held.response or held.message or held
        told = bytes(holder.usage)
        begin = data.rfind(told)
        if not told.startswith(b"{"):
            return data
        changed = self.apply_to_message(self.apply(told))
        return data[:begin] + changed + data[begin + len(told) :]


class UsageRewrite:
    """What an engine cannot know of the usage that it reports.

    Args:
        prompt: What the prefill leg told; None leaves the engine's own.
        resumed_tokens: Tokens that earlier bindings emitted: subtracted from the prompt and added
            to the completion.

    Attributes:
        changes: Whether any usage object changes.
        prompt: What the prefill leg told, as above.
    """

    __slots__ = ("_resumed_tokens", "changes", "prompt")

    def __init__(self, prompt: PromptUsage | None = None, resumed_tokens: int = 0) -> None:
        self.prompt = prompt
        self._resumed_tokens = resumed_tokens
        self.changes = prompt is not None or resumed_tokens > 0

    def correct_prompt(self, prompt: PromptUsage) -> None:
        """Take what a prefill told that ended after the decode leg began."""
        self.prompt = prompt
        self.changes = True

    def apply(self, event: bytes) -> bytes:
        """Return an event with its usage object rewritten, if it has one."""
        if not self.changes or event.rfind(USAGE) < 0:
            return event
        begin, end = event.rfind(_PLACE), len(event)
        if begin < 0:
            begin, end = find_usage(event) or (end, end)
        usage = event[begin:end]
        if self.prompt is not None:
            usage = self.prompt.apply(usage)
        if self._resumed_tokens:
            usage = _COUNTS.sub(self._shift, usage)
        return event[:begin] + usage + event[end:]

    def total(self, last: Mapping[str, Any]) -> bytes | None:
        """Return the event with the usage at the end, by the usage that the answer's last event tells.

        Returns:
            None if that tells none.
        """
        usage = last.get("usage")
        if not isinstance(usage, dict) or any(token_count(usage, one) is None for one in _TOTAL):
            return None
        told: dict[str, Any] = {name: usage[name] for name in _TOTAL}
        if self.prompt is not None:
            told["prompt_tokens_details"] = {"cached_tokens": self.prompt.cached_tokens}
        told |= {name: value for name, value in usage.items() if value is not None}
        message = {**last, "choices": [], "usage": told}
        text = json.dumps(message, separators=(",", ":"), ensure_ascii=False)
        return self.apply(b"data: %b\n\n" % text.encode("utf-8", "replace"))

    def _shift(self, count: "re.Match[bytes]") -> bytes:
        by = -self._resumed_tokens if count[2] == b"prompt" else self._resumed_tokens
        return b"%b%d" % (count[1], max(0, int(count[3]) + by))


def find_usage(event: bytes) -> tuple[int, int] | None:
    """Return where the usage object of an event stands, its name included, whatever its place and spelling.

    Returns:
        None if the event has none.
    """
    found, name, depth = None, -1, 0
    if event.rfind(USAGE) < 0:
        return None
    for token in _TOKENS.finditer(event):
        text = token[0]
        if text in b"{[":
            depth += 1
        elif text in b"}]":
            depth -= 1
            if depth == 1 and name >= 0:
                found, name = (name, token.end()), -1
        elif depth == 1 and text == USAGE and _VALUE.match(event, token.end()):
            name = token.start()
    return found


def without_usage(event: bytes, span: tuple[int, int]) -> bytes:
    """Return an event without the member that `find_usage` found, and without the comma that it leaves."""
    head, tail = event[: span[0]], event[span[1] :]
    before = head.rstrip()
    if before.endswith(b","):
        return before[:-1] + tail
    behind = tail.lstrip()
    return head + (behind[1:].lstrip() if behind.startswith(b",") else tail)


def with_prompt_usage(body: bytes, prompt: PromptUsage) -> bytes:
    """Return a whole answer of a chat or a completion with what the prefill leg told in its usage."""
    begin = body.rfind(USAGE)
    return body if begin < 0 else body[:begin] + prompt.apply(body[begin:])


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
