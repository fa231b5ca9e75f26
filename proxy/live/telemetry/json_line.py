"""One JSON object a line, as every log writes it."""

import json

_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


def json_line(fields: dict[str, object]) -> bytes:
    """Return an object as one line of ASCII without control characters, with its newline."""
    return _encode(fields).encode("ascii") + b"\n"
