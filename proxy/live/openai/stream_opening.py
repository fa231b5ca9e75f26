"""The beginning of a stream: events that say nothing, held, and a first event that is an error.

The first event that goes to the client commits the answer. So one without data, for example, waits for the
first that says something, and if that is an error, neither is sent, and the request may be tried
elsewhere. So does what opens an answer: vLLM names the role of a chat, and begins a message, before it tells
that the request has failed, and a response before it has tried. Comments that come before all of
them are no events, and go to the client at once.
"""

from balanceroute.proxy.wire.sse import event_data

# Comments of many minutes; an engine that sends more of them says nothing by that.
_MOST_HELD_BYTES = 65_536
# What opens an answer may repeat what the client sent; beyond this it is not held.
_MOST_OPENING_BYTES = 4 << 20


class StreamOpening:
    """Decides what may be the first of a stream.

    Args:
        resumes: Whether the client's stream began on an earlier binding: then an error is the
            client's, whenever it comes, and comments are left out until something is said.

    Attributes:
        begun: Whether anything was the first.
        error: The first event, if it is an error and not the client's.
        waits: Whether what opens the answer waits, though the engine has begun with it.
    """

    __slots__ = ("_held", "_opening_room", "_room", "begun", "error", "resumes", "waits")

    def __init__(self, *, resumes: bool) -> None:
        self.resumes = resumes
        self.error = b""
        self.begun = False
        self._held: list[bytes] = []
        self._room = _MOST_HELD_BYTES
        self._opening_room = _MOST_OPENING_BYTES
        self.waits = False

    def begin(self, event: bytes) -> bytes:
        """Return an event with what was held before it; empty stays empty."""
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
        """Return what is held, as nothing has come behind it for a while."""
        self.begun, self.waits = True, False
        return b"".join(self._held)

    def pass_empty(self, event: bytes) -> bytes:
        """Return an event that says nothing, or nothing readable; empty if it is held or left out."""
        if self.begun:
            return event
        self._room -= len(event)
        # What nobody can read may have been text, and is judged by who compares what comes again.
        tells = bool(event_data(event))
        if self._room < 0:
            return event if tells else b""
        if tells or not self.resumes:
            self._held.append(event)
        return b""

    def pass_error(self, event: bytes) -> bytes:
        """Return an error event; empty if nothing came before it, so that it is not the client's."""
        if self.begun or self.resumes:
            return event
        self.error = event
        return b""
