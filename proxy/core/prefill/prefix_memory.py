"""The tokens of a prompt that each prefiller should find in its prefix cache.

From the prompts that it was given, or from its own cache events if it sends any.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.events import PrefillDone, PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.prefill.budgets import PrefillRequest
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, Knowledge

# Which blocks of prompts a prefiller was given lately, in bounded memory.
#
# A block is known by a hash of the prompt up to its end, so a prompt that shares its first m
# blocks with an earlier one has m hashes in common with it. The index is a queue of hash tables:
# new blocks go to the newest one, and when that is full the oldest one is dropped, with what was
# not given again since. A prompt's blocks are added together, so each table holds a beginning of
# the prompt or nothing of it, and its length is found by binary search.
#
# Memory: 16 bytes for each block, in tables that are at most half full.

_TABLES = 4
# Multiplicative hashing: the ids of a trace are small numbers in a row.
_ODD = np.uint64(0x9E3779B97F4A7C15)


def block_keys(blocks: tuple[int, ...]) -> NDArray[np.uint64]:
    """Return the keys of blocks, uint64[n], never 0. Hashes are below 2**63."""
    keys = np.array(blocks, np.int64).astype(np.uint64) * _ODD
    return np.asarray(keys | np.uint64(1), np.uint64)


class BlockIndex:
    """The blocks of one prefiller.

    Args:
        blocks: How many are remembered at most; at least three quarters of it of the latest ones.
    """

    def __init__(self, blocks: int) -> None:
        self._room = max(1, blocks // _TABLES)
        bits = max(4, (2 * self._room - 1).bit_length())
        self._shift, self._slots = 64 - bits, 1 << bits
        self._tables: deque[_Table] = deque()
        self._made = 0

    def leading(self, keys: list[int]) -> tuple[int, int]:
        """Return how many of a prompt's first blocks are known.

        Returns:
            Their number, and the number of the table that knows the last one; see `drop`.
        """
        known, number = 0, self._made
        for table in reversed(self._tables):
            if known == len(keys):
                break
            if table.has(keys[known]):
                known, number = table.leading(keys, known), table.number
        return known, number

    def add(self, keys: NDArray[np.uint64]) -> None:
        """Note the blocks of one prompt, in order; of very many the first."""
        keys = keys[: self._room]
        if not self._tables or self._tables[-1].count + len(keys) > self._room:
            if len(self._tables) == _TABLES:
                self._tables.popleft()
            self._made += 1
            self._tables.append(_Table(self._slots, self._shift, self._made))
        self._tables[-1].add(keys)

    def drop(self, number: int) -> None:
        """Forget what was added before a table was full, or with it."""
        while self._tables and self._tables[0].number <= number:
            self._tables.popleft()

    @property
    def newest(self) -> int:
        """The number of the table that is being filled."""
        return self._made


class _Table:
    """Keys by open addressing: a key is at its slot, or at the next that was free."""

    def __init__(self, slots: int, shift: int, number: int) -> None:
        self.number = number
        self.count = 0
        self._keys = np.zeros(slots, np.uint64)
        # Reading single items of an array is three times slower.
        self._view = self._keys.data
        self._mask, self._shift = slots - 1, shift

    def has(self, key: int) -> bool:
        at = key >> self._shift
        while found := self._view[at]:
            if found == key:
                return True
            at = (at + 1) & self._mask
        return False

    def leading(self, keys: list[int], known: int) -> int:
        """Return how many leading keys are here, if the one at `known` is."""
        least, most = known + 1, len(keys)
        while least < most:
            middle = (least + most) // 2
            if self.has(keys[middle]):
                least = middle + 1
            else:
                most = middle
        return least

    def add(self, keys: NDArray[np.uint64]) -> None:
        table = self._keys
        slots = (keys >> np.uint64(self._shift)).astype(np.intp)
        while len(keys):
            free = table[slots] == 0
            # Of several keys for one slot the last one stays; the rest tries the next slot.
            table[slots[free]] = keys[free]
            there = table[slots] == keys
            self.count += int(np.count_nonzero(free & there))
            keys, slots = keys[~there], (slots[~there] + 1) & self._mask


# What prefillers report of their caches, and the prompts on their way there, which they do not report
# yet.

# Blocks of prompts on their way to one prefiller that are remembered. They are forgotten together when
# the last one of a quarter is there.
_PENDING = 1 << 16


class ReportedPrefixes:
    """How much of a prompt each prefiller has or will have."""

    def __init__(self, engines: EngineBlocks) -> None:
        self.engines = engines
        self._pending: defaultdict[PrefillerId, BlockIndex] = defaultdict(
            lambda: BlockIndex(_PENDING)
        )
        # Running requests by table of those.
        self._under_way: defaultdict[PrefillerId, Counter[int]] = defaultdict(Counter)
        self._tables: dict[RequestId, tuple[PrefillerId, int]] = {}

    def cached(self, prefiller: PrefillerId, reported_blocks: Sequence[int]) -> tuple[int, bool]:
        """Return how many tokens of a prompt a prefiller reports, and whether those are all blocks."""
        there = self.engines.leading(prefiller, reported_blocks)
        return there * self.engines.block_tokens, there == len(reported_blocks)

    def coming(self, prefiller: PrefillerId, keys: list[int]) -> int:
        """Return how many of a prompt's first blocks are on their way there; `keys` are its own."""
        return self._pending[prefiller].leading(keys)[0]

    def begin(self, request: RequestId, prefiller: PrefillerId, ticket: Ticket) -> None:
        if ticket.blocks:
            if not ticket.token_blocks:
                self.engines.texts.sent(ticket.blocks)
            pending = self._pending[prefiller]
            pending.add(block_keys(ticket.blocks))
            self._under_way[prefiller][pending.newest] += 1
            self._tables[request] = prefiller, pending.newest

    def end(self, request: RequestId) -> None:
        """Note that its prefill ended: the prefiller has reported what it stored."""
        prefiller, table = self._tables.pop(request, (None, 0))
        if prefiller is None:
            return
        under_way = self._under_way[prefiller]
        under_way[table] -= 1
        under_way += Counter()  # Without those of which none is left.
        oldest = min(under_way, default=table + 1)
        self._pending[prefiller].drop(oldest - 1)


