"""/v1/responses, OpenAI's Responses API, as vLLM serves it without its store (the default).

Fields and their order are those of vLLM 0.32 (`vllm/entrypoints/openai/responses`). What a proxy has to
know: it ignores `X-Request-Id` and `X-data-parallel-rank`; a stream begins before there is a token; a
stream that fails is cut, without an event; an answer that was aborted or handed back ("recomputed") says
that it is complete, for it has no member for reasons; `min_tokens` and `n` are ignored.
"""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from balanceroute.proxy.lab.emulate.hub import Hub
from balanceroute.proxy.lab.emulate.request import (
    EMPTY,
    ApiError,
    bad_parameter,
    bad_request,
    check_model,
    invalid,
)
from balanceroute.proxy.lab.emulate.translated_reply import TranslatedReply, named_event

if TYPE_CHECKING:
    from balanceroute.proxy.wire.messages import Headers, Reply


# Requests to /v1/responses: the chat request that is equivalent to each.
#
# By vLLM 0.32's `vllm/entrypoints/openai/responses/protocol.py` and `utils.py`, without its
# store.

LOGPROBS = "message.output_text.logprobs"
"""What `include` has to name for log-probabilities."""

INPUT = "input"
"""The one member of a custom tool's arguments."""

_CUSTOM = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
# Fields that have the same meaning in both APIs.
_SHARED = (
    "model", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "kv_transfer_params",
    "request_id", "cache_salt",
)  # fmt: skip
_KINDS: Mapping[type, tuple[str, str]] = {
    int: ("int_type", "Input should be a valid integer"),
    bool: ("bool_type", "Input should be a valid boolean"),
    str: ("string_type", "Input should be a valid string"),
    list: ("list_type", "Input should be a valid list"),
    dict: ("dict_type", "Input should be a valid dictionary"),
}
_FIELDS: Mapping[str, type] = {
    "max_output_tokens": int,
    "stream": bool,
    "store": bool,
    "background": bool,
    "instructions": str,
    "previous_response_id": str,
    "tools": list,
    "include": list,
    "text": dict,
    "reasoning": dict,
}
_TOOLS = (
    "function", "file_search", "computer", "computer_use_preview", "web_search",
    "web_search_2025_08_26", "mcp", "code_interpreter", "programmatic_tool_calling",
    "image_generation", "local_shell", "shell", "custom", "namespace", "tool_search",
    "web_search_preview", "web_search_preview_2025_03_11", "apply_patch",
)  # fmt: skip


