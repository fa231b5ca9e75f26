"""The prefix caches of one engine: of each rank the blocks of prompts that it can use again.

A block is found by the tokens of its prompt, whatever is in it. One whose KV came from somewhere else by
mistake spoils every later prompt that begins so.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from balanceroute.proxy.lab.emulate.engine_metrics import RankCounters
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.lab.sim.engines import PrefixCache

# A decode rank's KV cache after a pull, as with vLLM's NIXL connector.
#
# The rank compares no lengths. It counts every token of its prompt but the last as computed
# elsewhere, pulls so many blocks as its own prefix cache does not have, and takes as many of the
# prefiller's: the last ones. So a prompt that is longer or shorter than the prefiller's is right
# only by the count of blocks.

# The content of a block before the first write; no token has this id.
NOTHING = 2**64 - 1


def pulled(
    prompt: Sequence[int], cached: Sequence[int], prefilled: Sequence[int], block_tokens: int
) -> list[int] | None:
    """Return the tokens whose KV the rank then has; None if its engine dies instead.

    Args:
        cached: The tokens of the full blocks that its prefix cache has.
        prefilled: The prompt of which the prefiller keeps the blocks.
        block_tokens: Tokens of a block.
    """
    missing = -(-len(prompt) // block_tokens) - len(cached) // block_tokens
    blocks = -(-len(prefilled) // block_tokens)
    if missing > blocks:
        return None  # vLLM: `assert num_decode_blocks <= len(prefill_group)`.
    read = [*cached, *prefilled[(blocks - missing) * block_tokens :]][: len(prompt) - 1]
    read += [NOTHING] * (len(prompt) - 1 - len(read))
    return [*read, prompt[-1]]  # The last one is computed by the rank.


# The KV cache events of an emulated prefiller, as vLLM numbers and writes them.

# As vLLM's default buffer_steps.
_KEPT = 10_000
_MASK = (1 << 64) - 1
_encode = msgspec.msgpack.Encoder().encode
Listener = Callable[[int, bytes], None]


class Publisher(Protocol):
    """Serves one engine's log."""

    events: str  # Where batches are published, as in `tcp://127.0.0.1:5557`.
    replay: str  # Where they are sent again.

    def close(self) -> None:
        """End like a process that ends; a second time changes nothing."""
        ...


# Given a log, the host, and the addresses' ports; 0 for free ones.
Publish = Callable[["KvLog", str, tuple[int, int]], Publisher]


class KvLog:
    """One engine's batches from its start on, and their listeners."""

    def __init__(self, settings: EmulationSettings, rng: random.Random) -> None:
        # The latest ones with their numbers, as they should be.
        self.batches: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self.listeners: list[Listener] = []  # Called with each batch that is published.
        self._settings = settings
        self._rng = rng
        self._seed = rng.getrandbits(64)
        self._next = 0
        self._delayed: list[tuple[int, bytes]] = []

    def changed(
        self,
        stored: Sequence[int],
        before: int | None,
        tokens: list[int],
        dropped: Sequence[int],
        session: str = "",
    ) -> None:
        """Publish the changes by one prompt, if there are any.

        `stored` and `dropped` are hashes of consecutive blocks, `before` that of the block in front of those
        stored, None if they begin the prompt, and `tokens` are theirs.
        """
        events: list[dict[str, object]] = []
        if stored:
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [self._name(block) for block in stored],
                    "parent_block_hash": None if before is None else self._name(before),
                    "token_ids": tokens,
                    "block_size": self._settings.block_tokens,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "session_id": session or None,
                }
            )
        # vLLM drops them one by one.
        events += (
            {"type": "BlockRemoved", "block_hashes": [self._name(block)], "medium": "GPU"}
            for block in dropped
        )
        if events:
            batch = self._next, _encode([0.0, events, 0])
            self._next += 1
            self.batches.append(batch)
            for number, payload in self._spoiled(batch):
                for listener in self.listeners:
                    listener(number, payload)

    def _name(self, block: int) -> bytes:
        return ((block ^ self._seed) & _MASK).to_bytes(8) * 4

    def _spoiled(self, batch: tuple[int, bytes]) -> list[tuple[int, bytes]]:
        rng, (number, payload) = self._rng, batch
        if not self._settings.kv_event_faults or rng.random() >= self._settings.kv_event_faults:
            late, self._delayed = self._delayed, []
            return [batch, *late]
        match rng.randrange(6):
            case 0:
                return []
            case 1:
                return [batch, batch]
            case 2:
                self._delayed.append(batch)
                return []
            case 3:
                return [(rng.getrandbits(64), payload)]
            case 4:
                return [(number, rng.randbytes(rng.randrange(64)))]
            case _:
                # Of blocks that the engine does not have.
                other = _encode([0.0, [self._lie()], 0])
                return [(number, other)]

    def _lie(self) -> dict[str, object]:
        size = self._settings.block_tokens
        return {
            "type": "BlockStored",
            "block_hashes": [self._rng.getrandbits(64)],
            "parent_block_hash": None,
            "token_ids": [self._rng.randrange(100) for _ in range(size)],
            "block_size": size,
            "medium": None,
        }


class PrefixCaches:
    """One cache for each rank, or none without `prefix_cache_tokens`; writes changes to the ranks' logs."""

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

        `read` are the tokens whose KV it has, if these differ; `session` is for the log.
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
