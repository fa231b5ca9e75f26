"""Errors of engines, in every form that their frontends have, and the proxy's own in the form of the API.

| who | form |
| --- | --- |
| vLLM | {"error": {"message", "type", "param", "code": 400}}, also as an event of a stream whose status is 200 |
| vLLM's Rust frontend | the same with a word: "code": "invalid_request_error" |
| SGLang, and vLLM before 0.10 | flat: {"object": "error", "message", "type", "code": 400} |
| `/v1/messages` | {"type": "error", "error": {"type": "invalid_request_error", "message"}} |
| `/v1/responses` | in a stream {"type": "error", "code": "server_error", "message"} |
| FastAPI | {"detail": "words"}, or a list of what is invalid |
| vLLM's middlewares, other servers | {"error": "words"}, {"code", "message"} |

What the status does not say is read from the code, else from the type. What neither says is the engine's fault.
"""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec
from msgspec import Struct

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.live.openai.stream_reader import decode

_MAX_ERROR_BYTES = 65_536
_MAX_WORDS = 200
_MAX_NAME = 64
# Where errors say their status, the surest first.
_STATUS_MEMBERS = ("code", "status_code", "status", "type", "error_type")
# What vLLM says once its engine has died: its Python server, and its Rust server.
_DEAD = (
    "EngineCore encountered an issue",
    "EngineDeadError",
    "engine core reported fatal failure",
    "engine-core output dispatcher closed",
    "engine-core client is closed",
)
_NO_LETTER = re.compile(r"[^a-z]+")


def _plain(name: str) -> str:
    """Return a name without what its spellings differ by: "Bad Request", "BadRequestError", "BAD_REQUEST"."""
    return _NO_LETTER.sub("", name.lower()).removesuffix("error").removesuffix("exception")


_NAMES = {
    **{_plain(status.phrase): status.value for status in HTTPStatus if status >= 400},
    **dict.fromkeys(("invalidrequest", "validation", "requestvalidation", "value", "type"), 400),
    **dict.fromkeys(("jsonparse", "contextlengthexceeded", "invalidprompt", "badparameter"), 400),
    **dict.fromkeys(("authentication", "invalidapikey"), 401),
    **dict.fromkeys(("permission", "permissiondenied"), 403),
    "modelnotfound": 404,
    "requesttoolarge": 413,
    "unprocessableentity": 422,
    **dict.fromkeys(("ratelimit", "ratelimitexceeded", "insufficientquota"), 429),
    **dict.fromkeys(("server", "internal", "api"), 500),
    "overloaded": 503,
    "timeout": 504,
}


class EngineError(Struct, frozen=True):
    """An error that an engine reported."""

    status: int  # From 400 to 599.
    words: str  # Its reason, cut for a log; empty if it gives none.
    of_api: bool  # Whether an API wrote it; else a web server or a gateway may have.

    @property
    def is_death(self) -> bool:
        """Whether the engine says that it has died. Else what it says may be its client's words."""
        # In a stream vLLM before 0.11 calls every error the client's.
        return self.words.startswith(_DEAD[0]) or (self.status >= 500 and names_death(self.words))


def read_error(message: Mapping[str, Any]) -> EngineError | None:
    error = message.get("error")
    if "choices" in message and not error:
        return None  # As nearly every event.
    if isinstance(error, dict):
        return EngineError(_status_of(error), _words(error.get("message")), of_api=True)
    if error is not None:
        return EngineError(_status_of(message), _words(error), of_api=False)
    if message.get("object") == "error" or message.get("type") == "error":
        return EngineError(_status_of(message), _words(message.get("message")), of_api=True)
    if "detail" in message:
        return _detail_error(message, message["detail"])
    if isinstance(message.get("message"), str) and not message.keys().isdisjoint(_STATUS_MEMBERS):
        return EngineError(_status_of(message), _words(message["message"]), of_api=False)
    return None


def _detail_error(message: Mapping[str, Any], detail: object) -> EngineError:
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        status, words = HTTPStatus.UNPROCESSABLE_ENTITY.value, detail[0].get("msg")
    else:
        status, words = _status_of(message), detail
    return EngineError(status, _words(words), of_api=False)


def _words(reason: object) -> str:
    return str(reason)[:_MAX_WORDS] if reason else ""


def _status_of(error: Mapping[str, Any]) -> int:
    for name in _STATUS_MEMBERS:
        status = _read_status(error.get(name))
        if status is not None:
            return status
    return HTTPStatus.INTERNAL_SERVER_ERROR.value


def _read_status(given: object) -> int | None:
    if isinstance(given, str) and len(given) <= _MAX_NAME:
        if not (given.isascii() and given.isdigit()):
            return _NAMES.get(_plain(given))
        given = int(given)
    if isinstance(given, int | float) and given in range(400, 600):
        return int(given)
    return None


class _WholeAnswer(Struct):
    """The members of a whole answer that may report an error; the decoder skips the rest."""

    choices: Any = msgspec.UNSET
    error: Any = msgspec.UNSET
    object: Any = msgspec.UNSET
    type: Any = msgspec.UNSET
    error_type: Any = msgspec.UNSET
    detail: Any = msgspec.UNSET
    message: Any = msgspec.UNSET
    code: Any = msgspec.UNSET
    status_code: Any = msgspec.UNSET
    status: Any = msgspec.UNSET


