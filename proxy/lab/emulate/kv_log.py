"""The KV cache events of an emulated prefiller, as vLLM numbers and writes them."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from balanceroute.proxy.lab.emulate.settings import EmulationSettings

# As vLLM's default buffer_steps.
_KEPT = 10_000
_MASK = (1 << 64) - 1
_encode = msgspec.msgpack.Encoder().encode
Listener = Callable[[int, bytes], None]


class Publisher(Protocol):
    """Serves one engine's log.

    Attributes:
        events: Where batches are published, as in `tcp://127.0.0.1:5557`.
        replay: Where they are sent again.
    """

    events: str
    replay: str

    def close(self) -> None:
        """End like a process that ends; a second time changes nothing."""
        ...


# Given a log, the host, and the addresses' ports; 0 for free ones.
Publish = Callable[["KvLog", str, tuple[int, int]], Publisher]


class KvLog:
    """One engine's batches from its start on, and who listens to them.

    Args:
        settings: The probability that a batch is not published as it should be, and blocks' sizes.
        rng: For the seed of the engine's hashes, and faults.

    Attributes:
        batches: The latest ones with their numbers, as they should be.
        listeners: Called with each batch that is published.
    """

    def __init__(self, settings: EmulationSettings, rng: random.Random) -> None:
        self.batches: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self.listeners: list[Listener] = []
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
        """Publish what one prompt changed; nothing if that is nothing.

        Args:
            stored: Hashes of consecutive blocks that were not there before.
            before: That of the block before them; None if they begin the prompt.
            tokens: Their token ids.
            dropped: Hashes of blocks that are there no more.
            session: What the request called its session; empty for nothing.
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
        """Return what is published in place of a batch."""
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
