"""The parts of an answer that both APIs share: its head, its usage, its end.

Field order, spacing and nulls are those of vLLM 0.32.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from balanceroute.proxy.lab.emulate.request import GenerationRequest, Prompt
from balanceroute.proxy.lab.emulate.tokens import (
    ASSISTANT,
    EOS,
    FRAGMENTS,
    TOKEN_TEXTS,
    VOCABULARY_SIZE,
    Sampler,
    TokenLogprob,
    ends_within_character,
    tokenise,
    unit_draws,
)
from balanceroute.proxy.wire.messages import Headers

# Scripts: the emulated model's output when it calls a function (Hermes format), or follows a
# schema.
#
#     <tool_call>
#     {"name": "get_weather", "arguments": {"city": "t12"}}
#     </tool_call>
#
# As in vLLM with a tool parser, a stream has nothing until the name is complete, then the name,
# then the arguments as they are generated. A named or required function is always called. With
# "auto" the prompt determines it; about half of all prompts have a call. An answer by a schema
# begins with its first token, whatever the prompt ends with: a grammar begins anew with each
# request.


class Channel(Enum):
    """The part of an answer that a token's text belongs to."""

    CONTENT = "content"
    REASONING = "reasoning"  # Read by the reasoning parser.
    SILENT = "silent"  # Read by the tool parser.
    NAME = "name"
    ARGUMENTS = "arguments"


@dataclass(frozen=True, slots=True)
class Piece:
    token: int  # Id of the token.
    said: str  # Text of the token.
    channel: Channel  # Its part of the answer.
    shown: str  # Its text there.


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


# One choice of an answer: its tokens, and how it ends.

(EOS_ID,) = tokenise("<|eos|>")
# With a reasoning parser a chat begins with fewer tokens of reasoning than this.
_REASONING_BELOW = 16


@dataclass(slots=True)
class Delta:
    """The part of a choice that one token adds, or several in one event."""

    text: str = ""  # The visible text; in a tool call, its name or a part of its arguments.
    channel: Channel = Channel.CONTENT  # The field that it belongs to.
    token_ids: tuple[int, ...] = ()  # The tokens, or none if the choice ended without one.
    logprobs: tuple[TokenLogprob, ...] = ()  # Log-probabilities of each, if requested.
    offset: int = 0  # Characters of the choice before the first of the tokens.
    late: bool = False  # Whether the server lags, so that this is sent with the next token.

    def merged(self, later: "Delta") -> "Delta":
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            offset=self.offset,
        )


