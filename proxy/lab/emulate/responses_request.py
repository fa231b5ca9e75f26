"""Requests to /v1/responses: the chat request that is equivalent to each.

By vLLM 0.32's `vllm/entrypoints/openai/responses/protocol.py` and `utils.py`, without its store.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from balanceroute.proxy.lab.emulate.api_error import (
    EMPTY,
    ApiError,
    bad_parameter,
    bad_request,
    invalid,
)
from balanceroute.proxy.lab.emulate.hub import Hub
from balanceroute.proxy.lab.emulate.request import check_model

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
    """Return what an item of reasoning says."""
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
