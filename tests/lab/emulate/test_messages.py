"""/v1/messages is the chat API behind a translation, in the shapes of vLLM 0.32."""

import json
from typing import Any

import pytest
from tests.lab.emulate.lab import CHAT, Lab, emulated

from balanceroute.proxy.wire.sse import event_data

PATH = "/v1/messages"
USER = {"role": "user", "content": "hello there"}
ASKED = {"model": "tiny", "max_tokens": 12, "messages": [USER], "temperature": 0.0}
TOOL = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {}}}}


def types(exchanged: Any) -> list[str]:
    """Return the types of a stream's events, each said twice."""
    found = []
    for event in exchanged.events:
        value = json.loads(event_data(event))
        assert event.startswith(f"event: {value['type']}\n".encode())
        found.append(value["type"])
    return found


@emulated()
async def test_a_message_says_what_the_chat_says(lab: Lab) -> None:
    chat = await lab.post("decode/0", CHAT, ASKED)
    whole = (await lab.post("decode/0", PATH, ASKED)).json
    assert whole["content"] == [{"type": "text", "text": chat.text}]
    assert whole["stop_reason"] == "max_tokens"
    usage = chat.json["usage"]
    assert whole["usage"] == {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
    }


@emulated()
async def test_a_streamed_message_has_anthropics_events(lab: Lab) -> None:
    chat = await lab.post("decode/0", CHAT, ASKED)
    streamed = await lab.post("decode/0", PATH, ASKED | {"stream": True})
    assert list(dict.fromkeys(types(streamed))) == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    deltas = [one["delta"] for one in streamed.chunks if one["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == chat.text
    (ending,) = [one for one in streamed.chunks if one["type"] == "message_delta"]
    assert ending["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert ending["usage"]["output_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
@emulated()
async def test_a_forced_tool_is_used(lab: Lab, stream: bool) -> None:
    asked = ASKED | {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 200}
    answered = await lab.post("decode/0", PATH, asked | {"stream": stream})
    if stream:
        blocks = [one for one in answered.chunks if one["type"] == "content_block_start"]
        deltas = [one for one in answered.chunks if one["type"] == "content_block_delta"]
        block = blocks[-1]["content_block"]
        said = json.loads("".join(one["delta"]["partial_json"] for one in deltas))
        reason = answered.chunks[-2]["delta"]["stop_reason"]
    else:
        block, reason = answered.json["content"][-1], answered.json["stop_reason"]
        said = block["input"]
    assert (block["type"], block["name"], reason) == ("tool_use", "get_weather", "tool_use")
    assert "city" in said


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"max_tokens": 0}, 400, "max_tokens must be positive"),
        ({"stream": "often"}, 400, "valid boolean"),
        ({"max_tokens": "many"}, 400, "valid integer"),
        ({"messages": "hello"}, 400, "valid list"),
        ({"model": "other"}, 404, "does not exist"),
        ({"model": ""}, 400, "Model is required"),
        ({"temperature": -1.0}, 400, "temperature must be non-negative"),
    ],
)
@emulated()
async def test_a_refusal_has_anthropics_shape_unless_the_schema_refuses(
    lab: Lab, changes: dict[str, Any], status: int, words: str
) -> None:
    refused = await lab.post("decode/0", PATH, ASKED | changes)
    assert refused.status == status
    if "validation error" in refused.json["error"]["message"]:
        assert refused.json["error"]["code"] == status
    else:
        assert refused.json["type"] == "error"
    assert words in refused.json["error"]["message"]


@emulated()
async def test_a_failing_stream_ends_with_an_error_event(lab: Lab) -> None:
    lab.fleet.faults.set("decode/0", error_event_after_tokens=3)
    streamed = await lab.post("decode/0", PATH, ASKED | {"stream": True})
    assert types(streamed)[-1] == "error"


@emulated()
async def test_tokens_are_counted(lab: Lab) -> None:
    chat = await lab.post("decode/0", CHAT, ASKED)
    counted = await lab.post(
        "decode/0", f"{PATH}/count_tokens", {"model": "tiny", "messages": [USER]}
    )
    tokens = chat.json["usage"]["prompt_tokens"]
    assert counted.json == {
        "input_tokens": tokens,
        "context_management": {"original_input_tokens": tokens},
    }
    for nameless in ({}, {"model": ""}):
        body = {"messages": [USER]} | nameless
        assert (await lab.post("decode/0", f"{PATH}/count_tokens", body)).status == 400


@emulated()
async def test_a_chat_may_name_no_model(lab: Lab) -> None:
    for nameless in ({}, {"model": None}, {"model": ""}):
        body = {"messages": [USER], "max_tokens": 1} | nameless
        assert (await lab.post("decode/0", CHAT, body)).status == 200