@dataclass(slots=True, eq=False)
class Choice:
    """One sequence of tokens and its state."""

    request: GenerationRequest
    index: int  # Its place among the choices of the answer.
    prompt: Prompt
    max_tokens: int
    mean_tokens: float  # Mean length of a text that ends by itself.
    eos_first: bool = False  # Whether the first token ends it, whatever the request says.
    # Tokens of the text, including the one that ends it, whatever the request says except its
    # limit; None for the model to decide.
    length: int | None = None
    # Probability that a token ends within a character, so that its text is sent with the next
    # one's.
    partial_utf8: float = 0.0
    merged_outputs: float = 0.0  # Probability that a token is sent in one event with the next.
    cached_tokens: int = 0  # Tokens of the prompt that its engine had in its prefix cache.
    emitted: int = 0  # Tokens so far, including the one that ends it.
    text: str = ""  # Its text, unless it is plain.
    reasoning: str = ""  # The reasoning before the text.
    most_reasoning: int = 0  # The tokens of reasoning, if it does not end before.
    finish_reason: str | None = None  # "stop" or "length" once it has ended.
    # The stop string or token id, or "recomputed"; None for the end of the text.
    stop_reason: str | int | None = None
    script: ToolScript | None = None  # The tool call that it makes.
    plain: bool = True  # Whether each token is only its text, so that a fast path may write it.
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    sampler: Sampler = field(init=False)
    _shown: int = 0  # Characters of `text` that were sent.
    _held_back: int = 0  # Characters that may be the start of a stop string.
    _decoded: int = 0  # Characters of `text` that tokens have completed.
    _again: str = ""  # The prompt, which is said before the first token.
    _offset: int = 0  # Characters of all tokens so far.

    def __post_init__(self) -> None:
        self.begin(self.prompt)
        # vLLM's `DecodeStream`, primed with an incomplete suffix, finds the whole prompt to be new.
        if self.prompt.text is None and ends_within_character(self.prompt.tokens[-1]):
            self._again, self.plain = self.prompt.said, False

    def begin(self, read: Prompt) -> None:
        """Start the text that follows the prompt whose KV cache was read; another one after a misread."""
        request = self.request
        key = request.sampling + (self.index % request.n).to_bytes(4, "little")
        if request.penalised:  # By where the answer begins.
            key += len(read.tokens).to_bytes(4, "little")
        self.sampler = Sampler(read.packed, key, self.mean_tokens)
        self.most_reasoning = 0
        if not self.eos_first:
            self.script = tool_script(request, read, key)
            if self.script is None and request.schema is not None:
                self.script = schema_script(request.schema, read, key)
        self.plain = self.script is None and not (
            request.stop or request.stop_token_ids or request.logprobs
        )
        # Only at the beginning of a turn, and without stop conditions or log-probabilities.
        if self.plain and request.reasoning_parser and self.prompt.said.endswith(ASSISTANT):
            self.most_reasoning = self.prompt.digest[0] % _REASONING_BELOW
        if self.most_reasoning or self.partial_utf8 or self.merged_outputs:
            self.plain = False
        self._held_back = max(map(len, request.stop), default=1) - 1
        if request.include_stop:
            self._held_back = 0

    @property
    def kv_tokens(self) -> int:
        return len(self.prompt.tokens) + self.emitted

    @property
    def reasoning_tokens(self) -> int:
        return min(self.emitted, self.most_reasoning)

    @property
    def said(self) -> str:
        """The text, up to a stop condition."""
        if self.plain:
            return "".join([TOKEN_TEXTS[token] for token in self.token_ids if token != EOS_ID])
        return self.text

    @property
    def calls_tool(self) -> bool:
        script = self.script
        return script is not None and bool(script.name) and self.emitted >= len(script.pieces)

    def next_token(self) -> int:
        """Emit the next token of a plain choice; return its id, or EOS."""
        self.emitted += 1
        request = self.request
        may_end = (
            self.length is None and not request.ignore_eos and self.emitted > request.min_tokens
        )
        ends = self.eos_first or self.emitted == self.length
        token = EOS if ends else self.sampler.next(may_end=may_end)
        partial = token != EOS and self.sampler.happens(self.partial_utf8, word=2)
        self.token_ids.append(EOS_ID if token == EOS else token + FRAGMENTS * partial)
        if token == EOS:
            self.finish_reason = "stop"
        elif self.emitted >= self.max_tokens:
            self.finish_reason = "length"
        return token

    def advance(self) -> Delta:
        """Emit the next token of any kind of choice."""
        if self.script is not None:
            return self._follow(self.script)
        return self._say(self.next_token())

    def end(self, stop_reason: str | None, finish_reason: str = "stop") -> Delta:
        """End the choice from outside, without a token."""
        self.finish_reason = finish_reason
        self.stop_reason = stop_reason
        # Of a tool call the parser has sent everything already.
        return Delta("" if self.script is not None else self._release(0))

    def _follow(self, script: ToolScript) -> Delta:
        self.emitted += 1
        if self.emitted > len(script.pieces):
            self.sampler.force(EOS_ID)
            self.finish_reason = "stop"
            self.token_ids.append(EOS_ID)
            return Delta("", Channel.SILENT, (EOS_ID,), self._logprobs(""))
        piece = script.pieces[self.emitted - 1]
        self.sampler.force(piece.token)
        self.text += piece.said
        self.token_ids.append(piece.token)
        if self.emitted >= self.max_tokens:
            self.finish_reason = "length"
        return Delta(piece.shown, piece.channel, (piece.token,), self._logprobs(piece.said))

    def _say(self, token: int) -> Delta:
        said = "" if token == EOS else TOKEN_TEXTS[token]
        offset, self._offset = self._offset, self._offset + len(said)
        if self.emitted <= self.most_reasoning:
            self.reasoning += said
            return Delta(said, Channel.REASONING, (self.token_ids[-1],))
        logprobs = self._logprobs(said)
        ids = (self.token_ids[-1],)
        if ids[0] in self.request.stop_token_ids and self.emitted > self.request.min_tokens:
            self.finish_reason, self.stop_reason = "stop", ids[0]
            said = said if self.request.include_stop else ""
        said, self._again = self._again + said, ""
        self.text += said
        if said and self.request.stop and self.emitted > self.request.min_tokens:
            self._look_for_stop(len(said))
        partial = ends_within_character(ids[0])
        if partial and self.finish_reason == "length":
            self.text = self.text[: self._decoded]  # Nothing completes it.
        elif not partial:
            self._decoded = len(self.text)
        if self.finish_reason is not None:
            return Delta(self._release(0), Channel.CONTENT, ids, logprobs, offset)
        late = self.sampler.happens(self.merged_outputs, word=3)
        shown = "" if partial else self._release(self._held_back)
        return Delta(shown, Channel.CONTENT, ids, logprobs, offset, late)

    def _look_for_stop(self, added: int) -> None:
        """Cut the text at the first stop string that the last `added` characters complete."""
        for stop in self.request.stop:
            begin = self.text.find(stop, max(0, len(self.text) - added - len(stop) + 1))
            if begin >= 0:
                self.text = self.text[: begin + len(stop) * self.request.include_stop]
                self.finish_reason, self.stop_reason = "stop", stop
                return

    def _release(self, held_back: int) -> str:
        end = max(self._shown, len(self.text) - held_back)
        shown, self._shown = self.text[self._shown : end], end
        return shown

    def _logprobs(self, said: str) -> tuple[TokenLogprob, ...]:
        if not self.request.logprobs:
            return ()
        logprob = self.sampler.logprob(said, self.request.logprobs)
        self.logprobs.append(logprob)
        return (logprob,)


