"""The ids of a stream with stop strings or log-probabilities: kept with care, each event parsed.

An engine looks for stop strings in the text that it says itself. So the next one begins so far back that
no stop string can have begun before and be complete only behind what the client has. And an engine holds
back as many characters as could be the beginning of a stop string: of an event with text it is known how
many, so that the place in the text is known at which the next engine begins.

Log-probabilities come with each token, also with those whose text is held back. What the client has of
them behind the ids that count comes again, too, and is left out.
"""

from collections import deque
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from balanceroute.proxy.live.openai.repeated_text import RepeatedText
from balanceroute.proxy.live.openai.stream_event import text_of
from balanceroute.proxy.live.openai.token_ids import TokenIds


class Care(Struct, frozen=True):
    """What a request asks for that ids alone do not tell.

    Attributes:
        again: Characters that have to come again: one less than the longest stop string has.
        held: Characters that the engine holds back.
        logprobs: Whether it tells log-probabilities.
    """

    again: int = 0
    held: int = 0
    logprobs: bool = False


def care_of(kept: Mapping[str, Any]) -> Care | None:
    """Return what a request asks for; None if its ids are all.

    Args:
        kept: The members of its body that a continuation keeps.
    """
    stop, logprobs = kept.get("stop") or [], asks_logprobs(kept)
    if not stop and not logprobs:
        return None
    longest = max(map(len, [stop] if isinstance(stop, str) else stop), default=1)
    shown = kept.get("include_stop_str_in_output") is True
    return Care(longest - 1, 0 if shown else longest - 1, logprobs)


def asks_logprobs(kept: Mapping[str, Any]) -> bool:
    """Return whether a request asks for log-probabilities."""
    asked = kept.get("logprobs")
    return asked is not None and asked is not False


class _Piece(Struct):
    """One event with ids behind those that count."""

    ids: list[int]
    text: str
    end: int  # The offset in the text of the token that comes next, as log-probabilities tell.


class BackedUpIds(TokenIds):
    """The ids of one leg.

    Args:
        care: What the request asks for.
        repeated: As for `TokenIds`, like the next.
    """

    __slots__ = ("_care", "_characters", "_counted", "_end", "_pieces", "_places", "_promoted")

    def __init__(
        self,
        care: Care,
        repeated: RepeatedText | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        super().__init__(repeated, prompt_tokens)
        self._care = care
        self._pieces: deque[_Piece] = deque()
        # Where the ids may come to count: so many pieces, and characters of text, up to there. In a stream
        # of several ids an event there may be none for long, so the pieces are never searched for them.
        self._places: deque[tuple[int, int]] = deque()
        self._counted = 0  # Pieces whose ids count.
        self._characters = 0
        self._promoted = False
        self._end = 0

    @property
    def told(self) -> int:
        """How many ids the engine has told, those that do not count included."""
        return self.count + sum(len(piece.ids) for piece in self._pieces)

    @property
    def behind(self) -> str:
        """The text that the client has behind the ids that count."""
        text = "".join(piece.text for piece in self._pieces)
        return text[self._care.held :] if self._promoted else text

    @property
    def tokens_behind(self) -> int:
        """How many tokens behind them the client has log-probabilities of."""
        return sum(len(piece.ids) for piece in self._pieces) if self._care.logprobs else 0

    @property
    def end(self) -> int:
        """The offset in this leg's text of the first token behind them."""
        return self._end

    @property
    def form(self) -> None:
        """Nothing: every event is parsed."""

    def take_text(self, event: bytes) -> bytes:
        """Leave every event to be read."""
        del event
        return b""

    def is_plain(self, event: bytes) -> bool:
        """Have every event parsed."""
        del event
        return False

    def _keep_parsed(self, event: bytes, choice: dict[str, Any], ids: list[int]) -> None:
        text = text_of(choice) or ""
        self._pieces.append(_Piece(ids, text, _end_of(choice)))
        self._characters += len(text)
        if text and len(ids) == 1:
            self._places.append((self._counted + len(self._pieces), self._characters))
        while self._places and self._characters - self._places[0][1] >= self._care.again:
            self._promote(self._places.popleft()[0] - self._counted)

    def _promote(self, count: int) -> None:
        """Have the ids of the first pieces count."""
        self._counted += count
        self._promoted = True
        for _ in range(count):
            piece = self._pieces.popleft()
            self._end = piece.end
            for token in piece.ids:
                self._kept += b",%d" % token


def _end_of(choice: dict[str, Any]) -> int:
    """Return where the next token begins, by a completion's log-probabilities; 0 if there are none."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict) or not logprobs.get("text_offset"):
        return 0
    return int(logprobs["text_offset"][-1]) + len(logprobs["tokens"][-1])
