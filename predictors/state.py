"""What a predictor has learned, as plain values: how to save it, and read it back strictly.

A state is JSON's types and texts, nothing else; reading one never runs code. A predictor is
restored through the methods here, so that every value is checked in one manner.
"""

import binascii
import math
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import Predictor
from balanceroute.proxy.core.errors import BalanceRouteError

# Longer outputs count as this long: predictors index arrays by output length.
MAX_OUTPUT_TOKENS = 2**24


Array = np.ndarray[Any, np.dtype[Any]]


class StateError(BalanceRouteError):
    """A state that no predictor can be restored from. The message names the field and the reason."""


@dataclass(frozen=True, slots=True)
class State:
    """What a predictor has learned, never the requests that are active."""

    kind: str  # Which predictor it is of.
    fields: dict[str, object]  # Values of JSON's types by name.
    # Long texts by name, a model's own format for example.
    texts: dict[str, str] = field(default_factory=dict)

    def value(self, name: str) -> object:
        """Return a field.

        Raises:
            StateError: There is none.
        """
        if name not in self.fields:
            raise StateError(f"field {name!r} is missing")
        return self.fields[name]

    def integer(self, name: str, *, least: int, most: int) -> int:
        """Return an integer field.

        Raises:
            StateError: It is missing, no integer, or out of range.
        """
        value = self.value(name)
        # Not isinstance: a bool is an int to isinstance.
        if type(value) is not int:
            raise StateError(f"field {name!r} must be an integer, not {type(value).__name__}")
        if not least <= value <= most:
            raise StateError(f"field {name!r} must be in {least}..{most}, not {value}")
        return value

    def number(self, name: str, *, least: float = -math.inf, most: float = math.inf) -> float:
        """Return a finite number.

        Raises:
            StateError: It is missing, no number, not finite, or out of range.
        """
        value = self.value(name)
        if type(value) is not int and type(value) is not float:
            raise StateError(f"field {name!r} must be a number, not {type(value).__name__}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise StateError(f"field {name!r} must be finite")
        if not least <= number <= most:
            raise StateError(f"field {name!r} must be in {least:g}..{most:g}, not {number:g}")
        return number

    def integers(self, name: str, *, least: int, most: int) -> list[int]:
        """Return a list of integers.

        Raises:
            StateError: It is missing, no list of integers, or one of them is out of range.
        """
        value = self.value(name)
        if type(value) is not list:
            raise StateError(f"field {name!r} must be a list, not {type(value).__name__}")
        # Over a million integers this is several times quicker than a loop.
        if not set(map(type, value)) <= {int}:
            raise StateError(f"field {name!r} must hold integers only")
        if value and not least <= min(value) <= max(value) <= most:
            raise StateError(
                f"field {name!r} must hold integers in {least}..{most}, "
                f"not {min(value)}..{max(value)}"
            )
        return value

    def outputs(self, name: str) -> NDArray[np.int64]:
        """Return a list of output lengths, int64[n].

        Raises:
            StateError: It is missing or no list of lengths in 0..`MAX_OUTPUT_TOKENS`.
        """
        return np.array(self.integers(name, least=0, most=MAX_OUTPUT_TOKENS), np.int64)

    def packed(self, name: str, kind: type[np.generic], *, least: float, most: float) -> Array:
        """Return an array that `packed` made a text of.

        Raises:
            StateError: It is missing, no such text, or a number is not finite or out of range.
        """
        value = self.value(name)
        if type(value) is not str:
            raise StateError(f"field {name!r} must be a text, not {type(value).__name__}")
        little_endian = np.dtype(kind).newbyteorder("<")
        try:
            array = np.frombuffer(b64decode(value, validate=True), little_endian).astype(kind)
        except (binascii.Error, ValueError) as error:
            raise StateError(f"field {name!r} must be packed numbers: {error}") from error
        # Not a number compares with nothing.
        if array.size and not (array.min() >= least and array.max() <= most):
            raise StateError(f"field {name!r} must hold numbers in {least:g}..{most:g}")
        return array

    def text(self, name: str) -> str:
        """Return a text.

        Raises:
            StateError: There is none.
        """
        if name not in self.texts:
            raise StateError(f"text {name!r} is missing")
        return self.texts[name]


def packed(array: Array) -> str:
    """Return an array of numbers as a text: the bytes, little end first, in base 64.

    A table of a million numbers is written and read a hundred times faster than as numbers of JSON.
    """
    return b64encode(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


class Savable(Predictor, Protocol):
    """A predictor whose learning outlives it."""

    uses_keys: ClassVar[bool]  # Whether it learns by the keys of requests.

    def state(self) -> State:
        """Return its state."""

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Return a predictor that has learned the same.

        Raises:
            StateError: The state cannot be of this predictor.
        """
        ...
