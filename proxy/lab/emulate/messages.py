"""/v1/messages, Anthropic's API, as vLLM serves it: its chat API behind a translation both ways.

Fields and their order are those of vLLM 0.32 (`vllm/entrypoints/anthropic/serving.py`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.lab.emulate.hub import Hub
from balanceroute.proxy.lab.emulate.request import (
    EMPTY,
    ApiError,
    bad_request,
    chat_text,
    check_model,
    invalid,
)
from balanceroute.proxy.lab.emulate.tokens import tokenise
from balanceroute.proxy.lab.emulate.translated_reply import TranslatedReply, named_event

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Reply

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Fields that have the same meaning in both APIs.
_SHARED = ("model", "max_tokens", "temperature", "top_p", "top_k", "kv_transfer_params")
_BLOCKS = (
    "text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking",
    "tool_addition", "tool_removal",
)  # fmt: skip
_BILLING = "x-anthropic-billing-header"
_LEAST_THINKING = 1024
_DONE = b"[DONE]"
# What vLLM's translation says of an error event of the chat, which it takes for a part of the answer.
_NOT_A_CHUNK = "2 validation errors for ChatCompletionStreamResponse" + "".join(
    f"\n{name}\n  Field required [type=missing, input_value={{'error': {{'message': "
    "'In...am': None, 'code': 500}}, input_type=dict]\n    For further information visit "
    "https://errors.pydantic.dev/2.14/v/missing"
    for name in ("model", "choices")
)

_Event = tuple[str, dict[str, object]]


def as_chat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request equivalent to a body of /v1/messages.

    Raises:
        ApiError: It is malformed, by vLLM's schema.
    """
    messages = values.get("messages")
    if not isinstance(messages, list):
        raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
    chat: dict[str, Any] = {name: values[name] for name in _SHARED if name in values}
    chat["messages"] = [*_system(values.get("system")), *chain(*map(_messages, messages))]
    if not chat["messages"]:
        raise bad_request(EMPTY)
    if values.get("stop_sequences"):
        chat["stop"] = values["stop_sequences"]
    if values.get("stream"):
        usage = {"include_usage": True, "continuous_usage_stats": True}
        chat |= {"stream": True, "stream_options": usage}
    tools = values.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise invalid("list_type", "body.tools", "Input should be a valid list", tools)
    choice = values.get("tool_choice")
    if tools:
        chat["tools"] = list(map(_tool, tools))
    if tools and isinstance(choice, dict):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = _TOOL_CHOICES.get(str(choice.get("type")), named)
    return chat


