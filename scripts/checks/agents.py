"""What must hold of the APIs that agents speak, messages and responses: by what agents send, and drawn."""

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

from checks.fleet import (
    CHAT,
    CLIENT,
    EMPTY_CALL,
    GENERATE,
    IMAGE,
    LAST,
    MESSAGES,
    RESPONSES,
    Checks,
    Engine,
    Fleet,
    Proxy,
    Streaming,
    ask,
    assert_equal,
    begun,
    chat,
    essence,
    ids_of,
    names_of,
)
from checks.packages import CITY_SCHEMA, Result

# Requests as Claude Code and Codex send them, without the model.

_SESSION = "0b6c2f4e-7d1a-4c55-9a43-6f1f0c5e9d21"
_CLAUDE_HEADERS = """\
accept: application/json
content-type: application/json
user-agent: claude-cli/2.1.257 (external, cli)
authorization: Bearer none
anthropic-version: 2023-06-01
anthropic-beta: claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,\
prompt-caching-scope-2026-01-05,mid-conversation-system-2026-04-07,effort-2025-11-24
anthropic-dangerous-direct-browser-access: true
x-app: cli
x-claude-code-session-id: SESSION
x-stainless-helper-method: stream
x-stainless-lang: js
x-stainless-retry-count: 0
x-stainless-timeout: 600"""
_CODEX_HEADERS = """\
accept: text/event-stream
content-type: application/json
authorization: Bearer none
user-agent: codex_cli_rs/0.144.1 (Debian 12.0.0; x86_64) xterm-256color
originator: codex_cli_rs
version: 0.144.1
session_id: SESSION
session-id: SESSION
thread-id: SESSION
conversation_id: SESSION
x-client-request-id: SESSION
x-codex-beta-features: memories
x-codex-turn-metadata: {"session_id": "SESSION", "turn_id": "1"}
x-codex-window-id: SESSION:0
x-openai-subagent: review"""
_CLAUDE = """\
{"max_tokens": 32000, "stream": true, "thinking": {"type": "adaptive"}, "output_config": {"effort": "medium"},
 "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
 "metadata": {"user_id": "user_0_account__session_SESSION"},
 "system": [
  {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.257.d5e; cch=1a2b3;"},
  {"type": "text", "text": "You work in a terminal.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
  {"type": "text", "text": "Use the tools. Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
 "tools": [
  {"name": "Bash", "description": "Bash of the workspace.", "input_schema":
   {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "required": ["command", "timeout"],
    "properties": {"command": {"type": "string", "description": "What."}, "timeout": {"type": "number"}},
    "additionalProperties": false}},
  {"name": "TodoWrite", "description": "The list.", "cache_control": {"type": "ephemeral"}, "input_schema":
   {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "required": ["todos"],
    "properties": {"todos": {"type": "array", "items": {"type": "object", "properties":
     {"content": {"type": "string", "description": "What."}}}}}, "additionalProperties": false}}]}"""
_CLAUDE_TURNS = """\
[{"role": "user", "content": [
  {"type": "text", "text": "<system-reminder>\\nThe date is today.\\n</system-reminder>\\n"},
  {"type": "text", "text": "why does the build fail?", "cache_control": {"type": "ephemeral"}}]},
 {"role": "assistant", "content": [
  {"type": "thinking", "thinking": "The log tells.", "signature": "EqQBCkYIBxgC"},
  {"type": "redacted_thinking", "data": "EmwKAhgBEgy3"},
  {"type": "text", "text": "I read the log."},
  {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "tail build.log"}},
  {"type": "tool_use", "id": "toolu_02", "name": "Read", "input": {"file_path": "/a"}}]},
 {"role": "user", "content": [
  {"tool_use_id": "toolu_01", "type": "tool_result", "content": "error: no such file"},
  {"tool_use_id": "toolu_02", "type": "tool_result", "is_error": true, "cache_control": {"type": "ephemeral"},
   "content": [{"type": "text", "text": "<tool_use_error>not found</tool_use_error>"}]}]},
 {"role": "system", "content": "The user changed a file."}]"""