def read_responses(values: Mapping[str, Any], hub: Hub) -> dict[str, Any]:
    """Return the chat request equivalent to a body.

    Raises:
        ApiError: It cannot be served; this is the answer.
    """
    for name, kind in _FIELDS.items():
        value = values.get(name)
        if value is not None and type(value) is not kind:
            raise invalid(_KINDS[kind][0], f"body.{name}", _KINDS[kind][1], value)
    if values.get("background") and not values.get("store", True):
        raise bad_parameter("background can only be used when `store` is true", "background")
    if values.get("prompt") is not None:
        raise bad_parameter("prompt template is not supported", "prompt")
    chat: dict[str, Any] = {name: values[name] for name in _SHARED if name in values}
    _add_tools(chat, values)
    _refuse_state(values, hub)
    chat["messages"] = [*_instructions(values), *_conversation(values)]
    if not chat["messages"]:
        raise bad_request(EMPTY)
    if values.get("max_output_tokens") is not None:
        chat["max_tokens"] = values["max_output_tokens"]
    if values.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if LOGPROBS in (values.get("include") or ()):
        chat |= {"logprobs": True, "top_logprobs": values.get("top_logprobs") or 0}
    if _continues(values.get("input")):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def _add_tools(chat: dict[str, Any], values: Mapping[str, Any]) -> None:
    tools = values.get("tools") or []
    functions: list[dict[str, Any]] = []
    for number, tool in enumerate(tools):
        place = f"body.tools.{number}"
        if not isinstance(tool, dict) or tool.get("type") not in _TOOLS:
            raise invalid("literal_error", f"{place}.type", "Input should be a known tool", tool)
        kind = tool["type"]
        if kind in ("function", "custom", "namespace") and not isinstance(tool.get("name"), str):
            raise invalid("missing", f"{place}.name", "Field required", tool)
        wanted = tool.get("format")
        if kind == "custom" and isinstance(wanted, dict) and wanted.get("type") == "grammar":
            message = (
                "Custom tools with a grammar format are not supported; only free-form text custom "
                "tools are accepted."
            )
            raise bad_parameter(message, "tools")
        functions += _functions(tool, place)
    choice = values.get("tool_choice", "auto")
    named = isinstance(choice, dict) and choice.get("type") in ("function", "custom")
    if choice == "required" and not tools:
        message = "Tool choice 'required' must be specified with 'tools' parameter."
        raise bad_parameter(message, "tool_choice")
    names = [function["name"] for function in functions]
    if named and choice.get("name") not in names:
        message = "Tool choice 'function' not found in 'tools' parameter."
        raise bad_parameter(message, "tool_choice")
    if not functions:
        if choice == "required":
            message = (
                "tool_choice requires a function call, but tools contains no function tool the "
                "model can call."
            )
            raise bad_parameter(message, "tool_choice")
        return
    chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if named:
        chat["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    else:
        chat["tool_choice"] = choice if choice in ("none", "required") else "auto"


def _functions(tool: Mapping[str, Any], place: str) -> Iterator[dict[str, Any]]:
    """Yield the functions of a tool that the model is shown; of most kinds there are none."""
    kind = tool["type"]
    if kind == "custom":
        yield {"name": tool["name"], "description": tool.get("description"), "parameters": _CUSTOM}
    elif kind == "function":
        known = {"name": tool["name"], "description": tool.get("description")}
        yield known | {"parameters": tool.get("parameters") or {}}
    elif kind == "namespace":
        inners = tool.get("tools")
        if not isinstance(inners, list):
            raise invalid("list_type", f"{place}.tools", _KINDS[list][1], inners)
        for inner in inners:
            if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
                raise invalid("missing", f"{place}.tools.name", "Field required", inner)
            yield from _functions({**inner, "name": f"{tool['name']}__{inner['name']}"}, place)


def _refuse_state(values: Mapping[str, Any], hub: Hub) -> None:
    """Refuse what needs responses that are kept, and a model that is not served."""
    check_model(values, hub.settings)
    kind = "invalid_request_error"
    if values.get("background"):
        message = (
            "This vLLM engine does not support `store=True` and therefore does not support the "
            "background mode. To enable these features, set the environment variable "
            "`VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
        )
        raise ApiError(message, kind=kind, param="background")
    earlier = values.get("previous_response_id")
    if earlier is not None:
        message = f"Response with id '{earlier}' not found."
        raise ApiError(message, status=404, kind=kind, param="response_id")


def _instructions(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    said = values.get("instructions")
    return [{"role": "system", "content": said}] if said else []


def _conversation(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of `input`."""
    given = values.get("input")
    if given is None:
        raise invalid("missing", "body.input", "Field required", dict(values))
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise invalid("string_type", "body.input.str", _KINDS[str][1], given)
    messages: list[dict[str, Any]] = []
    for item in given:
        if not isinstance(item, dict):
            raise invalid("dict_type", "body.input.list", _KINDS[dict][1], item)
        _add_item(messages, item)
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Add an item to a conversation; those of one turn of the model make one message."""
    kind = item.get("type", "message")
    said: dict[str, Any]
    if kind == "message" and isinstance(item.get("role"), str):
        content = item.get("content")
        if item["role"] != "assistant":
            messages.append({"role": item["role"], "content": content})
            return
        if isinstance(content, list):
            content = content[0].get("text") if content and isinstance(content[0], dict) else ""
        said = {"content": content}
    elif kind in ("function_call", "custom_tool_call"):
        arguments = item.get("arguments")
        if kind == "custom_tool_call":
            arguments = json.dumps({INPUT: item.get("input") or ""}, ensure_ascii=False)
        space = item.get("namespace")
        name = f"{space}__{item.get('name')}" if space else item.get("name")
        function = {"name": name, "arguments": arguments}
        call = {"id": item.get("call_id"), "function": function, "type": "function"}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
            return
        said = {"tool_calls": [call]}
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = {"content": item.get("output"), "tool_call_id": item.get("call_id")}
        messages.append({"role": "tool"} | output)
        return
    elif kind == "reasoning":
        said = {"reasoning": _thought(item)}
    else:
        raise bad_parameter(f"Unsupported input item type: {kind}", "input")
    (name,) = said
    if messages and messages[-1]["role"] == "assistant" and messages[-1].get(name) is None:
        messages[-1] |= said
    else:
        messages.append({"role": "assistant"} | said)


def _thought(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise bad_parameter("Encrypted content is not supported.", "input")
    parts = item.get("content") or item.get("summary") or [{}]
    if not isinstance(parts, list) or not isinstance(parts[0], dict):
        raise invalid("list_type", "body.input.list.content", _KINDS[list][1], parts)
    return str(parts[0].get("text", ""))


def _continues(given: object) -> bool:
    """Return whether the last item is a part of an answer, to be continued."""
    last = given[-1] if isinstance(given, list) and given else None
    return (
        isinstance(last, dict)
        and last.get("type", "message") in ("message", "reasoning")
        and last.get("status") in ("in_progress", "incomplete")
    )


_DONE = b"[DONE]"
_HUGE = 1e308


class ResponsesReply(TranslatedReply):
    """A reply that translates the chat API's answer to a response."""

    def __init__(self, reply: "Reply", values: Mapping[str, Any], hub: Hub) -> None:
        super().__init__(reply)
        self._response = _Response(values, hub)
        self._stream = _Stream(self._response)
        self._opened = False

    def open(self, max_tokens: int) -> None:
        """Note that the engine took the request, which may have so many tokens."""
        self._response.open(max_tokens)
        self._opened = True

    def start(self, status: int, headers: "Headers") -> None:
        """Begin a stream, with the events that come before there is a token."""
        self.reply.start(status, headers)
        if self._opened:
            for event in self._stream.begin():
                self._put(event)

    def _whole(self, status: int, value: dict[str, Any]) -> object:
        if status != 200:
            return _renamed(value)
        choice = value["choices"][0]
        status_word = "incomplete" if choice["finish_reason"] == "length" else "completed"
        output = self._response.items(choice)
        usage, kv = _usage(value["usage"]), value.get("kv_transfer_params")
        return self._response.said(status_word, output, usage, kv)

    def _events(self, data: bytes) -> Iterator[bytes]:
        if data == _DONE:
            return
        chunk = json.loads(data)
        if "error" not in chunk:
            yield from self._stream.events(chunk)
        elif self._opened:
            self.abort()  # vLLM fails to write the error as an event, and cuts the stream.
        else:
            yield b"data: %b\n\n" % data


class _Response:
    """The object that answers a request, as far as the request determines it."""

    def __init__(self, values: Mapping[str, Any], hub: Hub) -> None:
        self._values = values
        self._hub = hub
        self._max_tokens = 0
        self._created = 0
        given = values.get("request_id")
        self._id = given if isinstance(given, str) else self.name("resp")
        tools = [tool for tool in values.get("tools") or () if isinstance(tool, dict)]
        self.custom = {tool["name"] for tool in tools if tool.get("type") == "custom"}
        self._local = {
            f"{space['name']}__{tool['name']}": (tool["name"], space["name"])
            for space in tools
            if space.get("type") == "namespace"
            for tool in space["tools"]
        }
        self.shows_reasoning = values.get("include_reasoning") is not False

    def name(self, kind: str) -> str:
        return f"{kind}_{self._hub.hexadecimal(16)}"

    def open(self, max_tokens: int) -> None:
        """Note the limit of the answer's tokens, and when it was begun."""
        self._max_tokens, self._created = max_tokens, self._hub.unix_s

    def said(
        self, status: str, output: list[dict[str, object]], usage: object, kv: object = None
    ) -> dict[str, object]:
        values = self._values
        tools = values.get("tools") or []
        choice = values.get("tool_choice") or "auto"
        limited = {"reason": "max_output_tokens"} if status == "incomplete" else None
        listed = values.get("top_logprobs") or 0
        said: dict[str, object] = {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": limited,
            "instructions": values.get("instructions"),
            "metadata": values.get("metadata"),
            "model": values.get("model") or self._hub.settings.model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": _or(values.get("parallel_tool_calls"), True),
            "temperature": _number(values.get("temperature"), 1.0),
            "tool_choice": _shown_choice(choice) if tools else "none",
            "tools": list(map(_shown_tool, tools)),
            "top_p": _number(values.get("top_p"), 1.0),
            "background": bool(values.get("background")),
            "max_output_tokens": self._max_tokens,
            "max_tool_calls": values.get("max_tool_calls"),
            "previous_response_id": None,
            "prompt": None,
            "reasoning": _shown_reasoning(values.get("reasoning")),
            "service_tier": values.get("service_tier") or "auto",
            "status": status,
            "text": _shown_text(values.get("text")),
            "top_logprobs": listed if LOGPROBS in (values.get("include") or ()) else None,
            "truncation": values.get("truncation") or "disabled",
            "usage": usage,
            "user": values.get("user"),
            "presence_penalty": _number(values.get("presence_penalty"), 0.0),
            "frequency_penalty": _number(values.get("frequency_penalty"), 0.0),
            "kv_transfer_params": kv,
        }
        return said | dict.fromkeys(("ec_transfer_params", "input_messages", "output_messages"))

    def items(self, choice: Mapping[str, Any]) -> list[dict[str, object]]:
        said = choice["message"]
        items: list[dict[str, object]] = []
        if said.get("reasoning") and self.shows_reasoning:
            items.append(_reasoning(self.name("rs"), said["reasoning"], None))
        if said.get("content"):
            part = _text(said["content"], _logprobs(choice) or None)
            items.append(_message(self.name("msg"), [part], "completed"))
        for call in said.get("tool_calls") or ():
            function = call["function"]
            name, arguments = function["name"], function["arguments"]
            items.append(self.call(self.call_id(name), call["id"], name, arguments, "completed"))
        return items

    def call_id(self, name: str) -> str:
        return self.name("ctc" if name in self.custom else "fc")

    def call(
        self, own_id: str, call_id: str, name: str, arguments: str, status: str
    ) -> dict[str, object]:
        local, space = self._local.get(name, (name, None))
        ids: dict[str, object] = {"call_id": call_id}
        if name in self.custom:
            typed = {"name": local, "type": "custom_tool_call", "id": own_id}
            return ids | {"input": custom_input(arguments)} | typed | _CALL | {"namespace": space}
        typed = {"name": local, "type": "function_call", "id": own_id}
        return (
            {"arguments": arguments} | ids | typed | _CALL | {"namespace": space, "status": status}
        )


class _Stream:
    """The events of one response, from those of a chat."""

    def __init__(self, response: _Response) -> None:
        self._response = response
        self._number = 0  # Of the next event.
        self._output: list[dict[str, object]] = []
        self._kind = ""  # The channel whose item is open.
        self._id = self._call_id = self._tool = self._text = self._shown = ""
        self._logprobs: list[object] = []
        self._status = "completed"

    def begin(self) -> Iterator[bytes]:
        """Yield the events before the first token."""
        said = self._response.said("in_progress", [], None)
        for kind in ("created", "in_progress"):
            yield self._event(kind, {"response": said})

    def events(self, chunk: Mapping[str, Any]) -> Iterator[bytes]:
        if not chunk["choices"]:
            yield from self._close()
            said = self._response.said(self._status, self._output, _usage(chunk["usage"]))
            yield self._event("completed", {"response": said})
            return
        (choice,) = chunk["choices"]
        if choice["finish_reason"] == "length":
            self._status = "incomplete"
        delta = choice["delta"]
        if delta.get("reasoning") and self._response.shows_reasoning:
            yield from self._say("reasoning", delta["reasoning"])
        if delta.get("content"):
            yield from self._say("text", delta["content"], _logprobs(choice))
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if function.get("name"):
                yield from self._close()
                yield from self._open_call(call["id"], function["name"])
            if function.get("arguments"):
                yield from self._argue(function["arguments"])

    def _say(
        self, kind: str, text: str, logprobs: list[dict[str, Any]] | None = None
    ) -> Iterator[bytes]:
        if self._kind != kind:
            yield from self._close()
            yield from self._open(kind)
        self._text += text
        said: dict[str, object] = {"content_index": 0, "delta": text, "item_id": self._id}
        if kind == "text":
            self._logprobs += logprobs or ()
            said["logprobs"] = list(map(_short_logprob, logprobs or ()))
        yield self._event(f"{_CHANNELS[kind]}.delta", said | {"output_index": len(self._output)})

    def _open(self, kind: str) -> Iterator[bytes]:
        self._kind, self._text, self._logprobs = kind, "", []
        if kind == "text":
            self._id = self._response.name("msg")
            item, part = _message(self._id, [], "in_progress"), _text("", [])
        else:
            self._id = self._response.name("rs")
            item, part = _reasoning(self._id, None, "in_progress"), _reasoning_part("")
        yield self._item("added", item)
        yield self._part("added", part)

    def _open_call(self, call_id: str, name: str) -> Iterator[bytes]:
        self._kind, self._text, self._shown = "call", "", ""
        self._id, self._call_id, self._tool = self._response.call_id(name), call_id, name
        yield self._item("added", self._response.call(self._id, call_id, name, "", "in_progress"))

    def _argue(self, text: str) -> Iterator[bytes]:
        self._text += text
        if self._tool in self._response.custom:
            text = custom_input(self._text).removeprefix(self._shown)
            if not text:
                return
            self._shown += text
        kind = _arguments(custom=self._tool in self._response.custom)
        yield self._event(f"{kind}.delta", {"delta": text, **self._place()})

    def _close(self) -> Iterator[bytes]:
        kind, self._kind = self._kind, ""
        if not kind:
            return
        text = self._text
        if kind == "call":
            item = self._response.call(self._id, self._call_id, self._tool, text, "completed")
            custom = self._tool in self._response.custom
            if custom:
                said = {"input": item["input"], **self._place()}
            else:
                said = {"arguments": text, **self._place()}
            # The name is behind the type.
            tail = {} if custom else {"name": item["name"]}
            yield self._event(f"{_arguments(custom=custom)}.done", said, tail)
        else:
            if kind == "text":
                part: dict[str, object] = _text(text, self._logprobs or None)
                item = _message(self._id, [part], "completed")
                logprobs: dict[str, object] = {"logprobs": []}
            else:
                part, logprobs = _reasoning_part(text), {}
                item = _reasoning(self._id, text, "completed")
            said = {"content_index": 0, "item_id": self._id, **logprobs}
            said["output_index"] = len(self._output)
            yield self._event(f"{_CHANNELS[kind]}.done", said, text=text)
            yield self._part("done", part)
        yield self._item("done", item)
        self._output.append(item)

    def _place(self) -> dict[str, object]:
        return {"item_id": self._id, "output_index": len(self._output)}

    def _item(self, what: str, item: dict[str, object]) -> bytes:
        said = {"item": item, "output_index": len(self._output)}
        return self._event(f"output_item.{what}", said)

    def _part(self, what: str, part: dict[str, object]) -> bytes:
        said = {"content_index": 0, **self._place(), "part": part}
        return self._event(f"content_part.{what}", said)

    def _event(
        self,
        kind: str,
        said: Mapping[str, object],
        tail: Mapping[str, object] | None = None,
        **text: str,
    ) -> bytes:
        name = f"response.{kind}"
        numbered = {**said, "sequence_number": self._number, **text, "type": name, **(tail or {})}
        self._number += 1
        return named_event(name, numbered)


_CHANNELS = {"text": "output_text", "reasoning": "reasoning_text"}
_CALL: dict[str, object] = {"async": None, "caller": None}


def _arguments(*, custom: bool) -> str:
    return "custom_tool_call_input" if custom else "function_call_arguments"


def custom_input(arguments: str) -> str:
    """Return a custom tool's input, as far as its arguments have come."""
    for end in ("", '"}'):
        try:
            said = json.loads(arguments + end)
        except ValueError:
            continue
        if isinstance(said, dict):
            return str(said.get(INPUT, ""))
    return ""


def _renamed(value: dict[str, Any]) -> dict[str, Any]:
    """Return an error of the chat API with this one's name of a limit past the context."""
    error = value["error"]
    if error.get("param") == "max_tokens" and "cannot be greater" in error["message"]:
        error["message"] = error["message"].replace("max_tokens", "max_output_tokens")
        error["param"] = "max_output_tokens"
    return value


def _message(own_id: str, content: list[dict[str, object]], status: str) -> dict[str, object]:
    said = {"id": own_id, "content": content, "role": "assistant", "status": status}
    return said | {"type": "message", "phase": None}


def _text(text: str, logprobs: object) -> dict[str, object]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _reasoning_part(text: str) -> dict[str, object]:
    return {"text": text, "type": "reasoning_text"}


def _reasoning(own_id: str, text: str | None, status: str | None) -> dict[str, object]:
    content = None if text is None else [_reasoning_part(text)]
    said: dict[str, object] = {"id": own_id, "summary": [], "type": "reasoning"}
    said["content"] = content
    return said | {"encrypted_content": None, "status": status}


def _usage(usage: Mapping[str, Any]) -> dict[str, object]:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
    read: dict[str, object] = {"cached_tokens": cached, "cache_write_tokens": 0}
    said: dict[str, object] = {"reasoning_tokens": reasoning, "tool_output_tokens": 0}
    read |= {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
    said |= {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
    return {
        "input_tokens": prompt,
        "input_tokens_details": read,
        "output_tokens": output,
        "output_tokens_details": said,
        "total_tokens": prompt + output,
    }


def _logprobs(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    listed = (choice.get("logprobs") or {}).get("content") or ()
    return [
        _logprob(one) | {"top_logprobs": list(map(_logprob, one["top_logprobs"]))} for one in listed
    ]


def _logprob(one: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one[name] for name in ("token", "bytes", "logprob")}


def _short_logprob(one: Mapping[str, Any]) -> dict[str, Any]:
    short: dict[str, Any] = {name: one[name] for name in ("token", "logprob")}
    if "top_logprobs" in one:
        short["top_logprobs"] = list(map(_short_logprob, one["top_logprobs"]))
    return short


def _shown_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = tool["type"]
    if kind not in ("function", "custom"):
        return tool
    own = ("name", "parameters", "strict") if kind == "function" else ("name",)
    last = "output_schema" if kind == "function" else "format"
    more = ("allowed_callers", "async", "defer_loading", "description", last)
    known: dict[str, Any] = {name: tool.get(name) for name in own}
    return known | {"type": kind} | {name: tool.get(name) for name in more}


def _shown_choice(choice: object) -> object:
    if isinstance(choice, dict) and "name" in choice:
        return {"name": choice["name"], "type": choice.get("type")}
    return choice


def _shown_text(text: Mapping[str, Any] | None) -> object:
    if text is None:
        return None
    wanted = text.get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        members = ("name", "schema", "type", "description", "strict")
        wanted = {name: wanted.get(name) for name in members}
    return {"format": wanted, "verbosity": text.get("verbosity")}


def _shown_reasoning(reasoning: Mapping[str, Any] | None) -> object:
    if reasoning is None:
        return None
    members = ("context", "effort", "generate_summary", "mode", "summary")
    return {name: reasoning.get(name) for name in members}


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < _HUGE else default


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
