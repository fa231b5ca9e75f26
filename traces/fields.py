"""Fields of a trace line, read strictly.

Every format reads its fields through these functions, so all of them accept the same numbers and
give the same reasons. They raise `MalformedLineError`; the reader adds file and line.
"""

import re
import reprlib
from decimal import ROUND_HALF_EVEN, Context, Decimal

from balanceroute.traces.record import MAX_ARRIVAL_NS, MAX_LEVEL, MAX_TOKENS

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

# Digits alone: int() and Decimal() also take underscores, padding and other scripts' digits.
# A table of pandas with an empty cell writes its integers as 470.0.
_INTEGER = re.compile(r"([+-]?[0-9]+)(?:\.0*)?")
_NUMBER = re.compile(r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,6})?")
# Longer than any number in range, and below the length at which int() itself refuses.
_MAX_CHARACTERS = 100
_LATEST_EPOCH_MS = 10**13
# Wide enough that only the rounding to whole nanoseconds rounds, whatever the caller's context.
# No traps: a product that overflows becomes infinite, and so out of range.
_EXACT = Context(prec=2 * _MAX_CHARACTERS, traps=[])


class MalformedLineError(ValueError):
    """A line that does not follow its format; the message is the reason."""


def shown(value: object) -> str:
    """Return a shortened `repr`, so that the reason stays readable for any line."""
    return reprlib.repr(value)


def tokens_from_text(name: str, text: str) -> int:
    """Read a count of tokens from a CSV cell.

    Raises:
        MalformedLineError: Not an integer, negative, or over `MAX_TOKENS`.
    """
    return _bounded_tokens(name, _integer(name, text))


def tokens_from_json(name: str, value: object) -> int:
    """Read a count of tokens from a JSON value.

    Raises:
        MalformedLineError: Not an integer (a bool is none), negative, or over `MAX_TOKENS`.
    """
    return _bounded_tokens(name, _json_integer(name, value))


def nanoseconds_from_text(name: str, text: str, *, unit_ns: int) -> int:
    """Read a time from a CSV cell, rounded to a whole nanosecond.

    Args:
        name: The column, for the reason.
        text: The cell.
        unit_ns: Nanoseconds in the unit of the cell.

    Raises:
        MalformedLineError: Not a finite number, negative, or over `MAX_ARRIVAL_NS`.
    """
    if len(text) > _MAX_CHARACTERS or _NUMBER.fullmatch(text) is None:
        raise MalformedLineError(f"{name} is not a finite number: {shown(text)}")
    return _whole_nanoseconds(name, Decimal(text), unit_ns)


def nanoseconds_from_json(name: str, value: object, *, unit_ns: int) -> int:
    """Read a time from a JSON value decoded with exact decimals, rounded to a whole nanosecond.

    Args:
        name: The key, for the reason.
        value: The decoded value.
        unit_ns: Nanoseconds in the unit of the value.

    Raises:
        MalformedLineError: Not a finite number, negative, or over `MAX_ARRIVAL_NS`.
    """
    if type(value) is not int and not (isinstance(value, Decimal) and value.is_finite()):
        raise MalformedLineError(f"{name} is not a finite number: {_shown_json(value)}")
    return _whole_nanoseconds(name, Decimal(value), unit_ns)


def level_from_text(name: str, text: str) -> int:
    """Read a class of service from a CSV cell.

    Raises:
        MalformedLineError: Not an integer, or beyond `MAX_LEVEL`.
    """
    return _bounded_level(name, _integer(name, text))


def level_from_json(name: str, value: object) -> int:
    """Read a class of service from a JSON value.

    Raises:
        MalformedLineError: Not an integer, or beyond `MAX_LEVEL`.
    """
    return _bounded_level(name, _json_integer(name, value))


def name_from_json(name: str, value: object) -> str:
    """Read a name from a JSON value.

    Raises:
        MalformedLineError: Not a string.
    """
    if not isinstance(value, str):
        raise MalformedLineError(f"{name} is not a string: {_shown_json(value)}")
    return value


def hash_ids_from_json(name: str, value: object) -> tuple[int, ...]:
    """Read the ids of the prefix blocks from a JSON value.

    Raises:
        MalformedLineError: Not a list of integers.
    """
    if not isinstance(value, list):
        raise MalformedLineError(f"{name} is not a list: {_shown_json(value)}")
    for item in value:
        if type(item) is not int:
            raise MalformedLineError(f"{name} holds a non-integer: {_shown_json(item)}")
    return tuple(value)


def _integer(name: str, text: str) -> int:
    match = _INTEGER.fullmatch(text) if len(text) <= _MAX_CHARACTERS else None
    if match is None:
        raise MalformedLineError(f"{name} is not an integer: {shown(text)}")
    return int(match[1])


def _json_integer(name: str, value: object) -> int:
    if type(value) is int:
        return value
    # Compared before it is converted: 1e999999 is an integer of a million digits.
    if isinstance(value, Decimal) and abs(value) <= MAX_ARRIVAL_NS and value == int(value):
        return int(value)
    raise MalformedLineError(f"{name} is not an integer: {_shown_json(value)}")


def _bounded_tokens(name: str, tokens: int) -> int:
    if tokens < 0:
        raise MalformedLineError(f"{name} is negative: {shown(tokens)}")
    if tokens > MAX_TOKENS:
        raise MalformedLineError(f"{name} is over {MAX_TOKENS}: {shown(tokens)}")
    return tokens


def _bounded_level(name: str, level: int) -> int:
    if abs(level) > MAX_LEVEL:
        raise MalformedLineError(f"{name} is beyond {MAX_LEVEL}: {shown(level)}")
    return level


def _whole_nanoseconds(name: str, value: Decimal, unit_ns: int) -> int:
    if value < 0:
        raise MalformedLineError(f"{name} is negative: {shown(str(value))}")
    exact_ns = _EXACT.multiply(value, unit_ns)
    # Before int(): a short text such as 1e999999 is an integer of a million digits.
    if exact_ns > MAX_ARRIVAL_NS:
        hint = ""
        if unit_ns == NS_PER_S and value < _LATEST_EPOCH_MS:
            hint = ", as seconds; if it is in milliseconds since 1970, divide it by 1,000"
        raise MalformedLineError(f"{name} is out of range: {shown(str(value))}{hint}")
    return int(exact_ns.to_integral_value(ROUND_HALF_EVEN))


def _shown_json(value: object) -> str:
    # A Decimal is a JSON number with a fraction; its `repr` is not what the file has.
    return str(value)[:40] if isinstance(value, Decimal) else shown(value)
