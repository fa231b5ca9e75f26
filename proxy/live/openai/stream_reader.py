"""What every reader of an engine's stream has: its beginning, its count of tokens, and its errors."""

from typing import TYPE_CHECKING

from balanceroute.proxy.live.openai.stream_opening import StreamOpening
from balanceroute.proxy.wire.sse import event_data

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.wire.http1.pump import EventForm, Passed

_MAX_REASON = 200


class StreamReader:
    """Reads the events of one stream, and counts their tokens.

    Args:
        resumes: Whether the client's stream began on an earlier binding.

    Attributes:
        over: Whether nothing that follows matters: `first_error`, `aborted`, `handed_back` or `cut_short`
            say why.
        comparison: Called with each event that is read until it returns true; None if nothing is.
        aborted: Whether the engine gave the answer up, though nobody had told it to.
        cut_short: Whether the engine says that the stream is done, and the answer is not.
        differs: Whether it says something else than the client has of it.
        done: Whether the engine said that the stream is.
        handed_back: Whether the rank hands the request back.
        error: What the engine reported to the client as an error; empty if nothing.
        usage_tokens: Tokens of the answer by the engine's usage object; None if it sent none.
        prompt_tokens: Those of the prompt by it; 0 if it sent none.
    """

    __slots__ = (
        *("_events", "_opening", "aborted", "comparison", "cut_short", "differs", "done", "error"),
        *("handed_back", "over", "prompt_tokens", "usage_tokens"),
    )

    def __init__(self, *, resumes: bool) -> None:
        self._opening = StreamOpening(resumes=resumes)
        self._events = 0  # With tokens, as far as they are counted by events.
        self.over = False
        self.comparison: Callable[[bytes], bool] | None = None
        self.aborted = False
        self.cut_short = False
        self.differs = False
        self.done = False
        self.handed_back = False
        self.error = ""
        self.usage_tokens: int | None = None
        self.prompt_tokens = 0

    @property
    def first_error(self) -> bytes:
        """The first event, if it is an error; empty if it was none."""
        return self._opening.error

    @property
    def complete(self) -> bool:
        """Whether the answer is."""
        raise NotImplementedError

    @property
    def waits(self) -> bool:
        """Whether something waits for what follows."""
        return self._opening.waits

    def release(self) -> bytes:
        """Return what waits, as nothing has come behind it for a while."""
        return self._opening.release()

    @property
    def told(self) -> bool:
        """Whether the client may have more of the answer than its opening."""
        return True

    @property
    def plain(self) -> bool:
        """Whether only token events are expected, so that `take_token` may try."""
        return False

    @property
    def repeating(self) -> bool:
        """Whether what comes is left out, as the client has it."""
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
        """Return the tokens received."""
        return self._events

    def take_token(self, event: bytes) -> bytes:
        """Count a token event, given without the blank line behind it; return what of it is the client's.

        Returns:
            Nothing if it is no token event: it was not taken then, and is to be read.
        """
        del event
        return b""

    @property
    def form(self) -> "EventForm | None":
        """What others may take for token events in its place; None if they cannot."""
        return None

    def take_passed(self, passed: "Passed") -> None:
        """Go on behind token events that others have taken."""
        self._events = passed.tokens

    def read(self, event: bytes) -> bytes:
        """Return what of any event is the client's; empty if nothing is."""
        return self._opening.begin(self._read(event))

    def compare(self, event: bytes) -> None:
        """Compare an event that has been read, if anything is to be compared."""
        # What a rank says that hands the request back is no part of the answer.
        if self.comparison is not None and not self.handed_back and self.comparison(event):
            self.comparison = None

    def flush(self) -> bytes:
        """Return what is held for an event that does not come."""
        return b""

    def ending(self) -> bytes | None:
        """Return what a stream lacks that breaks off now, if all of the answer has come.

        Returns:
            None if something of the answer is missing, or nobody can tell what comes behind it.
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
