"""`round-robin`: the prefillers in turn."""

from collections.abc import Sequence

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill.base import PrefillRequest, PrefillView


class RoundRobin:
    """The first candidate after the last one chosen, in the order of their numbers."""

    observer = None

    def __init__(self) -> None:
        self._last = -1

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        """Return the candidate whose turn it is."""
        del request, view
        later = [prefiller for prefiller in candidates if prefiller > self._last]
        self._last = (later or candidates)[0]
        return PrefillerId(self._last)
