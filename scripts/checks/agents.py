"""What must hold of the APIs that agents speak, messages and responses: by what agents send, and drawn."""

import http.client
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx

from checks.fleet import CLIENT, EMPTY_CALL, LAST, Checks, Fleet, Proxy, until
from checks.legs import CHAT, IMAGE, chat
from checks.packages import Result

_TIMEOUT_S = 120.0
# What differs between two right answers to one request.
_DRAWN = re.compile(
    r'"(?:id|item_id|call_id|signature)":"[^"]*"|"created_at":\d+|"sequence_number":\d+'
    r'|"cached_tokens":\d+|"cache_read_input_tokens":\d+'
)
_SESSION = "0b6c2f4e-7d1a-4c55-9a43-6f1f0c5e9d21"
_CLAUDE_HEADERS = {
    "accept": "application/json",
    "content-type": "application/json",
    "user-agent": "claude-cli/2.1.257 (external, cli)",
    "authorization": "Bearer none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": (
        "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
        "prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24"
    ),
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-claude-code-session-id": _SESSION,
    "x-stainless-helper-method": "stream",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
_CODEX_HEADERS = {
    "accept": "text/event-stream",
    "content-type": "application/json",
    "authorization": "Bearer none",
    "user-agent": "codex_cli_rs/0.144.1 (Debian 12.0.0; x86_64) xterm-256color",
    "originator": "codex_cli_rs",
    "version": "0.144.1",
    "session_id": _SESSION,
    "session-id": _SESSION,
    "thread-id": _SESSION,
    "conversation_id": _SESSION,
    "x-client-request-id": _SESSION,
    "x-codex-beta-features": "memories",
    "x-codex-turn-metadata": json.dumps({"session_id": _SESSION, "turn_id": "1"}),
    "x-codex-window-id": f"{_SESSION}:0",
    "x-openai-subagent": "review",
}
_CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
_SCHEMA = "http://json-schema.org/draft-07/schema#"


def _claude_tool(name: str, **properties: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"$schema": _SCHEMA, "type": "object", "properties": properties}
    schema |= {"required": list(properties), "additionalProperties": False}
    return {"name": name, "description": f"{name} of the workspace.", "input_schema": schema}


def _claude(*turns: dict[str, Any], **members: Any) -> dict[str, Any]:
    """Return a turn of Claude Code's main loop."""
    text = {"type": "string", "description": "What."}
    todo = {"type": "array", "items": {"type": "object", "properties": {"content": text}}}
    return {
        "max_tokens": 32_000,
        "messages": list(turns),
        "system": [
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cc_version=2.1.257.d5e; cch=1a2b3;",
            },
            {"type": "text", "text": "You work in a terminal."} | _CACHED,
            {"type": "text", "text": "Use the tools. Be brief."} | _CACHED,
        ],
        "tools": [
            _claude_tool("Bash", command=text, timeout={"type": "number"}),
            _claude_tool("Read", file_path=text),
            _claude_tool("TodoWrite", todos=todo) | {"cache_control": {"type": "ephemeral"}},
        ],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "metadata": {"user_id": f"user_0_account__session_{_SESSION}"},
        "stream": True,
    } | members


_ASKED = {
    "role": "user",
    "content": [
        {"type": "text", "text": "<system-reminder>\nThe date is today.\n</system-reminder>\n"},
        {
            "type": "text",
            "text": "why does the build fail?",
            "cache_control": {"type": "ephemeral"},
        },
    ],
}
_CALLED = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "The log tells.", "signature": "EqQBCkYIBxgC"},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy3"},
        {"type": "text", "text": "I read the log."},
        {
            "type": "tool_use",
            "id": "toolu_01",
            "name": "Bash",
            "input": {"command": "tail build.log"},
        },
        {"type": "tool_use", "id": "toolu_02", "name": "Read", "input": {"file_path": "/a"}},
    ],
}
_TOLD = {
    "role": "user",
    "content": [
        {"tool_use_id": "toolu_01", "type": "tool_result", "content": "error: no such file"},
        {
            "tool_use_id": "toolu_02",
            "type": "tool_result",
            "is_error": True,
            "content": [{"type": "text", "text": "<tool_use_error>not found</tool_use_error>"}],
            "cache_control": {"type": "ephemeral"},
        },
    ],
}
_REMINDED = {"role": "system", "content": "The user changed a file."}


