"""Numbers in the command lines of scripts: types for argparse."""

from argparse import ArgumentTypeError


def positive(text: str) -> int:
    """Return an integer of at least 1."""
    return _at_least(1, text)


def several(text: str) -> int:
    """Return an integer of at least 2."""
    return _at_least(2, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text} is not an integer of at least {least}")
    return int(text)
