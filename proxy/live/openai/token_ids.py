"""The ids of a stream's tokens: asked for with `return_token_ids`, kept, and cut out again.

The proxy keeps them as the engine wrote them: if it fails, the next engine goes on from them. A client that
did not ask for ids sees none: vLLM writes null where there are no ids, and in a chat leaves out events that
carry nothing else. Its Rust frontend writes no member that is null, and sends a completion's prompt in an
event of its own.

The next engine's detokeniser must not begin inside a character: vLLM would repeat the prompt's text
(`DecodeStream` primed with an incomplete suffix). So ids count only up to the last event with text. And
of several ids in one event the last may be such a beginning, which no event shows: they count only when
an event with one id and text has come. Of events that do not count the proxy keeps the text: the next
engine begins before it, and the proxy leaves out what it repeats.
"""

import re
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from balanceroute.proxy.live.openai.stream_reader import RepeatedText, choices_of, parsed, text_of
from balanceroute.proxy.wire.http1.pump import IDS, IDS_OF_COMPLETION, IDS_WAIT, Passed

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.token_counts import TokenCounts

# As vLLM writes them.
_IDS = b'"token_ids":['
_VALUE = len(_IDS) - 1
_PROMPT = re.compile(rb'"prompt_token_ids":\s*+\[([^\[\]]*+)\]')
_END = b"}\n\n"
# What stands between a text and its ids in an event that goes on, as vLLM writes it.
_CHAT = b'"},"logprobs":null,"finish_reason":null,"token_ids":['
_COMPLETION = (
    b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
    b'"token_ids":['
)
_QUOTE, _COMMA = b'",'
# As any engine may write them.
_NAMED = rb'"(?:prompt_)?token_ids"\s*+:\s*+'
_MEMBER = re.compile(rb"(" + _NAMED + rb")\[[\d,\s]*+\]")
_MEMBER_WITH_COMMA = re.compile(
    rb",\s*+" + _NAMED + rb"\[[\d,\s]*+\]|" + _NAMED + rb"\[[\d,\s]*+\]\s*+(?:,\s*+)?+"
)
_LIST = re.compile(rb"\s*+\d++\s*+(?:,\s*+\d++\s*+)*+")
_NOTHING = b'"delta":{}'
_NO_TEXT = b'":""'
_CHOICES = b'"choices":['
# The members of a choice that holds a completion's prompt and nothing else.
_PROMPT_ALONE = {"index", "text", "prompt_token_ids"}