DONE = b"data: [DONE]\n\n"
PlainEvent = Callable[[bytes, int], bytes]
"""Returns the event of a plain token, from its escaped text and the token count including it."""

_COUNTS = '"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d'
# The text of each token, escaped for the inside of a JSON string.
TOKEN_TEXTS_JSON = tuple(
    said.encode()
    if said[0] == " " and said[1:].isalnum()  # Needs no escape.
    else json.dumps(said, ensure_ascii=False)[1:-1].encode()
    for said in TOKEN_TEXTS
)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that every part of an answer repeats."""

    id: str  # "chatcmpl-…" or "cmpl-…".
    created: int  # Unix time, seconds.
    model: str
    fingerprint: str  # `system_fingerprint`.
    report_cached: bool  # Whether usage has the cached prompt tokens.

    def opening(self, kind: str) -> str:
        """Return the first members of an object, without the closing brace."""
        name, model = quoted(self.id), quoted(self.model)
        return f'{{"id":{name},"object":"{kind}","created":{self.created},"model":{model}'


class AnswerFormat:
    """How one API writes an answer; `kind` is the object that its events are."""

    kind = ""

    def __init__(self, request: GenerationRequest, head: AnswerHead) -> None:
        self._request = request
        self._head = head
        self._chunk = f'data: {head.opening(self.kind)},"choices":['

    def opening(self, choice: Choice) -> bytes:
        """Return the event that comes before a choice's first token; empty if there is none."""
        del choice
        return b""

    def plain(self, choice: Choice) -> PlainEvent | None:
        """Return a writer of plain tokens' events; None if these differ in more than text."""
        raise NotImplementedError

    def event(self, choice: Choice, delta: Delta) -> bytes:
        """Return the event of a token; empty if it has no content."""
        raise NotImplementedError

    def usage_event(self, choices: Sequence[Choice]) -> bytes:
        usage = final_usage(self._request, choices, cached=self._head.report_cached)
        fingerprint = quoted(self._head.fingerprint)
        return as_bytes(f'{self._chunk}],"usage":{usage},"system_fingerprint":{fingerprint}}}\n\n')

    def whole(self, choices: Sequence[Choice], kv_transfer_params: object) -> bytes:
        raise NotImplementedError


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def as_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def as_bytes(text: str) -> bytes:
    """Return JSON text as bytes; lone surrogates, which UTF-8 cannot encode, become "?"."""
    return text.encode("utf-8", "replace")


