"""The lengths of the answers to named requests, as set by a load generator.

A replay knows the length of every answer from its trace. It sends the lengths to the engines on a
separate route (`POST /emulation/lengths`), by the `X-Request-Id` that a proxy forwards, and not in the
requests. So a proxy and its predictor learn a length when the answer ends, as with real engines.
"""

from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.core.errors import ConfigError

# The oldest are dropped: a fleet may serve many replays.
MAX_LENGTHS = 2_000_000
_MAX_TOKENS = 2**31 - 1


class Lengths:
    """The lengths by request id."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def add(self, tokens: Mapping[str, Any]) -> int:
        """Set how many tokens some answers have, including the one that ends each.

        Returns:
            How many were set.

        Raises:
            ConfigError: One is not a whole number from 1 to 2**31 - 1; none is set.
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
        """Note that a request ended as recomputed after `emitted` tokens; its next part is shorter."""
        left = self._tokens.get(request_id)
        if left is not None:
            self._tokens[request_id] = max(1, left - emitted)
