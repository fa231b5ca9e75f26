"""HTTP/3's frames and field sections: aioquic's, with limits, and errors that end one request alone."""

import re
from dataclasses import dataclass

import pylsqpack
from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import (
    FrameType,
    H3Connection,
    H3Stream,
    MessageError,
    Setting,
    encode_frame,
)
from aioquic.h3.events import H3Event
from aioquic.quic.connection import QuicConnection

from balanceroute.proxy.wire.http1.heads import (
    HOST,
    METHODS,
    OWN_FIELDS,
    RequestHead,
    encode_fields,
    length_of,
    unknown_method,
)
from balanceroute.proxy.wire.messages import (
    Headers,
    MalformedError,
    ServerLimits,
    UnsafeHeaderError,
)

# What either side's QPACK encoder may make the other one keep.
_TABLE_BYTES = 4096


@dataclass
class MalformedMessage(H3Event):
    """A message that violates RFC 9114; only its stream is at fault."""

    stream_id: int
    reason: str


class Framing(H3Connection):
    """The frames of one connection.

    No dynamic table is kept for what the peer sends: a table lets a few bytes stand for any number.

    Args:
        head_limit_bytes: The largest field section that is accepted.
    """

    def __init__(self, quic: QuicConnection, *, head_limit_bytes: int) -> None:
        self._head_limit_bytes = head_limit_bytes
        super().__init__(quic)

    def abandon(self, stream_id: int) -> None:
        """Read nothing more of a stream."""
        stream = self._stream.get(stream_id)
        if stream is not None:
            stream.buffer = b""
            stream.receiving_ended = True

    def release(self, stream_id: int) -> None:
        self._stream.pop(stream_id, None)

    def send_goaway(self, stream_id: int) -> None:
        """Tell the client that this request and later ones will not be served."""
        frame = encode_frame(FrameType.GOAWAY, encode_uint_var(stream_id))
        self._quic.send_stream_data(self.control_stream, frame)

    @property
    def control_stream(self) -> int:
        assert self._local_control_stream_id is not None
        return self._local_control_stream_id

    # In place of aioquic's own.

    def _init_connection(self) -> None:
        self._max_table_capacity = self._blocked_streams = 0
        self._decoder = pylsqpack.Decoder(0, 0)
        super()._init_connection()

    def _get_local_settings(self) -> dict[int, int]:
        return {
            Setting.QPACK_MAX_TABLE_CAPACITY: 0,
            Setting.QPACK_BLOCKED_STREAMS: 0,
            Setting.MAX_FIELD_SECTION_SIZE: self._head_limit_bytes,
        }

    def _validate_settings(self, settings: dict[int, int]) -> None:
        super()._validate_settings(settings)
        table = settings.get(Setting.QPACK_MAX_TABLE_CAPACITY, 0)
        settings[Setting.QPACK_MAX_TABLE_CAPACITY] = min(table, _TABLE_BYTES)

    def _receive_request_or_push_data(
        self, stream: H3Stream, data: bytes, stream_ended: bool
    ) -> list[H3Event]:
        try:
            return super()._receive_request_or_push_data(stream, data, stream_ended)
        except MessageError as error:
            stream.buffer = b""
            stream.receiving_ended = True
            return [MalformedMessage(stream.stream_id, error.reason_phrase)]


# The heads of HTTP/3's messages, as the heads of HTTP/1.1's that mean the same (RFC 9114 section
# 4).

# What each field counts for beside its bytes (RFC 9114 section 4.2.2).
_FIELD_BYTES = 32
_TARGET = re.compile(rb"/[\x21\x22\x24-\x7e]*+")
_SCHEMES = frozenset({b"https", b"http"})


def request_head(fields: Headers, limits: ServerLimits) -> RequestHead:
    """Return the head that a field section is.

    Args:
        fields: With the pseudo-header fields, which aioquic has checked: each once, and first.
        limits: What is accepted.

    Raises:
        MalformedError: It is no request, or beyond a limit; the error has the status to answer.
    """
    pseudo = {name: value for name, value in fields if name.startswith(b":")}
    headers = [field for field in fields if not field[0].startswith(b":")]
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    authority = pseudo.get(b":authority", b"")
    if len(target) > limits.target_limit_bytes:
        raise MalformedError("the request target is too long", 414)
    size = sum(len(name) + len(value) + _FIELD_BYTES for name, value in fields)
    if size > limits.header_limit_bytes:
        raise MalformedError("the request's head is too long", 431)
    if len(headers) > limits.header_limit:
        raise MalformedError("the request has too many headers", 431)
    protocol = pseudo.get(b":protocol", b"").lower()
    if method == b"CONNECT" and protocol == b"websocket":
        # Over HTTP/1.1 this is a GET with this header (RFC 9220). Its method stays, so that nobody answers
        # it with 200, which would open a tunnel.
        headers.append((b"upgrade", protocol))
    elif method not in METHODS:
        raise unknown_method(method)
    elif b":protocol" in pseudo:
        raise MalformedError("no other protocol is spoken over a request")
    if pseudo.get(b":scheme", b"").lower() not in _SCHEMES:
        raise MalformedError("the :scheme is missing, or neither https nor http")
    if not _TARGET.fullmatch(target) and (target, method) != (b"*", b"OPTIONS"):
        raise MalformedError("the request target is no absolute path")
    try:
        encode_fields(headers)
    except UnsafeHeaderError:
        raise MalformedError("a header is malformed") from None
    if not HOST.fullmatch(authority):
        raise MalformedError("the :authority is malformed")
    if any(value != authority for name, value in headers if name == b"host"):
        raise MalformedError("Host and :authority differ")
    headers = [field for field in headers if field[0] != b"host"]
    headers.append((b"host", authority))
    lengths = [value for name, value in headers if name == b"content-length"]
    expectations = [value.lower() for name, value in headers if name == b"expect"]
    if expectations not in ([], [b"100-continue"]):
        raise MalformedError("the only expectation served is 100-continue", 417)
    path, _, query = target.partition(b"?")
    return RequestHead(
        method,
        path,
        query,
        http_1_0=False,
        headers=headers,
        content_length=length_of(lengths) if lengths else None,
        chunked=False,
        keep_alive=True,
        expects_continue=bool(expectations),
    )


def sent_fields(headers: Headers) -> Headers:
    """Return headers to send, without those that frame a message of HTTP/1.1.

    Raises:
        UnsafeHeaderError: A name is no token, or a value has a control byte.
    """
    encode_fields(headers)
    return [(name, value.strip()) for name, value in headers if name not in OWN_FIELDS]
