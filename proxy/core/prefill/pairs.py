"""Which ranks can use the KV caches of which prefillers.

Engines of two versions, or with KV caches of two kinds, may serve side by side while a fleet is
updated. A request then goes from its prefiller to one of those ranks that can read its KV cache, and
no prefiller computes a prompt that no open rank could take over.
"""

from balanceroute.proxy.core.events import Eligible, PrefillerId, RankId


class Pairs:
    """The pairs that are allowed; all of them at first, and all ranks are open.

    Attributes:
        limited: Whether some pair is not allowed.
    """

    def __init__(self) -> None:
        self._ranks: dict[PrefillerId, frozenset[RankId]] = {}
        self._closed: set[RankId] = set()
        self.limited = False

    def set(self, prefiller: PrefillerId, ranks: frozenset[RankId] | None) -> None:
        """Allow a prefiller these ranks alone; None for all, also those that are added later."""
        if ranks is None:
            self._ranks.pop(prefiller, None)
        else:
            self._ranks[prefiller] = ranks
        self.limited = bool(self._ranks)

    def set_open(self, rank: RankId, is_open: bool) -> None:
        """Note whether a rank takes new requests."""
        (self._closed.discard if is_open else self._closed.add)(rank)

    def ranks_of(self, prefiller: PrefillerId | None) -> frozenset[RankId] | None:
        """Return the only ranks that can use a prefiller's KV caches; None for all."""
        return None if prefiller is None else self._ranks.get(prefiller)

    def feeds(self, prefiller: PrefillerId, eligible: Eligible | None = None) -> bool:
        """Return whether an open rank can use its KV caches; of those that are eligible, None for all.

        True if nothing is known of its ranks.
        """
        ranks = self._ranks.get(prefiller)
        if ranks is None:
            return True
        if eligible is not None:
            ranks &= eligible.ranks
        return bool(ranks - self._closed)
