"""How long the answers to named requests are: told by a load generator, and by nobody else.

A replay knows from its trace how long every answer was. It tells the engines so on a route of their
own (`POST /emulation/lengths`), by the `X-Request-Id` that a proxy passes on, and not in the requests:
a proxy, and a predictor in it, learns a length as with real engines, when the answer ends.
"""

from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.core.errors import ConfigError

# The oldest are forgotten: a fleet may outlive many replays.
MAX_LENGTHS = 2_000_000
_MAX_TOKENS = 2**31 - 1


class Lengths:
    """The lengths by request id."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def add(self, tokens: Mapping[str, Any]) -> int:
        """Note how many tokens, the one that ends it included, each of some answers has.

        Returns:
            How many were noted.

        Raises:
            ConfigError: One is not a whole number from 1 to 2**31 - 1; none is noted.
        """
        for name, count in tokens.items():
            if type(count) is not int or not 1 <= count <= _MAX_TOKENS:
                raise ConfigError(f"{name!r}: {count!r} is not from 1 to {_MAX_TOKENS}")
        self._tokens |= tokens
        while len(self._tokens) > MAX_LENGTHS:
            del self._tokens[next(iter(self._tokens))]
        return len(tokens)

    def of(self, request_id: str) -> int | None:
        """Return how many tokens the answer has; None to let the model decide."""
        return self._tokens.get(request_id)

    def handed_back(self, request_id: str, emitted: int) -> None:
        """Note that a request was handed back, to go on elsewhere, after `emitted` of its tokens."""
        left = self._tokens.get(request_id)
        if left is not None:
            self._tokens[request_id] = max(1, left - emitted)
