"""The events of /v1/chat/completions and /v1/completions: counted, rewritten, and what they end with.

An ordinary token event is recognised by a substring, and only counted (`take_token`); the first and
the last events of a stream are parsed (`read`).

Tokens are counted by the engine's own counts (`token_counts`), or else each content event is one token.
That is so in vLLM without speculative decoding, as long as every token ends a character and its HTTP
server keeps up with its engine: else it puts several tokens into one event (seen: 24 in 8). The usage
object at the end, if the client asked for one, then corrects the count.
"""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.live.openai.answer import ABORT, is_handed_back
from balanceroute.proxy.live.openai.errors import EngineError, read_error
from balanceroute.proxy.live.openai.stream_reader import (
    DONE,
    StreamReader,
    choices_of,
    decoded,
    is_opening,
)
from balanceroute.proxy.live.openai.token_counts import (
    USAGE,
    TokenCounts,
    UsageRewrite,
    continuous_usage_is_expensive,
    is_total,
    token_count,
)
from balanceroute.proxy.wire.http1.pump import (
    COMPLETIONS,
    COUNTED,
    GENERATE,
    HIDE,
    NO_USAGE,
    TEXT,
    EventForm,
    Passed,
)
from balanceroute.proxy.wire.sse import event_data

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.token_ids import TokenIds
    from balanceroute.proxy.live.openai.transcript import Transcript

# The last token of a stream, held until the total that the client did not ask for has come.
#
# An engine that reports the total puts its fingerprint there, else into the event of the last
# token.

_LINE_ENDS = b"\r\n"


