"""Equal instances take turns, so that no one of several idle ones gets every request."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

Instance = TypeVar("Instance", bound=int)


class Turns:
    """Remembers in which order instances were chosen."""

    def __init__(self) -> None:
        self._choices = 0
        self._last_choice: defaultdict[int, int] = defaultdict(int)

    def take(self, equals: Sequence[Instance]) -> Instance:
        """Return the instance chosen least recently; of those never chosen, the first.

        Args:
            equals: At least one.
        """
        chosen = equals[0] if len(equals) == 1 else min(equals, key=self._last_choice.__getitem__)
        self._choices += 1
        self._last_choice[chosen] = self._choices
        return chosen
