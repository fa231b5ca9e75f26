"""The output of a faulty engine."""

import asyncio
import gzip
import re
from collections.abc import Callable

from balanceroute.proxy.lab.emulate.faults import Faults, MalformedAnswer, MalformedStream
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import Headers

_HUGE_BYTES = 20 << 20
_JOINED_BYTES = 20_000
_NOTHING = b" " * 65_536
_NOTHING_S = 0.005
_DONE = b"data: [DONE]"
_USAGE_LAST = re.compile(rb',("choices":\[.*\]),("usage":\{(?:[^{}]|\{[^{}]*\})*\})(?=[,}])')

Write = Callable[[bytes], None]


def malformed_write(kind: MalformedStream, write: Write) -> Write:
    """Return a function that writes malformed events."""
    broken: Write
    match kind:
        case MalformedStream.BYTES:
            broken = _Bytewise(write).write
        case MalformedStream.JOINED:
            broken = _Joined(write).write
        case MalformedStream.BOM:
            broken = _Marked(write, b"\xef\xbb\xbf").write
        case MalformedStream.HUGE:
            broken = _Marked(write, b":" + b"x" * _HUGE_BYTES + b"\n").write
        case _:
            broken = _Spoilt(write, kind).write

    def write_event(event: bytes) -> None:
        if event:  # Some tokens have no visible text.
            broken(event)

    return write_event


def send_malformed(reply: Reply, headers: Headers, body: bytes, faults: Faults) -> None:
    """Answer 200 with a malformed body."""
    match faults.malformed_answer:
        case MalformedAnswer.NOT_JSON:
            reply.send(200, headers, b"<html><body>Welcome to nginx!</body></html>")
        case MalformedAnswer.CUT_JSON:
            reply.send(200, headers, body[: len(body) // 2])
        case MalformedAnswer.TRUNCATED:
            reply.start(200, headers)
            reply.write(body[: len(body) // 2])
            reply.abort()
        case MalformedAnswer.GZIP:
            packed = gzip.compress(body, mtime=0)
            reply.send(200, [*headers, (b"content-encoding", b"gzip")], packed)
        case MalformedAnswer.TRICKLE:
            reply.start(200, headers)
            _trickle(reply, body, 0, faults.trickle_s)
        case MalformedAnswer.ENDLESS:
            reply.start(200, headers)
            reply.write(body)
            _go_on(reply)
        case None:
            reply.send(200, headers, body)


def _trickle(reply: Reply, body: bytes, begin: int, gap_s: float) -> None:
    if reply.closed:
        return
    if begin == len(body):
        reply.end()
        return
    reply.write(body[begin : begin + 1])
    asyncio.get_running_loop().call_later(gap_s, _trickle, reply, body, begin + 1, gap_s)


def keep_alive(reply: Reply, gap_s: float) -> None:
    """Write a comment into a stream again and again, as vLLM does on request while nothing comes."""
    if not reply.closed:
        asyncio.get_running_loop().call_later(gap_s, _say_nothing, reply, gap_s)


def _say_nothing(reply: Reply, gap_s: float) -> None:
    if not reply.closed:
        reply.write(b": keep-alive\n\n")
        keep_alive(reply, gap_s)


def _go_on(reply: Reply) -> None:
    if not reply.closed:
        reply.write(_NOTHING)
        asyncio.get_running_loop().call_later(_NOTHING_S, _go_on, reply)


class _Bytewise:
    """Writes one byte at a time."""

    def __init__(self, write: Write) -> None:
        self._write = write

    def write(self, event: bytes) -> None:
        for i in range(len(event)):
            self._write(event[i : i + 1])


class _Joined:
    """Collects events and writes many at once."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._waiting = b""

    def write(self, event: bytes) -> None:
        self._waiting += event
        if len(self._waiting) >= _JOINED_BYTES or event.startswith(_DONE):
            self._write(self._waiting)
            self._waiting = b""


class _Marked:
    """Writes something before the first event."""

    def __init__(self, write: Write, mark: bytes) -> None:
        self._write = write
        self._mark = mark

    def write(self, event: bytes) -> None:
        self._write(self._mark + event)
        self._mark = b""


class _Spoilt:
    """Writes each event with something wrong in it."""

    def __init__(self, write: Write, kind: MalformedStream) -> None:
        self._write = write
        self._kind = kind

    def write(self, event: bytes) -> None:
        self._write(_spoilt(self._kind, event))


def _spoilt(kind: MalformedStream, event: bytes) -> bytes:
    inside = event.removesuffix(b"\n\n")
    match kind:
        case MalformedStream.BAD_JSON:
            return inside[: len(inside) * 2 // 3] + b"\n\n"
        case MalformedStream.NUL:
            return inside.replace(b'":', b'"\0:', 1) + b"\n\n"
        case MalformedStream.NO_DATA:
            return event.removeprefix(b"data: ")
        case MalformedStream.CRLF:
            return inside + b"\r\n\r\n"
        case MalformedStream.CR:
            return inside + b"\r\r"
        case MalformedStream.MIXED_ENDS:
            return inside + b"\r\n\n"
        case MalformedStream.COMMENTS:
            return b": ping\n\n" + event
        case MalformedStream.USAGE_FIRST:
            return _USAGE_LAST.sub(rb",\2,\1", event)
        case MalformedStream.NO_LAST_BLANK if event.startswith(_DONE):
            return inside
        case MalformedStream.FIELDS:
            return b"event: message\nid: 7\nretry: 1000\n" + event
        case _:
            return event