def _codex_tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    tool = {"type": "function", "name": name, "description": f"{name} of the workspace."}
    return tool | {"strict": False, "parameters": schema | {"required": list(properties)}}


def _said(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": kind, "text": text} for text in texts]
    return {"type": "message", "role": role, "content": parts}


def _codex(
    *items: dict[str, Any], tools: tuple[dict[str, Any], ...] = (), **more: Any
) -> dict[str, Any]:
    """Return a turn of Codex."""
    text = {"type": "string", "description": "What."}
    plan = {"type": "array", "items": {"type": "object", "properties": {"step": text}}}
    return {
        "instructions": "You are a coding agent. Be brief.",
        "input": [
            _said("developer", "<permissions>read only</permissions>"),
            _said("user", "<environment_context>\n  <cwd>/w</cwd>\n</environment_context>"),
            _said("user", "why does the build fail?"),
            *items,
        ],
        "tools": [
            _codex_tool("exec_command", cmd=text, yield_time_ms={"type": "number"}),
            _codex_tool("update_plan", plan=plan),
            _codex_tool("view_image", path=text),
            {"type": "web_search", "external_web_access": False},
            *tools,
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": _SESSION,
        "text": {"verbosity": "medium"},
        "client_metadata": {"x-codex-installation-id": _SESSION},
    } | more


_PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
_GRAMMAR = {"format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
_RAN: tuple[dict[str, Any], ...] = (
    {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
    _said("assistant", "I read the log.") | {"phase": "commentary"},
    {
        "type": "function_call",
        "name": "exec_command",
        "arguments": '{"cmd":"tail build.log"}',
        "call_id": "call_1",
    },
    {"type": "function_call_output", "call_id": "call_1", "output": "error: no such file"},
    {"type": "custom_tool_call", "status": "completed", "call_id": "call_2"}
    | {"name": "apply_patch", "input": "*** Begin Patch\n*** End Patch\n"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
)


@dataclass(frozen=True)
class Wire:
    """A request as an agent sends it."""

    name: str  # What it shows.
    target: str  # Path and query.
    headers: dict[str, str]  # Of the agent.
    body: dict[str, Any] = field(repr=False)  # Without the model.
    status: int = 200  # What an engine answers.


def wires() -> Iterator[Wire]:
    """Yield the requests."""
    searching = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    small = {"system": [], "tools": [], "messages": [{"role": "user", "content": "quota"}]}
    forced = {"tool_choice": {"type": "tool", "name": "Bash", "disable_parallel_tool_use": True}}
    for name, body, status in (
        ("first turn", _claude(_ASKED), 200),
        ("turn with results of tools", _claude(_ASKED, _CALLED, _TOLD), 200),
        ("turn with a system message between", _claude(_ASKED, _CALLED, _TOLD, _REMINDED), 200),
        ("a forced tool", _claude(_ASKED, **forced), 200),
        (
            "a budget for thoughts",
            _claude(_ASKED, thinking={"type": "enabled", "budget_tokens": 31_999}),
            200,
        ),
        ("look at the quota", {"max_tokens": 1, **small}, 200),
        ("not streamed", _claude(_ASKED, stream=False), 200),
        (
            "a budget beyond the limit",
            _claude(_ASKED, thinking={"type": "enabled", "budget_tokens": 32_000}),
            400,
        ),
        ("a tool that a server runs", _claude(_ASKED, tools=[searching]), 400),
        ("a document", _claude({"role": "user", "content": [{"type": "document"}]}), 400),
    ):
        yield Wire(f"Claude Code, {name}", "/v1/messages?beta=true", _CLAUDE_HEADERS, body, status)
    counted = {"messages": [_ASKED], "tools": _claude()["tools"]}
    target = "/v1/messages/count_tokens?beta=true"
    yield Wire("Claude Code, counts tokens", target, _CLAUDE_HEADERS, counted)
    secret = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"}
    for name, body, status in (
        ("first turn", _codex(), 200),
        ("turn with outputs of tools", _codex(*_RAN), 200),
        ("a patch without a grammar", _codex(tools=(_PATCH,)), 200),
        (
            "tools in a namespace",
            _codex(
                tools=(
                    {
                        "type": "namespace",
                        "name": "mcp__a",
                        "description": "a",
                        "tools": [_codex_tool("b")],
                    },
                )
            ),
            200,
        ),
        ("not streamed", _codex(stream=False), 200),
        ("a patch by a grammar", _codex(tools=(_PATCH | _GRAMMAR,)), 400),
        ("thoughts of another provider", _codex(secret), 400),
        ("items that are compacted", _codex({"type": "compaction", "encrypted_content": "g"}), 400),
    ):
        yield Wire(f"Codex, {name}", "/v1/responses", _CODEX_HEADERS, body, status)


def check_agents(url: str, engine_url: str, model: str) -> Iterator[Result]:
    """Send each to the proxy and to an engine, and compare the answers byte for byte but for ids."""
    for wire in wires():
        ours, theirs = (send(one, wire, {"model": model}) for one in (url, engine_url))
        fault = None
        if theirs[0] != wire.status:
            fault = f"the engine answers {theirs[0]}, not {wire.status}: {theirs[1][:200]}"
        elif ours[0] != theirs[0] or _essence(ours[1]) != _essence(theirs[1]):
            fault = f"{ours[0]} {ours[1][:300]} where {theirs[0]} {theirs[1][:300]} belongs"
        yield Result("agents", wire.name, fault)


def send(url: str, wire: Wire, members: dict[str, Any]) -> tuple[int, str]:
    """Send a request with further members; return status and body, or 0 and what went wrong."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=_TIMEOUT_S
    )
    try:
        body = json.dumps(wire.body | members).encode()
        connection.request("POST", wire.target, body, wire.headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error)
    finally:
        connection.close()


def _essence(answer: str) -> str:
    return _DRAWN.sub("", answer)


# What must hold of the APIs that agents speak: messages and responses, through prefill and decode
# legs.

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
_CONTROL = re.compile(r"[\x00-\x1f]")
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
        {"stop": ["e"]},  # A longer one holds text back, which thoughts do not survive.
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
    assert last in LAST, f"the stream ends with {last}"
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
            said[name] = _arguments(said[name])
    return said


def _arguments(said: str) -> str:
    """Return the arguments of a call without what vLLM may add to them.

    With a control character in a string they are no JSON, and hermes' parser (vLLM 0.32, 0.33) takes the
    brace that ends the call for theirs if `</tool_call>` comes in a later event.
    """
    said = said.removesuffix(EMPTY_CALL)
    if _CONTROL.search(said):
        with suppress(ValueError):
            json.loads(said[:-1], strict=False)
            return said[:-1]
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


def alike(one: Any, other: Any) -> bool:
    """Return whether what two answers tell is the same, but for log-probabilities of thoughts.

    Where the end of thoughts and the begin of the text come in one event, vLLM 0.32 and 0.33 tell the
    thoughts' log-probabilities as the text's, up to those of `</think>`.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            (_same_but_for_thoughts if name == "logprobs" else alike)(value, other[name])
            for name, value in one.items()
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def _same_but_for_thoughts(one: Any, other: Any) -> bool:
    if not (one and other):
        return bool(one == other)
    shorter, longer = sorted((one, other), key=len)
    before = longer[: len(longer) - len(shorter)]
    ends = not before or "</think>" in before[-1].values()
    return bool(ends and longer[len(before) :] == shorter)


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


# What must hold of the APIs that agents speak: messages and responses, through prefill and decode
# legs.

REQUESTS = 200
"""So many of each API are compared."""

_AT_A_TIME = 4
_WIRE_TOKENS = 40
_OK = 200
# Of what ranks have of prompts, they compute no more than the last token of each.
_COMPUTED = 0.1
_TRIALS = 7
_STREAMS = 6
_STREAMED_TOKENS = 800
# How much longer than by chat others may wait. Below the floor a gap is the machine's own.
_LONGER = 1.5
_FLOOR_S = 0.015


class AgentChecks(Checks):
    """The APIs that agents speak.

    Args:
        fleet: What runs.
        long_words: Words of a prompt that is long beside a step, and fits.
    """

    def __init__(self, fleet: Fleet, *, long_words: int) -> None:
        super().__init__(fleet)
        self._long_words = long_words

    def check_messages_are_those_of_one_engine(self) -> str:
        return self._compare(MESSAGES, draw_messages)

    def check_responses_are_those_of_one_engine(self) -> str:
        return self._compare(RESPONSES, draw_responses)

    def check_what_an_engine_refuses_of_agents_is_refused_in_its_words(self) -> str:
        ask = {"messages": [{"role": "user", "content": "a"}], "model": "tiny", "max_tokens": 4}
        said = {"input": "a", "model": "tiny"}
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
        hosted = {"type": "web_search_20250305", "name": "web_search"}
        refused: list[tuple[str, dict[str, Any]]] = [
            *((path, with_image(path, IMAGE)) for path in (MESSAGES, RESPONSES)),
            (MESSAGES, ask | {"max_tokens": 0}),
            (MESSAGES, ask | {"max_tokens": 100_000}),
            (MESSAGES, ask | {"tools": [hosted]}),
            (MESSAGES, ask | {"temperature": -1}),
            (MESSAGES, ask | {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
            (RESPONSES, said | {"max_output_tokens": 0}),
            (RESPONSES, said | {"tools": [{"type": "custom", "name": "a", "format": grammar}]}),
            (RESPONSES, said | {"tools": [{"type": "nothing"}]}),
            (RESPONSES, said | {"tool_choice": "required"}),
            (RESPONSES, said | {"input": [{"type": "item_reference", "id": "a"}]}),
            (RESPONSES, said | {"prompt": {"id": "a"}}),
        ]
        with self._fleet.proxy("agents-refused") as proxy:
            for path, body in refused:
                ours, theirs = (
                    CLIENT.post(f"{url}{path}", json=body, timeout=60.0)
                    for url in (proxy.url, self._prefiller.url)
                )
                words = [one.json()["error"]["message"] for one in (ours, theirs)]
                # The types of Anthropic's errors are vLLM's own until 0.33.
                same = words[0] == words[1] and (path == MESSAGES or ours.json() == theirs.json())
                assert same, f"{body}: {ours.text[:200]} and {theirs.text[:200]}"
                assert ours.status_code == 400, f"{body}: {ours.text[:200]}"
        return f"{len(refused)} of them, images among them: the tiny models take none"

    def check_claude_code_and_codex_get_what_one_engine_answers(self) -> str:
        statuses: Counter[int] = Counter()
        with self._fleet.proxy("agents-wires") as proxy:
            for wire in wires():
                # The tiny models' context is short, and equal answers need no chance.
                limit = "max_output_tokens" if "input" in wire.body else "max_tokens"
                members = {"model": "tiny", "temperature": 0, limit: _WIRE_TOKENS}
                answers = []
                for url in (proxy.url, self._prefiller.url):
                    status, text = send(url, wire, members)
                    stream = status == _OK and wire.body.get("stream") is True
                    answers.append((status, told(text, stream=stream)))
                assert answers[0] == answers[1], f"{wire.name}: {answers[0]} and {answers[1]}"
                statuses[answers[0][0]] += 1
        seen = ", ".join(f"{count} of {status}" for status, count in sorted(statuses.items()))
        return f"{statuses.total()} requests, answered with {seen}"

    def check_a_long_prompt_of_an_agent_holds_up_nobody(self) -> str:
        gaps: dict[str, list[float]] = {CHAT: [], MESSAGES: [], RESPONSES: []}
        before = self._counts()
        with self._fleet.proxy("agents-long") as proxy:
            for number in range(_TRIALS):
                for path, found in gaps.items():
                    found.append(self._longest_gap(proxy, path, number))
        self._had_from_prefillers(before)
        by_chat = max(median(gaps[CHAT]), _FLOOR_S)
        seen = ", ".join(f"{path} {1000 * median(found):.1f} ms" for path, found in gaps.items())
        for path in (MESSAGES, RESPONSES):
            assert median(gaps[path]) <= _LONGER * by_chat, f"longest gaps of others: {seen}"
        return f"longest gap of {_STREAMS} streams, median of {_TRIALS}: {seen}"

    # How it is done.

    def _compare(self, path: str, draw: Callable[[random.Random, int], dict[str, Any]]) -> str:
        before = self._counts()
        rng = random.Random(path)
        bodies = [draw(rng, number) for number in range(REQUESTS)]
        name = f"agents-{path.rpartition('/')[2]}"
        with self._fleet.proxy(name) as proxy, ThreadPoolExecutor(_AT_A_TIME) as pool:
            found = pool.map(lambda body: self._difference(proxy, path, body), bodies)
            wrong = list(filter(None, found))
        assert not wrong, f"{len(wrong)} of {len(bodies)} differ: {wrong[0]}"
        pulled = self._had_from_prefillers(before)
        streamed = sum(bool(body.get("stream")) for body in bodies)
        return f"{len(bodies)} requests, {streamed} streamed; {pulled:.0f} prompt tokens pulled"

    def _difference(self, proxy: Proxy, path: str, body: dict[str, Any]) -> str:
        """Return how an answer differs from the single engine's; empty if it does not."""
        stream = bool(body.get("stream"))
        answers = []
        try:
            for url in (proxy.url, self._prefiller.url):
                answer = CLIENT.post(f"{url}{path}", json=body, timeout=240.0)
                assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:300]}"
                answers.append(told(answer.text, stream=stream))
        except (AssertionError, httpx.HTTPError) as error:
            return f"{body}: {error!r}"
        if alike(*answers):
            return ""
        for one, other in zip(*answers, strict=False):
            if not alike(one, other):
                return f"{body}: {one} where {other} belongs"
        return f"{body}: {len(answers[0])} events for {len(answers[1])}"

    def _had_from_prefillers(self, before: tuple[float, float]) -> float:
        """Return the prompt tokens that decode ranks have had from elsewhere since `before`.

        Raises:
            AssertionError: They computed more than the last tokens of prompts.
        """
        had, computed = (
            after - earlier for after, earlier in zip(self._counts(), before, strict=True)
        )
        share = computed / max(1.0, had + computed)
        assert share <= _COMPUTED, (
            f"the answers are right, but decode ranks computed {share:.0%} of the prompts: "
            f"{computed:.0f} tokens, and had {had:.0f} from prefillers and caches"
        )
        return had

    def _counts(self) -> tuple[float, float]:
        """Return the prompt tokens that decode ranks had from elsewhere, and those they computed."""
        had = self._prompt_tokens("external_kv_transfer", "local_cache_hit")
        return had, self._prompt_tokens("local_compute")

    def _longest_gap(self, proxy: Proxy, path: str, number: int) -> float:
        """Return the longest time without an event of any stream while a long prompt is served."""
        streams = [_Stream(proxy, f"{number} {path} {i}") for i in range(_STREAMS)]
        until(lambda: all(len(one.times) > 1 for one in streams), "all streams", step_s=0.01)
        begin_s = time.monotonic()
        body = long_prompt(path, number, self._long_words)
        answer = CLIENT.post(f"{proxy.url}{path}", json=body, timeout=120.0)
        assert answer.status_code == 200, answer.text[:300]
        end_s = time.monotonic()
        time.sleep(0.05)
        for one in streams:
            one.leave()
        gaps = [gap for one in streams for gap in one.gaps(begin_s, end_s)]
        assert gaps, "the streams ended too soon"
        return max(gaps)


class _Stream:
    """A streamed chat whose events are timed."""

    def __init__(self, proxy: Proxy, text: str) -> None:
        self.times: list[float] = []  # When each came, on the monotonic clock.
        self._left = False
        path, body = chat(text, max_tokens=_STREAMED_TOKENS, stream=True, ignore_eos=True)
        self._url, self._body = f"{proxy.url}{path}", body
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Return the times between events of which the later one came between two moments."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [
            later - earlier for earlier, later in pairs if begin_s <= later and earlier <= end_s
        ]

    def leave(self) -> None:
        """Read no further, and wait until the connection is closed."""
        self._left = True
        self._thread.join(60.0)

    def _read(self) -> None:
        with CLIENT.stream("POST", self._url, json=self._body, timeout=240.0) as answer:
            for _ in answer.iter_raw():
                self.times.append(time.monotonic())
                if self._left:
                    return