# A prefiller that found nothing of its latest prompts so often in a row has lost its cache.
_MISSES = 2
# In place of a table: the prefiller reported it.
_REPORTED = -1


class Expected(NamedTuple):
    """The part of a prompt that a prefiller should find."""

    cached_tokens: int  # Tokens that it need not compute.
    table: int  # The table of its index that says so.


class PrefixMemory:
    """The indices of all prefillers, corrected by the cached tokens that engines report.

    Args:
        blocks: Blocks that are remembered of each prefiller.
        engines: The blocks that prefillers report; None if the proxy does not listen.
    """

    def __init__(self, blocks: int, engines: EngineBlocks | None = None) -> None:
        self._reported = None if engines is None else ReportedPrefixes(engines)
        self._resets: defaultdict[PrefillerId, int] = defaultdict(int)
        self._indices: defaultdict[PrefillerId, BlockIndex] = defaultdict(
            lambda: BlockIndex(blocks)
        )
        self._running: dict[RequestId, tuple[PrefillerId, Expected]] = {}
        self._misses: defaultdict[PrefillerId, int] = defaultdict(int)

    def expect(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId]
    ) -> dict[PrefillerId, Expected]:
        ticket = request.ticket
        if not ticket.blocks:
            return dict.fromkeys(candidates, Expected(0, 0))
        keys = block_keys(ticket.blocks).tolist()
        reported_blocks = () if self._reported is None else self._reported.engines.beginning(ticket)
        found: dict[PrefillerId, Expected] = {}
        for prefiller in candidates:
            known, table = self._leading(prefiller, ticket, keys, reported_blocks)
            # The last token is always computed: its output is the answer's first token.
            found[prefiller] = Expected(min(known, request.tokens - 1), table)
        return found

    def _leading(
        self,
        prefiller: PrefillerId,
        ticket: Ticket,
        keys: list[int],
        reported_blocks: Sequence[int],
    ) -> tuple[int, int]:
        """Return how many of a prompt's first tokens a prefiller should have, and the table."""
        reported = self._reported
        if reported is None:
            return self._given(prefiller, ticket, keys)
        resets = reported.engines.resets(prefiller)
        if resets != self._resets[prefiller]:
            self._resets[prefiller] = resets
            self._indices.pop(prefiller, None)
        knowledge = reported.engines.knowledge(prefiller)
        if knowledge is Knowledge.NONE or not reported_blocks:
            return self._given(prefiller, ticket, keys)
        there, whole = reported.cached(prefiller, reported_blocks)
        coming = round(reported.coming(prefiller, keys) * ticket.block_tokens)
        expected = max(there, coming), _REPORTED
        if knowledge is Knowledge.ALL and (ticket.token_blocks or not whole):
            return expected
        # Of a text, what follows the part whose tokens are known may be there too.
        return max(self._given(prefiller, ticket, keys), expected)

    def _given(self, prefiller: PrefillerId, ticket: Ticket, keys: list[int]) -> tuple[int, int]:
        """Return the same by the prompts that it was given."""
        known, table = self._indices[prefiller].leading(keys)
        return round(known * ticket.block_tokens), table

    def add(self, request: PrefillRequest, prefiller: PrefillerId) -> None:
        """Note that a prefiller takes a request, and so has its blocks soon."""
        if request.ticket.blocks:
            self._indices[prefiller].add(block_keys(request.ticket.blocks))

    def watch(self, request: PrefillRequest, prefiller: PrefillerId, expected: Expected) -> None:
        """Expect `ended` for a request that was added."""
        self._running[request.request] = prefiller, expected
        if self._reported is not None:
            self._reported.begin(request.request, prefiller, request.ticket)

    def ended(self, request: RequestId, done: PrefillDone | None) -> None:
        """Compare the found tokens with the expected ones; `done` is None if the prefill was lost.

        An engine drops the blocks first that were not used for longest. So one that finds less than
        half has dropped the prompts that it got in that time, and before it.
        """
        if self._reported is not None:
            self._reported.end(request)
        prefiller, expected = self._running.pop(request, (None, None))
        if prefiller is None or expected is None or done is None or done.cached_tokens is None:
            return
        if expected.table == _REPORTED:
            return  # It corrects itself.
        if 2 * done.cached_tokens >= expected.cached_tokens:
            self._misses[prefiller] = 0
            return
        index = self._indices[prefiller]
        if expected.table < index.newest:
            index.drop(expected.table)
        elif done.cached_tokens == 0:
            # Not at once: of two prompts of a batch the second may miss the blocks of the first.
            self._misses[prefiller] += 1
            if self._misses[prefiller] >= _MISSES:
                index.drop(index.newest)
                self._misses[prefiller] = 0
