"""/v1/messages, Anthropic's API, as vLLM serves it: its chat API behind a translation both ways.

Fields and their order are those of vLLM 0.32 (`vllm/entrypoints/anthropic/serving.py`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.emulate.api_error import compact, invalid
from balanceroute.proxy.emulate.hub import Hub
from balanceroute.proxy.emulate.request import chat_text, check_model
from balanceroute.proxy.emulate.tokens import tokenise
from balanceroute.proxy.wire.sse import EventScanner, event_data

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers
    from balanceroute.proxy.wire.reply import Reply

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Fields that have the same meaning in both APIs.
_SHARED = ("model", "max_tokens", "temperature", "top_p", "top_k", "kv_transfer_params")
_MAX_EVENT_BYTES = 64 << 20
_DONE = b"[DONE]"


def as_chat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request equivalent to a body of /v1/messages.

    Raises:
        ApiError: It is malformed, by vLLM's schema.
    """
    messages = values.get("messages")
    if not isinstance(messages, list):
        raise invalid("list_type", "body.messages", "Input should be a valid list", messages)
    chat: dict[str, Any] = {name: values[name] for name in _SHARED if name in values}
    chat["messages"] = [*_system(values.get("system")), *map(_message, messages)]
    if values.get("stop_sequences"):
        chat["stop"] = values["stop_sequences"]
    if values.get("stream"):
        usage = {"include_usage": True, "continuous_usage_stats": True}
        chat |= {"stream": True, "stream_options": usage}
    tools = values.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise invalid("list_type", "body.tools", "Input should be a valid list", tools)
    if tools:
        chat["tools"] = list(map(_tool, tools))
    choice = values.get("tool_choice")
    if isinstance(choice, dict):
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
        message = "Value error, max_tokens must be positive"
        raise invalid("value_error", "body.max_tokens", message, limit)
    if not isinstance(values.get("model"), str):
        raise invalid("missing", "body.model", "Field required", values.get("model"))
    stream = values.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise invalid("bool_type", "body.stream", "Input should be a valid boolean", stream)
    return as_chat(values)


def answer_count_tokens(values: dict[str, Any], hub: Hub) -> object:
    """Return the answer of /v1/messages/count_tokens.

    Raises:
        ApiError: The body is malformed, or of another model.
    """
    check_model(values, hub.settings)
    return {"input_tokens": len(tokenise(chat_text(as_chat(values))))}


def as_anthropic_error(value: Mapping[str, Any]) -> dict[str, object]:
    """Return a chat API's error object in Anthropic's shape."""
    error = value["error"]
    return {"type": "error", "error": {"type": error["type"], "message": error["message"]}}


class TranslatedReply:
    """A reply that gets the chat API's answer, and sends another one.

    What is no such answer (an injected fault) is forwarded unchanged.
    """

    def __init__(self, reply: "Reply") -> None:
        self._reply = reply
        self._scanner = EventScanner(max_event_bytes=_MAX_EVENT_BYTES)

    closed = property(lambda self: self._reply.closed)
    started = property(lambda self: self._reply.started)
    paused = property(lambda self: self._reply.paused)

    @property
    def on_closed(self) -> Callable[[], None] | None:
        """Called once if the client leaves before the answer is complete."""
        return self._reply.on_closed

    @on_closed.setter
    def on_closed(self, called: Callable[[], None] | None) -> None:
        self._reply.on_closed = called

    def send(self, status: int, headers: "Headers", body: bytes) -> None:
        """Send a whole answer."""
        try:
            translated = compact(self._whole(status, json.loads(body)))
        except (ValueError, KeyError, TypeError):
            translated = body
        self._reply.send(status, headers, translated)

    def start(self, status: int, headers: "Headers") -> None:
        """Begin a stream."""
        self._reply.start(status, headers)

    def write(self, data: bytes) -> None:
        """Translate a piece of a stream."""
        for event in self._scanner.feed(data):
            try:
                translated = list(self._events(event_data(event)))
            except (ValueError, KeyError, TypeError):
                translated = [event]
            for one in translated:
                self._reply.write(one)

    def end(self) -> None:
        """End a stream."""
        self._reply.end()

    def abort(self) -> None:
        """Cut the answer."""
        self._reply.abort()

    def _whole(self, status: int, value: dict[str, Any]) -> object:
        """Return the body of a whole answer; raises ValueError, KeyError or TypeError for none."""
        raise NotImplementedError

    def _events(self, data: bytes) -> Iterator[bytes]:
        """Yield the events for the data of one; raises ValueError, KeyError or TypeError for none."""
        raise NotImplementedError


class MessagesReply(TranslatedReply):
    """A reply that translates the chat API's answer to a message."""

    def __init__(self, reply: "Reply") -> None:
        super().__init__(reply)
        self._stream = _MessageStream()

    def _whole(self, status: int, value: dict[str, Any]) -> object:
        return _whole(value) if status == 200 else as_anthropic_error(value)

    def _events(self, data: bytes) -> Iterator[bytes]:
        for kind, value in self._stream.events(data):
            yield b"event: %b\ndata: %b\n\n" % (kind.encode(), compact(value))


