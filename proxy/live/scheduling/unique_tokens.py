"""Tokens that nobody can guess, made in batches: the system is asked for randomness once for many."""

import random

_BATCH = 64
_DIGITS = 32  # Of 128 bits.


class UniqueTokens:
    """Returns a token that no other has, 32 hexadecimal digits, whenever it is called."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._made: list[str] = []

    def __call__(self) -> str:
        """Return the next token."""
        if not self._made:
            digits = f"{self._rng.getrandbits(_BATCH * _DIGITS * 4):0{_BATCH * _DIGITS}x}"
            self._made = [digits[at : at + _DIGITS] for at in range(0, len(digits), _DIGITS)]
        return self._made.pop()
