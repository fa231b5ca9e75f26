"""What an engine with vLLM's Rust frontend writes, by the frontend's sources."""

import json
from typing import Any

import pytest
from tests.lab.emulate.lab import Lab, emulated

from balanceroute.proxy.lab.emulate import Frontend

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "t1"}], "max_tokens": 2},
    COMPLETIONS: {"prompt": "t1 t2", "max_tokens": 2},
    GENERATE: {"token_ids": [1, 2], "sampling_params": {"max_tokens": 2, "ignore_eos": True}},
}
EACH: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def said(path: str, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "stream": stream, "ignore_eos": True} | BODIES[path] | more


def choices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for event in events for choice in event["choices"]]


def nulls(value: object) -> bool:
    if isinstance(value, dict):
        return any(one is None or nulls(one) for one in value.values())
    return isinstance(value, list) and any(map(nulls, value))


@pytest.mark.parametrize("path", BODIES)
@emulated(model="tiny", frontend=Frontend.RUST)
async def test_a_stream_leaves_out_what_is_null(lab: Lab, path: str) -> None:
    answer = await lab.post("decode/0", path, said(path))
    data = [event.removeprefix(b"data: ").strip() for event in answer.events]
    assert data[-1] == b"[DONE]"
    events = [json.loads(one) for one in data[:-1]]
    assert not any(map(nulls, events))
    told = [set(choice) for choice in choices(events)]
    text = "delta" if path == CHAT else "text"
    if path == GENERATE:
        assert told == [{"index", "token_ids"}, {"index", "token_ids", "finish_reason"}]
        return
    assert told[-1] == {"index", text, "finish_reason"}
    assert not choices(events)[-1][text]
    assert told[:-1] == [{"index", text}] * (3 if path == CHAT else 2)


@emulated(model="tiny", frontend=Frontend.RUST)
async def test_the_prompt_of_a_completion_has_an_event_of_its_own(lab: Lab) -> None:
    answer = await lab.post(
        "decode/0", COMPLETIONS, said(COMPLETIONS, return_token_ids=True, **EACH)
    )
    data = [event.removeprefix(b"data: ").strip() for event in answer.events]
    events = [json.loads(one) for one in data[:-1]]
    first, *_, total = events
    assert set(first["choices"][0]) == {"index", "text", "prompt_token_ids"}
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 2, 2, 2]
    assert total["choices"] == []
    assert list(total["usage"])[-1] == "prompt_tokens_details"


@pytest.mark.parametrize(
    ("changes", "status", "kind", "code"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "invalid_request_error"),
        ({"model": "other"}, 404, "invalid_request_error", "model_not_found"),
    ],
)
@emulated(model="tiny", frontend=Frontend.RUST)
async def test_its_errors_have_words_for_codes(
    lab: Lab, changes: dict[str, Any], status: int, kind: str, code: str
) -> None:
    answer = await lab.post("decode/0", COMPLETIONS, said(COMPLETIONS, **changes))
    assert answer.status == status
    assert (answer.json["error"]["type"], answer.json["error"]["code"]) == (kind, code)


@emulated(model="tiny", frontend=Frontend.RUST)
async def test_a_whole_answer_to_token_ids_has_no_usage(lab: Lab) -> None:
    answer = await lab.post("decode/0", GENERATE, said(GENERATE, stream=False))
    assert "usage" not in answer.json
    whole = await lab.post("decode/0", CHAT, said(CHAT, stream=False))
    assert whole.json["usage"]["completion_tokens"] == 2
