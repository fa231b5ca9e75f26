"""What one side has to say in a turn of its event loop, sent together at the turn's end."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

_Message = TypeVar("_Message")


class Outbox(Generic[_Message]):
    """Collects messages to the other side.

    Args:
        call_soon: The loop's.
        write: Sends messages as one frame.
        first: Returns what is to stand before all others of a frame.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        write: Callable[[Sequence[_Message]], None],
        first: Callable[[], list[_Message]] = list,
    ) -> None:
        self._call_soon = call_soon
        self._write = write
        self._first = first
        self._messages: list[_Message] = []
        self._is_due = False
        self._closed = False

    def send(self, message: _Message) -> None:
        """Send a message with this turn's others."""
        self._messages.append(message)
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._flush)

    def flush_soon(self) -> None:
        """See that a frame is sent at the end of this turn, if there is anything to say."""
        if not self._is_due:
            self._is_due = True
            self._call_soon(self._flush)

    def close(self) -> None:
        """Send nothing any more: the other side is gone."""
        self._closed = True
        self._messages.clear()

    def _flush(self) -> None:
        self._is_due = False
        if self._closed:
            return
        messages, self._messages = self._messages, []
        first = self._first()
        if first:
            messages = first + messages
        if messages:
            self._write(messages)
