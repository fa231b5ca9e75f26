"""The native parser takes what the readers in Python would take, byte for byte; see `differential.py`."""

import ctypes
import random
from collections import Counter

import pytest
from tests.native import needs_native
from tests.pump.differential import HEAD, RECORDED, Lender, Receiver, compare, load

pytestmark = needs_native
CASES = 700
PLAIN = {"sequences": 1, "counts": None, "cached": None, "text": False, "ids": False}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return load()


def test_streams_are_the_same_with_the_parser_and_without(library: ctypes.CDLL) -> None:
    events: Counter[str] = Counter()
    reasons: Counter[int] = Counter()
    # The last ones break off behind the answer, and have a list of ids without an end.
    for seed in (*range(CASES), 30_090_983, 50_035_844):
        lender = compare(library, seed)
        events[lender.kind] += lender.events
        reasons += lender.reasons
    assert len(events) == 3 * 4 + 2
    assert min(events.values()) > 0
    assert min(reasons[reason] for reason in (0, 1, 2)) > CASES / 50


@pytest.mark.parametrize(("kind", "events"), RECORDED[::3])
def test_a_real_stream_is_the_same_wherever_it_is_cut(
    library: ctypes.CDLL, kind: str, events: list[bytes]
) -> None:
    options = PLAIN | {"kind": kind, "sequences": 1 + (b'"index":1' in b"".join(events))}
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    body, begins = b"".join([*chunks, b"0\r\n\r\n"]), len(b"".join(chunks[:4]))
    for at in range(begins + 1, len(body), 3):
        alone, lender = Receiver(options), Lender(library, options, random.Random(at))
        for piece in (HEAD, body[:begins], body[begins:at], body[at:]):
            alone.feed(piece)
            lender.feed(piece)
        alone.end()
        lender.end()
        assert alone.state() == lender.state()
        assert lender.lent
