"""The prefix caches of one engine: of each rank the blocks of prompts that it can use again."""

from collections.abc import Sequence

from balanceroute.proxy.emulate.engine_metrics import RankCounters
from balanceroute.proxy.emulate.kv_log import KvLog
from balanceroute.proxy.emulate.settings import EmulationSettings
from balanceroute.proxy.sim.prefix_cache import PrefixCache


class PrefixCaches:
    """One cache for each rank, or none without `prefix_cache_tokens`; counts what it is asked for.

    Args:
        settings: Their size.
        counters: Of each rank.
        log: Told what changes; None if nobody listens.
    """

    def __init__(
        self,
        settings: EmulationSettings,
        counters: Sequence[RankCounters],
        log: KvLog | None = None,
    ) -> None:
        self._log = log
        size, tokens = settings.block_tokens, settings.prefix_cache_tokens
        self._block_tokens = size
        self._counters = counters
        self._caches: list[PrefixCache] = []
        if tokens is not None:
            self._caches = [PrefixCache(tokens // size, size) for _ in counters]

    def compute(self, rank: int, tokens: list[int]) -> int:
        """Return how many tokens of a prompt need not be computed; from now on all are kept."""
        cached = self.keep(rank, tokens)
        if self._caches:
            self._counters[rank].prefix_queries += len(tokens)
            self._counters[rank].prefix_hits += cached
        return cached

    def keep(self, rank: int, tokens: list[int]) -> int:
        """Keep a prompt whose KV cache came from elsewhere; return what was there before."""
        if not self._caches:
            return 0
        cache, size = self._caches[rank], self._block_tokens
        blocks = _blocks(tokens, size)
        if self._log is None:
            return cache.use(blocks, len(tokens))
        known = cache.leading(blocks)
        cached = cache.use(blocks, len(tokens))
        self._log.changed(
            blocks[known:],
            blocks[known - 1] if known else None,
            tokens[known * size : len(blocks) * size],
            [block for block in cache.dropped if isinstance(block, int)],
        )
        return cached


def _blocks(tokens: list[int], size: int) -> list[int]:
    """Return a hash of each full block and of all before it. Hashes of integers never change."""
    hashes, before = [], 0
    for begin in range(0, len(tokens) - size + 1, size):
        before = hash((before, *tokens[begin : begin + size]))
        hashes.append(before)
    return hashes
