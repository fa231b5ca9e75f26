"""Bodies that a real engine was sent and that it answered."""

from collections.abc import Callable
from pathlib import Path

import pytest

from balanceroute.proxy.wire.chunked import ChunkedDecoder

TRANSCRIPTS = Path(__file__).parent / "transcripts"


@pytest.fixture(scope="session")
def body_of() -> Callable[[str], bytes]:
    """Return the body of a transcript, without its framing."""

    def read(name: str) -> bytes:
        head, _, body = (TRANSCRIPTS / name).read_bytes().partition(b"\r\n\r\n")
        return ChunkedDecoder().feed(body) if b"transfer-encoding: chunked" in head else body

    return read
