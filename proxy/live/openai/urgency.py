"""How urgent a request is by its client's own word: level and deadlines.

The level is the body's `priority`, as in vLLM: lower goes first, and 0 is the usual one. Without it
the level is the urgency of the `Priority` header less 3, so that RFC 9218's default is 0 too.
"""

import re

from msgspec import Struct

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.shape import Api, integer
from balanceroute.proxy.wire.messages import Headers

_USUAL_URGENCY = 3
# When the first token is due, and when the whole answer is, both from the request's arrival.
FIRST_TOKEN_DUE, ANSWER_DUE = b"x-request-deadline-ms", b"x-answer-deadline-ms"
# A day. A longer wait is no deadline.
_MOST_MS = 86_400_000
_DEADLINE = re.compile(rb"[0-9]{1,8}")

# The grammar of a dictionary of structured fields, RFC 8941 section 3.2.
_KEY = rb"[a-z*][a-z0-9_\-.*]*"
_BARE = (
    rb"(?:-?[0-9]{1,12}\.[0-9]{1,3}|-?[0-9]{1,15}"
    rb"|\"(?:[ !#-\[\]-~]|\\[\"\\])*\""
    rb"|[A-Za-z*][!#$%&'*+\-.^_`|~0-9A-Za-z:/]*|:[A-Za-z0-9+/=]*:|\?[01])"
)
_PARAMETERS = rb"(?:; *" + _KEY + rb"(?:=" + _BARE + rb")?)*"
_ITEM = _BARE + _PARAMETERS
_LIST = rb"\( *(?:" + _ITEM + rb"(?: +" + _ITEM + rb")* *)?\)" + _PARAMETERS
_VALUE = rb"(?:=(?:" + _LIST + rb"|(" + _BARE + rb")" + _PARAMETERS + rb")|" + _PARAMETERS + rb")"
_MEMBER = re.compile(rb"(" + _KEY + rb")" + _VALUE + rb"[ \t]*(,[ \t]*|$)")
_URGENCY = re.compile(rb"[0-7]")
# A field of 30 KiB takes milliseconds to read.
_MOST_BYTES = 1024


class Urgency(Struct, frozen=True):
    """How urgent a request is, and its share; see `Ticket`."""

    level: int = 0
    deadline_ns: int | None = None
    weight: float = 1.0


def read_level(api: Api, headers: Headers, body: RequestBody) -> int:
    """Return the level that a request asks for; its shape has been read."""
    # Anthropic's API has no such member, and ignores what it does not know.
    priority = None if api is Api.MESSAGES else integer(body.values.get("priority"))
    return urgency(headers) - _USUAL_URGENCY if priority is None else priority


def urgency(headers: Headers) -> int:
    """Return the urgency of the `Priority` header, 0 to 7; 3 if it has none that can be read.

    What cannot be read is ignored, as RFC 9218 (section 4) demands: the header is for any proxy on
    the way, and one written for another one must not fail the request.
    """
    field = b", ".join(value.strip() for name, value in headers if name == b"priority")
    if len(field) > _MOST_BYTES:
        return _USUAL_URGENCY
    found, position = _USUAL_URGENCY, 0
    while position < len(field):
        member = _MEMBER.match(field, position)
        # A comma has to be followed by a member.
        if member is None or (member[3] and member.end() == len(field)):
            return _USUAL_URGENCY
        if member[1] == b"u":
            # The last one counts, also if it is out of range and so ignored.
            value = member[2] or b""
            found = int(value) if _URGENCY.fullmatch(value) else _USUAL_URGENCY
        position = member.end()
    return found


def unreadable_deadline(headers: Headers) -> str | None:
    """Return the error of a header of a deadline, beginning with its name; None if it is right."""
    for name in (FIRST_TOKEN_DUE, ANSWER_DUE):
        values = [value for one, value in headers if one == name]
        if values and (len(values) > 1 or _read_ms(values[0]) is None):
            shown = name.decode().title()
            return f"{shown} must be given once, as an integer from 1 to {_MOST_MS}"
    return None


def deadline_ms(headers: Headers, name: bytes) -> int | None:
    """Return the milliseconds of a deadline; None if there is none that can be read."""
    values = [value for one, value in headers if one == name]
    return _read_ms(values[0]) if len(values) == 1 else None


def _read_ms(value: bytes) -> int | None:
    ms = int(value) if _DEADLINE.fullmatch(value) else 0
    return ms if 1 <= ms <= _MOST_MS else None
