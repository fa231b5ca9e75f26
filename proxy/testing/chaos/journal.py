"""What happened in a run, a line each: a seed gives the same lines whenever and wherever it runs."""

import hashlib
from collections.abc import Callable


class Journal:
    """Lines with the time in virtual seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.lines: list[str] = []
        self._clock = clock

    def write(self, *words: object) -> None:
        """Add a line."""
        self.lines.append(f"{self._clock():.6f} {' '.join(map(str, words))}")

    @property
    def digest(self) -> str:
        """Identifies the run: SHA-256 of all lines, in hexadecimal."""
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()
