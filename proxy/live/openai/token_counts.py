"""Tokens of a stream by the engine's own count: asked for in every event, read, and cut out again.

A content event is one token only if the engine's HTTP server keeps up, every token ends a character
and nothing is speculated. vLLM says in each event how many tokens there are if
`stream_options.continuous_usage_stats` asks for it. What the client did not ask for itself is taken
out again, so that it gets the bytes that the engine would have sent it.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from balanceroute.proxy.live.openai.body import dump, is_deep
from balanceroute.proxy.live.openai.shape import CHAT, COMPLETIONS, Shape

# Usage objects: read, and put right as of one engine that did the whole request.
#
# Two engines share a request, so none knows all of its usage. A decode rank takes every token of
# a transferred prompt for cached; only the prefiller knows how many were, and how many it wrote
# to its cache. And after a rank handed the request back, the next one counts the tokens that it
# resumes from as prompt.
#
# Chats and completions have the object in each event or in the last one, at its top. /v1/messages
# has it in `message_start`, where nothing counts as cached, and in `message_delta`; its
# `input_tokens` are those neither read from the cache nor written to it. /v1/responses has it in
# the response that its last event holds, behind all that the client sent, tools with parameters
# of any name among it.

# The text of an answer is escaped JSON: it cannot hold the name with plain quotes.
USAGE = b'"usage"'
# As vLLM writes it, at the end of nearly every event.
_USAGE_PLACE = b'],"usage":{'
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
_TOTALS = ("prompt_tokens", "total_tokens", "completion_tokens")


class _Holder(Struct):
    usage: msgspec.Raw = msgspec.Raw()


class _Held(Struct):
    """The usage of an answer or an event; the decoder skips the rest."""

    usage: msgspec.Raw = msgspec.Raw()
    response: _Holder | None = None
    message: _Holder | None = None


_decode_held = msgspec.json.Decoder(_Held).decode


class PromptUsage(Struct, frozen=True):
    """The counts of a prompt by the engine that computed it."""

    cached_tokens: int  # Found in its prefix cache.
    written_tokens: int | None = None  # Put there; None if the engine does not report it.

    def apply(self, usage: bytes) -> bytes:
        usage = _CACHED_TOKENS.sub(rb"\g<1>%d" % self.cached_tokens, usage)
        if self.written_tokens is None:
            return usage
        return _WRITTEN_TOKENS.sub(rb"\g<1>%d" % self.written_tokens, usage)

    def apply_to_message(self, usage: bytes) -> bytes:
        """Return the same of Anthropic's, which counts apart what was cached."""
        counts = {name: int(count) for _, name, count in _OF_MESSAGE.findall(usage)}
        if b"input" not in counts or b"cache_read_input" not in counts:
            return usage
        total = sum(counts.values())
        counts[b"cache_read_input"] = min(total, self.cached_tokens)
        if self.written_tokens is not None and b"cache_creation_input" in counts:
            counts[b"cache_creation_input"] = self.written_tokens
        apart = counts[b"cache_read_input"] + counts.get(b"cache_creation_input", 0)
        counts[b"input"] = max(0, total - apart)
        return _OF_MESSAGE.sub(lambda one: b"%b%d" % (one[1], counts[one[2]]), usage)

    def apply_within(self, data: bytes) -> bytes:
        """Return the JSON of a message, a response, or an event of theirs, with its usage put right."""
        if data.rfind(USAGE) < 0:
            return data
        try:
            held = _decode_held(data)
        except (ValueError, RecursionError):
            return data  # Where usage stands is unknown.
        holder = held.response or held.message or held
        usage = bytes(holder.usage)
        begin = data.rfind(usage)
        if not usage.startswith(b"{"):
            return data
        changed = self.apply_to_message(self.apply(usage))
        return data[:begin] + changed + data[begin + len(usage) :]


class UsageRewrite:
    """Corrects the usage that an engine reports by counts that it cannot know.

    Args:
        prompt: Reported by the prefill leg; None leaves the engine's own.
        resumed_tokens: Tokens that earlier bindings emitted: subtracted from the prompt and added
            to the completion.
    """

    __slots__ = ("_resumed_tokens", "changes", "prompt")

    def __init__(self, prompt: PromptUsage | None = None, resumed_tokens: int = 0) -> None:
        self.prompt = prompt
        self._resumed_tokens = resumed_tokens
        self.changes = prompt is not None or resumed_tokens > 0  # Whether any usage object changes.

    def correct_prompt(self, prompt: PromptUsage) -> None:
        """Take the report of a prefill that ended after the decode leg began."""
        self.prompt = prompt
        self.changes = True

    def apply(self, event: bytes) -> bytes:
        if not self.changes or event.rfind(USAGE) < 0:
            return event
        begin, end = event.rfind(_USAGE_PLACE), len(event)
        if begin < 0:
            begin, end = find_usage(event) or (end, end)
        usage = event[begin:end]
        if self.prompt is not None:
            usage = self.prompt.apply(usage)
        if self._resumed_tokens:
            usage = _COUNTS.sub(self._shift, usage)
        return event[:begin] + usage + event[end:]

    def total(self, last: Mapping[str, Any]) -> bytes | None:
        """Return the event with the usage at the end, by the usage in the answer's last event.

        Returns:
            None if that event has none.
        """
        usage = last.get("usage")
        if not isinstance(usage, dict) or any(token_count(usage, one) is None for one in _TOTALS):
            return None
        total: dict[str, Any] = {name: usage[name] for name in _TOTALS}
        if self.prompt is not None:
            total["prompt_tokens_details"] = {"cached_tokens": self.prompt.cached_tokens}
        total |= {name: value for name, value in usage.items() if value is not None}
        message = {**last, "choices": [], "usage": total}
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
    """Return a whole answer of a chat or a completion with the prefill leg's counts in its usage."""
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


