"""Reading and passing on an engine's whole answer."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.shape import Api
from balanceroute.proxy.live.openai.stream_reader import decode
from balanceroute.proxy.live.openai.token_counts import token_count
from balanceroute.proxy.wire.messages import Headers

# Headers of engines that reach no client: those of the connection (RFC 9110 section 7.6.1), those that the
# proxy says itself, and those by which one engine would speak for the whole site that the proxy is, or give
# orders to a web server in front of it. Cookies too: none goes to an engine, so none could come back.
_WITHHELD = frozenset(
    {
        *(b"connection", b"content-length", b"keep-alive", b"proxy-authenticate"),
        *(b"proxy-authentication-info", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"x-request-id"),
        *(b"accept-ch", b"alt-svc", b"clear-site-data", b"expect-ct", b"nel"),
        *(b"public-key-pins", b"public-key-pins-report-only", b"report-to", b"reporting-endpoints"),
        *(b"set-cookie", b"set-cookie2", b"strict-transport-security", b"timing-allow-origin"),
        *(b"x-accel-charset", b"x-accel-expires", b"x-accel-limit-rate", b"x-accel-redirect"),
        *(b"x-lighttpd-send-file", b"x-reproxy-url", b"x-sendfile"),
    }
)
_WITHHELD_BEGINNINGS = (b"access-control-", b"x-balanceroute-", b"x-ratelimit-")
# Some clients read no head of more than 100 lines, and the proxy adds its own.
_MOST_HEADERS = 64
_PLAIN_CODINGS = frozenset({b"", b"identity"})
# The finish reason of an answer that an engine gave up. vLLM writes it after an order to stop, pause or sleep.
ABORT = "abort"
# The stop reason of what a rank hands back.
RECOMPUTED = "recomputed"
# The status of a Responses API response that vLLM gave up; it writes one for models in harmony format.
CANCELLED = "cancelled"
# A count of more digits cannot be true.
_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s*(\d{1,9})\b')
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens":\s*(\d{1,9})\b')
# Of a prompt; /v1/messages counts them apart from `input_tokens`.
_CACHE_TOKENS = re.compile(rb'"cache_(?:read|creation)_input_tokens":\s*(\d{1,9})\b')


class _Ending(Struct):
    """The members of an answer that say how it ended; the rest is passed over."""

    choices: Any = None
    status: Any = None
    stop_reason: Any = None
    stop_sequence: Any = None
    type: Any = None


_decode_ending = msgspec.json.Decoder(_Ending).decode


def passable_headers(headers: Headers) -> Headers:
    """Return the headers of an engine's answer that go on to the client."""
    withheld = _WITHHELD
    if b"connection" in dict(headers):  # It names headers that are for the next hop alone.
        named = b",".join(value for name, value in headers if name == b"connection")
        withheld |= {option.strip().lower() for option in named.split(b",")}
    return [
        field
        for field in headers
        if field[0] not in withheld and not field[0].startswith(_WITHHELD_BEGINNINGS)
    ][:_MOST_HEADERS]


def headers_of_refusal(status: int, headers: Headers) -> Headers:
    """Return the headers of an engine's refusal; one that invites a retry says when."""
    passed = passable_headers(headers)
    if status in (429, 503) and not any(name == b"retry-after" for name, _ in passed):
        passed.append((b"retry-after", b"1"))
    return passed


def stream_headers(headers: Headers) -> Headers:
    """Return the same of a stream, which no web server on its way is to gather in a buffer."""
    passed = [field for field in passable_headers(headers) if field[0] != b"x-accel-buffering"]
    return [*passed, (b"x-accel-buffering", b"no")]


def is_encoded(headers: Headers) -> bool:
    """Return whether the body is compressed; the proxy cannot read it then."""
    # A generator would cost each answer more than its headers do.
    for name, value in headers:
        if name == b"content-encoding" and value.lower() not in _PLAIN_CODINGS:
            return True
    return False


def is_whole(body: bytes) -> bool:
    """Return whether a body is a JSON object: not cut off, not a web server's page, not compressed."""
    # vLLM puts usage behind the choices. To parse a long answer only to look at it is expensive.
    if body.startswith(b"{") and body.endswith(b"}") and body.rfind(b'"usage":') >= 0:
        return True
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def is_handed_back(choice: dict[str, Any]) -> bool:
    """Return whether a choice ends because the rank hands the request back."""
    return choice.get("stop_reason") == RECOMPUTED


def is_recomputed(api: Api, body: bytes) -> bool:
    """Return whether the rank gave the request back instead of finishing it.

    A response of /v1/responses has no place for it.
    """
    if b'"recomputed"' not in body:
        return False
    if api is Api.MESSAGES:
        ending = _ending(body)
        return (ending.stop_reason, ending.stop_sequence) == ("stop_sequence", RECOMPUTED)
    return RECOMPUTED in _reasons(body, "stop_reason")


