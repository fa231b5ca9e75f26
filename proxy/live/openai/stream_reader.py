"""The base of every reader of an engine's stream: its beginning, its count of tokens, and its errors."""

import json
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from balanceroute.proxy.wire.http1.pump import EventForm, Passed
from balanceroute.proxy.wire.sse import event_data

if TYPE_CHECKING:
    from collections.abc import Callable

# The beginning of a stream: events that say nothing, held, and a first event that is an error.
#
# The first event that goes to the client commits the answer. So one without data, for example,
# waits for the first that says something, and if that is an error, neither is sent, and the
# request may be tried elsewhere. So does what opens an answer: vLLM names the role of a chat, and
# begins a message, before it reports that the request has failed, and a response before it has
# tried. Comments that come before all of them are no events, and go to the client at once.

# Comments of many minutes; an engine that sends more of them says nothing by that.
_MOST_HELD_BYTES = 65_536
# What opens an answer may repeat what the client sent; beyond this it is not held.
_MOST_OPENING_BYTES = 4 << 20


class StreamOpening:
    """Decides what may be the first of a stream.

    Args:
        resumes: Whether the client's stream began on an earlier binding: then an error is the
            client's, whenever it comes, and comments are left out until something is said.
    """

    __slots__ = ("_held", "_opening_room", "_room", "begun", "error", "resumes", "waits")

    def __init__(self, *, resumes: bool) -> None:
        self.resumes = resumes
        self.error = b""  # The first event, if it is an error and not the client's.
        self.begun = False  # Whether anything was the first.
        self._held: list[bytes] = []
        self._room = _MOST_HELD_BYTES
        self._opening_room = _MOST_OPENING_BYTES
        # Whether what opens the answer waits, though the engine has begun with it.
        self.waits = False

    def begin(self, event: bytes) -> bytes:
        """Return an event with the held ones before it; empty stays empty."""
        if self.begun or not event:
            return event
        self.begun, self.waits = True, False
        return b"".join([*self._held, event])

    def open(self, event: bytes, *, begins: bool) -> bytes:
        """Return an event that only opens the answer; empty if it is held, or the client has one.

        `begins`: whether the engine sends it with the first token.
        """
        if self.resumes or not event:
            return b""
        self._opening_room -= len(event)
        if self.begun or self._opening_room < 0:
            return event
        self._held.append(event)
        self.waits |= begins
        return b""

    def release(self) -> bytes:
        """Return the held events, as nothing has come behind them for a while."""
        self.begun, self.waits = True, False
        return b"".join(self._held)

    def pass_empty(self, event: bytes) -> bytes:
        """Return an event that says nothing, or nothing readable; empty if it is held or left out."""
        if self.begun:
            return event
        self._room -= len(event)
        # An unreadable event may have been text: the reader that compares repeated text judges it.
        has_data = bool(event_data(event))
        if self._room < 0:
            return event if has_data else b""
        if has_data or not self.resumes:
            self._held.append(event)
        return b""

    def pass_error(self, event: bytes) -> bytes:
        """Return an error event; empty if nothing came before it, so that it is not the client's."""
        if self.begun or self.resumes:
            return event
        self.error = event
        return b""


_MAX_REASON = 200


