"""The prefix caches of one engine: of each rank the blocks of prompts that it can use again.

A block is found by the tokens of its prompt, whatever is in it. One whose KV came from somewhere else by
mistake spoils every later prompt that begins so.
"""

from collections.abc import Sequence

from balanceroute.proxy.lab.emulate.engine_metrics import RankCounters
from balanceroute.proxy.lab.emulate.kv_log import KvLog
from balanceroute.proxy.lab.emulate.pulled_blocks import NOTHING
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.lab.sim.engines import PrefixCache


class PrefixCaches:
    """One cache for each rank, or none without `prefix_cache_tokens`; counts what it is asked for.

    Args:
        settings: Their size.
        counters: Of each rank.
        logs: Of each rank, told what changes; empty if nobody listens.
    """

    def __init__(
        self,
        settings: EmulationSettings,
        counters: Sequence[RankCounters],
        logs: Sequence[KvLog] = (),
    ) -> None:
        self._logs = logs
        size, tokens = settings.block_tokens, settings.prefix_cache_tokens
        self._block_tokens = size
        self._counters = counters
        self._caches: list[PrefixCache] = []
        # The tokens whose KV is in a block, where these are not those of its prompt.
        self._spoilt: list[dict[int, list[int]]] = [{} for _ in counters]
        if tokens is not None:
            self._caches = [PrefixCache(tokens // size, size) for _ in counters]

    def compute(self, rank: int, tokens: list[int], session: str = "") -> int:
        """Return how many tokens of a prompt need not be computed; from now on all are kept."""
        found = self.cached(rank, tokens) if self._caches and self._spoilt[rank] else tokens
        read = None
        if found != tokens[: len(found)]:
            read = [*found, *[NOTHING] * (len(tokens) - len(found))]  # Computed from what is wrong.
        cached = self.keep(rank, tokens, read, session)
        if self._caches:
            self._counters[rank].prefix_queries += len(tokens)
            self._counters[rank].prefix_hits += cached
        return cached

    def cached(self, rank: int, tokens: list[int]) -> list[int]:
        """Return the tokens whose KV is in the blocks that a prompt finds, full ones before its last."""
        if not self._caches:
            return []
        blocks, size = _blocks(tokens[:-1], self._block_tokens), self._block_tokens
        known = self._caches[rank].leading(blocks)
        found, spoilt = tokens[: known * size], self._spoilt[rank]
        for number, block in enumerate(blocks[:known] if spoilt else ()):
            found[number * size : (number + 1) * size] = spoilt.get(
                block, found[number * size : (number + 1) * size]
            )
        return found

    def keep(
        self, rank: int, tokens: list[int], read: list[int] | None = None, session: str = ""
    ) -> int:
        """Keep a prompt; return how many tokens of it were there before.

        `read` are the tokens whose KV it has, if these are others; `session` is for the log.
        """
        if not self._caches:
            return 0
        cache, size = self._caches[rank], self._block_tokens
        blocks, spoilt = _blocks(tokens, size), self._spoilt[rank]
        known = cache.leading(blocks) if self._logs or spoilt or read else 0
        cached = cache.use(blocks, len(tokens))
        if spoilt or read:
            self._note(
                spoilt, blocks[known:], tokens[known * size :], (read or tokens)[known * size :]
            )
            for block in cache.dropped:
                spoilt.pop(block, None)  # type: ignore[call-overload]
        if self._logs:
            self._logs[rank].changed(
                blocks[known:],
                blocks[known - 1] if known else None,
                tokens[known * size : len(blocks) * size],
                [block for block in cache.dropped if isinstance(block, int)],
                session,
            )
        return cached

    def _note(
        self, spoilt: dict[int, list[int]], blocks: list[int], tokens: list[int], read: list[int]
    ) -> None:
        """Note what is in new blocks."""
        size = self._block_tokens
        for number, block in enumerate(blocks):
            part = slice(number * size, (number + 1) * size)
            if read[part] != tokens[part]:
                spoilt[block] = read[part]
            else:
                spoilt.pop(block, None)


def _blocks(tokens: list[int], size: int) -> list[int]:
    """Return a hash of each full block and of all before it. Hashes of integers never change."""
    hashes, before = [], 0
    for begin in range(0, len(tokens) - size + 1, size):
        before = hash((before, *tokens[begin : begin + size]))
        hashes.append(before)
    return hashes
