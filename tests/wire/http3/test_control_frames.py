"""The control stream: priorities in any pieces, and frames that are too long."""

import pytest

pytest.importorskip("aioquic", reason="needs the extra h3")

from aioquic.buffer import encode_uint_var
from aioquic.h3.connection import ErrorCode, encode_frame
from aioquic.quic.events import StreamDataReceived

from balanceroute.proxy.wire.http3.server import ControlError, ControlFrames

UPDATE = 0xF0700


def update(number: int, value: bytes) -> bytes:
    return encode_frame(UPDATE, encode_uint_var(number) + value)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1_000])
@pytest.mark.parametrize("kind", [b"\x00", b"\x40\x00"])
def test_priorities_are_found_in_any_pieces(size: int, kind: bytes) -> None:
    text = kind + encode_frame(4, b"\x01\x00") + update(8, b"u=1") + encode_frame(33, b"?" * 99)
    text += update(400, b"") + update(4, b"u=7, i")
    frames, found = ControlFrames(), []
    for start in range(0, len(text), size):
        found += frames.feed(StreamDataReceived(text[start : start + size], False, 2))
    assert found == [(8, b"u=1"), (400, b""), (4, b"u=7, i")]


def test_other_streams_have_none() -> None:
    frames = ControlFrames()
    for number, kind in ((2, b"\x02"), (6, b"\x03"), (10, b"\x21"), (0, b"\x00")):
        assert frames.feed(StreamDataReceived(kind + update(4, b"u=1"), False, number)) == []
        assert frames.feed(StreamDataReceived(update(4, b"u=1"), True, number)) == []


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (encode_uint_var(4) + encode_uint_var(5_000), ErrorCode.H3_EXCESSIVE_LOAD),
        (encode_uint_var(UPDATE) + encode_uint_var(1 << 40), ErrorCode.H3_EXCESSIVE_LOAD),
        (encode_frame(UPDATE, b""), ErrorCode.H3_FRAME_ERROR),
        (update(2, b"u=1"), ErrorCode.H3_ID_ERROR),
    ],
)
def test_what_cannot_be_is_an_error(text: bytes, code: ErrorCode) -> None:
    with pytest.raises(ControlError) as error:
        ControlFrames().feed(StreamDataReceived(b"\x00" + text, False, 2))
    assert error.value.code == code