class StreamReader:
    """Reads the events of one stream, and counts their tokens."""

    __slots__ = (
        *("_events", "_opening", "aborted", "comparison", "cut_short", "differs", "done", "error"),
        *("handed_back", "over", "prompt_tokens", "usage_tokens"),
    )

    def __init__(self, *, resumes: bool) -> None:
        self._opening = StreamOpening(resumes=resumes)
        self._events = 0  # With tokens, as far as they are counted by events.
        # Whether nothing that follows matters: `first_error`, `aborted`, `handed_back` or
        # `cut_short` say why.
        self.over = False
        # Called with each event that is read until it returns true; None if nothing is.
        self.comparison: Callable[[bytes], bool] | None = None
        self.aborted = False  # Whether the engine gave the answer up without an order of the proxy.
        # Whether the engine says that the stream is done, and the answer is not.
        self.cut_short = False
        self.differs = False  # Whether it says something else than the client has of it.
        self.done = False  # Whether the engine said that the stream is.
        self.handed_back = False  # Whether the rank hands the request back.
        self.error = ""  # What the engine reported to the client as an error; empty if nothing.
        # Tokens of the answer by the engine's usage object; None if it sent none.
        self.usage_tokens: int | None = None
        self.prompt_tokens = 0  # Those of the prompt by it; 0 if it sent none.

    @property
    def first_error(self) -> bytes:
        """The first event, if it is an error; empty if it was none."""
        return self._opening.error

    @property
    def complete(self) -> bool:
        raise NotImplementedError

    @property
    def waits(self) -> bool:
        """Whether something waits for the next event."""
        return self._opening.waits

    def release(self) -> bytes:
        """Return the waiting events, as nothing has come behind them for a while."""
        return self._opening.release()

    @property
    def past_opening(self) -> bool:
        """Whether the client may have more of the answer than its opening."""
        return True

    @property
    def plain(self) -> bool:
        """Whether only token events are expected, so that `take_token` may try."""
        return False

    @property
    def repeating(self) -> bool:
        """Whether the reader leaves out what comes, as the client has it."""
        return False

    @property
    def _may_be_mended(self) -> bool:
        """Whether another engine goes on if this one reports an error."""
        return False

    def is_progress(self, event: bytes) -> bool:
        """Return whether an event has data; a comment only says that the engine's server is there."""
        return event.startswith(b"data:") or bool(event_data(event))

    def is_remark(self, event: bytes) -> bool:
        """Return whether an event is no part of any answer, so that it may go before it: comments alone."""
        return event[:1] == b":" and all(line[:1] in (b"", b":") for line in event.splitlines())

    def read_tokens(self) -> int:
        return self._events

    def take_token(self, event: bytes) -> bytes:
        """Count a token event, given without the blank line behind it; return what of it is the client's.

        Returns:
            Nothing if it is no token event: it was not taken then, and is to be read.
        """
        del event
        return b""

    @property
    def form(self) -> EventForm | None:
        """The events that the native pump may take as token events; None if it may take none."""
        return None

    def take_passed(self, passed: Passed) -> None:
        """Go on behind token events that the native pump has taken."""
        self._events = passed.tokens

    def read(self, event: bytes) -> bytes:
        """Return what of any event is the client's; empty if nothing is."""
        return self._opening.begin(self._read(event))

    def compare(self, event: bytes) -> None:
        # What a rank says that hands the request back is no part of the answer.
        if self.comparison is not None and not self.handed_back and self.comparison(event):
            self.comparison = None

    def flush(self) -> bytes:
        """Return the held events, as the one they wait for does not come."""
        return b""

    def ending(self) -> bytes | None:
        """Return what a stream lacks that breaks off now, if all of the answer has come.

        Returns:
            None if something of the answer is missing, or may be.
        """
        return b"" if self.complete and not self.error else None

    def _read(self, event: bytes) -> bytes:
        raise NotImplementedError

    def _take_done(self, event: bytes) -> bytes:
        """Return the event that says that the stream is done; nothing if the answer is not.

        Clients take it for the end of a whole answer, whatever comes behind it.
        """
        self.done = True
        if not self.complete and not self.error:
            self.over = self.cut_short = True
        return b"" if self.over else event

    def _report(self, error: str) -> None:
        self.error = error[:_MAX_REASON]


# One event of a stream, parsed.

# What an engine says again, and the client has.


class RepeatedText(Struct, eq=False):
    """The beginning of an answer that the reader leaves out."""

    left: str = ""  # What of the text has yet to come.
    tokens: int = 0  # Of how many tokens the log-probabilities have.

    @property
    def over(self) -> bool:
        return not self.left and not self.tokens

    def trim(self, text: str) -> str | None:
        """Return what of the next text is new; None if it is not what the client has."""
        both = min(len(text), len(self.left))
        if text[:both] != self.left[:both]:
            return None
        self.left = self.left[both:]
        return text[both:]


# Decoding what engines write.

_decode = msgspec.json.Decoder().decode


def decode(data: bytes) -> Any:
    """Return the value of some JSON, with NaN and lone surrogates as Python's own servers write them.

    Strict JSON costs a quarter of what `json` takes.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(data)


# The data of the event behind the last one.
DONE = b"[DONE]"


def parsed(event: bytes) -> dict[str, Any] | None:
    """Return the object that an event carries, if it carries one."""
    return decoded(event_data(event))


def decoded(data: bytes) -> dict[str, Any] | None:
    """Return the object that the data of an event is, if it is one."""
    if data[:1] != b"{" and not data.lstrip().startswith(b"{"):
        return None  # [DONE], a comment, a heartbeat: quicker than the exception for it.
    try:
        message = decode(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def choices_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a parsed event; none if they have another form."""
    choices = message.get("choices")
    if not isinstance(choices, list):
        return []
    return [choice for choice in choices if isinstance(choice, dict)]


def is_opening(choice: dict[str, Any]) -> bool:
    """Return whether a choice only says whose turn it is."""
    delta = choice.get("delta")
    if not isinstance(delta, dict) or "role" not in delta or choice.get("finish_reason"):
        return False
    return not any(value for name, value in delta.items() if name != "role")


def text_of(choice: dict[str, Any]) -> str | None:
    """Return the text of a choice; None if it says something that text cannot carry."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        text = delta.get("content") or ""
        more = any(value for name, value in delta.items() if name not in ("role", "content"))
    else:
        text, more = choice.get("text"), False
    return None if more or not isinstance(text, str) else text
