"""The client's side of one request: the answer as it goes out, and what slows or ends it."""

from typing import TYPE_CHECKING, Protocol

from balanceroute.proxy.live.openai.answer import (
    STREAM_HEADERS,
    headers_of_refusal,
    passable_headers,
    stream_headers,
)
from balanceroute.proxy.live.openai.errors import (
    JSON_HEADERS,
    NEVER_AGAIN,
    answer_event,
    error_body,
    error_event,
    error_words,
)
from balanceroute.proxy.live.openai.shape import Api

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import RequestRecord
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers


# Signs of life: Anthropic's clients know events of that name; all others pass over comments.
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_COMMENT = b": keep-alive\n\n"


class AnswerSource(Protocol):
    """Where an answer comes from."""

    def pause(self) -> None:
        """Read no further: the client reads too slowly."""

    def resume(self) -> None:
        """Read on."""


class AnswerOwner(Protocol):
    """Who is told what the client does."""

    @property
    def held(self) -> AnswerSource:
        """Where the answer comes from at present."""

    def left(self) -> None:
        """Take note that the client is gone."""


class ClientAnswer:
    """One answer; it keeps the record's status.

    Attributes:
        is_paused: Whether the client reads too slowly at present.
        opened: Whether the client has something of the answer; a comment is nothing of it.
    """

    __slots__ = ("_heard_s", "_owner", "_record", "_written", "is_paused", "opened", "reply")

    def __init__(self, owner: AnswerOwner, reply: "Reply", record: "RequestRecord") -> None:
        self.reply = reply
        self.opened = False
        self.is_paused = False
        self._record = record
        self._written = reply.written
        self._heard_s = record.arrived_ns / 1e9  # When the client was first seen to have that much.
        self._owner: AnswerOwner | None = owner
        reply.on_closed = owner.left

    def open(self, status: int, headers: "Headers") -> None:
        """Begin a stream."""
        self.opened = True
        self._record.status = status
        self.reply.on_pause = self._pause
        self.reply.on_resume = self._resume
        self.reply.start(status, [*stream_headers(headers), self._name])

    def comment(self, headers: "Headers", data: bytes) -> None:
        """Send what is no part of the answer; the first begins the stream, whatever comes of it."""
        if self.opened:
            self.reply.write(data)
        elif not self.reply.closed:
            self._record.status = 200
            self.reply.on_pause = self._pause
            self.reply.on_resume = self._resume
            self.reply.comment([*stream_headers(headers), self._name], data, self._late)

    def keep_alive(self, now_s: float, silence_s: float) -> None:
        """Send a sign of life if the client of a stream has had nothing for so long."""
        if self.reply.written == self._written:
            if now_s < self._heard_s + silence_s or self.reply.paused:
                return
            messages = self._record.endpoint == Api.MESSAGES.value
            self.comment(STREAM_HEADERS, _PING if messages else _COMMENT)
        self._written, self._heard_s = self.reply.written, now_s

    def send(self, status: int, headers: "Headers", body: bytes) -> None:
        """Send a whole answer."""
        self._record.status = 200 if self.reply.commented else status
        self.reply.send(status, [*passable_headers(headers), self._name], body)

    def pass_on(self, status: int, headers: "Headers", body: bytes) -> str:
        """Send an engine's own refusal; return what it says."""
        words = error_words(body)
        self.send(status, headers_of_refusal(status, headers), body)
        return f"the engine answered {status}" + (f": {words}" if words else "")

    def fail(
        self,
        status: int,
        reason: str,
        *,
        retry_after_s: int | None = None,
        for_good: bool = False,
    ) -> None:
        """Send an error: as an answer, or at the end of a stream that then breaks off.

        `for_good` says that the client is not to try again.
        """
        if self.opened:
            self.reply.write(error_event(status, reason, endpoint=self._record.endpoint))
            self.reply.abort()
            return
        headers = list(JSON_HEADERS)
        if retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % retry_after_s))
        if for_good:
            headers.append(NEVER_AGAIN)
        self.send(status, headers, error_body(status, reason, endpoint=self._record.endpoint))

    def forget(self) -> None:
        """Listen to the client no more."""
        self.reply.on_closed = self.reply.on_pause = self.reply.on_resume = None
        self._owner = None  # Leave no cycle behind.

    def _pause(self) -> None:
        self.is_paused = True
        if self._owner is not None:
            self._owner.held.pause()

    def _resume(self) -> None:
        self.is_paused = False
        if self._owner is not None:
            self._owner.held.resume()

    def _late(self, status: int, body: bytes) -> bytes:
        return answer_event(status, body, error_words(body), endpoint=self._record.endpoint)

    @property
    def _name(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self._record.request_id.encode()