def is_aborted(api: Api, body: bytes) -> bool:
    """Return whether the engine gave the request up, with whatever it had by then.

    Only the engine's own members show it: the client (`metadata`) or the model wrote all other ones.
    """
    if api is Api.MESSAGES:
        ending = _ending(body)
        return ending.type == "message" and ending.stop_reason is None  # It has no word for it.
    if api is Api.RESPONSES:
        return b'"cancelled"' in body and _ending(body).status == CANCELLED
    return b'"abort"' in body and ABORT in _reasons(body, "finish_reason")


def _reasons(body: bytes, name: str) -> list[object]:
    choices = _ending(body).choices
    if not isinstance(choices, list):
        return []
    return [choice.get(name) for choice in choices if isinstance(choice, dict)]


def _ending(body: bytes) -> _Ending:
    try:
        return _decode_ending(body)
    except (ValueError, RecursionError):
        pass  # It may be JSON that is less strict.
    try:
        return msgspec.convert(decode(body), _Ending)
    except (ValueError, RecursionError):
        return _Ending()


def stops_at_recomputed(body: RequestBody) -> bool:
    """Return whether the client's own stop words may make an engine report what a hand-back does."""
    try:
        stop = body.values.get("stop_sequences") or body.values.get("stop")
        sampling = body.values.get("sampling_params")
        if isinstance(sampling, dict):
            stop = sampling.get("stop", stop)
    except BodyError:
        return True  # Too large to read, so it may.
    return stop == RECOMPUTED or (isinstance(stop, list) and RECOMPUTED in stop)


def counts_of(body: bytes) -> tuple[int, int]:
    """Return the prompt and completion tokens of the answer's usage object, 0 where it has none.

    The text of an answer is escaped JSON, so it cannot hold these names with plain quotes.
    """
    begin = body.rfind(b'"usage":')
    if begin < 0:
        return 0, 0
    prompt = _PROMPT_TOKENS.search(body, begin)
    completion = _COMPLETION_TOKENS.search(body, begin)
    prompt_tokens = int(prompt[1]) if prompt else 0
    if prompt and body.find(b'"cache_', begin) >= 0:
        prompt_tokens += sum(map(int, _CACHE_TOKENS.findall(body, begin)))
    return prompt_tokens, int(completion[1]) if completion else 0


# A whole answer of one token, written as the events of a stream: vLLM's members, in vLLM's order.