# As vLLM writes it, at the end of every event with tokens but those of the reasoning parsers.
_PLACE = b'],"usage":{"prompt_tokens":'
_COUNT = b'"completion_tokens":'
_BRACE = 0x7D
_END = b"}}"
# Of vLLM 0.33, in all events but the last.
_NEWER_END = b'},"kv_transfer_params":null}'
_NEWER = len(_NEWER_END)
# As any engine may write it.
_ANY_COUNT = re.compile(rb'"completion_tokens"\s*+:\s*+(\d{1,9})\b')
_MAX_DIGITS = 9


class CountsAsked(Struct, frozen=True):
    """The counts that a decode leg asks for beyond its client's wishes."""

    options: Mapping[str, object]  # The leg's `stream_options`.
    each: bool  # Whether every event is to report its count; else the end alone reports the total.
    hide_each: bool  # Whether the client wants no usage in every event.
    hide_total: bool  # Whether it wants no usage event at the end.
    member: bytes = b""  # The same as text, its name included.

    def __post_init__(self) -> None:
        force_setattr(self, "member", dump({"stream_options": self.options})[1:-1])


_TOTAL: Mapping[str, object] = {"include_usage": True, "continuous_usage_stats": False}
_TOTAL_ALONE = CountsAsked(_TOTAL, each=False, hide_each=True, hide_total=True)
_EACH: Mapping[str, object] = {"include_usage": True, "continuous_usage_stats": True}
_USUAL = CountsAsked(_EACH, each=True, hide_each=True, hide_total=True)


def ask_for_counts(
    shape: Shape, values: Mapping[str, Any], *, each: bool = True
) -> CountsAsked | None:
    """Return what to ask for, given a request and its members; not `each` asks for the total alone.

    None for an answer that is not streamed, where counts do not add up (several sequences, of which
    each event reports one), for other APIs, and where the options are the engine's to judge.
    """
    if not shape.stream or shape.sequences > 1 or shape.api not in (CHAT, COMPLETIONS):
        return None
    options = values.get("stream_options")
    if options is None:
        return _USUAL if each else _TOTAL_ALONE
    if not isinstance(options, dict) or is_deep(options):
        return None
    wishes = options.get("include_usage"), options.get("continuous_usage_stats")
    if any(wish is not None and not isinstance(wish, bool) for wish in wishes):
        return None
    each = each or all(wishes)
    return CountsAsked(
        options | {"include_usage": True, "continuous_usage_stats": each},
        each=each,
        hide_each=not all(wishes),
        hide_total=not wishes[0],
    )


class TokenCounts:
    """Reads the counts of one stream of one sequence."""

    __slots__ = ("_all_reported", "_counted", "_hide_each", "_tokens", "asked")

    def __init__(self, asked: CountsAsked) -> None:
        self.asked = asked
        self._hide_each = asked.hide_each
        self._tokens = 0
        self._counted = b""  # The last event with a count that was not read yet.
        self._all_reported = asked.each  # By every event so far.

    @property
    def reported(self) -> int | None:
        """The tokens so far, as the engine counts them; None if an event had no count."""
        return self.read_tokens() if self._all_reported else None

    def read_tokens(self) -> int:
        """Return the tokens so far. An event without a count is one."""
        if self._counted:
            # Read only now: a step clock looks less often than events come.
            _, _, behind = self._counted.rpartition(_COUNT)
            self._counted = b""
            self._record_count(behind.partition(b",")[0].partition(b"}")[0])
        return self._tokens

    def take_passed(self, tokens: int, *, uncounted: bool) -> None:
        """Go on behind events that the native pump has counted; `uncounted` says that some had no count."""
        self._counted, self._tokens = b"", tokens
        self._all_reported = self._all_reported and not uncounted

    def take(self, event: bytes) -> bytes:
        """Count an event with tokens in it; return what of it is the client's."""
        return self.take_line(event[:-2]) if event[-2:] == b"\n\n" else self._count_slow(event)

    def take_line(self, event: bytes) -> bytes:
        """Count one that is given without the blank line behind it."""
        begin = event.rfind(_PLACE)
        if begin < 0 or event[-2:] != _END or _BRACE in event[begin:-2]:
            if begin < 0 or event[-_NEWER:] != _NEWER_END or _BRACE in event[begin:-_NEWER]:
                return self._count_slow(event + b"\n\n")
            self._counted = event
            return (event[: begin + 1] + _NEWER_END[1:] if self._hide_each else event) + b"\n\n"
        self._counted = event
        return event[: begin + 1] + b"}\n\n" if self._hide_each else event + b"\n\n"

    def hide(self, event: bytes) -> bytes:
        """Return what of an event without tokens is the client's."""
        span = find_usage(event)
        return event if span is None else self._cut(event, span)

    def _count_slow(self, event: bytes) -> bytes:
        tokens = self.read_tokens()
        span = find_usage(event)
        count = None if span is None else _ANY_COUNT.search(event, *span)
        if count is None:
            self._tokens, self._all_reported = tokens + 1, False
        else:
            self._record_count(count[1])
        return event if span is None else self._cut(event, span)

    def _record_count(self, digits: bytes) -> None:
        # A count that goes backwards, or has more digits than any answer has tokens, is ignored.
        if digits.isdigit() and len(digits) <= _MAX_DIGITS:
            self._tokens = max(self._tokens, int(digits))

    def _cut(self, event: bytes, span: tuple[int, int]) -> bytes:
        return without_usage(event, span) if self._hide_each else event