class HeldEnd:
    """Holds the event that ends the sequence. Whatever event comes next releases it."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = b""

    def hold(self, event: bytes) -> None:
        self._event = event

    def release(self, message: Mapping[str, Any] | None) -> tuple[bytes, bool]:
        """Return the event held, if any, and whether `message`, which follows, is the hidden total."""
        event, self._event = self._event, b""
        if message is None or not is_total(message):
            return event, False
        fingerprint = message.get("system_fingerprint")
        if fingerprint is not None:
            inside = event.rstrip(_LINE_ENDS)
            if inside.endswith(b"}"):
                member = f',"system_fingerprint":{json.dumps(fingerprint)}}}'
                event = inside[:-1] + member.encode() + event[len(inside) :]
        return event, True


# In every vLLM event of a token that is not the last of its sequence. The text of an answer cannot
# hold it: its quotes are escaped.
GOING_ON = b'"finish_reason":null'
_ROLE = b'"role":'
_DONE = b"data: [DONE]\n\n"


class CompletionStream(StreamReader):
    """Reads one stream.

    Args:
        sequences: Sequences that must finish before the stream may end.
        resumes: Whether the client's stream began on an earlier binding: its opening event is not
            repeated.
        asks_total: Whether the client asked for the usage at the end.
        counts: The engine's own counts; None if they were not asked for.
        transcript: Keeps the text; None if no rank can hand the request back.
        ids: Keeps the ids of the tokens; None if they were not asked for.
        expensive: Called if the engine's counts cost it more the longer the answer.
        may_abort: Returns whether the proxy has ordered the engine to give the answer up.
    """

    __slots__ = (
        "_awaits_total",
        "_counts",
        "_expensive",
        "_has_begun",
        "_held_end",
        "_ids",
        "_last",
        "_may_abort",
        "_sequences",
        "_shows_each",
        "_transcript",
        "_usage",
        "finished",
    )

    def __init__(
        self,
        sequences: int,
        *,
        resumes: bool,
        usage: UsageRewrite,
        asks_total: bool,
        counts: TokenCounts | None,
        transcript: "Transcript | None",
        ids: "TokenIds | None" = None,
        expensive: Callable[[], None],
        may_abort: Callable[[], bool],
    ) -> None:
        super().__init__(resumes=resumes)
        self._sequences = sequences
        self._usage = usage
        self._counts = counts
        self._shows_each = counts is None or not counts.asked.hide_each
        hides_total = counts is not None and counts.asked.hide_total
        self._held_end = HeldEnd() if hides_total else None
        self._transcript = transcript
        self._ids = ids
        if ids is not None:
            ids.counts = counts
        self._expensive = expensive
        self._may_abort = may_abort
        self._has_begun = False  # Only openings came so far: they wait for the next event.
        self._awaits_total = asks_total
        self._last: dict[str, Any] = {}  # The event that ended the last sequence.
        self.finished = 0

    @property
    def complete(self) -> bool:
        return self.finished >= self._sequences

    @property
    def plain(self) -> bool:
        if not self._has_begun or self.over or self.handed_back:
            return False
        # What opens it may still wait, behind tokens that the client does not see.
        if not self._opening.begun:
            return False
        return self._counts is None or not self.finished  # It may be held: nothing overtakes it.

    def read_tokens(self) -> int:
        return self._events if self._counts is None else self._counts.read_tokens()

    def take_token(self, event: bytes) -> bytes:
        # From the right, where it stands: a third of what `in` costs.
        if event.rfind(GOING_ON) < 0 or (
            self._shows_each and self._usage.changes and event.rfind(USAGE) >= 0
        ):
            return b""
        if self._ids is not None:
            event = self._ids.take_text(event)
            if not event:
                return b""
        if self._counts is None:
            self._events += 1
            event += b"\n\n"
        else:
            event = self._counts.take_line(event)
        if self._transcript is not None:
            self._transcript.keep(event)
        return event

    @property
    def form(self) -> EventForm | None:
        flags = NO_USAGE if self._shows_each and self._usage.changes else 0
        if self._counts is not None:
            flags |= COUNTED | (HIDE if self._counts.asked.hide_each else 0)
        return self._form(COMPLETIONS, flags)

    def _form(self, kind: int, flags: int) -> EventForm | None:
        """Return what the native pump may take, and what it is to keep of it."""
        kept = 0 if self._ids is None else self._ids.form
        if kept is None:
            return None
        if self._transcript is not None and self._transcript.text is not None:
            kept |= TEXT
        return EventForm(kind, flags | kept, self.read_tokens())

    def take_passed(self, passed: Passed) -> None:
        if self._counts is None:
            super().take_passed(passed)
        else:
            self._counts.take_passed(passed.tokens, uncounted=passed.uncounted > 0)
        if self._transcript is not None:
            self._transcript.take_passed(passed.texts, passed.last)
        if self._ids is not None:
            self._ids.take_passed(passed)

    def read(self, event: bytes) -> bytes:
        if self.handed_back:
            self._look_for_total(event)
            return b""
        if self.finished and self._held_end is not None:
            event = self._read_behind(self._held_end, event)
        else:
            event = self._read(event)
        return event if self._opening.begun else self._opening.begin(event)

    def flush(self) -> bytes:
        """Return the end held, if it waits for a total that does not come; else nothing."""
        if self._held_end is None:
            return b""
        return self._opening.begin(self._held_end.release(None)[0])

    def ending(self) -> bytes | None:
        if self.handed_back or super().ending() is None:
            return None
        if self.done:
            return b""
        total: bytes | None = b""
        if self._awaits_total:
            total = None if self._sequences > 1 else self._usage.total(self._last)
        return None if total is None else total + _DONE

    def _read_behind(self, held_end: HeldEnd, event: bytes) -> bytes:
        """Read an event behind the one that ended the sequence, which may be held for it."""
        data = event_data(event)
        if not data:
            return event  # A comment, for example.
        message = decoded(data)
        end, hidden = held_end.release(message)
        end = self._opening.begin(end)
        if hidden:
            assert message is not None
            self._take_usage(message["usage"])
            return end
        if message is None:
            return end + self._read_data(event, data, None)
        return end + self._read(event)

    def _read(self, event: bytes) -> bytes:
        ids = self._ids
        going_on = event.rfind(GOING_ON) >= 0 and event.find(_ROLE) < 0
        if going_on and (ids is None or ids.is_plain(event)):
            self._has_begun = True
            if self._transcript is not None:
                self._transcript.keep(event)
            event = self._usage.apply(self._count(event))
            return event if ids is None else ids.take(event)
        data = event_data(event)
        return self._read_data(event, data, decoded(data))

    def _read_data(self, event: bytes, data: bytes, message: dict[str, Any] | None) -> bytes:
        if message is None:
            if data and self._ids is not None:
                self._ids.lost = True
            return self._take_done(event) if data == DONE else self._opening.pass_empty(event)
        error = read_error(message)
        if error is not None:
            return self._read_error(event, error)
        choices = choices_of(message)
        if is_total(message):
            self._take_usage(message.get("usage"))
            self._awaits_total = False
            if self._held_end is not None:
                return b""  # Before the end that it is to stand behind.
        elif not choices:
            return self._opening.pass_empty(event)  # Unreadable, or without content.
        for choice in choices:
            if choice.get("finish_reason") == ABORT and not self._may_abort():
                self.aborted = self.over = True
                return b""
        return self._read_message(event, message, choices)

    def _count(self, event: bytes) -> bytes:
        """Count an event's tokens; return what of it is the client's."""
        if self._counts is None:
            self._events += 1
            return event
        return self._counts.take(event)

    def _tokens_of(self, choice: dict[str, Any]) -> int:
        """Return the tokens of a parsed choice that has no count of the engine's.

        An engine that leaves out null members sends the finish reason, or the prompt, in an event of its own.
        """
        has_tokens = choice.get("delta") or choice.get("text") or choice.get("token_ids")
        return int(bool(has_tokens or "logprobs" in choice))

    @property
    def _may_be_mended(self) -> bool:
        ids = self._ids
        return ids is not None and (ids.usable or not ids.begun)

    def _read_error(self, event: bytes, error: EngineError) -> bytes:
        if self._may_be_mended:
            self._opening.error = event  # Another engine goes on.
            passed = b""
        else:
            passed = self._opening.pass_error(event)
        if passed:
            self._report(error.words or "error")
        else:
            self.over = True
        return passed

    def _read_message(
        self, event: bytes, message: dict[str, Any], choices: list[dict[str, Any]]
    ) -> bytes:
        opens = bool(choices)
        for choice in choices:
            if self._transcript is not None and is_handed_back(choice):
                self._take_back(self._transcript, message, choice)
                return b""
            if not self._opens(choice):
                opens = False
                self._take_choice(choice)
        if self._ids is not None:
            self._ids.note(event, message)
        if self.finished == self._sequences == 1:
            self._take_usage(message.get("usage"))
        said = message.get("choices")
        if said and self.finished >= self._sequences:
            self._last = message
        counts = self._counts if said else None
        if counts is not None and continuous_usage_is_expensive(message):
            self._expensive()
            if self._ids is not None:
                self._ids.lost = True  # A parser may yet find that it was not the answer.
        if counts is not None:
            event = counts.hide(event) if opens else counts.take(event)
        event = self._usage.apply(event)
        if self._ids is not None:
            event = self._ids.hide(event, message)
        if opens:
            return self._opening.open(event, begins=True)
        if counts is None or not self.finished or self._held_end is None:
            return event
        self._held_end.hold(event)
        return b""

    def _opens(self, choice: dict[str, Any]) -> bool:
        """Return whether a choice brings nothing of the answer: whose turn it is, or the prompt alone."""
        if is_opening(choice):
            return True
        return not (self._has_begun or choice.get("finish_reason") or self._tokens_of(choice))

    def _take_choice(self, choice: dict[str, Any]) -> None:
        self._has_begun = True
        if self._counts is None:
            self._events += self._tokens_of(choice)
        if self._transcript is not None:
            self._transcript.keep_choice(choice)
        reason = choice.get("finish_reason")
        if reason and isinstance(reason, str):
            self.finished += 1

    def _take_usage(self, usage: object) -> None:
        count = token_count(usage, "completion_tokens")
        if count is not None:
            self.usage_tokens = count
            self.prompt_tokens = token_count(usage, "prompt_tokens") or 0

    # A request that the rank hands back.

    def _take_back(
        self, transcript: "Transcript", message: dict[str, Any], choice: dict[str, Any]
    ) -> None:
        event = transcript.keep_withheld(message, choice)
        if event and self._counts is not None:
            event = self._counts.take(event)
        event = self._usage.apply(event)
        transcript.withheld = event if self._ids is None else self._ids.hide(event, message)
        self.handed_back = True
        # Where only the end reports a count, that is awaited.
        self.over = self._counts is None or self._counts.asked.each

    def _look_for_total(self, event: bytes) -> None:
        data = event_data(event)
        if data:  # No comment, for example.
            message = decoded(data)
            if message is not None and is_total(message):
                self._take_usage(message["usage"])
            self.over = True


# The events of /inference/v1/generate: token ids instead of text (vLLM 0.32).
#
# Each event lists the ids that it brings, so they are counted exactly, without a count of the
# engine's. Its events name every member, `"usage":null` too.

# The quote before it excludes `prompt_token_ids`. Text is escaped, so it cannot hold this.
_IDS = b'"token_ids":['
_USAGE = b'"usage":{'


class TokenStream(CompletionStream):
    """Reads one stream; see `CompletionStream`."""

    __slots__ = ()

    @property
    def form(self) -> EventForm | None:
        return self._form(GENERATE, 0)

    def take_token(self, event: bytes) -> bytes:
        if event.find(GOING_ON) < 0 or event.find(_USAGE) >= 0:
            return b""
        self._events += ids_in(event)
        if self._ids is not None:
            self._ids.take(event)
        event += b"\n\n"
        if self._transcript is not None:
            self._transcript.keep(event)
        return event

    def _count(self, event: bytes) -> bytes:
        self._events += ids_in(event)
        return event

    def _tokens_of(self, choice: dict[str, Any]) -> int:
        ids = choice.get("token_ids")
        return len(ids) if isinstance(ids, list) else 0


def ids_in(event: bytes) -> int:
    """Return how many ids an event lists; 1 if it has no list."""
    begin = event.find(_IDS)
    if begin < 0:
        return 1
    begin += len(_IDS)
    end = event.find(b"]", begin)
    return event.count(b",", begin, end) + 1 if event[begin:end].strip() else 0
