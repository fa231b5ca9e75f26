"""/v1/responses is the chat API behind a translation, in the shapes of vLLM 0.32."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tests.lab.emulate.lab import CHAT, Lab, emulated

from balanceroute.proxy.wire.sse import event_data

PATH = "/v1/responses"
ASKED = {"model": "tiny", "max_output_tokens": 12, "input": "hello there", "temperature": 0.0}
USER = {"role": "user", "content": "hello there"}
CHATTED = {"model": "tiny", "max_tokens": 12, "messages": [USER], "temperature": 0.0}
CITY = {"type": "object", "properties": {"city": {}}}
TOOL = {"type": "function", "name": "get_weather", "parameters": CITY}
PLAIN = [
    "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
    "output_text.done", "content_part.done", "output_item.done", "completed",
]  # fmt: skip


def types(exchanged: Any) -> list[str]:
    """Return the types of a stream's events, each said twice, numbered without a gap."""
    found = []
    for number, event in enumerate(exchanged.events):
        value = json.loads(event_data(event))
        assert event.startswith(f"event: {value['type']}\n".encode())
        assert value["sequence_number"] == number
        found.append(value["type"].removeprefix("response."))
    return found


def final(exchanged: Any) -> Any:
    """Return the response that a stream or a whole answer ends with."""
    return exchanged.chunks[-1]["response"] if exchanged.events else exchanged.json


def without_ids(value: Any) -> Any:
    """Return a response without what differs between two answers to one request."""
    match value:
        case dict():
            return {
                name: without_ids(one)
                for name, one in value.items()
                if name not in ("id", "item_id", "created_at", "call_id", "kv_transfer_params")
            }
        case list():
            return [without_ids(one) for one in value]
        case _:
            return value


@emulated()
async def test_a_response_says_what_the_chat_says(lab: Lab) -> None:
    chat = await lab.post("decode/0", CHAT, CHATTED)
    whole = (await lab.post("decode/0", PATH, ASKED)).json
    (item,) = whole["output"]
    assert [part["text"] for part in item["content"]] == [chat.text]
    assert (whole["status"], whole["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    usage = chat.json["usage"]
    assert whole["usage"]["input_tokens"] == usage["prompt_tokens"]
    assert whole["usage"]["output_tokens"] == usage["completion_tokens"] == 12
    assert whole["max_output_tokens"] == 12


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 200},
        {"max_output_tokens": 40, "stop": ["t1"]},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ],
)
@emulated()
async def test_a_stream_ends_with_what_a_whole_answer_says(
    lab: Lab, changes: dict[str, Any]
) -> None:
    whole = await lab.post("decode/0", PATH, ASKED | changes)
    streamed = await lab.post("decode/0", PATH, ASKED | changes | {"stream": True})
    assert without_ids(final(streamed)) == without_ids(final(whole))
    said = [one for one in streamed.chunks if one["type"].endswith("done")]
    assert [one["item"] for one in said if "item" in one] == final(streamed)["output"]


@emulated()
async def test_a_stream_begins_before_there_is_a_token(lab: Lab) -> None:
    streamed = await lab.post("decode/0", PATH, ASKED | {"stream": True})
    assert list(dict.fromkeys(types(streamed))) == PLAIN
    times = streamed.times_s
    assert times[0] == times[1] < times[2]
    assert streamed.chunks[0]["response"]["status"] == "in_progress"
    deltas = [one["delta"] for one in streamed.chunks if "delta" in one]
    assert "".join(deltas) == final(streamed)["output"][0]["content"][0]["text"]


@pytest.mark.parametrize(
    "tool",
    [
        TOOL,
        {"type": "custom", "name": "edit"},
        {"type": "namespace", "name": "space", "tools": [TOOL]},
    ],
)
@emulated()
async def test_a_forced_tool_is_used(lab: Lab, tool: Mapping[str, Any]) -> None:
    # Of the second one the model is shown nothing.
    tools = [tool, {"type": "web_search"}]
    asked = ASKED | {"tools": tools, "tool_choice": "required", "max_output_tokens": 200}
    streamed = await lab.post("decode/0", PATH, asked | {"stream": True})
    (item,) = final(streamed)["output"]
    deltas = "".join(one["delta"] for one in streamed.chunks if "delta" in one)
    if tool["type"] == "custom":
        assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "edit", deltas)
        assert types(streamed)[-3:-1] == ["custom_tool_call_input.done", "output_item.done"]
    else:
        space = tool["name"] if "tools" in tool else None
        assert (item["type"], item["name"]) == ("function_call", "get_weather")
        assert (item["namespace"], item["arguments"]) == (space, deltas)
        assert "city" in json.loads(deltas)
    whole = await lab.post("decode/0", PATH, asked)
    assert without_ids(whole.json["output"]) == without_ids([item])