class _MessageStream:
    """The events of one message, from those of a chat."""

    def __init__(self) -> None:
        self._begun = False
        self._block = ""  # The type of the content block that is open.
        self._index = 0
        self._reasons: tuple[str | None, object] = (None, None)
        self._called = False
        self._failed = False

    def events(self, data: bytes) -> Iterator[tuple[str, dict[str, object]]]:
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
            yield "error", as_anthropic_error(chunk)
        elif not self._begun:
            self._begun = True
            yield "message_start", {"type": "message_start", "message": _message_head(chunk)}
        elif not chunk["choices"]:
            yield from self._close_block()
            delta = _stop(*self._reasons, called=self._called)
            usage = _usage(chunk["usage"])
            yield "message_delta", {"type": "message_delta", "delta": delta, "usage": usage}
        else:
            yield from self._content(chunk["choices"][0])

    def _content(self, choice: dict[str, Any]) -> Iterator[tuple[str, dict[str, object]]]:
        if choice["finish_reason"] is not None:
            self._reasons = (choice["finish_reason"], choice.get("stop_reason"))
        delta = choice["delta"]
        for member, block, kind in (
            ("reasoning", {"type": "thinking", "thinking": ""}, "thinking"),
            ("content", {"type": "text", "text": ""}, "text"),
        ):
            if delta.get(member):
                yield from self._open_block(block)
                yield self._delta({"type": f"{kind}_delta", kind: delta[member]})
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if function.get("name"):
                self._called = True
                block = {"type": "tool_use", "id": call["id"], "name": function["name"]}
                yield from self._open_block(block | {"input": {}}, anew=True)
            if function.get("arguments"):
                yield self._delta(
                    {"type": "input_json_delta", "partial_json": function["arguments"]}
                )

    def _delta(self, delta: dict[str, object]) -> tuple[str, dict[str, object]]:
        kind = "content_block_delta"
        return kind, {"type": kind, "delta": delta, "index": self._index}

    def _open_block(
        self, block: dict[str, Any], *, anew: bool = False
    ) -> Iterator[tuple[str, dict[str, object]]]:
        if self._block == block["type"] and not anew:
            return
        yield from self._close_block()
        self._block = block["type"]
        kind = "content_block_start"
        yield kind, {"type": kind, "content_block": block, "index": self._index}

    def _close_block(self) -> Iterator[tuple[str, dict[str, object]]]:
        if self._block:
            kind = "content_block_stop"
            yield kind, {"type": kind, "index": self._index}
            self._block = ""
            self._index += 1


def _system(system: Any) -> list[dict[str, object]]:
    if not system:
        return []
    if isinstance(system, list):
        system = "".join(
            str(block.get("text") or "") for block in system if isinstance(block, dict)
        )
    elif not isinstance(system, str):
        raise invalid("string_type", "body.system", "Input should be a valid string", system)
    return [{"role": "system", "content": system}]


def _message(message: object) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise invalid("literal_error", "body.messages", "Input should be a message", message)
    content = message.get("content")
    if isinstance(content, list):
        content = [
            {"type": "text", "text": str(block.get("text") or block.get("content") or "")}
            for block in content
            if isinstance(block, dict)
        ]
    elif not isinstance(content, str):
        raise invalid("string_type", "body.messages", "Input should be a valid string", content)
    return {"role": message["role"], "content": content}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise invalid("missing", "body.tools.0.name", "Field required", tool)
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {}}
    return {"type": "function", "function": function}


def _whole(answer: Mapping[str, Any]) -> dict[str, object]:
    choice = answer["choices"][0]
    said, calls = choice["message"], choice["message"].get("tool_calls") or ()
    content: list[dict[str, object]] = []
    if said.get("reasoning"):
        content.append({"type": "thinking", "thinking": said["reasoning"], "signature": "0"})
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
        **_stop(choice["finish_reason"], choice.get("stop_reason"), called=bool(calls)),
        "usage": _usage(answer["usage"]),
        "kv_transfer_params": answer.get("kv_transfer_params"),
    }
    return {name: value for name, value in message.items() if value is not None}


def _message_head(chunk: Mapping[str, Any]) -> dict[str, object]:
    head = {"id": chunk["id"], "type": "message", "role": "assistant", "content": []}
    tail = {"stop_reason": None, "stop_sequence": None, "usage": _usage(chunk["usage"])}
    return head | {"model": chunk["model"]} | tail


def _stop(finish: str | None, matched: object, *, called: bool) -> dict[str, object]:
    if finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if finish == "abort":
        return {"stop_reason": None, "stop_sequence": None}
    if called:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Mapping[str, Any]) -> dict[str, object]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    fields = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    if cached is not None:
        fields["input_tokens"] -= cached
        fields["cache_read_input_tokens"] = cached
    return fields
