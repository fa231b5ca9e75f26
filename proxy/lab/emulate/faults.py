"""Faults that an emulated engine shows on request."""

import asyncio
import gzip
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert, to_builtins

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import Headers


class Frozen(Enum):
    """The behaviour of the other ranks while an engine's own do nothing.

    Its server answers all the same: an engine's core is another process.
    """

    ALONE = "alone"  # They go on.
    BARRIER = "barrier"  # They wait for it, so none makes tokens.


class AfterPull(Enum):
    """A fault of a request between the pull of its KV cache and its first token.

    The head of a stream was sent by then, but no byte of any other answer. The prefiller's blocks are
    free and may hold another prompt.
    """

    RESET = "reset"  # The connection is reset; the engine continues and takes new ones.
    ERROR = "error"  # A stream's first event is an error; another answer is a 500.
    DEATH = "death"  # The engine dies.
    SILENCE = "silence"


class MalformedStream(Enum):
    """A fault of the events of a stream. Some are unusual, but valid."""

    BAD_JSON = "bad_json"
    NUL = "nul"
    NO_DATA = "no_data"  # Lines without `data:`.
    CRLF = "crlf"
    CR = "cr"
    MIXED_ENDS = "mixed_ends"
    COMMENTS = "comments"
    FIELDS = "fields"  # event:, id: and retry: lines.
    BOM = "bom"
    BYTES = "bytes"  # One byte at a time.
    JOINED = "joined"  # Many events in one piece.
    HUGE = "huge"  # A comment of 20 MiB within the first event.
    USAGE_FIRST = "usage_first"  # Usage before the choices.
    NO_LAST_BLANK = "no_last_blank"  # The last event lacks its blank line.


class ErrorForm(Enum):
    """How errors are written, other than by vLLM's Python frontend."""

    WORDS = "words"  # A word for a code, as by its Rust frontend.
    DIGITS = "digits"  # The code as a text.
    NO_CODE = "no_code"
    FLAT = "flat"  # As by SGLang, and by vLLM before 0.10.
    TYPED = "typed"  # As by Anthropic.


class MalformedAnswer(Enum):
    """A fault of an answer that is not streamed."""

    NOT_JSON = "not_json"
    TRUNCATED = "truncated"  # Half of the body, then the end of the connection.
    CUT_JSON = "cut_json"  # Half of the JSON, framed as the whole body.
    GZIP = "gzip"  # Compressed, without `Accept-Encoding`.
    TRICKLE = "trickle"  # A byte every `trickle_s`.
    ENDLESS = "endless"  # White space behind it, without end.


class MalformedScrape(Enum):
    """A fault of /metrics."""

    GARBAGE = "garbage"
    EMPTY = "empty"
    NAN = "nan"
    NEGATIVE = "negative"
    INFINITE = "infinite"
    HUGE = "huge"  # 20 MiB.
    STATUS_500 = "status_500"
    IDLE = "idle"  # Claims that nothing runs, waits or fills the cache.


Share = Annotated[float, Meta(ge=0, le=1)]
Time = Annotated[float, Meta(ge=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=10**9)]
SomeTime = Annotated[float, Meta(gt=0, le=1e9)]


class Faults(Struct, frozen=True, forbid_unknown_fields=True):
    """The faults of an engine. Probabilities are per request, drawn on arrival."""

    status_400: Share = 0.0  # Probability of an error with this status; likewise the next four.
    status_413: Share = 0.0
    status_429: Share = 0.0
    status_500: Share = 0.0
    status_503: Share = 0.0
    retry_after_s: Count = 1  # `Retry-After` of the 429 and 503.
    error_form: ErrorForm | None = None  # How errors are written; None for as vLLM does.
    # Whether refusals have the status 200: of a stream they are its first event.
    errors_in_200: bool = False
    reset_before_headers: Share = 0.0  # Probability of a reset instead of an answer.
    hang: bool = False  # Requests are accepted and never answered.
    refuse: bool = False  # Connections are refused; answers in progress continue.
    unhealthy: bool = False  # GET /health answers 503.
    # The engine is stopping: it aborts requests in progress, and new ones at once.
    stopping: bool = False
    frozen: Frozen | None = None  # A decode engine's ranks do nothing more; None for they work.
    delay_s: Time = 0.0  # Emulated time that a request waits before it is processed.
    # The connection is reset after so many tokens of a choice; with 0 after the headers. An answer
    # that ends sooner has no fault. Likewise the next four.
    reset_after_tokens: Count | None = None
    # The stream ends properly, but without a finish reason or `[DONE]`.
    end_after_tokens: Count | None = None
    # No further token is emitted, and the slot stays taken.
    stall_after_tokens: Count | None = None
    error_event_after_tokens: Count | None = None  # The engine fails as vLLM does.
    recomputed_after_tokens: Count | None = None  # The choice ends with `stop_reason` "recomputed".
    lose_end: bool = False  # Streams are reset behind their last token: no usage, no `[DONE]`.
    # Loop time between two comments in streams, however little else comes; None for none.
    keep_alive_s: SomeTime | None = None
    # Probability that the first token ends the text, whatever `min_tokens` says.
    eos_first: Share = 0.0
    drop_kv_params: Share = 0.0  # Probability that a prefill answer has no `kv_transfer_params`.
    alien_kv_params: Share = 0.0  # Probability that it has those of another request.
    after_pull: AfterPull | None = None  # A fault of requests whose KV cache has been pulled.
    after_pull_s: Time = 0.0  # Emulated time from the pull to that.
    lease_s: SomeTime | None = None  # Lease of prefilled KV caches, instead of the fleet's setting.
    malformed: MalformedStream | None = None  # The fault of streams.
    malformed_answer: MalformedAnswer | None = None  # The fault of other answers.
    trickle_s: Time = 0.1  # Loop time between two bytes of a trickling answer.
    slow_scrape_s: Time = 0.0  # Loop time until GET /metrics answers.
    malformed_scrape: MalformedScrape | None = None  # The fault of /metrics.

    @property
    def by_token(self) -> bool:
        return any(getattr(self, name) is not None for name in TOKEN_FAULTS)

    def changed(self, changes: Mapping[str, Any]) -> "Faults":
        """Return these faults with some changed, by field, as parsed from JSON.

        Raises:
            ConfigError: A field is unknown, or a value is invalid.
        """
        wanted = to_builtins(self) | to_builtins(dict(changes))
        try:
            return convert(wanted, Faults)
        except ValidationError as error:
            reason, _, place = str(error).partition(" - at `$.")
            raise ConfigError(f"{place.strip('`')}: {reason}" if place else reason) from None


