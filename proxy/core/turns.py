"""Equals take turns, so that none of several idle instances gets everything."""

from collections.abc import Sequence
from typing import TypeVar

One = TypeVar("One", bound=int)


class Turns:
    """Remembers in which order instances were chosen."""

    def __init__(self) -> None:
        self._choices = 0
        self._last_choice: dict[int, int] = {}

    def take(self, equals: Sequence[One]) -> One:
        """Return the one chosen least recently, of those never chosen the first.

        Args:
            equals: At least one.
        """
        chosen = min(equals, key=lambda one: self._last_choice.get(one, 0))
        self._choices += 1
        self._last_choice[chosen] = self._choices
        return chosen
