"""The parts of an answer that both APIs share: its head, its usage, its end.

Field order, spacing and nulls are those of vLLM 0.32.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from balanceroute.proxy.lab.emulate.choice import Choice, Delta
from balanceroute.proxy.lab.emulate.request import GenerationRequest
from balanceroute.proxy.lab.emulate.tokens import TOKEN_TEXTS
from balanceroute.proxy.wire.messages import Headers

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
    """The fields that every part of an answer repeats.

    Attributes:
        id: "chatcmpl-…" or "cmpl-…".
        created: Unix time, seconds.
        fingerprint: `system_fingerprint`.
        report_cached: Whether usage has the cached prompt tokens.
    """

    id: str
    created: int
    model: str
    fingerprint: str
    report_cached: bool

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
        """Return the event with the usage at the end of a stream."""
        usage = final_usage(self._request, choices, cached=self._head.report_cached)
        fingerprint = quoted(self._head.fingerprint)
        return as_bytes(f'{self._chunk}],"usage":{usage},"system_fingerprint":{fingerprint}}}\n\n')

    def whole(self, choices: Sequence[Choice], kv_transfer_params: object) -> bytes:
        """Return the body of an answer that is not streamed."""
        raise NotImplementedError


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def as_json(value: object) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def as_bytes(text: str) -> bytes:
    """Return JSON text as bytes; lone surrogates, which UTF-8 cannot encode, become "?"."""
    return text.encode("utf-8", "replace")


def plain_event(request: GenerationRequest, choice: Choice, before: str, behind: str) -> PlainEvent:
    """Return a writer of the events of a choice's plain tokens.

    Args:
        request: The request.
        choice: The choice.
        before: The text of the event before the token's text.
        behind: The text after it, up to usage.
    """
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
    """Return the value of `token_ids`."""
    return as_json(list(ids)) if request.return_token_ids else "null"


def json_headers(date: bytes) -> Headers:
    """Return the headers of a JSON answer."""
    return _headers(date, b"application/json")


def stream_headers(date: bytes) -> Headers:
    """Return the headers of a stream."""
    return _headers(date, b"text/event-stream; charset=utf-8")


def _headers(date: bytes, kind: bytes) -> Headers:
    return [
        (b"date", date),
        (b"server", b"uvicorn"),
        (b"content-type", kind),
        (b"vary", b"Origin"),
    ]


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
