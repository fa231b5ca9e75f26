"""A leg whose answer is taken whole."""

import sys

import pytest

from balanceroute.proxy.live.request.relay import BufferedLeg
from balanceroute.proxy.wire.messages import Headers, WireError, WireFault

HEADERS = [(b"content-type", b"application/json")]


class Listener:
    """Notes what it is told."""

    def __init__(self, max_bytes: int) -> None:
        self.answers: list[tuple[int, Headers, bytes]] = []
        self.errors: list[WireError] = []
        self.leg = BufferedLeg(self._answered, self.errors.append, max_bytes=max_bytes)
        self.leg.on_head(200, HEADERS)

    def _answered(self, status: int, headers: Headers, body: bytes) -> None:
        self.answers.append((status, headers, body))


@pytest.mark.parametrize("pieces", [[], [b"{}"], [b"{", b"", b"}", b"  "]])
def test_the_pieces_of_an_answer_are_joined(pieces: list[bytes]) -> None:
    listener = Listener(max_bytes=4)
    for piece in pieces:
        listener.leg.on_data(piece)
    listener.leg.on_end()
    assert listener.answers == [(200, HEADERS, b"".join(pieces))]
    assert not listener.errors


def test_an_answer_past_the_limit_is_an_error_and_nothing_of_it_is_kept() -> None:
    listener = Listener(max_bytes=4)
    for piece in (b"12", b"34"):
        listener.leg.on_data(piece)
    assert not listener.errors
    listener.leg.on_data(b"5")
    assert [error.kind for error in listener.errors] == [WireFault.TOO_LARGE]
    assert "longer than 4 bytes" in str(listener.errors[0])
    # Whoever hears of it aborts the exchange; until then nothing more is told.
    listener.leg.on_data(b"6")
    listener.leg.on_end()
    assert not listener.answers
    assert len(listener.errors) == 1
    assert listener.errors[0].sent
    assert listener.errors[0].answered


def test_an_endless_answer_does_not_fill_the_memory() -> None:
    listener = Listener(max_bytes=4)
    piece = bytes(5)
    held = sys.getrefcount(piece)
    for _ in range(3):
        listener.leg.on_data(piece)
    assert sys.getrefcount(piece) == held


def test_a_failure_is_handed_over() -> None:
    listener = Listener(max_bytes=4)
    listener.leg.on_data(b"12")
    error = WireError(WireFault.RESET, "gone", sent=True, answered=True)
    listener.leg.on_error(error)
    assert listener.errors == [error]
    assert not listener.answers
