"""A whole answer of one token, written as the events of a stream: vLLM's members, in vLLM's order."""

import json
from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.live.openai.shape import Api

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
