"""What agents ask: drawn requests to /v1/messages and /v1/responses, and what two answers must agree on."""

import json
import random
from collections.abc import Mapping
from typing import Any

from answers import EMPTY_CALL

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
# Arguments that a grammar makes of random weights end by themselves.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
_WORDS = (
    *("import", "class", "return", "yield", "lambda", "with", "open(path)", "except ValueError:"),
    *("def read(self):", "for line in file:", "naïve", "数据", "Straße", 'say "so"', "back\\slash"),
)
# Texts of a long prompt; the context of the tiny model has 2,048 tokens.
_LONG = 8
# Without `strict` a grammar leaves the arguments free, and random weights make no object of them.
_MESSAGES_TOOL = {
    "name": "get_weather", "description": "The weather.", "input_schema": SCHEMA, "strict": True,
}  # fmt: skip
_TOOL = {
    "type": "function", "name": "get_weather", "description": "The weather.", "parameters": SCHEMA,
    "strict": True,
}  # fmt: skip
# As Claude Code sends it; vLLM leaves it out.
_BILLING = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0"}
# What differs between two right answers to one request, and what has another meaning on a decode rank.
_OWN = (
    "id", "item_id", "call_id", "signature", "created_at", "sequence_number", "logprob",
    "kv_transfer_params", "input_tokens_details", "cache_creation_input_tokens",
    "cache_read_input_tokens",
)  # fmt: skip
# Half a character, which a text may end with. A stream tells it if its last token comes with the end.
_HALF = "\ufffd"
_ARGUMENTS = ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta")
_NOTHING = ("", {"type": "input_json_delta", "partial_json": ""})


def draw_messages(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a body for /v1/messages; its prompt begins as no other does."""
    text = _text(rng, number)
    user: dict[str, Any] = {"role": "user", "content": text}
    body: dict[str, Any] = {"model": "tiny", "max_tokens": rng.randrange(1, 40), "temperature": 0}
    kinds: list[dict[str, Any]] = [
        {},
        {"system": "Be brief."},
        {
            "system": [
                _BILLING,
                {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}},
            ]
        },
        {"messages": _messages_turns(text), "tools": [_MESSAGES_TOOL]},
        {"tools": [_MESSAGES_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 200},
        {"tools": [_MESSAGES_TOOL], "tool_choice": {"type": "none"}},
        {
            "tools": [_MESSAGES_TOOL, _MESSAGES_TOOL | {"name": "second"}],
            "tool_choice": {
                "type": "tool",
                "name": "get_weather",
                "disable_parallel_tool_use": True,
            },
            "max_tokens": 200,
        },
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 200},
        {"stop_sequences": ["e", "never said"]},
        {"messages": [user | {"content": " ".join(_text(rng, number) for _ in range(_LONG))}]},
        {"thinking": {"type": "adaptive"}, "metadata": {"user_id": "somebody"}, "max_tokens": 80},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}, "top_k": 1},
    ]
    return {"messages": [user]} | body | kinds[number % len(kinds)] | _stream(number, len(kinds))


def draw_responses(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a body for /v1/responses; its prompt begins as no other does."""
    text = _text(rng, number)
    said = [{"type": "input_text", "text": text}]
    item: dict[str, Any] = {"type": "message", "role": "user", "content": said}
    body: dict[str, Any] = {
        "model": "tiny",
        "max_output_tokens": rng.randrange(1, 40),
        "temperature": 0,
    }
    begun = {"type": "message", "role": "assistant", "status": "incomplete"}
    schema = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}
    hosted = [_TOOL, {"type": "web_search"}]
    space = {"type": "namespace", "name": "home", "description": "All.", "tools": [_TOOL]}
    custom = {"type": "custom", "name": "edit", "description": "Edits a file."}
    codex = {"store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a"}
    kinds: list[dict[str, Any]] = [
        {},
        {"instructions": "Be brief.", "input": [item]},
        {"input": _items(item), "tools": hosted, "tool_choice": "auto"},
        {"tools": hosted, "tool_choice": "required", "max_output_tokens": 200},
        {
            "tools": hosted,
            "tool_choice": {"type": "function", "name": "get_weather"},
            "max_output_tokens": 200,
        },
        {"tools": [space], "tool_choice": "required", "max_output_tokens": 200},
        {"tools": [custom], "tool_choice": "required", "max_output_tokens": 30},
        {"text": {"format": schema}, "max_output_tokens": 200},
        {"stop": ["e", "never said"]},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"temperature": 0.8, "seed": number, "top_p": 0.9},
        {"input": [item, begun | {"content": [{"type": "output_text", "text": "It is"}]}]},
        codex | {"reasoning": {"effort": "low", "summary": "auto"}, "parallel_tool_calls": False},
        {"input": " ".join(_text(rng, number) for _ in range(_LONG))},
    ]
    return {"input": text} | body | kinds[number % len(kinds)] | _stream(number, len(kinds))