@emulated(reasoning_parser=True)
async def test_reasoning_is_an_item_of_its_own(lab: Lab) -> None:
    asked = ASKED | {"max_output_tokens": 40, "ignore_eos": True}
    streamed = await lab.post("decode/0", PATH, asked | {"stream": True})
    thought, said = final(streamed)["output"]
    assert (thought["type"], said["type"]) == ("reasoning", "message")
    assert thought["content"][0]["text"]
    assert final(streamed)["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    hidden = await lab.post("decode/0", PATH, asked | {"include_reasoning": False})
    assert [item["type"] for item in hidden.json["output"]] == ["message"]


@pytest.mark.parametrize("stream", [False, True])
@emulated()
async def test_a_decoder_continues_a_prefill(lab: Lab, stream: bool) -> None:
    alone = await lab.post("decode/1", PATH, ASKED | {"stream": stream})
    kv = {"do_remote_decode": True, "do_remote_prefill": False}
    first = {**ASKED, "max_output_tokens": 1, "kv_transfer_params": kv}
    prefilled = await lab.post("prefill/0", PATH, first)
    asked = {**ASKED, "kv_transfer_params": prefilled.json["kv_transfer_params"]}
    answer = await lab.post("decode/0", PATH, asked | {"stream": stream})
    assert lab.leases() == {"pulled": 1}
    usage = final(answer)["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1
    assert final(answer)["output"][0]["content"] == final(alone)["output"][0]["content"]


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"max_output_tokens": 0}, 400, "max_tokens must be at least 1"),
        ({"max_output_tokens": 5000}, 400, "max_output_tokens=5000 cannot be greater"),
        ({"stream": "often"}, 400, "valid boolean"),
        ({"input": 7}, 400, "valid string"),
        ({"input": [{"type": "item_reference"}]}, 400, "Unsupported input item type"),
        ({"model": "other"}, 404, "does not exist"),
        ({"temperature": -1.0}, 400, "temperature must be non-negative"),
        ({"background": True}, 400, "does not support `store=True`"),
        ({"background": True, "store": False}, 400, "`store` is true"),
        ({"previous_response_id": "resp_1"}, 404, "Response with id 'resp_1' not found."),
        ({"tools": [{"type": "nothing"}]}, 400, "known tool"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, 400, "gramm"),
        ({"tool_choice": "required"}, 400, "must be specified with 'tools'"),
    ],
)
@emulated()
async def test_a_refusal_has_the_chats_shape(
    lab: Lab, changes: dict[str, Any], status: int, words: str
) -> None:
    refused = await lab.post("decode/0", PATH, ASKED | changes)
    assert refused.status == status
    assert refused.json["error"]["code"] == status
    assert words in refused.json["error"]["message"]


@emulated()
async def test_a_failing_stream_is_cut_and_a_whole_answer_an_error(lab: Lab) -> None:
    lab.fleet.faults.set("decode/0", error_event_after_tokens=3)
    streamed = await lab.post("decode/0", PATH, ASKED | {"stream": True})
    assert types(streamed)[-1] == "output_text.delta"
    assert streamed.error is not None
    whole = await lab.post("decode/0", PATH, ASKED)
    assert (whole.status, whole.json["error"]["code"]) == (500, 500)


@pytest.mark.parametrize(
    "fault",
    [{"recomputed_after_tokens": 3}, {"stopping": True}],
    ids=lambda fault: next(iter(fault)),
)
@emulated()
async def test_an_answer_given_up_says_that_it_is_complete(lab: Lab, fault: dict[str, Any]) -> None:
    lab.fleet.faults.set("decode/0", **fault)
    streamed = await lab.post("decode/0", PATH, ASKED | {"stream": True})
    assert types(streamed)[-1] == "completed"
    assert final(streamed)["status"] == "completed"
    assert final(streamed)["usage"]["output_tokens"] < 12


@emulated()
async def test_an_unfinished_item_is_continued(lab: Lab) -> None:
    whole = (await lab.post("decode/0", PATH, ASKED)).json
    text = whole["output"][0]["content"][0]["text"]
    words = text.split()
    begun = {"type": "output_text", "text": " ".join(words[:5])}
    part = {"type": "message", "role": "assistant", "status": "incomplete", "content": [begun]}
    asked = ASKED | {"input": [USER, part], "max_output_tokens": 7}
    rest = (await lab.post("decode/0", PATH, asked)).json
    assert rest["output"][0]["content"][0]["text"].split() == words[5:]


@emulated()
async def test_the_ranks_header_is_not_read(lab: Lab) -> None:
    answer = await lab.post("decode/0", PATH, ASKED, {"X-data-parallel-rank": "7"})
    assert answer.status == 200