_CODEX = """\
{"instructions": "You are a coding agent. Be brief.", "tool_choice": "auto", "parallel_tool_calls": true,
 "reasoning": {"effort": "medium", "summary": "auto"}, "store": false, "stream": true,
 "include": ["reasoning.encrypted_content"], "prompt_cache_key": "SESSION", "text": {"verbosity": "medium"},
 "client_metadata": {"x-codex-installation-id": "SESSION"},
 "input": [
  {"type": "message", "role": "developer", "content":
   [{"type": "input_text", "text": "<permissions>read only</permissions>"}]},
  {"type": "message", "role": "user", "content":
   [{"type": "input_text", "text": "<environment_context>\\n  <cwd>/w</cwd>\\n</environment_context>"}]},
  {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "why does the build fail?"}]}],
 "tools": [
  {"type": "function", "name": "exec_command", "description": "Runs it.", "strict": false, "parameters":
   {"type": "object", "required": ["cmd", "yield_time_ms"], "additionalProperties": false, "properties":
    {"cmd": {"type": "string", "description": "What."}, "yield_time_ms": {"type": "number"}}}},
  {"type": "function", "name": "update_plan", "description": "Plans.", "strict": false, "parameters":
   {"type": "object", "required": ["plan"], "additionalProperties": false, "properties": {"plan":
    {"type": "array", "items": {"type": "object", "properties": {"step": {"type": "string"}}}}}}},
  {"type": "web_search", "external_web_access": false}]}"""
_CODEX_ITEMS = """\
[{"type": "reasoning", "summary": [], "content": null, "encrypted_content": null},
 {"type": "message", "role": "assistant", "phase": "commentary", "content":
  [{"type": "output_text", "text": "I read the log."}]},
 {"type": "function_call", "name": "exec_command", "arguments": "{\\"cmd\\":\\"tail build.log\\"}",
  "call_id": "call_1"},
 {"type": "function_call_output", "call_id": "call_1", "output": "error: no such file"},
 {"type": "custom_tool_call", "status": "completed", "call_id": "call_2", "name": "apply_patch",
  "input": "*** Begin Patch\\n*** End Patch\\n"},
 {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"}]"""


def _sent(text: str) -> Any:
    return json.loads(text.replace("SESSION", _SESSION))


