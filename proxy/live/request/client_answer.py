"""The client's side of one request: the answer as it goes out, and what slows or ends it."""

from typing import TYPE_CHECKING, Protocol

from balanceroute.proxy.live.openai.answer import passable_headers, stream_headers
from balanceroute.proxy.live.openai.api_error import (
    JSON_HEADERS,
    NEVER_AGAIN,
    error_body,
    error_event,
)
from balanceroute.proxy.live.openai.engine_error import error_words, is_error
from balanceroute.proxy.live.openai.shape import Api

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import RequestRecord
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers

# Not every engine has these routes.
_OPTIONAL = frozenset({Api.RESPONSES, Api.MESSAGES, Api.GENERATE})


class Source(Protocol):
    """Where an answer comes from."""

    def pause(self) -> None:
        """Read no further: the client reads too slowly."""

    def resume(self) -> None:
        """Read on."""


class AnswerOwner(Protocol):
    """Who is told what the client does."""

    @property
    def held(self) -> Source:
        """Where the answer comes from at present."""

    def left(self) -> None:
        """Take note that the client is gone."""


class ClientAnswer:
    """One answer; it keeps the record's status.

    Attributes:
        is_paused: Whether the client reads too slowly at present.
    """

    __slots__ = ("_owner", "_record", "is_paused", "opened", "reply")

    def __init__(self, owner: AnswerOwner, reply: "Reply", record: "RequestRecord") -> None:
        self.reply = reply
        self.opened = False
        self.is_paused = False
        self._record = record
        self._owner: AnswerOwner | None = owner
        reply.on_closed = owner.left

    def open(self, status: int, headers: "Headers") -> None:
        """Begin a stream."""
        self.opened = True
        self._record.status = status
        self.reply.on_pause = self._pause
        self.reply.on_resume = self._resume
        self.reply.start(status, [*stream_headers(headers), self._name])

    def send(self, status: int, headers: "Headers", body: bytes) -> None:
        """Send a whole answer."""
        self._record.status = status
        self.reply.send(status, [*passable_headers(headers), self._name], body)

    def pass_on(self, api: Api, status: int, headers: "Headers", body: bytes) -> str:
        """Send an engine's own refusal; return what it says."""
        words = error_words(body)
        reason = f"the engine answered {status}" + (f": {words}" if words else "")
        if status == 404 and api in _OPTIONAL and not is_error(body):
            status, reason, headers = 501, f"no engine serves {api.value}", JSON_HEADERS
            body = error_body(status, reason, endpoint=self._record.endpoint)
        self.send(status, headers, body)
        return reason

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

    @property
    def _name(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self._record.request_id.encode()