STATUSES = (400, 413, 429, 500, 503)
TOKEN_FAULTS = (
    "reset_after_tokens",
    "end_after_tokens",
    "stall_after_tokens",
    "error_event_after_tokens",
    "recomputed_after_tokens",
)


# The output of a faulty engine.

_HUGE_BYTES = 20 << 20
_JOINED_BYTES = 20_000
_NOTHING = b" " * 65_536
_NOTHING_S = 0.005
_DONE = b"data: [DONE]"
_USAGE_LAST = re.compile(rb',("choices":\[.*\]),("usage":\{(?:[^{}]|\{[^{}]*\})*\})(?=[,}])')

Write = Callable[[bytes], None]


def malformed_write(kind: MalformedStream, write: Write) -> Write:
    match kind:
        case MalformedStream.BYTES:

            def broken(event: bytes) -> None:
                for i in range(len(event)):
                    write(event[i : i + 1])

        case MalformedStream.JOINED:
            waiting = b""

            def broken(event: bytes) -> None:
                nonlocal waiting
                waiting += event
                if len(waiting) >= _JOINED_BYTES or event.startswith(_DONE):
                    write(waiting)
                    waiting = b""

        case MalformedStream.BOM | MalformedStream.HUGE:
            mark = b"\xef\xbb\xbf"
            if kind is MalformedStream.HUGE:
                mark = b":" + b"x" * _HUGE_BYTES + b"\n"

            def broken(event: bytes) -> None:
                nonlocal mark
                write(mark + event)
                mark = b""

        case _:

            def broken(event: bytes) -> None:
                write(_spoilt(kind, event))

    def write_event(event: bytes) -> None:
        if event:  # Some tokens have no visible text.
            broken(event)

    return write_event


def send_malformed(reply: Reply, headers: Headers, body: bytes, faults: Faults) -> None:
    match faults.malformed_answer:
        case MalformedAnswer.NOT_JSON:
            reply.send(200, headers, b"<html><body>Welcome to nginx!</body></html>")
        case MalformedAnswer.CUT_JSON:
            reply.send(200, headers, body[: len(body) // 2])
        case MalformedAnswer.TRUNCATED:
            reply.start(200, headers)
            reply.write(body[: len(body) // 2])
            reply.abort()
        case MalformedAnswer.GZIP:
            packed = gzip.compress(body, mtime=0)
            reply.send(200, [*headers, (b"content-encoding", b"gzip")], packed)
        case MalformedAnswer.TRICKLE:
            reply.start(200, headers)
            _trickle(reply, body, 0, faults.trickle_s)
        case MalformedAnswer.ENDLESS:
            reply.start(200, headers)
            reply.write(body)
            _go_on(reply)
        case None:
            reply.send(200, headers, body)


def _trickle(reply: Reply, body: bytes, begin: int, gap_s: float) -> None:
    if reply.closed:
        return
    if begin == len(body):
        reply.end()
        return
    reply.write(body[begin : begin + 1])
    asyncio.get_running_loop().call_later(gap_s, _trickle, reply, body, begin + 1, gap_s)


def keep_alive(reply: Reply, gap_s: float) -> None:
    """Write a comment into a stream again and again, as vLLM does on request while nothing comes."""
    if not reply.closed:
        asyncio.get_running_loop().call_later(gap_s, _say_nothing, reply, gap_s)


def _say_nothing(reply: Reply, gap_s: float) -> None:
    if not reply.closed:
        reply.write(b": keep-alive\n\n")
        keep_alive(reply, gap_s)


def _go_on(reply: Reply) -> None:
    if not reply.closed:
        reply.write(_NOTHING)
        asyncio.get_running_loop().call_later(_NOTHING_S, _go_on, reply)


def _spoilt(kind: MalformedStream, event: bytes) -> bytes:
    inside = event.removesuffix(b"\n\n")
    match kind:
        case MalformedStream.BAD_JSON:
            return inside[: len(inside) * 2 // 3] + b"\n\n"
        case MalformedStream.NUL:
            return inside.replace(b'":', b'"\0:', 1) + b"\n\n"
        case MalformedStream.NO_DATA:
            return event.removeprefix(b"data: ")
        case MalformedStream.CRLF:
            return inside + b"\r\n\r\n"
        case MalformedStream.CR:
            return inside + b"\r\r"
        case MalformedStream.MIXED_ENDS:
            return inside + b"\r\n\n"
        case MalformedStream.COMMENTS:
            return b": ping\n\n" + event
        case MalformedStream.USAGE_FIRST:
            return _USAGE_LAST.sub(rb",\2,\1", event)
        case MalformedStream.NO_LAST_BLANK if event.startswith(_DONE):
            return inside
        case MalformedStream.FIELDS:
            return b"event: message\nid: 7\nretry: 1000\n" + event
        case _:
            return event
