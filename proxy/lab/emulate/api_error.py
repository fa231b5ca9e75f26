"""Errors as vLLM answers them: status, JSON body, and the event that ends a stream."""

import json
from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.lab.emulate.faults import ErrorForm

INTERNAL = "Internal server error"
EMPTY = "Cannot apply chat template to an empty conversation. Provide at least one message."
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class ApiError(BalanceRouteError):
    """A request that is answered with an error.

    Attributes:
        kind: The `type` of the error object.
    """

    def __init__(
        self, message: str, *, status: int = 400, kind: str, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    @property
    def value(self) -> dict[str, object]:
        """The error object."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}

    def body(self, form: ErrorForm | None = None) -> bytes:
        """Return the body of an answer."""
        return compact(written(self.value, form))

    def event(self, form: ErrorForm | None = None) -> bytes:
        """Return the event of a stream, which vLLM writes with spaces, unlike all others."""
        text = json.dumps(written(self.value, form), ensure_ascii=False)
        return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


def written(value: Mapping[str, Any], form: ErrorForm | None) -> Mapping[str, Any]:
    """Return an error object in another form."""
    error: dict[str, Any] = value["error"]
    client = error["code"] < 500
    match form:
        case ErrorForm.WORDS:
            kind = "invalid_request_error" if client else "server_error"
            code = {404: "model_not_found", 429: "rate_limit_exceeded"}.get(error["code"], kind)
            return {"error": error | {"type": kind, "code": code}}
        case ErrorForm.DIGITS:
            return {"error": error | {"code": str(error["code"])}}
        case ErrorForm.NO_CODE:
            return {"error": {name: error[name] for name in ("message", "type")}}
        case ErrorForm.FLAT:
            return {"object": "error", **error}
        case ErrorForm.TYPED:
            kind = "invalid_request_error" if client else "api_error"
            kind = {429: "rate_limit_error"}.get(error["code"], kind)
            return {"type": "error", "error": {"type": kind, "message": error["message"]}}
        case None:
            return value


def bad_request(message: str, *, param: str | None = None) -> ApiError:
    """Return an error of the engine's own checks."""
    return ApiError(message, kind="BadRequestError", param=param)


def bad_parameter(message: str, name: str, value: object = None) -> ApiError:
    """Return an error of the engine's own checks that also names the parameter in its message."""
    shown = "" if value is None else f", value={value}"
    return bad_request(f"{message} (parameter={name}{shown})", param=name)


def invalid(kind: str, place: str, message: str, value: object, **more: object) -> ApiError:
    """Return an error of the body's schema (pydantic's errors, as vLLM prints them)."""
    shown = str(value)
    if isinstance(value, dict | list):
        shown = f"<{type(value).__name__} of {len(value)} items>"
    detail = {"type": kind, "loc": place, "msg": message, "input": shown} | more
    return ApiError(f"1 validation error:\n  {detail}", kind="Bad Request", param=place)


def internal_error(message: str = INTERNAL) -> ApiError:
    """Return a failure of the engine."""
    return ApiError(message, status=500, kind="InternalServerError")


def unknown_model(name: object, known: str) -> ApiError:
    """Return the error for a model that is not served."""
    message = f"The model `{name}` does not exist. Valid aliases: {known}."
    return ApiError(message, status=404, kind="NotFoundError", param="model")


def compact(value: object) -> bytes:
    """Return a value as JSON without spaces."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace")
