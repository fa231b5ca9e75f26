"""One JSON object a line, as every log writes it."""

import json

import msgspec
from msgspec import Struct

_encode = msgspec.json.Encoder().encode
_DELETE = 0x7F


def json_line(fields: dict[str, object] | Struct) -> bytes:
    """Return an object as one line of ASCII without control characters, with its newline."""
    try:
        line = _encode(fields)
    except UnicodeEncodeError:  # A lone surrogate.
        line = b""
    if not line or not line.isascii() or _DELETE in line:
        # A number that is none is null here, too.
        text = json.dumps(msgspec.to_builtins(fields))
        finite = json.loads(text, parse_constant=lambda _: None)
        line = json.dumps(finite, separators=(",", ":"), allow_nan=False).encode("ascii")
    return line + b"\n"
