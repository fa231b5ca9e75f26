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
# The finish reason of what an engine gave up: vLLM does so when it is told to stop, pause or sleep.
ABORT = "abort"
# The stop reason of what a rank hands back.
RECOMPUTED = "recomputed"
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
    stop_sequence: Any = None
    type: Any = None


_decode_ending = msgspec.json.Decoder(_Ending).decode


def passable_headers(headers: "Headers") -> "Headers":
    """Return the headers of an engine's answer that go on to the client."""
    withheld = _WITHHELD
    for name, value in headers:
        if name == b"connection":  # It names headers that are for the next hop alone.
            withheld |= {option.strip().lower() for option in value.split(b",")}
    return [
        field
        for field in headers
        if field[0] not in withheld and not field[0].startswith(_WITHHELD_BEGINNINGS)
    ][:_MOST_HEADERS]


def headers_of_refusal(status: int, headers: "Headers") -> "Headers":
    """Return the same of an engine's refusal: who is to come again is told when."""
    passed = passable_headers(headers)
    if status in (429, 503) and not any(name == b"retry-after" for name, _ in passed):
        passed.append((b"retry-after", b"1"))
    return passed


def stream_headers(headers: "Headers") -> "Headers":
    """Return the same of a stream, which no web server on its way is to gather in a buffer."""
    passed = [field for field in passable_headers(headers) if field[0] != b"x-accel-buffering"]
    return [*passed, (b"x-accel-buffering", b"no")]


def is_encoded(headers: "Headers") -> bool:
    """Return whether the body is compressed, so that nobody here can read it."""
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
    apart = sum(int(one) for one in _CACHE_TOKENS.findall(body, begin))
    return int(prompt[1]) + apart if prompt else 0, int(completion[1]) if completion else 0