class TokenIds:
    """The ids of one leg's prompt and answer.

    Args:
        repeated: What the client has of the answer, and that is said again; nothing by default.
        prompt_tokens: How many the prompt has by another engine's count; None if none has counted it.
            Other ids would let the answer go on behind another prompt.
    """

    __slots__ = (
        *("_before", "_behind", "_kept", "_new", "_nulls", "_prompt_tokens", "_repeated"),
        *("counts", "head", "lost", "prompt"),
    )

    def __init__(
        self, repeated: RepeatedText | None = None, prompt_tokens: int | None = None
    ) -> None:
        # The prompt's, as JSON without the brackets; empty until the engine has sent them.
        self.prompt = b""
        self.head = b""  # Of its events, all that stands before the choices.
        # Whether no engine can continue the answer from ids: this one sent none, or something
        # else than text, or the whole answer.
        self.lost = False
        # The engine's own counts of the same tokens; None if it was not asked for them.
        self.counts: TokenCounts | None = None
        self._nulls = False  # Whether the engine writes members that are null.
        self._before = _CHAT
        self._prompt_tokens = prompt_tokens
        self._repeated = repeated or RepeatedText()
        self._kept = bytearray()  # Each with a comma before it.
        self._new: list[bytes] = []  # Those behind the last text that counts.
        self._behind: list[bytes] = []  # Events with text that do not count.

    @property
    def kept(self) -> bytes:
        """The ids whose text the client has, as JSON without the brackets."""
        return bytes(self._kept[1:])

    @property
    def begun(self) -> bool:
        """Whether anything came that the client did not have."""
        return self.lost or (bool(self.prompt) and self._repeated.over)

    @property
    def count(self) -> int:
        return self._kept.count(_COMMA)

    @property
    def seen(self) -> int:
        """How many ids the engine has sent, those that do not count included."""
        return self.count + sum(ids.count(_COMMA) + 1 for ids in self._new if ids)

    @property
    def behind(self) -> str:
        """The text that the client has behind them."""
        messages = [parsed(event) or {} for event in self._behind]
        choices = [choice for message in messages for choice in choices_of(message)]
        return "".join(text_of(choice) or "" for choice in choices)

    @property
    def tokens_behind(self) -> int:
        """How many tokens behind them the client has log-probabilities of."""
        return 0

    @property
    def end(self) -> int:
        """The offset in this leg's text of the first token behind them, if log-probabilities give it."""
        return 0

    @property
    def usable(self) -> bool:
        """Whether the answer can be continued from them."""
        if self.lost or _LIST.fullmatch(self.prompt) is None:
            return False
        if self.counts is not None and self.counts.reported not in (None, self.seen):
            return False  # One of the two is wrong.
        kept = self.kept
        return not kept or _LIST.fullmatch(kept) is not None

    @property
    def form(self) -> int | None:
        """How the native pump is to keep them, as `EventForm.flags`; None if it cannot."""
        if self.lost or not self.prompt:
            return None
        place = IDS_OF_COMPLETION if self._before == _COMPLETION else 0
        return IDS | place | (IDS_WAIT if self._new else 0)

    def take_passed(self, passed: Passed) -> None:
        if passed.ids:
            self._kept += b"".join(b"," + ids for ids in self._new if ids) + passed.ids
            self._new.clear()
            self._behind.clear()
        if passed.new_ids is not None:
            self._new.append(passed.new_ids)
        self._behind += [event + b"\n\n" for event in passed.behind.split(b"\n\n")[:-1]]

    def take_text(self, event: bytes) -> bytes:
        """Keep the id of an event with text and one id, as most are; return the event without it.

        Neither has the blank line behind it. Nothing is kept or returned of any other event: that is to be read.
        """
        begin = event.rfind(self._before) + len(self._before)
        end = event.find(b"]", begin)
        ids = event[begin:end]
        if (
            end < 0
            or not ids.isdigit()
            or begin < len(self._before)
            or event[begin - len(self._before) - 1] == _QUOTE  # No text, or one that ends so.
            or self._new
            or not self.prompt
            or event[-1:] != b"}"
        ):
            return b""
        self._kept += b"," + ids
        return event[: begin - 1] + b"null" + event[end + 1 :]

    def is_plain(self, event: bytes) -> bool:
        """Return whether `take` may have a token event that goes on; else it is to be parsed."""
        return bool(self.prompt) and event.find(_NOTHING) < 0

    def take(self, event: bytes) -> bytes:
        """Keep the ids of a plain event; return the event without them."""
        begin = event.rfind(_IDS)
        end = event.find(b"]", begin)
        if begin < 0 or end < 0 or not event.endswith(_END):
            self.lost = True
            return _hidden(event)
        self._keep(event, event[begin + _VALUE + 1 : end], has_text=event.find(_NO_TEXT) < 0)
        return b"%bnull%b" % (event[: begin + _VALUE], event[end + 1 :])

    def note(self, event: bytes, message: dict[str, Any]) -> None:
        """Keep the ids of any event, which was parsed."""
        self._nulls = self._nulls or _has_null(message)
        if not self.prompt:
            found = _PROMPT.search(event)
            self.prompt = found[1] if found else b""
            count = self.prompt.count(_COMMA) + 1
            self.lost |= bool(self.prompt and self._prompt_tokens not in (None, count))
            self.head = event[: max(0, event.find(_CHOICES))]
        for choice in choices_of(message):
            self._before = _CHAT if "delta" in choice else _COMPLETION
            self._note_choice(event, choice)

    def hide(self, event: bytes, message: dict[str, Any]) -> bytes:
        """Return what of any event, which was parsed, is the client's."""
        for choice in choices_of(message):
            ended = choice.get("finish_reason") is not None
            if choice.get("delta") == {} and not ended and choice.get("logprobs") is None:
                return b""
            if choice.keys() == _PROMPT_ALONE and not choice["text"]:
                return b""
        return _hidden(event) if self._nulls else _MEMBER_WITH_COMMA.sub(b"", event)

    def _note_choice(self, event: bytes, choice: dict[str, Any]) -> None:
        text, ids = text_of(choice), choice.get("token_ids")
        listed = isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)
        if text is None or choice.get("finish_reason") or not self.prompt or (text and not listed):
            self.lost = True
        elif isinstance(ids, list) and listed:
            self._keep_parsed(event, choice, ids)

    def _keep_parsed(self, event: bytes, choice: dict[str, Any], ids: list[int]) -> None:
        self._keep(event, b",".join(b"%d" % one for one in ids), has_text=bool(text_of(choice)))

    def _keep(self, event: bytes, ids: bytes, *, has_text: bool) -> None:
        new = self._new
        new.append(ids)
        if not has_text:
            return
        if not ids or _COMMA in ids:
            self._behind.append(event)
            return
        for text in new:
            if text:
                self._kept += b"," + text
        new.clear()
        self._behind.clear()


