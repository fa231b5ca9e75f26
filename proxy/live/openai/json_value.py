"""Decoding what engines write."""

import json
from typing import Any

import msgspec

_decode = msgspec.json.Decoder().decode


def decode(data: bytes) -> Any:
    """Return the value of some JSON, with NaN and lone surrogates as Python's own servers write them.

    Strict JSON costs a quarter of what `json` takes.

    Raises:
        ValueError: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    try:
        return _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(data)
