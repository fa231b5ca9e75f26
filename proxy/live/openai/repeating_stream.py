"""Streams of answers that may be begun again, or were; see `told.py`.

Every event of such a stream is parsed.
"""

from collections.abc import Callable
from typing import Any

from balanceroute.proxy.live.openai.completion_stream import CompletionStream
from balanceroute.proxy.live.openai.continuation_stream import OTHERWISE
from balanceroute.proxy.live.openai.named_events import NamedEventStream
from balanceroute.proxy.live.openai.stream_reader import StreamReader
from balanceroute.proxy.live.openai.token_stream import TokenStream
from balanceroute.proxy.live.openai.told import DiffersError, Told
from balanceroute.proxy.wire.sse import whole_events


class _Repeating(StreamReader):
    """What these readers have in common: nothing reaches the client twice."""

    __slots__ = ()
    _told: Told
    _may_abort: Callable[[], bool]

    @property
    def repeating(self) -> bool:
        """Whether what comes is left out, as the client has it."""
        return self._told.repeating

    @property
    def plain(self) -> bool:
        """Whether only token events are expected, so that `take_token` may try."""
        return not self._told.repeating and super().plain

    @property
    def form(self) -> None:
        """Nothing: every event is parsed."""

    def take_token(self, event: bytes) -> bytes:
        """Count a token event; nothing if it is none, or comes again."""
        taken = b"" if self._told.repeating else super().take_token(event)
        return self._told.tell(taken) if taken else b""

    def read(self, event: bytes) -> bytes:
        """Return what of any event is the client's; empty if nothing is."""
        return self._pass(super().read(event))

    def release(self) -> bytes:
        """Return what waits, unless the client has it."""
        return self._pass(super().release())

    def flush(self) -> bytes:
        """Return what is held for an event that does not come."""
        return self._pass(super().flush())

    def ending(self) -> bytes | None:
        """Return what a stream lacks that breaks off now, if all of the answer has come."""
        return None if self._told.repeating else super().ending()

    @property
    def _may_be_mended(self) -> bool:
        return not self._told.lost

    def _pass(self, events: bytes) -> bytes:
        if not events or self.over:
            return events
        try:
            return b"".join(map(self._one, whole_events(events)))
        except DiffersError:
            self.over = self.differs = True
            self._opening.error = OTHERWISE
            return b""

    def _one(self, event: bytes) -> bytes:
        told = self._told
        if told.repeating:
            event = told.leave_out(event, may_abort=self._may_abort())
        return told.tell(event) if event else b""


class RepeatingCompletionStream(_Repeating, CompletionStream):
    """A chat, or a completion."""

    __slots__ = ("_told",)

    def __init__(self, sequences: int, told: Told, **options: Any) -> None:
        super().__init__(sequences, **options)
        self._told = told


class RepeatingTokenStream(_Repeating, TokenStream):
    """An answer of token ids."""

    __slots__ = ("_told",)

    def __init__(self, sequences: int, told: Told, **options: Any) -> None:
        super().__init__(sequences, **options)
        self._told = told


class RepeatingNamedEventStream(_Repeating, NamedEventStream):
    """A message, or a response."""

    __slots__ = ("_told",)

    def __init__(self, told: Told, **options: Any) -> None:
        super().__init__(**options)
        self._told = told
