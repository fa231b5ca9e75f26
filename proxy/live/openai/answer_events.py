"""A whole answer of one token, written as the events of a stream: vLLM's members, in vLLM's order."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from balanceroute.proxy.live.openai.shape import Api
from balanceroute.proxy.live.openai.usage import token_count

_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def events_head(api: Api, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all events of the answer begin with."""
    return {
        "id": message.get("id", ""),
        "object": "chat.completion.chunk" if api is Api.CHAT else "text_completion",
        "created": message.get("created", 0),
        "model": message.get("model", ""),
    }


def token_events(
    api: Api, message: Mapping[str, Any], *, shows_ids: bool = False
) -> list[dict[str, Any]]:
    """Return the events up to the token, as if more came behind it.

    `shows_ids`: the client asked for ids; else there is null where they stand.
    """
    head, choice = events_head(api, message), message["choices"][0]
    if api is not Api.CHAT:
        event = {"index": 0, "text": choice.get("text", ""), "logprobs": None}
        event |= {"finish_reason": None, "stop_reason": None}
        event |= _ids(choice, "prompt_token_ids", "token_ids", shown=shows_ids)
        return [head | {"choices": [event]}]
    said = choice.get("message")
    said = said if isinstance(said, dict) else {}
    opening, going_on = [
        {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        for delta in ({"role": said.get("role", "assistant"), "content": ""}, _delta(said))
    ]
    return [
        head
        | {"choices": [opening]}
        | _ids(message, "prompt_token_ids", "prompt_text", shown=shows_ids),
        head | {"choices": [going_on | _ids(choice, "token_ids", shown=shows_ids)]},
    ]


def ended_events(
    api: Api, message: Mapping[str, Any], *, include_usage: bool, shows_ids: bool = False
) -> list[dict[str, Any]]:
    """Return the events of an answer that its one token ended; `shows_ids` as for `token_events`."""
    events, choice = token_events(api, message, shows_ids=shows_ids), message["choices"][0]
    last = events[-1]["choices"][0]
    ids = _ids(last, "prompt_token_ids", "token_ids", shown=shows_ids)
    for name in ids:
        del last[name]
    last |= {name: choice.get(name) for name in ("logprobs", "finish_reason", "stop_reason")} | ids
    if include_usage:
        usage = without_nulls(message["usage"])
        events.append(events_head(api, message) | {"choices": [], "usage": usage})
    if message.get("system_fingerprint") is not None:
        events[-1]["system_fingerprint"] = message["system_fingerprint"]
    return events


class _Block(Struct, tag_field="type"):
    pass


class _Text(_Block, tag="text"):
    text: str


class _Thinking(_Block, tag="thinking"):
    thinking: str


class _ToolUse(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _Message(Struct):
    """What `message_events` needs of one."""

    id: str
    model: str
    usage: dict[str, Any]
    content: list[_Text | _Thinking | _ToolUse]
    stop_reason: str


def is_message(message: Mapping[str, Any]) -> bool:
    """Return whether `message_events` can tell a whole answer of /v1/messages."""
    try:
        msgspec.convert(message, _Message)
    except ValueError:
        return False
    return True


def message_events(message: Mapping[str, Any]) -> bytes:
    """Return the events of /v1/messages that tell a whole message, as vLLM 0.32 would stream it.

    It writes no block for an answer without text, which has an empty one as a whole, and counts what was
    cached only in the last usage.
    """
    usage = message["usage"]
    prompt = sum(token_count(usage, name) or 0 for name in ("input_tokens", *_CACHED))
    head = {"id": message["id"], "type": "message", "role": "assistant", "content": []}
    head |= {"model": message["model"], "stop_reason": None, "stop_sequence": None}
    head |= {"usage": {"input_tokens": prompt, "output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": head}]
    content = [block for block in message["content"] if block != {"type": "text", "text": ""}]
    for index, block in enumerate(content):
        opened, deltas = _block(block)
        events.append({"type": "content_block_start", "content_block": opened, "index": index})
        kind = "content_block_delta"
        events += [{"type": kind, "delta": delta, "index": index} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    stop = {name: message.get(name) for name in ("stop_reason", "stop_sequence")}
    events.append({"type": "message_delta", "delta": stop, "usage": usage})
    events.append({"type": "message_stop"})
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dump_compact(event))
        for event in events
    )


def _block(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a block of a message as it is opened, and what fills it."""
    kind = block["type"]
    if kind == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
        if "signature" in block:
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {"type": kind, "thinking": ""}, deltas
    if kind == "tool_use":
        filled = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return {**block, "input": {}}, [filled]
    return {"type": kind, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def without_nulls(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a usage object as a stream has it: without what is null, in its details, too."""
    return {
        name: without_nulls(count) if isinstance(count, dict) else count
        for name, count in usage.items()
        if count is not None
    }


def write_events(events: list[dict[str, Any]]) -> bytes:
    """Return events as bytes; lone surrogates, which UTF-8 cannot encode, become "?"."""
    return b"".join(b"data: " + dump_compact(event) + b"\n\n" for event in events)


def dump_compact(value: object) -> bytes:
    """Return a value as JSON as vLLM writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _delta(said: Mapping[str, Any]) -> dict[str, Any]:
    delta = {name: value for name, value in said.items() if value and name != "role"}
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        # In a stream every call says which one it is.
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(calls) if isinstance(call, dict)
        ]
    return delta


def _ids(values: Mapping[str, Any], *names: str, shown: bool) -> dict[str, Any]:
    """Return those members, of which not all versions have each, without a value unless `shown`."""
    return {name: values[name] if shown else None for name in names if name in values}
