"""What counts as the right answer."""

import json

import pytest
from tests.support.chaos.expectation import Expectation
from tests.support.chaos.requests import CHAT, MESSAGES, RESPONSES, ClientRequest

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


def message(*texts: str, signature: str = "a" * 32, reason: str | None = "end_turn") -> list[bytes]:
    """Return the events of a message that thinks, and says texts."""
    thought: dict[str, object] = {"type": "signature_delta", "signature": signature}
    told: list[dict[str, object]] = [
        {"type": "message_start", "message": {"id": "chatcmpl-req-0", "content": []}},
        {"type": "content_block_start", "content_block": {"type": "thinking"}, "index": 0},
        {"type": "content_block_delta", "delta": thought, "index": 0},
    ]
    for text in texts:
        delta = {"type": "text_delta", "text": text}
        told.append({"type": "content_block_delta", "delta": delta, "index": 1})
    end = {"stop_reason": reason, "stop_sequence": None}
    told.append({"type": "message_delta", "delta": end, "usage": {"output_tokens": 3}})
    return named([*told, {"type": "message_stop"}])


def response(*texts: str, drawn: str = "0" * 16, status: str = "completed") -> list[bytes]:
    """Return the events of a response that calls a function with arguments in pieces."""
    call = {"type": "function_call", "id": f"fc_{drawn}", "name": "f", "arguments": "".join(texts)}
    begun: dict[str, object] = {"type": "response.output_item.added"}
    begun["item"] = call | {"arguments": ""}
    told = [begun]
    for text in texts:
        piece = {"delta": text, "item_id": f"fc_{drawn}", "sequence_number": len(told)}
        told.append({"type": "response.function_call_arguments.delta"} | piece)
    whole = {"id": f"resp_{drawn}", "created_at": 7, "status": status, "output": [call]}
    usage = {"usage": {"output_tokens": 3}}
    end = {"response": whole | usage, "sequence_number": len(told)}
    return named([*told, {"type": "response.completed"} | end])


def named(told: list[dict[str, object]]) -> list[bytes]:
    dumped = ((one["type"], json.dumps(one, separators=(",", ":"))) for one in told)
    return [f"event: {kind}\ndata: {data}\n\n".encode() for kind, data in dumped]


def expected(path: str, events: list[bytes], *, reworded: bool = False) -> Expectation:
    request = ClientRequest(0, path, {"stream": True}, b"", "req-0")
    return Expectation(request, Response(200, [], b"".join(events)), reworded=reworded)


@pytest.mark.parametrize(
    ("path", "right", "same"),
    [
        (MESSAGES, message("a", "b"), message("a", "b", signature="b" * 32)),
        (RESPONSES, response("a", "b"), response("a", "b", drawn="1" * 16)),
    ],
    ids=["messages", "responses"],
)
def test_an_agents_stream_may_differ_in_what_is_drawn_for_it(
    path: str, right: list[bytes], same: list[bytes]
) -> None:
    wanted = expected(path, right)
    assert not wanted.differs(b"".join(same))
    assert not wanted.strays(same[:-1])
    assert "missing" in wanted.differs(b"".join(same[:-1]))


@pytest.mark.parametrize("reworded", [False, True])
@pytest.mark.parametrize(
    ("path", "right", "wrong"),
    [
        (MESSAGES, message("a", "b"), message("a", "c")),
        (MESSAGES, message("a", "b"), message("a", "b", reason="max_tokens")),
        (RESPONSES, response("a", "b"), response("a", "c")),
        (RESPONSES, response("a", "b"), response("a", "b", status="incomplete")),
    ],
)
def test_a_wrong_letter_or_end_of_an_agents_stream_is_seen(
    path: str, right: list[bytes], wrong: list[bytes], *, reworded: bool
) -> None:
    wanted = expected(path, right, reworded=reworded)
    assert wanted.differs(b"".join(wrong))
    assert not wanted.strays(right[:4] if path == MESSAGES else right[:2])


@pytest.mark.parametrize(
    ("path", "right", "pieces"),
    [
        (MESSAGES, message("a", "b"), message("ab")),
        (RESPONSES, response("a", "b"), response("ab")),
    ],
)
def test_the_pieces_of_a_reworded_stream_do_not_count(
    path: str, right: list[bytes], pieces: list[bytes]
) -> None:
    assert expected(path, right).differs(b"".join(pieces))
    assert not expected(path, right, reworded=True).differs(b"".join(pieces))


@pytest.mark.parametrize(
    ("path", "right", "aborted", "strays"),
    [
        (MESSAGES, message("a", "b"), message("a", reason=None), False),
        (MESSAGES, message("a", "b"), message("c", reason=None), True),
        (RESPONSES, response("a", "b"), response("a"), False),
    ],
)
def test_an_agents_answer_that_was_aborted_is_a_beginning(
    path: str, right: list[bytes], aborted: list[bytes], *, strays: bool
) -> None:
    assert bool(expected(path, right).strays_until_aborted(b"".join(aborted))) is strays


@pytest.mark.parametrize("reworded", [False, True])
@pytest.mark.parametrize(
    ("texts", "finish", "aborts", "strays"),
    [
        (("a", "b"), "abort", True, False),
        ((), "abort", True, False),
        (("a", "c"), "abort", True, True),
        (("a", "b"), "abort", False, True),
        (("a", "b"), "stop", True, True),
    ],
)
def test_a_choice_may_end_before_its_stream_breaks_where_that_was_ordered(
    texts: tuple[str, ...], finish: str, *, aborts: bool, strays: bool, reworded: bool
) -> None:
    right = Response(200, [], stream("a", "b", "c", finish="length"))
    judged = Expectation(REQUEST, right, aborts=aborts, reworded=reworded)
    told = stream(*texts, finish=finish).replace(b": ", b":").replace(b"data:", b"data: ")
    assert bool(judged.strays([event + b"\n\n" for event in told.split(b"\n\n")[:-1]])) is strays