def plain_event(request: GenerationRequest, choice: Choice, before: str, behind: str) -> PlainEvent:
    """Return a writer of the events of a choice's plain tokens, from what stands around the text."""
    if not request.continuous_usage:
        begin, end = as_bytes(before), as_bytes(f"{behind}}}\n\n")
        return lambda said, _: begin + said + end
    begin = as_bytes(before).replace(b"%", b"%%")
    frame = begin + as_bytes(f"%b{behind}{_usage_member(request, choice)}}}\n\n")
    prompt_tokens = len(choice.prompt.tokens)
    return lambda said, emitted: frame % (said, prompt_tokens, prompt_tokens + emitted, emitted)


def continuous_usage(request: GenerationRequest, choice: Choice) -> str:
    """Return the usage field of a chunk, if the request asks for one in each."""
    if not request.continuous_usage:
        return ""
    prompt_tokens, emitted = len(choice.prompt.tokens), choice.emitted
    return _usage_member(request, choice) % (prompt_tokens, prompt_tokens + emitted, emitted)


def final_usage(request: GenerationRequest, choices: Sequence[Choice], *, cached: bool) -> str:
    """Return the usage object of the event at the end of a stream."""
    details = f',"prompt_tokens_details":{_cached(request, choices)}' if cached else ""
    if request.reasoning_parser:
        details += f',"completion_tokens_details":{_reasoning(request, choices)}'
    return f"{{{_counts(request, choices)}{details}}}"


def whole_usage(request: GenerationRequest, choices: Sequence[Choice], *, cached: bool) -> str:
    """Return the usage object of an answer that is not streamed."""
    return (
        f'{{{_counts(request, choices)},"prompt_tokens_details":'
        f"{_whole_details(request, choices) if cached else 'null'},"
        f'"completion_tokens_details":{_reasoning(request, choices)}}}'
    )


def ending(request: GenerationRequest, choice: Choice, head: AnswerHead) -> str:
    """Return the fingerprint field, which the last chunk of a choice has unless usage has it."""
    if choice.finish_reason is None or request.include_usage:
        return ""
    return f',"system_fingerprint":{quoted(head.fingerprint)}'


def token_ids_json(request: GenerationRequest, ids: Sequence[int]) -> str:
    return as_json(list(ids)) if request.return_token_ids else "null"


def json_headers(date: bytes) -> Headers:
    return _headers(date, b"application/json")


def stream_headers(date: bytes) -> Headers:
    return _headers(date, b"text/event-stream; charset=utf-8")


def _headers(date: bytes, kind: bytes) -> Headers:
    return [(b"date", date), (b"server", b"uvicorn"), (b"content-type", kind), (b"vary", b"Origin")]


def _usage_member(request: GenerationRequest, choice: Choice) -> str:
    # The completions API does not set the details, and a stream omits unset fields.
    details = (
        f',"completion_tokens_details":{_reasoning(request, [choice])}' if request.chat else ""
    )
    return f',"usage":{{{_COUNTS}{details}}}'


def _counts(request: GenerationRequest, choices: Sequence[Choice]) -> str:
    emitted = sum(choice.emitted for choice in choices)
    return _COUNTS % (request.prompt_tokens, request.prompt_tokens + emitted, emitted)


def _reasoning(request: GenerationRequest, choices: Sequence[Choice]) -> str:
    if not request.reasoning_parser:
        return "null"
    return f'{{"reasoning_tokens":{sum(choice.reasoning_tokens for choice in choices)}}}'


def _whole_details(request: GenerationRequest, choices: Sequence[Choice]) -> str:
    # A stream leaves out what is null.
    more = ',"created_cache_tokens":null,"multimodal_tokens":null}'
    return _cached(request, choices).removesuffix("}") + more


def _cached(request: GenerationRequest, choices: Sequence[Choice]) -> str:
    # With a remote KV cache all but the last prompt token count as cached.
    remote = request.kv is not None and request.kv.get("do_remote_prefill") is True
    # Each prompt once, not for each of its choices.
    cached = sum(choice.cached_tokens for choice in choices[:: request.n])
    return f'{{"cached_tokens":{request.prompt_tokens - 1 if remote else cached}}}'