def _has_null(message: dict[str, Any]) -> bool:
    """Return whether an event is of an engine that writes members that are null.

    A completion of one token may have none. An engine that leaves them out sends the prompt in another event.
    """
    choices = choices_of(message)
    return None in message.values() or any(
        None in choice.values() or ("prompt_token_ids" in choice and choice.keys() > _PROMPT_ALONE)
        for choice in choices
    )


def _hidden(event: bytes) -> bytes:
    """Return an event with null for ids."""
    return _MEMBER.sub(rb"\1null", event)


# The ids of a stream with stop strings or log-probabilities: kept with care, each event parsed.
#
# An engine looks for stop strings in the text that it says itself. So the next one begins so far
# back that no stop string can have begun before and be complete only behind what the client has.
# And an engine holds back as many characters as could be the beginning of a stop string: of an
# event with text it is known how many, so that the place in the text is known at which the next
# engine begins.
#
# Log-probabilities come with each token, also with those whose text is held back. What the client
# has of them behind the ids that count comes again, too, and is left out.


class Care(Struct, frozen=True):
    """What a request asks for beyond what its ids show."""

    again: int = 0  # Characters that have to come again: one less than the longest stop string has.
    held: int = 0  # Characters that the engine holds back.
    logprobs: bool = False  # Whether the answer has log-probabilities.


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
    end: int  # The offset in the text of the token that comes next, by the log-probabilities.


class BackedUpIds(TokenIds):
    """The ids of one leg.

    Args:
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
    def seen(self) -> int:
        return self.count + sum(len(piece.ids) for piece in self._pieces)

    @property
    def behind(self) -> str:
        text = "".join(piece.text for piece in self._pieces)
        return text[self._care.held :] if self._promoted else text

    @property
    def tokens_behind(self) -> int:
        return sum(len(piece.ids) for piece in self._pieces) if self._care.logprobs else 0

    @property
    def end(self) -> int:
        return self._end

    @property
    def form(self) -> None:
        """Nothing: every event is parsed."""

    def take_text(self, event: bytes) -> bytes:
        del event
        return b""

    def is_plain(self, event: bytes) -> bool:
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


# The ids of a stream of `/inference/v1/generate`, which are the answer itself.
#
# The proxy asks for nothing and cuts nothing out. As there is no text to repeat, every id counts.
_BRACKETS = b"[] \t\r\n"


class GeneratedIds(TokenIds):
    """The ids of one leg.

    Args:
        prompt: The JSON text of the list of the prompt's.
    """

    __slots__ = ()

    def __init__(self, prompt: bytes) -> None:
        super().__init__()
        self.prompt = prompt.strip(_BRACKETS)

    @property
    def begun(self) -> bool:
        """Whether any id came, or something that is none."""
        return self.lost or bool(self._kept)

    @property
    def form(self) -> int | None:
        return None if self.lost else IDS

    def is_plain(self, event: bytes) -> bool:
        del event
        return True

    def take(self, event: bytes) -> bytes:
        """Keep the ids of an event that goes on; return it as it is."""
        begin = event.find(_IDS)
        end = event.find(b"]", begin)
        if begin < 0 or end < 0:
            self.lost = True
            return event
        ids = event[begin + len(_IDS) : end]
        if ids:
            self._kept += b"," + ids
        return event

    def note(self, event: bytes, message: dict[str, Any]) -> None:
        """Take an event that was parsed: with a reason it ends the answer."""
        for choice in choices_of(message):
            if choice.get("finish_reason"):
                self.lost = True
            else:
                self.take(event)

    def hide(self, event: bytes, message: dict[str, Any]) -> bytes:
        """Return the event: its ids are the client's."""
        del message
        return event
