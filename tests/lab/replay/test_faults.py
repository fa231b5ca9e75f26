"""Failures: their kinds, and messages that stay readable."""

import pytest

from balanceroute.proxy.lab.replay.figures import (
    FaultCount,
    ReplayFault,
    count_faults,
    from_status,
    from_wire,
)
from balanceroute.proxy.wire.messages import WireError, WireFault


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no room", "code": 503}}', "no room"),
        (b'{"error": "no room"}', '"no room"'),
        (b'{"detail": "Not Found"}', '{"detail": "Not Found"}'),
        (b"Bad\r\n  Gateway", "Bad Gateway"),
        (b"", ""),
        (b"\xff", "\ufffd"),
        (10_000 * b"[", 199 * "[" + "\u2026"),
        (500 * b"a", 199 * "a" + "\u2026"),
    ],
)
def test_an_answer_other_than_200_is_told_by_its_body(body: bytes, message: str) -> None:
    assert from_status(503, body) == ReplayFault("http 503", message)


@pytest.mark.parametrize("kind", list(WireFault))
def test_every_fault_of_the_wire_has_a_kind(kind: WireFault) -> None:
    fault = from_wire(WireError(kind, "what and where", sent=True, answered=False))
    assert fault.message == "what and where"
    # A reused connection that the server had closed is reset, like any other.
    name = WireFault.RESET.name if kind is WireFault.STALE else kind.name
    assert fault.kind == name.lower().replace("_", " ")


def test_kinds_are_counted_the_most_frequent_first() -> None:
    faults = [ReplayFault("a", "1"), ReplayFault("b", "2"), ReplayFault("b", "3")]
    assert count_faults(faults) == [FaultCount("b", 2, "2"), FaultCount("a", 1, "1")]
