"""The body of a form: passed on as it is, unless it steers what no client may.

A transcription takes `vllm_xargs` as JSON in a part of its own, and vLLM merges it with its own parameters
of the request. Parts are found as its server finds them, or more of them.
"""

import json
from email.message import Message
from typing import Any

from balanceroute.proxy.live.openai.body import BodyError
from balanceroute.proxy.live.openai.shape import refuse_internal
from balanceroute.proxy.wire.messages import Headers

_XARGS = "vllm_xargs"
# As many fields and files as the engine's server takes.
_MOST_PARTS = 2_000
_MOST_HEAD_BYTES = 16_384
_UTF_8 = frozenset({"utf-8", "utf8", "us-ascii", ""})
_HEAD_END = b"\r\n\r\n"
_decode = json.JSONDecoder().raw_decode


def refuse_internal_parts(headers: Headers, body: bytes) -> None:
    """Refuse a form that has internal members.

    Raises:
        BodyError: A part has such members, or cannot be read as the engine would read it.
    """
    for name, value in headers:
        if name == b"content-type":
            _check_parts(value, body)


def boundary_of(headers: Headers) -> bytes:
    """Return what stands between the parts of a form, which is another word each time; empty for no form."""
    for name, value in headers:
        if name == b"content-type":
            return _boundary(_params(value))
    return b""


def _boundary(params: dict[str, str]) -> bytes:
    return params.get("boundary", "").encode("latin-1", "replace")


def _check_parts(content_type: bytes, body: bytes) -> None:
    params = _params(content_type)
    boundary = _boundary(params)
    if not boundary:
        return  # The engine refuses it.
    if params.get("charset", "").lower() not in _UTF_8:
        raise BodyError("the form's charset must be utf-8")
    mark = b"--" + boundary
    begin, parts = body.find(mark), 0
    while begin >= 0:
        parts += 1
        if parts > _MOST_PARTS:
            raise BodyError(f"the form has more than {_MOST_PARTS} parts")
        begin += len(mark)
        _check_part(body, begin, mark)
        begin = body.find(mark, begin)


def _check_part(body: bytes, begin: int, mark: bytes) -> None:
    if body.startswith(b"--", begin):
        return  # The end.
    end = body.find(_HEAD_END, begin, begin + _MOST_HEAD_BYTES)
    if end < 0:
        if len(body) - begin > _MOST_HEAD_BYTES:
            raise BodyError("the head of a part of the form is too long")
        return
    for line in body[begin:end].split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-disposition" and _params(value).get("name") == _XARGS:
            start = end + len(_HEAD_END)
            stop = body.find(mark, start)
            _check_xargs(body[start : stop if stop >= 0 else len(body)])


def _check_xargs(text: bytes) -> None:
    try:
        value, _ = _decode(_text(text).lstrip(" \t\r\n"))
    except ValueError:
        return  # The engine refuses it.
    except RecursionError:
        raise BodyError(f"{_XARGS} is nested too deeply", _XARGS) from None
    refuse_internal(value, _XARGS)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("latin-1")  # As the engine's server does.


def _params(value: bytes) -> dict[str, str]:
    """Return the parameters of a header, decoded as the engine's server does it."""
    message = Message()
    message["content-type"] = value.decode("latin-1").replace("\r", " ").replace("\n", " ")
    params: dict[str, str] = {}
    found: Any = message.get_params(failobj=[])  # An encoded value is a tuple with its charset.
    for name, given in found:
        params[name.lower()] = given[-1] if isinstance(given, tuple) else given
    return params
