"""`random`: a prefiller drawn at random."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill.base import PrefillRequest, PrefillView

if TYPE_CHECKING:
    import random


class RandomOne:
    """A candidate drawn uniformly."""

    observer = None

    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        """Return any candidate."""
        del request, view
        return self._rng.choice(candidates)
