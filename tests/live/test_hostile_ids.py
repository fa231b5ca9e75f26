"""Decode engines that tell odd ids and then break off: what goes on is right, or it ends with an error."""

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.test_early_tokens import prefilled
from tests.live.test_proxy_connectors import COMPLETIONS
from tests.support.site import Site, served

from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

PROMPT = [1, 2]
ASKED: dict[str, Any] = {"prompt": "a b", "temperature": 0, "stream": True, "max_tokens": 9}
TOTAL: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}


def token(text: str, ids: object, **more: object) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": None, "prompt_token_ids": None}
    return {"choices": [choice | {"token_ids": ids} | more]}


def first(text: str, ids: object, prompt: object = PROMPT) -> dict[str, Any]:
    return token(text, ids, prompt_token_ids=prompt)


def counted(event: dict[str, Any], tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": 2, "total_tokens": 2 + tokens, "completion_tokens": tokens}
    return event | {"usage": usage}


X, Y = first("x", [7]), token("y", [8])
ALL_OF_THEM = [1, 2, 7, 8, 9, 6]


@pytest.mark.parametrize(
    ("said", "goes_on"),
    [
        ([], "again"),  # Headers, and then nothing.
        ([first("x", [7])], [1, 2, 7]),
        ([first("x", [7]), token("y", [8])], [1, 2, 7, 8]),
        ([first("x", [7]), TOTAL, token("y", [8])], [1, 2, 7, 8]),  # The total comes too early.
        ([first("x", [7]), token("y", None)], None),
        ([first("x", [7]), token("y", ["8"])], None),
        ([first("x", [7]), token("y", [-8])], None),
        ([first("x", None)], None),
        # Of another request: what it says would go on behind another prompt.
        ([first("x", [7], prompt=[5, 6, 7])], None),
        ([first("x", [7], prompt=[5])], None),
        ([first("x", [7], prompt=[])], None),
        ([first("x", [7], prompt=None)], None),
        # The engine's own counts say how many ids there are.
        ([counted(X, 1), counted(Y, 2)], [1, 2, 7, 8]),
        (
            [counted(X, 1), counted(token("yy", [8, 9]), 3), counted(token("y", [6]), 4)],
            ALL_OF_THEM,
        ),
        (
            [counted(X, 1), counted(token("", [8]), 2)],
            [1, 2, 7],
        ),  # Without text it does not count yet.
        ([counted(X, 1), Y], [1, 2, 7, 8]),  # Not all of them are told.
        ([counted(X, 1), counted(Y, 3)], None),  # One was left out.
        ([counted(X, 1), counted(Y, 2), counted(Y, 2)], None),  # One came twice.
        ([counted(X, 1), counted(token("y", [8, 8]), 2)], None),
        ([counted(X, 2)], None),
        ([counted(X, 1), counted(token("", [8]), 3)], None),
    ],
    ids=str,
)
@served(flags={"resume": "exact"}, at_rest=False)
async def test_a_stream_goes_on_behind_its_own_ids_or_ends_with_an_error(
    site: Site, said: list[dict[str, Any]], goes_on: object
) -> None:
    asked: list[object] = []

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        if engine.startswith("prefill"):
            prefilled(reply)
            return
        asked.append(json.loads(request.body)["prompt"])
        again = len(asked) > 1
        reply.start(200, [(b"content-type", b"text/event-stream")])
        rest = [first("z", [9], prompt=None), token("!", [10], finish_reason="stop")]
        for event in rest if again else said:
            data = json.dumps(event, separators=(",", ":"))
            reply.write(b"data: " + data.encode() + b"\n\n")
        if again:
            reply.write(b"data: [DONE]\n\n")
            reply.end()
        else:
            reply.abort()

    site.handlers[COMPLETIONS.encode()] = answer
    exchange = await site.post(COMPLETIONS, ASKED)
    text = "".join(event["choices"][0]["text"] for event in said if event["choices"])
    assert exchange.text == text + ("" if goes_on is None else "z!")
    assert exchange.done is (goes_on is not None)
    assert asked == ["a b"] + ([] if goes_on is None else [goes_on if said else "a b"])
    (record,) = await site.ended()
    assert (record.outcome is Outcome.OK) is (goes_on is not None)
    assert record.resumes == (goes_on not in (None, "again"))
