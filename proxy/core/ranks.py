"""The decode ranks: which are open, and how a policy sees them."""

from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.ledger import Ledger
from balanceroute.proxy.core.policies.base import UNLIMITED, Fleet

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Ranks:
    """G ranks; all are open at first.

    Attributes:
        is_open: bool[G], whether each takes new requests.
    """

    def __init__(self, ranks: int) -> None:
        self.is_open: NDArray[np.bool_] = np.ones(ranks, np.bool_)
        self._unlimited: NDArray[np.int64] = np.full(ranks, UNLIMITED)

    def grow(self, ranks: int) -> None:
        """Grow to `ranks`; the new ones are open."""
        new = np.ones(ranks - len(self.is_open), np.bool_)
        self.is_open = np.concatenate([self.is_open, new])
        self._unlimited = np.full(ranks, UNLIMITED)

    def fleet(self, ledger: Ledger, config: SchedulerConfig, beyond_batch: int | None) -> Fleet:
        """Return the ranks for a policy.

        Args:
            ledger: What is bound to them.
            config: Their limits.
            beyond_batch: Slots beyond its batch that a rank may be sent; None for any number.
        """
        if beyond_batch is None:
            free_slots = self._unlimited.copy()
        else:
            # A request with more slots than there were may have left a rank overbooked.
            free_slots = np.maximum(config.batch_limit + beyond_batch - ledger.bound, 0)
        free_slots *= self.is_open
        if config.rank_kv_tokens is None or beyond_batch is None:
            free_kv_tokens = self._unlimited.copy()
        else:
            free_kv_tokens = config.rank_kv_tokens - ledger.loads
        return Fleet(
            self.is_open, ledger.loads.copy(), ledger.bound.copy(), free_slots, free_kv_tokens
        )
