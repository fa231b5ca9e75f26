"""The client's side of one request: the answer as it goes out, and what slows or ends it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from balanceroute.proxy.live.openai.answer import (
    STREAM_HEADERS,
    dump_compact,
    ended_events,
    ended_token_events,
    headers_of_refusal,
    message_events,
    passable_headers,
    stream_headers,
    write_events,
)
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.errors import (
    JSON_HEADERS,
    NEVER_AGAIN,
    answer_event,
    error_body,
    error_event,
    error_words,
)
from balanceroute.proxy.live.openai.shape import Api, Shape, flag
from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import Headers

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.delivered import Delivered
    from balanceroute.proxy.live.request.early_token import EarlyToken


# Keep-alive data: Anthropic's clients know events named ping; all other clients skip comments.
_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
_COMMENT = b": keep-alive\n\n"


class ClientAnswer:
    """One answer; it keeps the record's status.

    Args:
        left: Called when the client is gone.
        slow: Called with whether the client reads too slowly, once that has changed.
    """

    __slots__ = ("_last_sent_s", "_record", "_slow", "_written", "is_paused", "opened", "reply")

    def __init__(
        self,
        reply: Reply,
        record: RequestRecord,
        *,
        left: Callable[[], None],
        slow: Callable[[bool], None],
    ) -> None:
        self.reply = reply
        # Whether the client has something of the answer; a comment is nothing of it.
        self.opened = False
        self.is_paused = False  # Whether the client reads too slowly at present.
        self._record = record
        self._written = reply.written
        self._last_sent_s = record.arrived_ns / 1e9  # When the proxy first saw `_written`.
        self._slow: Callable[[bool], None] | None = slow
        reply.on_closed = left

    def open(self, status: int, headers: Headers) -> None:
        self.opened = True
        self._record.status = status
        self.reply.on_pause = self._pause
        self.reply.on_resume = self._resume
        self.reply.start(status, [*stream_headers(headers), self._name])

    def comment(self, headers: Headers, data: bytes) -> None:
        """Send a comment, which is no part of the answer; the first begins the stream, which may fail yet."""
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
            if now_s < self._last_sent_s + silence_s or self.reply.paused:
                return
            messages = self._record.endpoint == Api.MESSAGES.value
            self.comment(STREAM_HEADERS, _PING if messages else _COMMENT)
        self._written, self._last_sent_s = self.reply.written, now_s

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        self._record.status = 200 if self.reply.commented else status
        self.reply.send(status, [*passable_headers(headers), self._name], body)

    def pass_on(self, status: int, headers: Headers, body: bytes) -> str:
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
        self.reply.on_closed = self.reply.on_pause = self.reply.on_resume = None
        self._slow = None  # Leave no cycle behind.

    def _pause(self) -> None:
        self.is_paused = True
        if self._slow is not None:
            self._slow(True)

    def _resume(self) -> None:
        self.is_paused = False
        if self._slow is not None:
            self._slow(False)

    def _late(self, status: int, body: bytes) -> bytes:
        return answer_event(status, body, error_words(body), endpoint=self._record.endpoint)

    @property
    def _name(self) -> tuple[bytes, bytes]:
        return b"x-request-id", self._record.request_id.encode()


class Emitted(Struct, eq=False):
    """All that the client has of an answer which its rank did not end; `Continued` goes on from it."""

    tokens: int = 0  # How many.
    # The first token, until a rank has said more than it; None if it waits for a rank.
    early: "EarlyToken | None" = None
    members: Mapping[str, object] = {}  # Of the client's body, those that change.
    # The request that continues from ids, in place of the client's; None if none does.
    continued: RequestBody | None = None
    # What the client has of an answer that is to begin again; None if none does.
    delivered: "Delivered | None" = None
    # When the client had something last, by the loop's clock; None if it has nothing.
    last_sent_s: float | None = None


# The answer of a prefiller that met a stop condition on its one token, as the client wants it.
#
# Nothing is left to decode then, and there is no KV cache to pull: the prefiller's answer is the
# answer. A client that asked for a stream gets the same events that a decode engine would have
# sent.


_PARAMS = "kv_transfer_params"


def answer_shortly(
    client: ClientAnswer, shape: Shape, body: RequestBody, message: Mapping[str, Any]
) -> None:
    """Send the prefiller's answer to the client, as a stream if it asked for one."""
    if shape.api is Api.MESSAGES:  # vLLM leaves out there what is null.
        message = {name: value for name, value in message.items() if name != _PARAMS}
        if not shape.stream:
            client.send(200, JSON_HEADERS, dump_compact(message))
            return
        client.open(200, STREAM_HEADERS)
        client.reply.write(message_events(message))
        client.reply.end()
        return
    if not shape.stream:
        client.send(200, JSON_HEADERS, short_answer_body(message))
        return
    options = body.values.get("stream_options")
    usage = isinstance(options, dict) and options.get("include_usage") is True
    client.open(200, STREAM_HEADERS)
    ids = flag(body.values.get("return_token_ids")) is True
    events = short_answer_events(shape.api, message, include_usage=usage, shows_ids=ids)
    client.reply.write(events)
    client.reply.end()


def short_answer_body(message: Mapping[str, Any]) -> bytes:
    """Return the prefiller's answer as that to a request that is not streamed."""
    return dump_compact({**message, _PARAMS: None})


def short_answer_events(
    api: Api, message: Mapping[str, Any], *, include_usage: bool, shows_ids: bool = False
) -> bytes:
    """Return the prefiller's answer as server-sent events; `shows_ids`: with its token ids."""
    if api is Api.GENERATE:
        events = ended_token_events(message, include_usage=include_usage)
    else:
        events = ended_events(api, message, include_usage=include_usage, shows_ids=shows_ids)
    return write_events(events) + b"data: [DONE]\n\n"
