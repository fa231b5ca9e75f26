"""`fewest-tokens`: the prefiller that holds the fewest KV tokens."""

from collections.abc import Sequence

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill.base import PrefillRequest, PrefillView, Turns


class FewestTokens:
    """The candidate that holds the fewest KV tokens; equal ones take turns."""

    observer = None

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        """Return the candidate with the fewest tokens; of equal ones that chosen least recently."""
        del request
        return self._turns.least(candidates, view.held_tokens.__getitem__)
