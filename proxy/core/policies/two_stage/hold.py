"""Below saturation: a large newcomer waits a moment if it would overflow every rank.

While slots are free, nobody behind it has to wait for it, and what it costs is its own moment. What it
saves is the step time of everybody: a rank often frees the room within some steps. Many requests with
long steps fill the slots in the end, so that without the hold all of them would wait.

So it pays where slots are about to run out; where they never do, it only lengthens TTFT. A burst fills
most slots for a moment at either load: what tells the two apart is how full the fleet was lately.
"""

from itertools import compress

import numpy as np

from balanceroute.proxy.core.policies.base import Fleet
from balanceroute.proxy.core.policies.two_stage.round import Round
from balanceroute.proxy.core.pool import PoolEntry

# Decisions that the mean covers: with 8 ranks x 16 slots two turnovers of the fleet.
_LATELY = 256
# Weight of the mean beside the moment. At 1.2 and 1.0 of the Mooncake trace's rate, two prefillers: the
# moment alone, from 3/4 on, leaves 20.1 % of idle time and a p99 wait of 0.12 s; from 2/3 on 18.8 % and
# 0.39 s. The mean alone comes too late for what it should prevent.
_MEAN_SHARE = 0.7
_BUSY = 2 / 3


class Occupancy:
    """The share of the open ranks' slots that is taken, now and over the latest decisions."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._decisions = 0

    def is_high(self, fleet: Fleet) -> bool:
        """Note a decision; return whether holds pay."""
        is_open: list[bool] = fleet.is_open.tolist()
        if sum(is_open) < 2:
            return False  # It makes no other rank wait.
        taken: int = sum(compress(fleet.bound.tolist(), is_open))
        slots = taken + fleet.free
        if not slots:
            return False
        self._decisions = min(self._decisions + 1, _LATELY)
        self._mean += (taken / slots - self._mean) / self._decisions
        return _MEAN_SHARE * self._mean + (1.0 - _MEAN_SHARE) * taken / slots > _BUSY


def is_held(work: Round, entry: PoolEntry, rank: int, now_ns: int) -> bool:
    """Return whether `entry` waits: on `rank`, its best one, it costs more than it fills."""
    if now_ns >= entry.since_ns + work.settings.hold_ns:
        return False
    (score,) = work.balance.scores_to_envelope(rank, np.array([entry.kv_tokens], np.float64))
    return bool(score < 0.0)