def long_prompt(path: str, number: int, words: int) -> dict[str, Any]:
    """Return a body with a prompt of so many words, to be answered with a few tokens."""
    text = f"{number} " + " ".join(f"w{i}" for i in range(words))
    if path == RESPONSES:
        return {"model": "tiny", "input": text, "max_output_tokens": 4, "temperature": 0}
    messages = [{"role": "user", "content": text}]
    return {"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0}


def with_image(path: str, image: str) -> dict[str, Any]:
    """Return a body with an image, a PNG in base64."""
    if path == RESPONSES:
        part = {"type": "input_image", "image_url": f"data:image/png;base64,{image}"}
        said = [{"type": "message", "role": "user", "content": [part]}]
        return {"model": "tiny", "input": said, "max_output_tokens": 4}
    source = {"type": "base64", "media_type": "image/png", "data": image}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    return {"model": "tiny", "messages": messages, "max_tokens": 4}


def told(answer: str, *, stream: bool) -> list[Any]:
    """Return what an answer tells, in order, without what two right ones differ in.

    Pieces of one text are joined: a server that lags puts several tokens into one event. If the last token
    of a call comes together with the end, vLLM 0.32 adds `{}` to its arguments (`EMPTY_CALL`).

    Raises:
        AssertionError: It is an error, or a stream that is cut or misnames its events.
    """
    if not stream:
        return [_ended(_plain(json.loads(answer)))]
    events: list[dict[str, Any]] = []
    for text in filter(None, answer.split("\n\n")):
        name, _, data = text.partition("\ndata: ")
        event: dict[str, Any] = json.loads(data)
        assert name == f"event: {event['type']}", text[:200]
        assert event["type"] != "error", f"the stream says {event}"
        _join(events, _plain(event))
    last = events[-1]["type"] if events else "nothing"
    assert last in ("message_stop", "response.completed"), f"the stream ends with {last}"
    return [event for event in map(_ended, events) if event.get("delta") not in _NOTHING]


def _ended(value: Any) -> Any:
    """Return a joined event, or an answer, without what vLLM may add to the end of a text."""
    if isinstance(value, str):
        return value.rstrip(_HALF)
    if isinstance(value, list):
        return [_ended(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    said = {name: _ended(one) for name, one in value.items()}
    names = ["arguments", "input", "partial_json"]
    if said.get("type") in _ARGUMENTS:
        names.append("delta")
    for name in names:
        if isinstance(said.get(name), str):
            said[name] = said[name].removesuffix(EMPTY_CALL)
    return said


def _join(events: list[dict[str, Any]], event: dict[str, Any]) -> None:
    """Add an event, to the one before if both are pieces of one text."""
    delta, before = event.get("delta"), events[-1] if events else {}
    if before.get("type") == event["type"] and isinstance(delta, str):
        before["delta"] += delta
        if "logprobs" in event:
            before["logprobs"] += event["logprobs"]
        return
    if isinstance(delta, dict) and before.get("type") == event["type"] == "content_block_delta":
        known = before["delta"]
        if known["type"] == delta["type"] and before["index"] == event["index"]:
            for member in delta.keys() - {"type"}:
                known[member] += delta[member]
            return
    events.append(event)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        said = {name: _plain(one) for name, one in value.items() if name not in _OWN}
        if "output_tokens" in value:  # What was cached is told beside the rest of the prompt.
            names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
            said["input_tokens"] = sum(value.get(name) or 0 for name in names)
        return said
    if not isinstance(value, list):
        return value
    # Of half a character vLLM tells log-probabilities only if its other half is in the same event.
    told = (one for one in value if not isinstance(one, Mapping) or one.get("token") != "")
    return [_plain(one) for one in told]


def _text(rng: random.Random, number: int) -> str:
    words = (rng.choice(_WORDS) for _ in range(rng.randrange(1, 30)))
    return f"{number} {rng.getrandbits(32)} {' '.join(words)}"


def _stream(number: int, kinds: int) -> dict[str, Any]:
    return {"stream": True} if number // kinds % 2 else {}


def _messages_turns(text: str) -> list[dict[str, Any]]:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "0"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1"}
    return [
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, call]},
        {
            "role": "user",
            "content": [
                result | {"content": [{"type": "text", "text": "Rain."}]},
                {"type": "text", "text": "And then?"},
            ],
        },
    ]


def _items(first: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"name": "get_weather", "arguments": '{"city": "Oslo"}', "call_id": "call_1"}
    said = [{"type": "output_text", "text": "Rain."}]
    return [
        {"type": "message", "role": "developer", "content": "Be brief."},
        first,
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "function_call"} | call,
        {"type": "function_call_output", "call_id": "call_1", "output": "Rain."},
        {"type": "message", "role": "assistant", "content": said},
        {"type": "message", "role": "user", "content": "And then?"},
    ]
