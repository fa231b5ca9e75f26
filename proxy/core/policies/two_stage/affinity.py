"""Prefix affinity: what it is worth that a request returns to a rank that has its prompt's beginning.

The rank pulls only the rest. A token that need not be pulled has a price in tokens of F: with kept(g)
for what rank g has of a prompt, and its mean over the open ranks, a request on g counts

    price x (kept(g) - mean)

more. F is minus the change of the idle tokens, so a price of 1 says that a pulled token is worth as much
as a token that one rank idles in one step. There is no threshold: an overflow of x tokens is worth a
detour of G x kept tokens, so a conversation leaves a rank that is full by itself. What all ranks have, as
a common system prompt, favours nobody.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from balanceroute.proxy.core.pool import PoolEntry
    from balanceroute.proxy.core.rank_memory import Keeping

# While slots abound: the price then only chooses between ranks, and idle time costs no output. Of
# conversations at 0.6 of the capacity 1 pulls 0.64 of the tokens, 3 0.55 and 5 0.48, with 0.0, 0.9 and
# 2.5 points more idle time. Where slots are scarce 3 would cost 1.9 % of the output, and 1 costs 0.3 %.
WHILE_FREE = 3.0


class Affinity:
    """The price during a round.

    Args:
        keeping: What the ranks have of the entries' prompts.
        price: Of a token that need not be pulled, in tokens that fill: what F counts them.
    """

    def __init__(self, keeping: "Keeping", price: float) -> None:
        self._keeping = keeping
        self._price = price

    def everywhere(self, entry: "PoolEntry") -> "NDArray[np.float64] | None":
        """Return float64[G], the worth of each rank in Stage 1; None if it is the same everywhere."""
        tokens = self._keeping.of(entry).tokens
        if min(tokens) == max(tokens):
            return None
        return np.asarray(WHILE_FREE * self._price * np.array(tokens, np.float64))

    def on(self, rank: int, entries: "Sequence[PoolEntry]") -> "NDArray[np.float64]":
        """Return float64[n], what it is worth for each entry to go to `rank`."""
        keeping = self._keeping
        now, worth = keeping.admissions, []
        for entry in entries:
            kept = entry.kept
            if kept is None or kept.until <= now:
                kept = keeping.of(entry)
            worth.append(kept.tokens[rank] - kept.mean)
        return self._price * np.array(worth)
