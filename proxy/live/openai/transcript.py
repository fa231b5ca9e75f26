"""The text of a streamed answer, kept for the case that its rank hands the request back.

vllm-ascend does so when it runs out of KV blocks: `stop_reason` is "recomputed". The next rank then
goes on from the prompt and this text. Nothing is kept where the connector's engines never do that.
"""

import json
from struct import Struct
from typing import Any

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.openai.stream_reader import choices_of, parsed, text_of

# The log-probabilities of an answer that goes on: counted on, and written as a chat's.
#
# A completion writes each token's candidates as one object, in which two with the same text are
# one. A chat's list cannot be written with such candidates missing.


class LogprobsError(BalanceRouteError):
    """A completion lacks log-probabilities that a chat would have."""


class Logprobs:
    """How they go on.

    Args:
        offset: Characters of all tokens before.
        candidates: How many a chat wants of each token.
    """

    __slots__ = ("_candidates", "_offset")

    def __init__(self, offset: int, candidates: int) -> None:
        self._offset = offset
        self._candidates = candidates

    def go_on(self, logprobs: dict[str, Any], again: int) -> None:
        """Leave out the first `again` tokens, and count a completion's offsets on."""
        for name, values in logprobs.items():
            if isinstance(values, list):
                logprobs[name] = values[again:]
        offsets = logprobs.get("text_offset")
        if isinstance(offsets, list):
            logprobs["text_offset"] = [offset + self._offset for offset in offsets]

    def as_chat(self, logprobs: dict[str, Any]) -> dict[str, Any]:
        """Return a completion's as a chat's.

        Raises:
            LogprobsError: A token has fewer candidates than the chat wants.
        """
        content = []
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            listed = list((top or {}).items())[: self._candidates]
            if len(listed) < self._candidates:
                raise LogprobsError(f"{token!r} has {len(listed)} of {self._candidates} candidates")
            top_logprobs = [_candidate(*one) for one in listed]
            content.append(_candidate(token, logprob) | {"top_logprobs": top_logprobs})
        return {"content": content}


def tokens_of(logprobs: object) -> int:
    """Return the number of tokens with log-probabilities."""
    if not isinstance(logprobs, dict):
        return 0
    listed = logprobs.get("tokens", logprobs.get("content"))
    return len(listed) if isinstance(listed, list) else 0


def _candidate(token: str, logprob: float | None) -> dict[str, Any]:
    spelled = list(token.encode("utf-8", "replace"))
    return {"token": token, "logprob": logprob, "bytes": spelled}


# Where the text of a token begins, in events that carry nothing else of the answer.
_CHAT_TEXT = b'"delta":{"content":"'
_COMPLETION_TEXT = b'"index":0,"text":"'
# Before each text that the native pump has kept: its length, and whether it is a whole event.
_LENGTH = Struct("<I")
_IS_EVENT = 1 << 31


class Transcript:
    """The text of one leg.

    Args:
        sequences: Of the answer; the text of several is not kept, nor of 0, which stands for other events.

    Attributes:
        text: The emitted text, in order; None if text cannot carry the answer (tool calls, reasoning).
        withheld: The event with text that came only when the rank handed the request back. It is
            the client's if the answer goes on; empty if there was none.
    """

    __slots__ = ("_last", "text", "withheld")

    def __init__(self, sequences: int) -> None:
        self.text: list[str] | None = [] if sequences == 1 else None
        self.withheld = b""
        self._last: bytes | dict[str, Any] = b""  # The event or choice with the latest tokens.

    @property
    def is_whole(self) -> bool:
        """Whether all tokens of which the client has ids or log-probabilities have all their text.

        Of several in one event the last may be a part of a character, and text that was withheld may
        be that of any.
        """
        if self.withheld or self.text is None:
            return False
        if isinstance(self._last, bytes):
            choices = choices_of(parsed(self._last) or {})
        else:
            choices = [self._last]
        return not choices or all(text_of(one) and _tokens_listed(one) <= 1 for one in choices)

    def keep(self, event: bytes) -> None:
        """Append the text of a token event, or give up keeping it."""
        if self.text is None:
            return
        self._last = event
        mark, end_mark = _CHAT_TEXT, b"}"
        begin = event.find(mark)
        if begin < 0:
            mark, end_mark = _COMPLETION_TEXT, b","
            begin = event.find(mark)
        if begin >= 0:
            begin += len(mark)
            end = event.find(b'"', begin)
            piece = event[begin:end]
            if b"\\" not in piece and event.startswith(end_mark, end + 1):
                self.text.append(piece.decode("utf-8", "replace"))
                return
        message = parsed(event)
        if message is None:
            self.text = None
            return
        for choice in choices_of(message):
            self.keep_choice(choice)

    def take_passed(self, texts: bytes, last: bytes) -> None:
        """Keep what the native pump has kept of token events, the last of which is `last`."""
        at = 0
        while at < len(texts) and self.text is not None:
            (length,) = _LENGTH.unpack_from(texts, at)
            begin = at + _LENGTH.size
            at = begin + (length & ~_IS_EVENT)
            if length & _IS_EVENT:
                self.keep(texts[begin:at])
            else:
                self.text.append(texts[begin:at].decode("utf-8", "replace"))
        self._last = last or self._last

    def keep_choice(self, choice: dict[str, Any]) -> None:
        """Append the text of a parsed choice, or give up keeping it."""
        text = text_of(choice)
        if self.text is None or text is None:
            self.text = None
        else:
            self.text.append(text)
            self._last = choice

    def keep_withheld(self, message: dict[str, Any], choice: dict[str, Any]) -> bytes:
        """Append text that the rank withheld until now because a stop string might begin in it.

        Returns:
            The event that brings it to the client; empty if there is no such text.
        """
        text = text_of(choice)
        if self.text is None or text is None:
            self.text = None
            return b""
        if not text:
            return b""
        self.text.append(text)
        going_on = choice | {"finish_reason": None, "stop_reason": None}
        data = json.dumps(message | {"choices": [going_on]}, separators=(",", ":"))
        return b"data: " + data.encode() + b"\n\n"


def _tokens_listed(choice: dict[str, Any]) -> int:
    ids = choice.get("token_ids")
    return max(tokens_of(choice.get("logprobs")), len(ids) if isinstance(ids, list) else 0)