_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def events_head(api: Api, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all events of the answer begin with."""
    return {
        "id": message.get("id", ""),
        "object": "chat.completion.chunk" if api is Api.CHAT else "text_completion",
        "created": message.get("created", 0),
        "model": message.get("model", ""),
    }


def token_events(
    api: Api, message: Mapping[str, Any], *, shows_ids: bool = False
) -> list[dict[str, Any]]:
    """Return the events up to the token, as if more came behind it.

    `shows_ids`: the client asked for ids; else there is null where they stand.
    """
    head, choice = events_head(api, message), message["choices"][0]
    if api is not Api.CHAT:
        event = {"index": 0, "text": choice.get("text", ""), "logprobs": None}
        event |= {"finish_reason": None, "stop_reason": None}
        event |= _ids(choice, "prompt_token_ids", "token_ids", shown=shows_ids)
        return [head | {"choices": [event]}]
    said = choice.get("message")
    said = said if isinstance(said, dict) else {}
    opening, going_on = [
        {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        for delta in ({"role": said.get("role", "assistant"), "content": ""}, _delta(said))
    ]
    return [
        head
        | {"choices": [opening]}
        | _ids(message, "prompt_token_ids", "prompt_text", shown=shows_ids),
        head | {"choices": [going_on | _ids(choice, "token_ids", shown=shows_ids)]},
    ]


def ended_events(
    api: Api, message: Mapping[str, Any], *, include_usage: bool, shows_ids: bool = False
) -> list[dict[str, Any]]:
    """Return the events of an answer that its one token ended; `shows_ids` as for `token_events`."""
    events, choice = token_events(api, message, shows_ids=shows_ids), message["choices"][0]
    last = events[-1]["choices"][0]
    ids = _ids(last, "prompt_token_ids", "token_ids", shown=shows_ids)
    for name in ids:
        del last[name]
    last |= {name: choice.get(name) for name in ("logprobs", "finish_reason", "stop_reason")} | ids
    if include_usage:
        usage = without_nulls(message["usage"])
        events.append(events_head(api, message) | {"choices": [], "usage": usage})
    if message.get("system_fingerprint") is not None:
        events[-1]["system_fingerprint"] = message["system_fingerprint"]
    return events


class _Block(Struct, tag_field="type"):
    pass


class _Text(_Block, tag="text"):
    text: str


class _Thinking(_Block, tag="thinking"):
    thinking: str


class _ToolUse(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class _Message(Struct):
    """The members that `message_events` needs."""

    id: str
    model: str
    usage: dict[str, Any]
    content: list[_Text | _Thinking | _ToolUse]
    stop_reason: str


def is_message(message: Mapping[str, Any]) -> bool:
    """Return whether `message_events` can write a whole answer of /v1/messages as events."""
    try:
        msgspec.convert(message, _Message)
    except ValueError:
        return False
    return True


def message_events(message: Mapping[str, Any]) -> bytes:
    """Return a whole message as events of /v1/messages, as vLLM 0.32 would stream it.

    It writes no block for an answer without text, which has an empty one as a whole, and counts what was
    cached only in the last usage.
    """
    usage = message["usage"]
    prompt = sum(token_count(usage, name) or 0 for name in ("input_tokens", *_CACHED))
    head = {"id": message["id"], "type": "message", "role": "assistant", "content": []}
    head |= {"model": message["model"], "stop_reason": None, "stop_sequence": None}
    head |= {"usage": {"input_tokens": prompt, "output_tokens": 0}}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": head}]
    content = [block for block in message["content"] if block != {"type": "text", "text": ""}]
    for index, block in enumerate(content):
        opened, deltas = _block(block)
        events.append({"type": "content_block_start", "content_block": opened, "index": index})
        kind = "content_block_delta"
        events += [{"type": kind, "delta": delta, "index": index} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    stop = {name: message.get(name) for name in ("stop_reason", "stop_sequence")}
    events.append({"type": "message_delta", "delta": stop, "usage": usage})
    events.append({"type": "message_stop"})
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), dump_compact(event))
        for event in events
    )


def _block(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    kind = block["type"]
    if kind == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}]
        if "signature" in block:
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
        return {"type": kind, "thinking": ""}, deltas
    if kind == "tool_use":
        filled = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        return {**block, "input": {}}, [filled]
    return {"type": kind, "text": ""}, [{"type": "text_delta", "text": block["text"]}]


def without_nulls(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a usage object as a stream has it: without what is null, in its details, too."""
    return {
        name: without_nulls(count) if isinstance(count, dict) else count
        for name, count in usage.items()
        if count is not None
    }


def write_events(events: list[dict[str, Any]]) -> bytes:
    """Return events as bytes; lone surrogates, which UTF-8 cannot encode, become "?"."""
    return b"".join(b"data: " + dump_compact(event) + b"\n\n" for event in events)


def dump_compact(value: object) -> bytes:
    """Return a value as JSON as vLLM writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def _delta(said: Mapping[str, Any]) -> dict[str, Any]:
    delta = {name: value for name, value in said.items() if value and name != "role"}
    calls = delta.get("tool_calls")
    if isinstance(calls, list):
        # In a stream every call says which one it is.
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(calls) if isinstance(call, dict)
        ]
    return delta


def _ids(values: Mapping[str, Any], *names: str, shown: bool) -> dict[str, Any]:
    """Return those members, of which not all versions have each, without a value unless `shown`."""
    return {name: values[name] if shown else None for name in names if name in values}


# A whole answer of /inference/v1/generate of one token, as the events of a stream.
#
# vLLM 0.32's members, in its order. The choices of both forms have the same.

# Those of the first event, which are left out where they are null.
_ONCE = ("prompt_token_ids", "mm_placeholders")
# Members of the last event of a choice.
_AT_END = ("finish_reason", "stop_reason", "weight_versions")


def ended_token_events(message: Mapping[str, Any], *, include_usage: bool) -> list[dict[str, Any]]:
    events = [_event(message, message["choices"][0])]
    if include_usage and message.get("usage") is not None:
        usage = without_nulls(message["usage"])
        events.append(
            {**_head(message), "usage": usage, "output_mode": _mode(message), "choices": []}
        )
    return events


def first_token_event(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the event of the token, as if more came behind it."""
    choice = message["choices"][0]
    return _event(message, choice | {name: None for name in _AT_END if name in choice})


def _event(message: Mapping[str, Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    once = {name: message[name] for name in _ONCE if message.get(name) is not None}
    body = {"output_mode": _mode(message), "choices": [choice]}
    return {**_head(message), "usage": None, **once, **body}


def _head(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"request_id": message.get("request_id", "")}


def _mode(message: Mapping[str, Any]) -> object:
    return message.get("output_mode", "tokens")
