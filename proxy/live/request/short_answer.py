"""The answer of a prefiller that met a stop condition on its one token, as the client wants it.

Nothing is left to decode then, and there is no KV cache to pull: the prefiller's answer is the answer.
A client that asked for a stream gets the same events that a decode engine would have sent.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.live.openai.api_error import JSON_HEADERS
from balanceroute.proxy.live.openai.shape import Api, Shape

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.request.client_answer import ClientAnswer


def answer_shortly(
    client: "ClientAnswer", shape: "Shape", body: "RequestBody", message: Mapping[str, Any]
) -> None:
    """Send the prefiller's answer to the client, as a stream if it asked for one."""
    if not shape.stream:
        client.send(200, JSON_HEADERS, short_answer_body(message))
        return
    options = body.values.get("stream_options")
    usage = isinstance(options, dict) and options.get("include_usage") is True
    client.open(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
    client.reply.write(short_answer_events(shape.api, message, include_usage=usage))
    client.reply.end()


def short_answer_body(message: Mapping[str, Any]) -> bytes:
    """Return the prefiller's answer as that to a request that is not streamed."""
    return _dump({**message, "kv_transfer_params": None})


def short_answer_events(api: Api, message: Mapping[str, Any], *, include_usage: bool) -> bytes:
    """Return the prefiller's answer as server-sent events, with vLLM's members in vLLM's order."""
    head = {
        "id": message.get("id", ""),
        "object": "chat.completion.chunk" if api is Api.CHAT else "text_completion",
        "created": message.get("created", 0),
        "model": message.get("model", ""),
    }
    choice = message["choices"][0]
    steps = _chat_steps(choice) if api is Api.CHAT else [{"text": choice.get("text", "")}]
    events: list[dict[str, Any]] = [
        head | {"choices": [{"index": 0, **step, "logprobs": None, "finish_reason": None}]}
        for step in steps
    ]
    # The last one says how it ended.
    events[-1]["choices"][0] |= {
        name: choice.get(name) for name in ("logprobs", "finish_reason", "stop_reason")
    }
    if include_usage:
        usage = {name: count for name, count in message["usage"].items() if count is not None}
        events.append(head | {"choices": [], "usage": usage})
    if message.get("system_fingerprint") is not None:
        events[-1]["system_fingerprint"] = message["system_fingerprint"]
    return b"".join(b"data: " + _dump(event) + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def _chat_steps(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    said = choice.get("message")
    said = said if isinstance(said, dict) else {}
    delta = {name: value for name, value in said.items() if value and name != "role"}
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        # In a stream every call says which one it is.
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(calls) if isinstance(call, dict)
        ]
    opening = {"role": said.get("role", "assistant"), "content": ""}
    return [{"delta": opening}, {"delta": delta or {"content": ""}}]


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
