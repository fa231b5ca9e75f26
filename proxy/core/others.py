"""Slots of the decode ranks when others send to them too, as a second proxy does during an update.

The engines' own counts tell how many requests of a rank are not this scheduler's. Each of several
schedulers that share a rank then stays within a limit of its own, so that together they fill the rank
and not more:

- While the others have their fair share, half of the batch, or more, it takes what is free, and keeps
  what it has up to the same share.
- While they have less, it gives way: it leaves as many slots free as they have, up to an eighth of the
  batch, so that their share can double with every reading until it is half. Nobody is preempted; slots
  pass over as requests end.
- Two that fill the same free slots see each other only at the next reading, so each takes half of
  them at a time.
- One slot is always its own. If not, a newcomer would have none for as long as the rank is full, and
  nobody would see that it wants one.

A scheduler that is alone has no limit but the batch.
"""

from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.core.events import OthersOnRank

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Of the batch: the most that is left free for others to grow into.
_GIVEN_SHARE = 1 / 8
_NO_LIMIT = 1 << 62


class Others:
    """What others have on each of G ranks.

    Attributes:
        slots: int64[G], the slots of their requests.
        kv_tokens: int64[G], what those hold.
        limits: int64[G], the slots that this scheduler's requests may have.
    """

    def __init__(self, ranks: int) -> None:
        self.slots: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self.kv_tokens: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self.limits: NDArray[np.int64] = np.full(ranks, _NO_LIMIT)

    def told(self, event: OthersOnRank, *, batch: int, own: int) -> None:
        """Take in what is known of a rank.

        Args:
            event: The rank and what is on it.
            batch: Slots of the rank.
            own: Those of this scheduler's requests.
        """
        rank = event.rank
        self.slots[rank], self.kv_tokens[rank] = event.slots, event.kv_tokens
        self.limits[rank] = own_limit(batch, event.slots, own) if event.slots else _NO_LIMIT

    def grow(self, ranks: int) -> None:
        """Follow a larger number of ranks; nobody else is on the new ones."""
        new = Others(ranks - len(self.slots))
        self.slots = np.concatenate([self.slots, new.slots])
        self.kv_tokens = np.concatenate([self.kv_tokens, new.kv_tokens])
        self.limits = np.concatenate([self.limits, new.limits])


def own_limit(batch: int, others: int, own: int) -> int:
    """Return the slots of a rank that its own requests may have, at least 1.

    Args:
        batch: Slots of the rank.
        others: Slots of the requests of others, at least 1.
        own: Slots of its own, now.
    """
    limit = batch - others
    fair = batch // 2
    if others < fair:
        most = max(1, int(batch * _GIVEN_SHARE))
        limit -= min(others, most, fair - others)
    else:
        limit = max(limit, min(own, fair))
    if limit > own:
        limit = own + (limit - own + 1) // 2
    return max(1, limit)
