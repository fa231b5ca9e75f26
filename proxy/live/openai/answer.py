"""Reading and passing on an engine's whole answer."""

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from balanceroute.proxy.live.openai.body import BodyError
from balanceroute.proxy.live.openai.json_value import decode
from balanceroute.proxy.live.openai.shape import Api

if TYPE_CHECKING:
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.wire.messages import Headers

# What of an engine's response head may reach a client. The rest belongs to the
# connection, or is not for clients.
_PASSABLE = frozenset({b"content-type", b"retry-after", b"www-authenticate", b"x-should-retry"})
# The finish reason of what an engine gave up: vLLM does so when it is told to stop, pause or sleep.
ABORT = "abort"
_RECOMPUTED = "recomputed"
# Of a response of the Responses API that was given up, where vLLM tells it: of models in harmony format.
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
    type: Any = None


_decode_ending = msgspec.json.Decoder(_Ending).decode


def passable_headers(headers: "Headers") -> "Headers":
    """Return the headers that may go on to the client."""
    return [(name, value) for name, value in headers if name in _PASSABLE]


def is_whole(body: bytes) -> bool:
    """Return whether a body is a JSON object: not cut off, not a web server's page, not compressed."""
    # vLLM puts usage behind the choices. To parse a long answer only to look at it is expensive.
    if body.startswith(b"{") and body.endswith(b"}") and body.rfind(b'"usage":') >= 0:
        return True
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def is_recomputed(body: bytes) -> bool:
    """Return whether the rank gave the request back instead of finishing it."""
    return b'"recomputed"' in body and _RECOMPUTED in _reasons(body, "stop_reason")


def is_aborted(api: Api, body: bytes) -> bool:
    """Return whether the engine gave the request up, with whatever it had by then.

    Its own members alone say so: others are the client's words (`metadata`) or the model's.
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


def stops_at_recomputed(body: "RequestBody") -> bool:
    """Return whether the client's own stop words may make an engine report what a hand-back does."""
    try:
        stop = body.values.get("stop")
        sampling = body.values.get("sampling_params")
        if isinstance(sampling, dict):
            stop = sampling.get("stop", stop)
    except BodyError:
        return True  # Too large to read, so it may.
    return stop == _RECOMPUTED or (isinstance(stop, list) and _RECOMPUTED in stop)


def counts_of(body: bytes) -> tuple[int, int]:
    """Return the prompt and completion tokens of the answer's usage object, 0 where it has none.

    The text of an answer is escaped JSON, so it cannot hold these names with plain quotes.
    """
    begin = body.rfind(b'"usage":')
    if begin < 0:
        return 0, 0
    prompt = _PROMPT_TOKENS.search(body, begin)
    completion = _COMPLETION_TOKENS.search(body, begin)
    apart = sum(int(one) for one in _CACHE_TOKENS.findall(body, begin))
    return int(prompt[1]) + apart if prompt else 0, int(completion[1]) if completion else 0
