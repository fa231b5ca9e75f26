"""Equals take turns, so that none of several idle instances gets everything."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

One = TypeVar("One", bound=int)


class Turns:
    """Remembers in which order instances were chosen."""

    def __init__(self) -> None:
        self._choices = 0
        self._last_choice: defaultdict[int, int] = defaultdict(int)

    def take(self, equals: Sequence[One]) -> One:
        """Return the one chosen least recently, of those never chosen the first.

        Args:
            equals: At least one.
        """
        chosen = equals[0] if len(equals) == 1 else min(equals, key=self._last_choice.__getitem__)
        self._choices += 1
        self._last_choice[chosen] = self._choices
        return chosen