_decode_answer = msgspec.json.Decoder(_WholeAnswer).decode


def error_in(body: bytes) -> EngineError | None:
    """Return the error that a whole answer with status 200 is; None if it is none.

    A response of the Responses API that failed is an answer of its own.
    """
    # Text is escaped, so it cannot hold these names with plain quotes.
    if body.find(b'"error"') < 0 and body.find(b'"choices"') >= 0:
        return None
    try:
        read = msgspec.structs.asdict(_decode_answer(body))
    except (ValueError, RecursionError):
        return _error_of(body)  # It may be JSON that is less strict.
    if read["object"] == "response":
        return None
    return read_error({name: value for name, value in read.items() if value is not msgspec.UNSET})


def _error_of(body: bytes) -> EngineError | None:
    if len(body) > _MAX_ERROR_BYTES:
        return None
    try:
        message = decode(body)
    except (ValueError, RecursionError):
        return None
    return read_error(message) if isinstance(message, dict) else None


def is_error(body: bytes) -> bool:
    """Return whether an answer is an API's error; that of a server without the route is not."""
    error = _error_of(body)
    return error is not None and error.of_api


def error_words(body: bytes) -> str:
    """Return what an error answer says of its reason, cut for a log; empty if it says nothing."""
    error = _error_of(body)
    return "" if error is None else error.words


def names_death(words: str) -> bool:
    """Return whether an engine's server says with an error of its own that the engine has died."""
    return any(one in words for one in _DEAD)


def says_dead(body: bytes) -> bool:
    """Return whether an error answer says that the engine has died."""
    error = _error_of(body)
    return error is not None and error.is_death


# Errors in the shape that the clients of an API understand.
#
# OpenAI's: {"error": {"message", "type", "param", "code"}}, as vLLM 0.32 answers. Anthropic's,
# for /v1/messages: {"type": "error", "error": {"type", "message"}}, with the types of
# https://docs.anthropic.com/en/api/errors. In a stream their events are named `error`.

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    411: "LengthRequiredError",
    413: "RequestTooLargeError",
    414: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    426: "UpgradeRequiredError",
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_MOST_ERROR_BYTES: Final = 65_536
_ANTHROPIC: Final = "/v1/messages"
_NAMED_EVENTS: Final = (_ANTHROPIC, "/v1/responses")
JSON_HEADERS = [(b"content-type", b"application/json")]
NEVER_AGAIN = (b"x-should-retry", b"false")
"""A header that keeps the clients of OpenAI and Anthropic from sending a request again."""


def error_body(status: int, message: str, *, param: str | None = None, endpoint: str = "") -> bytes:
    """Return the JSON body of an error answer.

    Args:
        status: Of the answer.
        message: For the client.
        param: The member of the request that is at fault; Anthropic's shape has no place for it.
        endpoint: The path asked for, which decides the shape.
    """
    if endpoint.startswith(_ANTHROPIC):
        kind = _ANTHROPIC_TYPES.get(
            status, "invalid_request_error" if status < 500 else "api_error"
        )
        return dump_escaped({"type": "error", "error": {"type": kind, "message": message}})
    error = {
        "message": message,
        "type": _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError"),
        "param": param,
        "code": status,
    }
    return dump_escaped({"error": error})


def error_event(status: int, message: str, *, endpoint: str = "") -> bytes:
    """Return the error as a server-sent event, for a stream that has begun."""
    return _event(error_body(status, message, endpoint=endpoint), endpoint)


def answer_event(status: int, body: bytes, words: str, *, endpoint: str = "") -> bytes:
    """Return a whole answer as the error event of a stream that has begun.

    An error in the API's own form stays as it is; of any other there are its words, if it has any.
    """
    try:
        message = json.loads(body) if len(body) <= _MOST_ERROR_BYTES else None
    except (ValueError, RecursionError):
        message = None
    if status < 400 or not isinstance(message, dict) or not isinstance(message.get("error"), dict):
        code = status if status >= 400 else 502
        words = words or f"the answer came as {status}"
        return error_event(code, words, endpoint=endpoint)
    return _event(dump_escaped(message), endpoint)


def _event(body: bytes, endpoint: str) -> bytes:
    name = b"event: error\n" if endpoint.startswith(_NAMED_EVENTS) else b""
    return name + b"data: " + body + b"\n\n"


def dump_escaped(value: object) -> bytes:
    """Return a value as JSON in ASCII."""
    return json.dumps(value, separators=(",", ":")).encode()


# Of streams that go on elsewhere: the errors that no engine reports.
OTHERWISE = error_event(409, "the answer goes on otherwise than it had begun")
LOGPROBS = error_event(409, "log-probabilities of a completion do not tell all that a chat's do")
EXPERTS = error_event(409, "routed_experts of an answer that two engines gave cannot be told")
OWN_ERRORS = frozenset({OTHERWISE, LOGPROBS, EXPERTS})


class CannotResumeError(BalanceRouteError):
    """The answer cannot be continued from its text."""
