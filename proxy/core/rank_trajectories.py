"""The summed trajectories of the requests of each rank.

A row is the survival of the requests times the KV tokens that they hold, and their survival times what
a slot gains while its request runs (`Slots.gains`). The gains differ from one decision to the next, as
another pool would refill the slots. So the survival is summed first, and the gains count once for each
rank. The two sums are kept until the next step, or a change of the rank.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.deposits import first_of_each
from balanceroute.proxy.core.trajectories import POINTS

if TYPE_CHECKING:
    from balanceroute.proxy.core.curves import Curves
    from balanceroute.proxy.core.projection import Projection
    from balanceroute.proxy.core.trajectories import Slots


class RankTrajectories:
    """What each rank is expected to hold over a whole output.

    Args:
        projection: The running requests.
        curves: Of these.
        slots: The grid, and what refilled slots hold.
    """

    def __init__(self, projection: "Projection", curves: "Curves", slots: "Slots") -> None:
        self._projection = projection
        self._curves = curves
        self._slots = slots
        # Of each rank, since when its row is kept, and since when its sums, -1 for neither.
        self._made_at = np.full(projection.ranks, -1)
        self._summed_at = np.full(projection.ranks, -1)
        self._rows = np.zeros((projection.ranks, POINTS))
        # The survival, times the KV tokens that the requests hold and times their sequences.
        self._sums = np.zeros((projection.ranks, 2, POINTS))

    def forget(self) -> None:
        """Make all rows anew, as the grid is another."""
        self._made_at[:] = self._summed_at[:] = -1

    def rows(self, free: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return float64[G, POINTS], the trajectories of the ranks. Read-only.

        Args:
            free: bool[G], ranks with a free slot.
        """
        # Between two free slots a rank's requests go on as expected, but a point's width later its row
        # has to move. The step clock may have restarted.
        now = self._projection.now
        age = now - self._made_at
        due = free | (self._made_at < 0) | (age < 0) | (age >= self._slots.width)
        # Within a step most ranks are as they were, but what would refill their slots is not.
        stale = due & (self._projection.changed | (self._summed_at != now))
        if stale.any():
            self._sum(stale)
        sums = self._sums[due]
        self._rows[due] = sums[:, 0] + sums[:, 1] @ self._slots.gains
        self._made_at[due] = now
        return self._rows

    def _sum(self, stale: NDArray[np.bool_]) -> None:
        running = self._projection.running_on(stale)
        self._sums[stale] = 0.0
        self._summed_at[stale] = self._projection.now
        self._projection.changed[stale] = False
        if not len(running.places):
            return
        curves = self._curves.rows_of(running)
        weights = np.array([running.kv_tokens, running.sequences], np.float64)
        ranks = running.ranks[first_of_each(running.ranks)]
        self._sums[ranks] = self._curves.sums(
            curves, running.ages, self._slots.width, weights=weights, groups=running.ranks
        )
        # These have the mean of the latest candidates, which is another at each decision.
        self._summed_at[running.ranks[curves == 0]] = -1
