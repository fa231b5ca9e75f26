"""What coding agents put on the wire, sent again: the proxy's answer is compared with that of one of its engines.

Claude Code's requests are shaped as recorded in github.com/RavenStorm-bit/claude-code-api-logger
(`full-requests-clean.md`), with the headers of later versions and the members of
https://code.claude.com/docs/en/llm-gateway. Codex' are shaped as its client builds them
(github.com/openai/codex, `codex-rs/core/src/client.rs`, and the requests that `codex-rs/core/tests` expects).
Prompts and schemas are this project's own.
"""

import http.client
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from kits import Result

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
    """A request as an agent sends it.

    Attributes:
        name: What it shows.
        target: Path and query.
        headers: Of the agent.
        body: Without the model.
        status: What an engine answers.
    """

    name: str
    target: str
    headers: dict[str, str]
    body: dict[str, Any] = field(repr=False)
    status: int = 200


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
