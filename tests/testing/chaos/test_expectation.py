"""What counts as the right answer."""

import json

import pytest

from balanceroute.proxy.testing.chaos.expectation import Expectation
from balanceroute.proxy.testing.chaos.requests import CHAT, ClientRequest
from balanceroute.proxy.wire.messages import Response

REQUEST = ClientRequest(0, CHAT, {"stream": True}, b"", "req-0")


def stream(*texts: str, finish: str) -> bytes:
    """Return a stream that says texts, and ends."""
    said = [({"content": text}, None) for text in texts]
    choices = [
        {"index": 0, "delta": delta, "finish_reason": reason}
        for delta, reason in [*said, ({}, finish)]
    ]
    return b"".join(b"data: %b\n\n" % json.dumps({"choices": [one]}).encode() for one in choices)


@pytest.mark.parametrize(
    ("texts", "finish", "sooner"),
    [
        (("a", "b"), "stop", True),
        (("ab",), "stop", True),
        ((), "stop", True),
        (("a", "c"), "stop", False),
        (("a", "b", "c", "d"), "stop", False),
        (("a", "b"), "length", False),
    ],
)
def test_a_stream_that_stops_sooner_says_a_beginning(
    texts: tuple[str, ...], finish: str, *, sooner: bool
) -> None:
    right = Response(200, [], stream("a", "b", "c", finish="length"))
    assert Expectation(REQUEST, right).stops_sooner(stream(*texts, finish=finish)) is sooner
