"""`least-conn`: the prefiller that works on the fewest requests."""

from collections.abc import Sequence

from balanceroute.proxy.core.events import PrefillerId
from balanceroute.proxy.core.prefill.base import PrefillRequest, PrefillView, Turns


class LeastConn:
    """The candidate with the fewest prefills and direct sequences; equal ones take turns."""

    observer = None

    def __init__(self) -> None:
        self._turns = Turns()

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        """Return the candidate with the fewest; of equal ones that chosen least recently."""
        del request
        return self._turns.least(candidates, lambda one: under_way(view, one))


def under_way(view: PrefillView, prefiller: PrefillerId) -> int:
    """Return what a prefiller works on: prefills, and sequences of direct requests."""
    return view.prefills[prefiller] + view.direct[prefiller]
