"""One JSON object a line, as every log writes it."""

import json
from collections.abc import Callable
from json.encoder import (  # type: ignore[attr-defined]  # typeshed leaves the first out.
    c_make_encoder,
    encode_basestring_ascii,
)

# What `JSONEncoder.encode` makes anew for each call, at the cost of half the line.
_encode: Callable[[object, int], tuple[str, ...]] = c_make_encoder(
    *(None, json.JSONEncoder().default, encode_basestring_ascii, None, ":", ","),
    *(False, False, False),
)


def json_line(fields: dict[str, object]) -> bytes:
    """Return an object as one line of ASCII without control characters, with its newline."""
    return "".join(_encode(fields, 0)).encode("ascii") + b"\n"
