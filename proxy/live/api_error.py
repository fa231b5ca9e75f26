"""Errors in the shape that OpenAI clients understand and vLLM uses.

Shape: {"error": {"message", "type", "param", "code"}}, as vLLM 0.32 answers.
"""

import json

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
    429: "RateLimitError",
    431: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    502: "BadGatewayError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
JSON_HEADERS = [(b"content-type", b"application/json")]


def error_body(status: int, message: str, *, param: str | None = None) -> bytes:
    """Return the JSON body of an error answer."""
    error = {
        "message": message,
        "type": _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError"),
        "param": param,
        "code": status,
    }
    return json.dumps({"error": error}, separators=(",", ":")).encode()


def error_event(status: int, message: str) -> bytes:
    """Return the error as a server-sent event, for a stream that has begun."""
    return b"data: " + error_body(status, message) + b"\n\n"
