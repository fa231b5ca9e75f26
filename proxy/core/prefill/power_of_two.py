"""`power-of-two`: the less busy of two prefillers drawn at random."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill.base import PrefillRequest, PrefillView
from balanceroute.proxy.core.prefill.least_conn import under_way

if TYPE_CHECKING:
    import random


class PowerOfTwo:
    """Of two candidates drawn uniformly, the one that works on fewer requests."""

    observer = None

    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        """Return the less busy of two; on a tie the one drawn first."""
        del request
        drawn = self._rng.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=lambda prefiller: under_way(view, prefiller))
