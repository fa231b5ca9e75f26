"""Frames of the relay protocol: a length, then one MessagePack array of messages.

A frame has what one side had to say in one turn of its event loop, in order.
"""

import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from msgspec import DecodeError, to_builtins
from msgspec.msgpack import Decoder, Encoder

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.processes.from_relay import FromRelay
from balanceroute.proxy.live.processes.to_relay import ToRelay

VERSION = 4
"""Of the protocol. Messages may get more fields at their end under the same version, never fewer."""

MAX_FRAME_BYTES = 64 << 20
"""Longer frames are refused: a length so large is no length."""

_LENGTH = struct.Struct("!I")
_LENGTH_BYTES = _LENGTH.size
_length_of = _LENGTH.pack
_encoded = Encoder().encode
_Message = TypeVar("_Message")
# The decoder's own error, and what it lets through: text that is no UTF-8, and nesting without end.
_NO_FRAME = (DecodeError, UnicodeDecodeError, RecursionError)


class FrameError(BalanceRouteError):
    """What came is no frame of the protocol. The connection is of no use any more."""


def encode(messages: Sequence[FromRelay | ToRelay]) -> bytes:
    """Return messages as one frame. Half a surrogate pair, which UTF-8 cannot have, becomes a `?`."""
    try:
        body = _encoded(messages)
    except UnicodeEncodeError:  # A client's JSON may have it: in the name of a model, say.
        body = _encoded(_without_surrogates(to_builtins(messages, builtin_types=(bytes,))))
    return _length_of(len(body)) + body


def _without_surrogates(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="replace").decode()
        case list() | tuple():
            return [_without_surrogates(item) for item in value]
        case dict():
            return {key: _without_surrogates(item) for key, item in value.items()}
        case _:
            return value


class FrameReader(Generic[_Message]):
    """Finds frames in what a connection brings, in pieces of any size; see `for_relay`."""

    def __init__(self, decoder: "Decoder[list[_Message]]") -> None:
        self._decoder = decoder
        self._data = bytearray()

    def feed(self, data: bytes) -> list[_Message]:
        """Return the messages of all frames that are whole now, in order.

        Raises:
            FrameError: A frame is too long, or is none of the protocol.
        """
        # Nearly always it is one whole frame.
        size = len(data) - _LENGTH_BYTES
        if int.from_bytes(data[:_LENGTH_BYTES]) == size and not self._data:
            return self._decode(memoryview(data)[_LENGTH_BYTES:])
        self._data += data
        messages: list[_Message] = []
        begin = 0
        while len(self._data) - begin >= _LENGTH_BYTES:
            body = begin + _LENGTH_BYTES
            (length,) = _LENGTH.unpack_from(self._data, begin)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length:,} bytes, at most {MAX_FRAME_BYTES:,}")
            if len(self._data) - body < length:
                break
            begin = body + length
            messages += self._decode(self._data[body:begin])
        del self._data[:begin]
        return messages

    def _decode(self, body: bytearray | memoryview) -> list[_Message]:
        try:
            return self._decoder.decode(body)
        except _NO_FRAME as error:
            message = f"a frame of {len(body):,} bytes is none of the protocol: {error}"
            raise FrameError(message) from None


def for_relay() -> FrameReader[ToRelay]:
    """Return a reader of what the scheduler process sends."""
    return FrameReader(Decoder(list[ToRelay]))


def for_scheduler() -> FrameReader[FromRelay]:
    """Return a reader of what a relay sends."""
    return FrameReader(Decoder(list[FromRelay]))
