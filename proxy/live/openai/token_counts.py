"""Tokens of a stream by the engine's own count: asked for in every event, read, and cut out again.

A content event is one token only if the engine's HTTP server keeps up, every token ends a character
and nothing is speculated. vLLM says in each event how many tokens there are if
`stream_options.continuous_usage_stats` asks for it. What the client did not ask for itself is taken
out again, so that it gets the bytes that the engine would have sent it.
"""

import re
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import force_setattr

from balanceroute.proxy.live.openai.body import dump, is_deep
from balanceroute.proxy.live.openai.shape import Api, Shape
from balanceroute.proxy.live.openai.usage import find_usage, without_usage

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
# Up to Python 3.11 each look at a member of an enumeration is a call.
_CHAT, _COMPLETIONS = Api.CHAT, Api.COMPLETIONS


class CountsAsked(Struct, frozen=True):
    """What a decode leg asks for beyond its client.

    Attributes:
        options: The leg's `stream_options`.
        member: The same as text, its name included.
        each: Whether every event is to report its count; else the end alone reports the total.
        hide_each: Whether the client wants no usage in every event.
        hide_total: Whether it wants no usage event at the end.
    """

    options: Mapping[str, object]
    each: bool
    hide_each: bool
    hide_total: bool
    member: bytes = b""

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
    if not shape.stream or shape.sequences > 1 or shape.api not in (_CHAT, _COMPLETIONS):
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

    __slots__ = ("_counted", "_hide_each", "_is_told", "_tokens", "asked")

    def __init__(self, asked: CountsAsked) -> None:
        self.asked = asked
        self._hide_each = asked.hide_each
        self._tokens = 0
        self._counted = b""  # The last event with a count that was not read yet.
        self._is_told = asked.each  # By every event so far.

    @property
    def told(self) -> int | None:
        """The tokens so far, as the engine counts them; None if not every event told."""
        return self.read_tokens() if self._is_told else None

    def read_tokens(self) -> int:
        """Return the tokens so far. An event without a count is one."""
        if self._counted:
            # Read only now: a step clock looks less often than events come.
            _, _, behind = self._counted.rpartition(_COUNT)
            self._counted = b""
            self._record_count(behind.partition(b",")[0].partition(b"}")[0])
        return self._tokens

    def take_passed(self, tokens: int, *, untold: bool) -> None:
        """Go on behind events that others have counted; `untold` says that some of them had no count."""
        self._counted, self._tokens = b"", tokens
        self._is_told = self._is_told and not untold

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
            self._tokens, self._is_told = tokens + 1, False
        else:
            self._record_count(count[1])
        return event if span is None else self._cut(event, span)

    def _record_count(self, digits: bytes) -> None:
        # A count that goes backwards, or has more digits than any answer has tokens, is ignored.
        if digits.isdigit() and len(digits) <= _MAX_DIGITS:
            self._tokens = max(self._tokens, int(digits))

    def _cut(self, event: bytes, span: tuple[int, int]) -> bytes:
        return without_usage(event, span) if self._hide_each else event
