"""What a client says on its control stream beyond what aioquic reads: priorities (RFC 9218 section 7.2).

It also keeps frames short that are read as a whole.
"""

from aioquic.h3.connection import ErrorCode, FrameType, StreamType
from aioquic.quic.connection import stream_is_unidirectional
from aioquic.quic.events import StreamDataReceived

from balanceroute.proxy.core.errors import BalanceRouteError

_PRIORITY_UPDATE = 0xF0700
# Of a frame that is read as a whole.
_MOST_BYTES = 4096
_WHOLE = frozenset({FrameType.SETTINGS, FrameType.MAX_PUSH_ID, _PRIORITY_UPDATE})


class ControlError(BalanceRouteError):
    """What ends a connection, with HTTP/3's code for it."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class ControlFrames:
    """Reads the control stream of one connection."""

    def __init__(self) -> None:
        self._control: int | None = None
        self._others: set[int] = set()
        # The first bytes of streams whose type is not known yet.
        self._begun: dict[int, bytes] = {}
        self._buffer = b""
        self._skip = 0

    def feed(self, event: StreamDataReceived) -> list[tuple[int, bytes]]:
        """Take what came on a stream; return the streams and the values of new priorities.

        Raises:
            ControlError: A frame is too long or malformed.
        """
        number, data = event.stream_id, event.data
        if not stream_is_unidirectional(number) or number in self._others:
            if event.end_stream:
                self._others.discard(number)
            return []
        if number != self._control:
            data = self._begun.pop(number, b"") + data
            kind = _varint(data)
            if kind is None:
                if not event.end_stream:
                    self._begun[number] = data
                return []
            if kind[0] != StreamType.CONTROL or self._control is not None:
                if not event.end_stream:
                    self._others.add(number)
                return []
            self._control, data = number, data[kind[1] :]
        return self._frames(data)

    def forget(self, number: int) -> None:
        """Note that a stream was reset."""
        self._others.discard(number)
        self._begun.pop(number, None)

    def _frames(self, data: bytes) -> list[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        data = self._buffer + data[skipped:]
        while (kind := _varint(data)) is not None:
            length = _varint(data[kind[1] :])
            if length is None:
                break
            begin = kind[1] + length[1]
            end = begin + length[0]
            if kind[0] not in _WHOLE:
                self._skip = max(0, end - len(data))
                data = data[end:]
                continue
            if length[0] > _MOST_BYTES:
                raise ControlError(ErrorCode.H3_EXCESSIVE_LOAD, "a control frame is too long")
            if end > len(data):
                break
            if kind[0] == _PRIORITY_UPDATE:
                found.append(_priority(data[begin:end]))
            data = data[end:]
        self._buffer = data
        return found


def _varint(data: bytes) -> tuple[int, int] | None:
    """Return the number at the beginning, and how many bytes it has; None if it is not complete."""
    if not data:
        return None
    size = 1 << (data[0] >> 6)  # RFC 9000 section 16.
    if len(data) < size:
        return None
    return int.from_bytes(data[:size]) & ((1 << (8 * size - 2)) - 1), size


def _priority(payload: bytes) -> tuple[int, bytes]:
    element = _varint(payload)
    if element is None:
        raise ControlError(ErrorCode.H3_FRAME_ERROR, "a PRIORITY_UPDATE names no stream")
    if element[0] % 4:
        raise ControlError(ErrorCode.H3_ID_ERROR, "a PRIORITY_UPDATE names no request")
    return element[0], payload[element[1] :]
