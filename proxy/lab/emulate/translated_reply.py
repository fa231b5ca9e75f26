"""A reply that gets the chat API's answer and sends that of another API."""

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.lab.emulate.api_error import compact
from balanceroute.proxy.lab.emulate.malformed import malformed_write
from balanceroute.proxy.wire.sse import EventScanner, event_data

if TYPE_CHECKING:
    from balanceroute.proxy.lab.emulate.faults import MalformedStream
    from balanceroute.proxy.wire.messages import Headers
    from balanceroute.proxy.wire.reply import Reply

_MAX_EVENT_BYTES = 64 << 20


class TranslatedReply:
    """A reply that gets the chat API's answer, and sends another one.

    What is no such answer (an injected fault) is forwarded unchanged.

    Attributes:
        reply: The one that is sent.
    """

    def __init__(self, reply: "Reply") -> None:
        self.reply = reply
        self._put: Callable[[bytes], None] = reply.write
        self._scanner = EventScanner(max_event_bytes=_MAX_EVENT_BYTES)

    closed = property(lambda self: self.reply.closed)
    started = property(lambda self: self.reply.started)
    paused = property(lambda self: self.reply.paused)

    @property
    def on_closed(self) -> Callable[[], None] | None:
        """Called once if the client leaves before the answer is complete."""
        return self.reply.on_closed

    @on_closed.setter
    def on_closed(self, called: Callable[[], None] | None) -> None:
        self.reply.on_closed = called

    def spoil(self, kind: "MalformedStream") -> None:
        """Write malformed events from now on."""
        self._put = malformed_write(kind, self.reply.write)

    def translated(self, status: int, body: bytes) -> bytes:
        """Return a whole answer's body."""
        try:
            return compact(self._whole(status, json.loads(body)))
        except (ValueError, KeyError, TypeError):
            return body

    def send(self, status: int, headers: "Headers", body: bytes) -> None:
        """Send a whole answer."""
        self.reply.send(status, headers, self.translated(status, body))

    def start(self, status: int, headers: "Headers") -> None:
        """Begin a stream."""
        self.reply.start(status, headers)

    def write(self, data: bytes) -> None:
        """Translate a piece of a stream."""
        for event in self._scanner.feed(data):
            try:
                translated = list(self._events(event_data(event)))
            except (ValueError, KeyError, TypeError):
                translated = [event]
            for one in translated:
                self._put(one)

    def end(self) -> None:
        """End a stream."""
        self.reply.end()

    def abort(self) -> None:
        """Cut the answer."""
        self.reply.abort()

    def _whole(self, status: int, value: dict[str, Any]) -> object:
        """Return the body of a whole answer; raises ValueError, KeyError or TypeError for none."""
        raise NotImplementedError

    def _events(self, data: bytes) -> Iterator[bytes]:
        """Yield the events for the data of one; raises ValueError, KeyError or TypeError for none."""
        raise NotImplementedError


def named_event(kind: str, value: object) -> bytes:
    """Return an event of a stream whose events are named."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), compact(value))
