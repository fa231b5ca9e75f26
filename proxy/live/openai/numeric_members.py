"""Numbers and flags of a request, read as vLLM 0.32 reads them: pydantic's lax mode.

Only the members that the proxy itself goes by are read: `stream`, `n`, the limits of the answer,
`truncate_prompt_tokens`, and `priority`, which no engine gets. All others (`seed`, `temperature`,
`top_p`, `top_k`, penalties, `logprobs`, `stop_token_ids`, ...) reach both legs as the client wrote
them and nothing here calculates with them, so their refusal is an engine's, on the prefill leg,
before anything was computed. vLLM ignores `best_of`; so does the proxy.
"""

import re

from balanceroute.proxy.live.openai.body import BodyError

MOST_TOKENS = 2**31 - 1
"""The largest limit of an answer that is calculated with. No context is this long."""

_LEAST_INT64, _MOST_INT64 = -(2**63), 2**63 - 1
# Python converts no text of more digits, and neither does pydantic.
_MAX_DIGITS = 4300
_INTEGER = re.compile(r"\s*([+-]?\d+(?:_\d+)*)(?:\.0*)?\s*", re.ASCII)
_FLAGS = {
    **dict.fromkeys(("true", "t", "yes", "y", "on", "1"), True),
    **dict.fromkeys(("false", "f", "no", "n", "off", "0"), False),
}


def integer(value: object) -> int | None:
    """Return the integer that a decoded value is taken for; None if it is none."""
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**63 else None
    if isinstance(value, str) and len(value) <= _MAX_DIGITS:
        found = _INTEGER.fullmatch(value)
        return None if found is None else int(found[1])
    return None


def flag(value: object) -> bool | None:
    """Return the truth value that a decoded value is taken for; None if it is none."""
    if isinstance(value, str):
        return _FLAGS.get(value.lower())
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    return None


def count(value: object, least: int) -> int | None:
    """Return an integer of at least `least`, at most `MOST_TOKENS`; None if it is none."""
    number = value if type(value) is int else integer(value)
    if number is None or number < least:
        return None
    return min(number, MOST_TOKENS)


def check_priority(value: object) -> None:
    """Refuse a `priority` that vLLM refuses: engines do not get it, so they cannot.

    Raises:
        BodyError: It is not an integer of 64 bits. The words are vLLM's.
    """
    number = integer(value)
    if number is None:
        raise BodyError("priority: Input should be a valid integer", "priority")
    if number > _MOST_INT64:
        most = f"less than or equal to {_MOST_INT64}"
        raise BodyError(f"priority: Input should be {most}", "priority")
    if number < _LEAST_INT64:
        least = f"greater than or equal to {_LEAST_INT64}"
        raise BodyError(f"priority: Input should be {least}", "priority")
