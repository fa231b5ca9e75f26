"""Errors in the shape that the clients of an API understand.

OpenAI's: {"error": {"message", "type", "param", "code"}}, as vLLM 0.32 answers. Anthropic's, for
/v1/messages: {"type": "error", "error": {"type", "message"}}, with the types of
https://docs.anthropic.com/en/api/errors. In a stream their events are named `error`.
"""

import json
from typing import Final

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
        return _dump({"type": "error", "error": {"type": kind, "message": message}})
    error = {
        "message": message,
        "type": _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError"),
        "param": param,
        "code": status,
    }
    return _dump({"error": error})


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
    return _event(_dump(message), endpoint)


def _event(body: bytes, endpoint: str) -> bytes:
    name = b"event: error\n" if endpoint.startswith(_NAMED_EVENTS) else b""
    return name + b"data: " + body + b"\n\n"


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
