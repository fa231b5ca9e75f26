"""What clients of HTTP/3 are asked to send, and what is compared of the answers."""

import re
from dataclasses import dataclass

from balanceroute.proxy.wire.messages import Headers

HOST, PATH = "127.0.0.1", b"/v1/completions"
# Of one protocol alone, or of the moment.
_NOT_COMPARED = {b"transfer-encoding", b"connection", b"date"}
_MADE = re.compile(rb'"created": ?[0-9]+')


@dataclass(frozen=True)
class Asked:
    """A request: its body, and its id, from which engines make that of the answer."""

    body: bytes
    request_id: bytes


@dataclass(frozen=True)
class Got:
    """An answer, as far as it is compared."""

    status: int
    headers: frozenset[tuple[bytes, bytes]]
    body: bytes


def got(status: int, headers: Headers, body: bytes) -> Got:
    """Return what is compared."""
    compared = frozenset(field for field in headers if field[0] not in _NOT_COMPARED)
    # A streamed answer has no length over HTTP/1.1, and needs none.
    return Got(status, compared, _MADE.sub(b'"created":0', body))


def headers_of(one: Asked) -> Headers:
    """Return the headers of a request."""
    return [(b"content-type", b"application/json"), (b"x-request-id", one.request_id)]
