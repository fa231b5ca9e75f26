"""The head of a client's request: identity, and what of it may reach an engine.

Engine requests are built from an allow-list, never by removing from what the client sent: rank
headers, proxies' own headers and cookies cannot pass by being forgotten.
"""

import re
from hashlib import sha256
from typing import TYPE_CHECKING

from balanceroute.proxy.live.openai.routes import Media
from balanceroute.proxy.live.security.credentials import Secret
from balanceroute.proxy.wire.messages import Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from balanceroute.proxy.wire.messages import Headers

NOT_FOUND = Rejection(404, "Not Found")
"""Of what is not served."""

# Visible ASCII that stands in JSON as it is.
_REQUEST_ID = re.compile(rb"[!#-\[\]-~]{1,128}")
_MOST_OF_AN_ID = 256
_JSON_TYPES = frozenset({b"", b"application/json", b"application/x-www-form-urlencoded"})
_NO_CODING = frozenset({b"", b"identity"})
_ID_DIGITS = 8
_MAX_USER_AGENT = 128
# The others choose what of Anthropic's API a client speaks.
_PASSED = frozenset({b"user-agent", b"anthropic-version", b"anthropic-beta"})
# Trace context (https://www.w3.org/TR/trace-context/) lets one trace span client and engine.
_TRACE = frozenset({b"traceparent", b"tracestate"})
# Answers are read here, for counts and errors, so no engine is to compress one.
_PLAIN = (b"accept-encoding", b"identity")
_ENGINE_LINES = (
    b"content-type: application/json\r\nx-request-id: %b\r\naccept-encoding: identity\r\n"
)
_TOKENS = re.compile(rb"[1-9][0-9]{0,8}")
_OPEN_WEBSOCKETS = frozenset({b"GET", b"CONNECT"})
_KEYS = frozenset({b"api-key", b"authorization", b"x-api-key"})
_WITH_KEYS = _PASSED | _KEYS
# Up to Python 3.11 each look at a member of an enumeration is a call.
_FORM = Media.FORM


class BadHintError(Exception):
    """X-Expected-Output-Tokens is given twice, or is no number of tokens."""

    def __str__(self) -> str:
        return "X-Expected-Output-Tokens must be a number from 1 to 999999999, given once"


def client_request_id(headers: "Headers") -> tuple[str, str]:
    """Return the client's X-Request-Id, and, where that cannot be kept, what it gave instead.

    Either is empty if there is no such thing. What cannot be kept is for the log alone: something else
    than 1 to 128 visible characters, or two ids that differ.
    """
    given = dict.fromkeys(value for name, value in headers if name == b"x-request-id")
    if len(given) == 1:
        (value,) = given
        if _REQUEST_ID.fullmatch(value):
            return value.decode(), ""
    return "", b", ".join(given)[:_MOST_OF_AN_ID].decode("utf-8", "backslashreplace")


def expected_output_tokens(headers: "Headers") -> int | None:
    """Return the client's X-Expected-Output-Tokens, or None if it gave none.

    Raises:
        BadHintError: It is given twice, or is no number of tokens.
    """
    values = [value for name, value in headers if name == b"x-expected-output-tokens"]
    if not values:
        return None
    if len(values) > 1 or not _TOKENS.fullmatch(values[0]):
        raise BadHintError
    return int(values[0])


def given_keys(headers: "Headers") -> list[bytes]:
    """Return the keys that are given: as the bearer token, Anthropic's X-Api-Key and Azure's Api-Key.

    Each of them may be given once: else none of them is a key.
    """
    given = [(name, value) for name, value in headers if name in _KEYS]
    if len({name for name, _ in given}) < len(given):
        return [b""]
    return [_token(name, value) for name, value in given]


def _token(name: bytes, value: bytes) -> bytes:
    """Return the key in a header; empty, which is no key, if the header holds something else."""
    if name != b"authorization":
        return value
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def api_key_id(headers: "Headers") -> str:
    """Return what names the given API key in logs: the first 8 hexadecimal digits of its SHA-256.

    That is short enough to say nothing of a random key, and the same in every proxy and after every
    restart.
    """
    for name, value in headers:
        if name in _KEYS:
            return sha256(_token(name, value)).hexdigest()[:_ID_DIGITS]
    return ""


def user_agent(headers: "Headers") -> str:
    """Return the client's own word of what it is, cut for a log."""
    for name, value in headers:
        if name == b"user-agent":
            return value[:_MAX_USER_AGENT].decode("latin-1")
    return ""


def asks_for_websocket(method: bytes, headers: "Headers") -> bool:
    """Return whether a head opens a WebSocket (RFC 6455 section 4.1, over HTTP/3 RFC 9220)."""
    if method not in _OPEN_WEBSOCKETS:
        return False
    named = b",".join(value for name, value in headers if name == b"upgrade").lower()
    return b"websocket" in {protocol.strip() for protocol in named.split(b",")}


def check_json_body(headers: "Headers") -> Rejection | None:
    """Return why a body so described is not read as JSON, or None.

    A body without a media type is, and so is a form, which is what curl calls a body without a
    media type.
    """
    for name, value in headers:
        if name == b"content-type":
            media_type = value.partition(b";")[0].strip().lower()
            if media_type not in _JSON_TYPES:
                return Rejection(415, "the Content-Type must be application/json")
        elif name == b"content-encoding" and value.lower() not in _NO_CODING:
            text = "the body must not be encoded: Content-Encoding is not served"
            return Rejection(415, text, ((b"accept-encoding", b"identity"),))
    return None


def engine_headers(
    headers: "Sequence[tuple[bytes, bytes]]",
    *,
    request_id: str,
    engine_key: Secret | None,
    keep_key: bool,
    media: Media = Media.JSON,
) -> "Headers":
    """Return the headers of every engine leg.

    Args:
        headers: The client's.
        request_id: Names the request at the engine; vLLM makes the response's id of it.
        engine_key: Bearer token for the engines; None for none.
        keep_key: Whether the client's own key is for the engines, if they have no key of ours.
        media: What the body is. A form's type is the client's own, since it names the boundary.
    """
    made: Headers = [(b"x-request-id", request_id.encode()), _PLAIN]
    if media is _FORM:
        made += [(name, value) for name, value in headers if name == b"content-type"]
    else:
        made.insert(0, (b"content-type", b"application/json"))
    return [
        *made,
        *key_headers(engine_key),
        *passed_headers(headers, keep_key=keep_key and engine_key is None),
        *trace_headers(headers),
    ]


def engine_lines(request_id: str, *more: bytes) -> bytes:
    """Return the same for a body of JSON, as lines; `more` are those of the other headers."""
    return b"".join((_ENGINE_LINES % request_id.encode(), *more))


def key_headers(engine_key: Secret | None) -> "Headers":
    """Return the header by which the engines know us."""
    return [] if engine_key is None else [(b"authorization", b"Bearer " + engine_key.value)]


def passed_headers(headers: "Sequence[tuple[bytes, bytes]]", *, keep_key: bool) -> "Headers":
    """Return the client's headers that are for engines, without those of a trace."""
    passed = _WITH_KEYS if keep_key else _PASSED
    return [field for field in headers if field[0] in passed]


def trace_headers(headers: "Sequence[tuple[bytes, bytes]]") -> "Headers":
    """Return those of a trace."""
    return [field for field in headers if field[0] in _TRACE]
