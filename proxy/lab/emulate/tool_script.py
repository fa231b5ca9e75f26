"""Scripts: what the emulated model emits when it calls a function (Hermes format), or follows a schema.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "t12"}}
    </tool_call>

As in vLLM with a tool parser, a stream has nothing until the name is complete, then the name, then the
arguments as they are generated. A named or required function is always called. With "auto" the
prompt determines it; about half of all prompts have a call. An answer by a schema begins with its first
token, whatever the prompt ends with: a grammar begins anew with each request.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from balanceroute.proxy.lab.emulate.request import GenerationRequest, Prompt
from balanceroute.proxy.lab.emulate.sampler import unit_draws
from balanceroute.proxy.lab.emulate.tokens import VOCABULARY_SIZE, tokenise


class Channel(Enum):
    """The part of an answer that a token's text belongs to."""

    CONTENT = "content"
    REASONING = "reasoning"  # Read by the reasoning parser.
    SILENT = "silent"  # Read by the tool parser.
    NAME = "name"
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a tool call.

    Attributes:
        token: Its id.
        said: Its text.
        channel: Its part of the answer.
        shown: Its text there.
    """

    token: int
    said: str
    channel: Channel
    shown: str


@dataclass(frozen=True, slots=True)
class ToolScript:
    """A whole tool call; or the text that a schema allows, which has no name."""

    call_id: str
    name: str
    arguments: str
    pieces: tuple[Piece, ...]


def tool_script(request: GenerationRequest, prompt: Prompt, key: bytes) -> ToolScript | None:
    """Return the call that a choice makes, if it makes one."""
    if request.tool_choice == "none":
        return None
    draws = unit_draws(prompt.digest + key)
    if request.tool_choice == "auto" and next(draws) < 0.5:
        return None
    functions = [tool["function"] for tool in request.tools]
    function = functions[int(next(draws) * len(functions))]
    if request.tool_choice == "named":
        function = next(known for known in functions if known["name"] == request.tool_name)
    arguments = json.dumps(_object(function.get("parameters"), draws), ensure_ascii=False)
    name = function["name"]
    pieces = tuple(_pieces(name, arguments))
    number = int(next(draws) * 2**52)
    return ToolScript(f"chatcmpl-tool-{number:016x}", name, arguments, pieces)


def schema_script(schema: Mapping[str, Any], prompt: Prompt, key: bytes) -> ToolScript:
    """Return the text that follows a schema."""
    text = json.dumps(_value(schema, unit_draws(prompt.digest + key)), ensure_ascii=False)
    found = [match[0] for match in re.finditer(r"\s*\S+", text)]
    pieces = tuple(Piece(tokenise(said)[0], said, Channel.CONTENT, said) for said in found)
    return ToolScript("", "", "", pieces)


def _pieces(name: str, arguments: str) -> Iterator[Piece]:
    head = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
    text = f"{head}{arguments}}}\n</tool_call>"
    begin, end = len(head), len(head) + len(arguments)
    named = False
    for match in re.finditer(r"\s*\S+", text):
        said = match[0]
        (token,) = tokenise(said)
        shown = text[max(begin, match.start()) : min(end, match.end())]
        if shown:
            yield Piece(token, said, Channel.ARGUMENTS, shown)
        elif not named and said.endswith('",'):
            named = True
            yield Piece(token, said, Channel.NAME, name)
        else:
            yield Piece(token, said, Channel.SILENT, "")


def _object(schema: object, draws: Iterator[float]) -> dict[str, object]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict):
        return {}
    return {name: _value(value, draws) for name, value in properties.items()}


def _value(schema: object, draws: Iterator[float]) -> object:
    if not isinstance(schema, Mapping):
        schema = {}
    known: Mapping[str, Any] = schema
    drawn = int(next(draws) * VOCABULARY_SIZE)
    options = known.get("enum")
    if isinstance(options, list) and options:
        return options[drawn % len(options)]
    match known.get("type"):
        case "integer":
            return drawn
        case "number":
            return drawn / 8
        case "boolean":
            return drawn % 2 == 1
        case "array":
            return [_value(known.get("items"), draws)]
        case "object":
            return _object(known, draws)
        case _:
            longest = known.get("maxLength")
            return f"t{drawn}"[: longest if isinstance(longest, int) else None]