def _headers(text: str) -> dict[str, str]:
    lines = text.replace("SESSION", _SESSION).splitlines()
    return {name: value for name, _, value in (line.partition(": ") for line in lines)}


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
    claude, turns, codex = _sent(_CLAUDE), _sent(_CLAUDE_TURNS), _sent(_CODEX)
    searching = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    small = {"system": [], "tools": [], "messages": [{"role": "user", "content": "quota"}]}
    forced = {"tool_choice": {"type": "tool", "name": "Bash", "disable_parallel_tool_use": True}}
    thinks = {"type": "enabled", "budget_tokens": 31_999}
    target, headers = "/v1/messages?beta=true", _headers(_CLAUDE_HEADERS)
    for name, members, status in (
        ("first turn", {}, 200),
        ("turn with results of tools", {"messages": turns[:3]}, 200),
        ("turn with a system message between", {"messages": turns}, 200),
        ("a forced tool", forced, 200),
        ("a budget for thoughts", {"thinking": thinks}, 200),
        ("look at the quota", {"max_tokens": 1, **small}, 200),
        ("not streamed", {"stream": False}, 200),
        ("a budget beyond the limit", {"thinking": thinks | {"budget_tokens": 32_000}}, 400),
        ("a tool that a server runs", {"tools": [searching]}, 400),
        ("a document", {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400),
    ):
        body = claude | {"messages": turns[:1]} | members
        yield Wire(f"Claude Code, {name}", target, headers, body, status)
    counted = {"messages": turns[:1], "tools": claude["tools"]}
    target = target.replace("?", "/count_tokens?")
    yield Wire("Claude Code, counts tokens", target, headers, counted)
    patch = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
    grammar = {"format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}
    space = {"type": "namespace", "name": "mcp__a", "description": "a"}
    secret = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"}
    for name, items, tools, status in (
        ("first turn", [], [], 200),
        ("turn with outputs of tools", _sent(_CODEX_ITEMS), [], 200),
        ("a patch without a grammar", [], [patch], 200),
        ("tools in a namespace", [], [space | {"tools": codex["tools"][:1]}], 200),
        ("not streamed", [], [], 200),
        ("a patch by a grammar", [], [patch | grammar], 400),
        ("thoughts of another provider", [secret], [], 400),
        ("items that are compacted", [{"type": "compaction", "encrypted_content": "g"}], [], 400),
    ):
        body = codex | {"input": codex["input"] + items, "tools": codex["tools"] + tools}
        body["stream"] = name != "not streamed"
        yield Wire(f"Codex, {name}", RESPONSES, _headers(_CODEX_HEADERS), body, status)


def check_agents(url: str, engine_url: str, model: str, **members: Any) -> Iterator[Result]:
    """Send each to the proxy and to an engine, and compare the answers; `members` replace some."""
    for wire in wires():
        limit = "max_output_tokens" if "input" in wire.body else "max_tokens"
        own = {limit if name == "limit" else name: value for name, value in members.items()}
        body, fault = wire.body | {"model": model} | own, None
        try:
            ours, theirs = (
                CLIENT.post(one + wire.target, json=body, headers=wire.headers, timeout=120.0)
                for one in (url, engine_url)
            )
            said = f"{ours.status_code} {ours.text[:300]} where {theirs.status_code} {theirs.text[:300]} belongs"
            assert ours.status_code == theirs.status_code, said
            assert members or ours.status_code == wire.status, said
            stream = ours.status_code == 200 and wire.body.get("stream") is True
            found = [parts_of(one.text, stream=stream) for one in (ours, theirs)]
            assert alike(*found), said
        except (AssertionError, httpx.HTTPError) as error:
            fault = str(error)
        yield Result("agents", wire.name, fault)


# What is drawn: every kind, its prompt as no other, and its end at any length.

_WORDS = (
    *("import", "class", "return", "yield", "lambda", "with", "open(path)", "except ValueError:"),
    *("def read(self):", "for line in file:", "naïve", "数据", "Straße", 'say "so"', "back\\slash"),
)
# Texts of a long prompt; the context of the tiny model has 2,048 tokens.
_LONG = 8
# Without `strict` a grammar leaves the arguments free, and random weights make no object of them.
_WEATHER = {"name": "get_weather", "description": "The weather.", "strict": True}
_MESSAGES_TOOL = _WEATHER | {"input_schema": CITY_SCHEMA}
_TOOL = {"type": "function"} | _WEATHER | {"parameters": CITY_SCHEMA}
# What differs between two right answers to one request, and what has another meaning on a decode rank.
_OWN = (
    "id", "item_id", "call_id", "signature", "created_at", "sequence_number", "logprob",
    "kv_transfer_params", "input_tokens_details", "cache_creation_input_tokens",
    "cache_read_input_tokens",
)  # fmt: skip
# Half a character, which a text may end with. A stream has it if its last token comes with the end.
_HALF = "\ufffd"
_CONTROL = re.compile(r"[\x00-\x1f]")
_ARGUMENTS = ("response.function_call_arguments.delta", "response.custom_tool_call_input.delta")
_NOTHING = ("", {"type": "input_json_delta", "partial_json": ""})


def _drawn(rng: random.Random, number: int, kinds: list[dict[str, Any]]) -> dict[str, Any]:
    stream = {"stream": True} if number // len(kinds) % 2 else {}
    limit = rng.randrange(1, 40)
    body = {"model": "tiny", "temperature": 0, "max_tokens": limit, "max_output_tokens": limit}
    del body["max_tokens" if "input" in kinds[0] else "max_output_tokens"]
    return body | kinds[0] | kinds[number % len(kinds)] | stream


def _text(rng: random.Random, number: int) -> str:
    words = (rng.choice(_WORDS) for _ in range(rng.randrange(1, 30)))
    return f"{number} {rng.getrandbits(32)} {' '.join(words)}"


def draw_messages(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a body for /v1/messages; its prompt begins as no other does."""
    text = _text(rng, number)
    user: dict[str, Any] = {"role": "user", "content": text}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0"}
    cached = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    forced = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    tools, long = {"tools": [_MESSAGES_TOOL]}, {"max_tokens": 200}
    second = {"tools": [_MESSAGES_TOOL, _MESSAGES_TOOL | {"name": "second"}]}
    kinds: list[dict[str, Any]] = [
        {"messages": [user]},
        {"system": "Be brief."},
        {"system": [billing, cached]},  # vLLM leaves the billing out.
        {"messages": [user, *_sent(_CLAUDE_TURNS)[1:3]]} | tools,
        {"tool_choice": {"type": "any"}} | tools | long,
        {"tool_choice": {"type": "none"}} | tools,
        {"tool_choice": forced} | second | long,
        {"output_config": {"format": {"type": "json_schema", "schema": CITY_SCHEMA}}} | long,
        {"stop_sequences": ["e", "never said"]},
        {"messages": [user | {"content": " ".join(_text(rng, number) for _ in range(_LONG))}]},
        {"thinking": {"type": "adaptive"}, "metadata": {"user_id": "somebody"}, "max_tokens": 80},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}, "top_k": 1},
    ]
    return _drawn(rng, number, kinds)


def draw_responses(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a body for /v1/responses; its prompt begins as no other does."""
    text = _text(rng, number)
    said = [{"type": "input_text", "text": text}]
    item: dict[str, Any] = {"type": "message", "role": "user", "content": said}
    half: dict[str, Any] = {"type": "message", "role": "assistant", "status": "incomplete"}
    half |= {"content": [{"type": "output_text", "text": "It is"}]}
    developer = {"type": "message", "role": "developer", "content": "Be brief."}
    then = {"type": "message", "role": "user", "content": "And then?"}
    schema = {"type": "json_schema", "name": "weather", "schema": CITY_SCHEMA, "strict": True}
    hosted = {"tools": [_TOOL, {"type": "web_search"}]}
    named = {"tool_choice": {"type": "function", "name": "get_weather"}}
    required, long = {"tool_choice": "required"}, {"max_output_tokens": 200}
    space = {"type": "namespace", "name": "home", "description": "All.", "tools": [_TOOL]}
    custom = {"type": "custom", "name": "edit", "description": "Edits a file."}
    codex = {"store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "a"}
    kinds: list[dict[str, Any]] = [
        {"input": text},
        {"instructions": "Be brief.", "input": [item]},
        {"input": [developer, item, *_sent(_CODEX_ITEMS)[:4], then], "tool_choice": "auto"}
        | hosted,
        hosted | required | long,
        hosted | named | long,
        {"tools": [space]} | required | long,
        {"tools": [custom], "max_output_tokens": 30} | required,
        {"text": {"format": schema}} | long,
        {"stop": ["e"]},  # A longer one holds text back, which thoughts do not survive.
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"temperature": 0.8, "seed": number, "top_p": 0.9},
        {"input": [item, half]},
        codex | {"reasoning": {"effort": "low", "summary": "auto"}, "parallel_tool_calls": False},
        {"input": " ".join(_text(rng, number) for _ in range(_LONG))},
    ]
    return _drawn(rng, number, kinds)


def _one_message(path: str, parts: object, limit: int = 4) -> dict[str, Any]:
    """Return a body for either API with one message of a user."""
    said: Any = [{"role": "user", "content": parts}]
    if path == RESPONSES:
        return {"model": "tiny", "input": said, "max_output_tokens": limit, "temperature": 0}
    return {"model": "tiny", "messages": said, "max_tokens": limit, "temperature": 0}


def same(path: str, ours: Any, theirs: Any, *, stream: bool) -> None:
    """Compare two answers as `ask` returns them. Raises AssertionError."""
    if path not in (MESSAGES, RESPONSES):
        assert_equal(essence(ours), essence(theirs))
        assert not stream or len(names_of(ours)) == 1, names_of(ours)
        ids = [ids_of(answer) for answer in (ours, theirs)] if path == GENERATE else []
        assert ids[:1] == ids[1:], ids
        return
    one, other = (parts_of(answer, stream=stream) for answer in (ours, theirs))
    for mine, its in zip(one, other, strict=False):
        assert alike(mine, its), f"{mine} where {its} belongs"
    assert len(one) == len(other), f"{len(one)} events for {len(other)}"


def compare_all(
    proxy: Proxy, engine: Engine, asked: Sequence[tuple[str, dict[str, Any]]], at_a_time: int = 4
) -> None:
    """Compare the proxy's answers with one engine's. Raises AssertionError."""

    def difference(one: tuple[str, dict[str, Any]]) -> str:
        path, body = one
        try:
            answers = [ask(url, path, body, timeout_s=240.0) for url in (proxy.url, engine.url)]
            same(path, *answers, stream=bool(body.get("stream")))
        except (AssertionError, httpx.HTTPError) as error:
            return f"{path}: {body}: {error!r}"
        return ""

    with ThreadPoolExecutor(at_a_time) as threads:
        wrong = [*filter(None, threads.map(difference, asked))]
    assert not wrong, f"{len(wrong)} of {len(asked)} differ: {wrong[0]}"


def parts_of(answer: str, *, stream: bool) -> list[Any]:
    """Return the parts of an answer in order, without those in which two right ones differ.

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
    """Return whether the parts of two answers are equal, but for log-probabilities of thoughts.

    Where the end of thoughts and the begin of the text come in one event, vLLM 0.32 and 0.33 send the
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
        if "output_tokens" in value:  # Cached tokens are counted beside the rest of the prompt.
            names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
            said["input_tokens"] = sum(value.get(name) or 0 for name in names)
        return said
    if not isinstance(value, list):
        return value
    # vLLM sends log-probabilities of half a character only if the other half is in the same event.
    entries = (one for one in value if not isinstance(one, Mapping) or one.get("token") != "")
    return [_plain(one) for one in entries]


# What must hold of the APIs that agents speak, through prefill and decode legs.

REQUESTS = 200
"""So many of each API are compared."""

# Of what ranks have of prompts, they compute no more than the last token of each.
_COMPUTED = 0.1
_TRIALS, _STREAMS, _STREAMED_TOKENS = 7, 6, 800
# How much longer other routes may take than chat. Below the floor a gap is the machine's own.
_LONGER, _FLOOR_S = 1.5, 0.015


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

    def _compare(self, path: str, draw: Callable[[random.Random, int], dict[str, Any]]) -> str:
        rng, before = random.Random(path), self._counts()
        asked = [(path, draw(rng, number)) for number in range(REQUESTS)]
        with self._fleet.proxy(f"agents-{path.rpartition('/')[2]}") as proxy:
            compare_all(proxy, self._prefiller, asked)
        pulled = self._had_from_prefillers(before)
        streamed = sum(bool(body.get("stream")) for _, body in asked)
        return f"{len(asked)} requests, {streamed} streamed; {pulled:.0f} prompt tokens pulled"

    def check_what_an_engine_refuses_of_agents_is_refused_in_its_words(self) -> str:
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
        hosted = {"type": "web_search_20250305", "name": "web_search"}
        source = {"type": "base64", "media_type": "image/png", "data": IMAGE}
        image = {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGE}"}
        messages, responses = (_one_message(path, "a") for path in (MESSAGES, RESPONSES))
        refused: list[tuple[str, dict[str, Any]]] = [
            (MESSAGES, _one_message(MESSAGES, [{"type": "image", "source": source}])),
            (RESPONSES, _one_message(RESPONSES, [image])),
            (MESSAGES, messages | {"max_tokens": 0}),
            (MESSAGES, messages | {"max_tokens": 100_000}),
            (MESSAGES, messages | {"tools": [hosted]}),
            (MESSAGES, messages | {"temperature": -1}),
            (MESSAGES, messages | {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
            (RESPONSES, responses | {"max_output_tokens": 0}),
            (
                RESPONSES,
                responses | {"tools": [{"type": "custom", "name": "a", "format": grammar}]},
            ),
            (RESPONSES, responses | {"tools": [{"type": "nothing"}]}),
            (RESPONSES, responses | {"tool_choice": "required"}),
            (RESPONSES, responses | {"input": [{"type": "item_reference", "id": "a"}]}),
            (RESPONSES, responses | {"prompt": {"id": "a"}}),
        ]
        with self._fleet.proxy("agents-refused") as proxy:
            for path, body in refused:
                ours, theirs = self._both(proxy, path, body)
                words = [one.json()["error"]["message"] for one in (ours, theirs)]
                # The types of Anthropic's errors are vLLM's own until 0.33.
                as_is = words[0] == words[1] and (path == MESSAGES or ours.json() == theirs.json())
                assert as_is, f"{body}: {ours.text[:200]} and {theirs.text[:200]}"
                assert ours.status_code == 400, f"{body}: {ours.text[:200]}"
        return f"{len(refused)} of them, images among them: the tiny models take none"

    def check_claude_code_and_codex_get_what_one_engine_answers(self) -> str:
        # The tiny models' context is short, and equal answers need no chance.
        members = {"temperature": 0, "limit": 40}
        with self._fleet.proxy("agents-wires") as proxy:
            found = list(check_agents(proxy.url, self._prefiller.url, "tiny", **members))
        wrong = [f"{one.check}: {one.fault}" for one in found if one.fault]
        assert not wrong, wrong
        return f"{len(found)} requests, answered as one engine does"

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
        more = {"max_tokens": _STREAMED_TOKENS, "stream": True, "ignore_eos": True}
        asked = [chat(f"{number} {path} {i}", **more) for i in range(_STREAMS)]
        streams = begun(proxy, asked)
        begin_s = time.monotonic()
        text = f"{number} " + " ".join(f"w{i}" for i in range(self._long_words))
        answer = CLIENT.post(proxy.url + path, json=_one_message(path, text), timeout=120.0)
        assert answer.status_code == 200, answer.text[:300]
        end_s = time.monotonic()
        time.sleep(0.05)
        gaps = [gap for one in streams for gap in _gaps(one, begin_s, end_s)]
        assert gaps, "the streams ended too soon"
        return max(gaps)


def _gaps(stream: Streaming, begin_s: float, end_s: float) -> list[float]:
    """Leave a stream; return the times between events that were not all before or behind two moments."""
    stream.leave()
    pairs = zip(stream.times, stream.times[1:], strict=False)
    return [later - earlier for earlier, later in pairs if begin_s <= later and earlier <= end_s]
