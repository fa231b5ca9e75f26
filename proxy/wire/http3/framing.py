"""HTTP/3's frames: aioquic's, with limits, and errors that end one request alone."""

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

# The state that either side's QPACK encoder may make the other one keep.
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
