"""What one side has to say in a turn of its event loop, sent together at the turn's end.

What nobody waits for may wait a moment for what has to go anyway: each frame wakes the other side up.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_Message = TypeVar("_Message")

LINGER_S = 0.001
"""So long a message waits at most that may wait."""


class Outbox(Generic[_Message]):
    """Collects messages to the other side.

    Args:
        call_soon: The loop's.
        call_later: The loop's.
        write: Sends messages as one frame.
        first: Returns what is to stand before all others of a frame.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        call_later: Callable[[float, Callable[[], None]], object],
        write: Callable[[Sequence[_Message]], None],
        first: Callable[[], list[_Message]] = list,
    ) -> None:
        self._call_soon = call_soon
        self._call_later = call_later
        self._write = write
        self._first = first
        self._messages: list[_Message] = []
        self._is_due = False
        self._lingers = False  # Whether the timer runs.
        self._closed = False

    def send(self, message: _Message) -> None:
        """Send a message with this turn's others, and with those that wait."""
        self._messages.append(message)
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._flush)

    def send_late(self, message: _Message) -> None:
        """Send a message, in its order, with the next frame; within `LINGER_S` in any case."""
        self._messages.append(message)
        # It is not called off by a frame before its time: what has come since goes earlier then.
        if not (self._is_due or self._lingers):
            self._lingers = True
            self._call_later(LINGER_S, self._end_linger)

    def flush_soon(self) -> None:
        """See that a frame is sent at the end of this turn, if there is anything to say."""
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._flush)

    def flush(self) -> None:
        """Send what there is to say at once."""
        if self._closed:
            return
        messages, self._messages = self._messages, []
        first = self._first()
        if first:
            messages = first + messages
        if messages:
            self._write(messages)

    def close(self) -> list[_Message]:
        """Send nothing any more: the other side is gone. Return what was not sent."""
        self._closed = True
        unsent, self._messages = self._messages, []
        return unsent

    def _flush(self) -> None:
        self._is_due = False
        self.flush()

    def _end_linger(self) -> None:
        self._lingers = False
        self.flush()
