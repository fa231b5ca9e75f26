"""Lines of JSON objects, decoded without loss: fractions stay decimal, NaN and infinity are errors."""

import json
from decimal import Decimal

from balanceroute.traces.fields import MalformedLineError, shown

ONE_A_LINE = "and a trace has one JSON object a line: jq -c '.[]' FILE, or jq -c . FILE"


def decode_object(line: str) -> dict[str, object]:
    """Decode one line that holds one JSON object.

    Raises:
        MalformedLineError: Not JSON, not an object, or a number is out of range.
    """
    try:
        value = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        if line.strip() in ("{", "[", "[{"):
            raise MalformedLineError(f"JSON over several lines, {ONE_A_LINE}") from error
        raise MalformedLineError(f"not valid JSON: {error.msg} at column {error.colno}") from error
    except (ArithmeticError, RecursionError, ValueError) as error:
        if isinstance(error, MalformedLineError):
            raise
        # Numbers too long for int() or Decimal(), and nesting too deep for the decoder.
        raise MalformedLineError(f"not decodable JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise MalformedLineError(f"not a JSON object: {shown(line)}")
    return value


def required(entry: dict[str, object], key: str) -> object:
    """Return the value of a key.

    Raises:
        MalformedLineError: The object has no such key.
    """
    if key not in entry:
        raise MalformedLineError(f"missing key {key!r}")
    return entry[key]


def keys_of(line: str) -> frozenset[str]:
    """Return the keys of a line's object; none if the line does not open an object.

    Raises:
        MalformedLineError: The line opens an object and is not valid JSON.
    """
    return frozenset(decode_object(line)) if line.lstrip().startswith("{") else frozenset()


def _refuse_constant(name: str) -> object:
    # Python's decoder takes NaN, Infinity and -Infinity, which JSON does not have.
    raise MalformedLineError(f"not valid JSON: {name} is not a finite number")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise MalformedLineError(f"the key {shown(twice)} is there twice")
    return found


_DECODER = json.JSONDecoder(
    parse_float=Decimal,
    parse_constant=_refuse_constant,
    object_pairs_hook=_without_duplicates,
)