def read_messages(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request of a body that asks for an answer.

    Raises:
        ApiError: It is malformed, by vLLM's schema.
    """
    limit = values.get("max_tokens")
    if type(limit) is not int:
        kind, message = ("missing", "Field required")
        if limit is not None:
            kind, message = ("int_type", "Input should be a valid integer")
        raise invalid(kind, "body.max_tokens", message, limit)
    if limit <= 0:
        raise _wrong("body.max_tokens", "max_tokens must be positive", limit)
    _check_names_model(values)
    stream = values.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise invalid("bool_type", "body.stream", "Input should be a valid boolean", stream)
    _check_thinking(values, limit)
    return as_chat(values) | {"max_completion_tokens": limit}


def _check_names_model(values: Mapping[str, Any]) -> None:
    model = values.get("model")
    if not isinstance(model, str):
        raise invalid("missing", "body.model", "Field required", model)
    if not model:
        raise _wrong("body.model", "Model is required", model)


def _check_thinking(values: Mapping[str, Any], limit: int) -> None:
    """Refuse a budget that the answer cannot have; a prefill, which has one token, may have any."""
    thinking = values.get("thinking")
    if not isinstance(thinking, dict) or thinking.get("type") != "enabled":
        return
    budget, place = thinking.get("budget_tokens"), "body.thinking.enabled.budget_tokens"
    if type(budget) is not int:
        raise invalid("missing", place, "Field required", thinking)
    if budget < _LEAST_THINKING:
        message = f"Input should be greater than or equal to {_LEAST_THINKING}"
        raise invalid("greater_than_equal", place, message, budget, ctx={"ge": _LEAST_THINKING})
    kv = values.get("kv_transfer_params")
    if budget >= limit and not (isinstance(kv, dict) and kv.get("do_remote_decode")):
        raise _wrong("body", "thinking.budget_tokens must be less than max_tokens", dict(values))


def _wrong(place: str, message: str, value: object) -> ApiError:
    error = {"error": ValueError(message)}
    return invalid("value_error", place, f"Value error, {message}", value, ctx=error)


def answer_count_tokens(values: dict[str, Any], hub: Hub) -> object:
    """Return the answer of /v1/messages/count_tokens.

    Raises:
        ApiError: The body is malformed, or of another model.
    """
    _check_names_model(values)
    check_model(values, hub.settings)
    tokens = len(tokenise(chat_text(as_chat(values))))
    return {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}


def as_anthropic_error(value: Mapping[str, Any]) -> dict[str, object]:
    """Return a chat API's error object in Anthropic's shape."""
    error = value["error"]
    return {"type": "error", "error": {"type": error["type"], "message": error["message"]}}


class MessagesReply(TranslatedReply):
    """A reply that translates the chat API's answer to a message."""

    def __init__(self, reply: "Reply", hub: Hub) -> None:
        super().__init__(reply)
        self._sign = partial(hub.hexadecimal, 32)
        self._stream = _MessageStream(self._sign)

    def _whole(self, status: int, value: dict[str, Any]) -> object:
        return _whole(value, self._sign) if status == 200 else as_anthropic_error(value)

    def _events(self, data: bytes) -> Iterator[bytes]:
        for kind, value in self._stream.events(data):
            yield named_event(kind, value)


class _MessageStream:
    """The events of one message, from those of a chat."""

    def __init__(self, sign: Callable[[], str]) -> None:
        self._sign = sign
        self._begun = False
        self._block = ""  # The type of the content block that is open.
        self._index = 0
        self._signature = ""  # Of an open block of thinking.
        self._held = ""  # Content behind a tool call, until its block ends.
        self._reasons: tuple[str | None, object] = (None, None)
        self._called = False
        self._arguments = ""  # Of the last tool call.
        self._failed = False

    def events(self, data: bytes) -> Iterator[_Event]:
        """Yield the events for one event of a chat, with their types."""
        if self._failed:
            return  # vLLM's translation ends with the error.
        if data == _DONE:
            yield from self._close_block()
            yield "message_stop", {"type": "message_stop"}
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self._failed = True
            error = {"type": "internal_error", "message": _NOT_A_CHUNK}
            yield "error", {"type": "error", "error": error}
        elif not self._begun:
            self._begun = True
            yield "message_start", {"type": "message_start", "message": _message_head(chunk)}
        elif not chunk["choices"]:
            yield from self._close_block()
            complete = self._called and _is_json(self._arguments)
            delta = _stop(*self._reasons, called=self._called, complete=complete)
            usage = _usage(chunk["usage"])
            yield "message_delta", {"type": "message_delta", "delta": delta, "usage": usage}
        else:
            yield from self._content(chunk["choices"][0])

    def _content(self, choice: dict[str, Any]) -> Iterator[_Event]:
        if choice["finish_reason"] is not None:
            self._reasons = (choice["finish_reason"], choice.get("stop_reason"))
        delta = choice["delta"]
        if delta.get("reasoning"):
            yield from self._say("thinking", "thinking", delta["reasoning"])
        if delta.get("content"):
            if self._block == "tool_use":
                self._held += delta["content"]
            else:
                yield from self._say("text", "text", delta["content"])
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if function.get("name"):
                self._called, self._arguments = True, ""
                block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
                yield from self._open_block(block | {"input": {}})
            if function.get("arguments"):
                self._arguments += function["arguments"]
                said = {"type": "input_json_delta", "partial_json": function["arguments"]}
                yield self._delta(said)

    def _say(self, block: str, member: str, text: str) -> Iterator[_Event]:
        if self._block != block:
            yield from self._open_block({"type": block, member: ""})
        yield self._delta({"type": f"{block}_delta", member: text})

    def _delta(self, delta: dict[str, object]) -> _Event:
        kind = "content_block_delta"
        return kind, {"type": kind, "delta": delta, "index": self._index}

    def _open_block(self, block: dict[str, Any]) -> Iterator[_Event]:
        yield from self._close_block()
        self._block = block["type"]
        self._signature = self._sign() if self._block == "thinking" else ""
        kind = "content_block_start"
        yield kind, {"type": kind, "content_block": block, "index": self._index}

    def _close_block(self) -> Iterator[_Event]:
        if not self._block:
            return
        if self._signature:
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        kind = "content_block_stop"
        yield kind, {"type": kind, "index": self._index}
        self._block = ""
        self._index += 1
        held, self._held = self._held, ""
        if held:
            yield from self._say("text", "text", held)
            yield from self._close_block()


def _system(system: Any) -> list[dict[str, object]]:
    if system and not isinstance(system, str | list):
        raise invalid("string_type", "body.system", "Input should be a valid string", system)
    text = _system_text(system)
    return [{"role": "system", "content": text}] if text else []


def _system_text(content: Any) -> str:
    """Return a system prompt, without the header that Claude Code puts into it for its accounting."""
    if not isinstance(content, list):
        return content or ""
    texts = [str(block.get("text") or "") for block in content if isinstance(block, dict)]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _messages(message: object) -> Iterator[dict[str, Any]]:
    """Yield the messages for one of the conversation: a tool's result is one of its own."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise invalid("literal_error", "body.messages", "Input should be a message", message)
    role, content = message["role"], message.get("content")
    if not isinstance(content, str | list):
        raise invalid("string_type", "body.messages", "Input should be a valid string", content)
    if role == "system":
        text = _system_text(content)
        if text:
            yield {"role": role, "content": text}
        return
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    for block in content:
        if not isinstance(block, dict) or block.get("type") not in _BLOCKS:
            raise invalid("literal_error", "body.messages.content.type", "Unknown block", block)
        if block["type"] == "tool_result":
            result = {"tool_call_id": block.get("tool_use_id") or ""}
            yield {"role": "tool"} | result | {"content": _result(block.get("content"))}
    said = _said(content)
    if said or role != "user":
        yield {"role": role} | said


def _said(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a message's parts: its text and images, its thoughts, its calls of tools."""
    said: dict[str, Any] = {}
    for block in blocks:
        kind = block["type"]
        if kind == "text" and block.get("text"):
            said.setdefault("content", []).append({"type": "text", "text": block["text"]})
        elif kind == "image":
            image = {"type": "image_url", "image_url": {"url": _url(block.get("source"))}}
            said.setdefault("content", []).append(image)
        elif kind == "thinking":
            said["reasoning"] = said.get("reasoning", "") + str(block.get("thinking") or "")
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name"), "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            said.setdefault("tool_calls", []).append(call)
    return said


def _result(content: object) -> str:
    if not isinstance(content, list):
        return str(content or "")
    texts = [block.get("text") or "" for block in content if isinstance(block, dict)]
    return "\n".join(map(str, texts))


def _url(source: object) -> str:
    known: Mapping[str, Any] = source if isinstance(source, dict) else {}
    if known.get("type") == "url":
        return str(known.get("url") or "")
    return f"data:{known.get('media_type', 'image/jpeg')};base64,{known.get('data', '')}"


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise invalid("missing", "body.tools.0.name", "Field required", tool)
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise invalid("dict_type", "body.tools.0.input_schema", "Field required", schema)
    function = {"name": tool["name"], "description": tool.get("description")}
    return {"type": "function", "function": function | {"parameters": {"type": "object"} | schema}}


def _whole(answer: Mapping[str, Any], sign: Callable[[], str]) -> dict[str, object]:
    choice = answer["choices"][0]
    said, calls = choice["message"], choice["message"].get("tool_calls") or ()
    content: list[dict[str, object]] = []
    if said.get("reasoning"):
        content.append({"type": "thinking", "thinking": said["reasoning"], "signature": sign()})
    if said.get("content"):
        content.append({"type": "text", "text": said["content"]})
    for call in calls:
        function = call["function"]
        block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
        content.append(block | {"input": json.loads(function["arguments"])})
    message = {
        "id": answer["id"],
        "type": "message",
        "role": "assistant",
        "content": content or [{"type": "text", "text": ""}],
        "model": answer["model"],
        **_stop(
            choice["finish_reason"],
            choice.get("stop_reason"),
            called=bool(calls),
            complete=bool(calls),
        ),
        "usage": _usage(answer["usage"]),
        "kv_transfer_params": answer.get("kv_transfer_params"),
    }
    return {name: value for name, value in message.items() if value is not None}


def _message_head(chunk: Mapping[str, Any]) -> dict[str, object]:
    head = {"id": chunk["id"], "type": "message", "role": "assistant", "content": []}
    tail = {"stop_reason": None, "stop_sequence": None, "usage": _usage(chunk["usage"])}
    return head | {"model": chunk["model"]} | tail


def _stop(
    finish: str | None, matched: object, *, called: bool, complete: bool
) -> dict[str, object]:
    """Return why a message ended, by the chat's finish and stop reason.

    A tool may have been called, with complete arguments or not.
    """
    reason: str | None = "end_turn"
    sequence = None
    if finish == "length":
        reason = "max_tokens"
    elif finish not in ("stop", "tool_calls"):
        reason = None
    elif complete:
        reason = "tool_use"
    elif isinstance(matched, str):
        reason, sequence = "stop_sequence", matched
    elif finish == "tool_calls" or called:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _usage(usage: Mapping[str, Any]) -> dict[str, object]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    fields = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    if cached is not None:
        fields["input_tokens"] -= cached
        fields["cache_read_input_tokens"] = cached
    return fields
