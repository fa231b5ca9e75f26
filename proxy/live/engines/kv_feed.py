"""The batches of one engine's KV cache events, in order: gaps, repetitions and restarts are found.

Batches are numbered from 0 since the engine began. When a number is not the next one, the batches from
the last one that was taken on are asked for again; if that one is another now, the engine has begun
anew. Where they cannot be had, the index of that engine is emptied, and what it stores from then on
is known. So whatever comes, no more is lost than what it has cached.

Source: https://github.com/vllm-project/vllm, ZmqEventPublisher at v0.32.0.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, Knowledge, mixed_in

if TYPE_CHECKING:
    import asyncio

# The KV cache events of an engine as they come: msgpack, in every form that vLLM has sent.
#
# A batch is an array or a map, and so is each event in it. Fields that are not known are ignored,
# so that later versions can add some. Blocks of further cache groups and on other tiers than the
# GPU do not count, nor do those of an adapter that the event names by its number alone.
#
# Source: https://github.com/vllm-project/vllm, vllm/distributed/kv_events.py at v0.32.0.

_STORED = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "session_id",
)
_REMOVED = ("type", "block_hashes", "medium", "group_idx", "locality")
_FIELDS = {"BlockStored": _STORED, "BlockRemoved": _REMOVED, "AllBlocksCleared": ("type",)}
_MASK = (1 << 64) - 1
# A block's hash is SHA-256 at most.
_HASH_BYTES = 64
_decode = msgspec.msgpack.Decoder().decode


class KvEventError(BalanceRouteError):
    """A batch is not one of KV cache events."""


def apply(payload: bytes, blocks: EngineBlocks, engine: int) -> int | None:
    """Take the events of one batch of an engine that was begun.

    Returns:
        A size of blocks that were left out because it is not `blocks.block_tokens`; None without.

    Raises:
        KvEventError: It is no batch, or an event is none; those before it have been taken.
    """
    try:
        batch = _decode(payload)
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
        raise KvEventError(f"not msgpack: {error}") from None
    if isinstance(batch, Mapping):
        events = batch.get("events")
    else:
        events = batch[1] if isinstance(batch, list) and len(batch) > 1 else None
    if not isinstance(events, list):
        raise KvEventError("a batch without events")
    other: int | None = None
    for event in events:
        fields = _fields(event)
        kind = fields["type"]
        if kind == "AllBlocksCleared":
            blocks.cleared(engine)
        elif kind == "BlockRemoved" and _counts(fields):
            blocks.removed(engine, _hashes(fields))
        elif kind == "BlockStored" and _counts(fields):
            size = fields.get("block_size")
            if size == blocks.block_tokens:
                _store(fields, blocks, engine)
            elif isinstance(size, int):
                other = size
    return other


def _store(fields: Mapping[str, Any], blocks: EngineBlocks, engine: int) -> None:
    hashes, tokens = _hashes(fields), fields.get("token_ids")
    before = fields.get("parent_block_hash")
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise KvEventError("token ids that are none")
    # With sliding windows the engine leaves out some blocks of a prompt, and does not say which.
    if len(tokens) == len(hashes) * blocks.block_tokens:
        try:
            extras, name = _extras(fields, len(hashes)), fields.get("session_id")
            blocks.stored(
                engine,
                hashes,
                None if before is None else _hash(before),
                tokens,
                extras=extras,
                name=name if isinstance(name, str) else "",
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise KvEventError(str(error)) from None


def _extras(fields: Mapping[str, Any], count: int) -> list[int]:
    """Return hashes of what blocks depend on beside their tokens; empty for nothing.

    Raises:
        ValueError: Not every block has one.
        TypeError, RecursionError: See `mixed_in`.
    """
    keys, adapter = fields.get("extra_keys"), fields.get("lora_name")
    if isinstance(keys, list) and any(keys):
        if len(keys) != count:
            raise ValueError(f"extra keys of {len(keys)} blocks for {count}")
        return [mixed_in(one) for one in keys]
    return [] if adapter is None else [mixed_in([adapter])] * count


def _fields(event: object) -> Mapping[str, Any]:
    """Return an event's fields by name; at least its type."""
    if isinstance(event, Mapping) and isinstance(event.get("type"), str):
        return event
    if isinstance(event, list) and event and isinstance(event[0], str):
        return dict(zip(_FIELDS.get(event[0], ("type",)), event, strict=False))
    raise KvEventError("an event without a type")


def _counts(fields: Mapping[str, Any]) -> bool:
    """Return whether an event is of blocks in the engine's memory, and names what they depend on."""
    return (
        fields.get("medium") in (None, "GPU")
        and fields.get("group_idx") in (None, 0)
        and fields.get("locality") in (None, "LOCAL")
        and (fields.get("lora_id") is None or fields.get("lora_name") is not None)
    )


def _hashes(fields: Mapping[str, Any]) -> list[int]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise KvEventError("an event without block hashes")
    return [_hash(one) for one in hashes]


def _hash(value: object) -> int:
    """Return 64 bits of a block's hash; 0, which no table has, is as good as none."""
    if isinstance(value, bytes) and len(value) <= _HASH_BYTES:
        return int.from_bytes(value[-8:])
    if type(value) is int:
        return value & _MASK
    raise KvEventError("a block hash that is none")


_DIGEST_BYTES = 16


class KvFeed:
    """The state of one engine's stream. It does no IO.

    Args:
        engine: Whose stream it is: its number in `blocks`.
        replays: Whether batches can be asked for again.
    """

    def __init__(self, blocks: EngineBlocks, engine: int, *, replays: bool) -> None:
        self.losses: list[str] = []  # Reasons for which the index was emptied since they were read.
        self.ended = False  # Whether it follows no more.
        # A size of its blocks that is not that of the index; None without.
        self.other_size: int | None = None
        self._blocks = blocks
        self._engine = engine
        self._replays = replays
        self._last: int | None = None
        self._digest = b""
        # Whether older batches may still come that a replay has brought.
        self._overlap = False
        # Whether the next batch is taken, whatever its number.
        self._any = not replays
        self._replayed_last: int | None = None
        blocks.begin(engine, Knowledge.SOME)

    def take(self, number: int, payload: bytes) -> bool:
        """Take a batch as it comes.

        Returns:
            Whether a replay is needed; the batch was then left out.
        """
        last = self._last
        if last is None:
            if number and not self._any:
                return True
            if number == 0:
                self._blocks.cleared(self._engine)
        elif number <= last:
            if self._overlap or (number == last and _digest(payload) == self._digest):
                return False
            return self._lost("repeated", number, payload)
        elif number > last + 1:
            return self._lost("gap", number, payload)
        self._overlap = self._any = False
        self._apply(number, payload)
        return False

    def interrupted(self) -> None:
        """Note that the connection was lost: any number of batches may be missing."""
        if not self._replays and self._last is not None:
            self._forget("interrupted")

    def begin_replay(self) -> int:
        """Return the number of the batch from which a replay is to be asked for."""
        self._replayed_last = None
        if self._blocks.knowledge(self._engine) is not Knowledge.ALL:
            self._last = None  # From the start, more may be known than now.
        return self._last or 0

    def replayed(self, number: int, payload: bytes) -> bool:
        """Take a batch of a replay.

        Returns:
            Whether it fits. If not, the engine has begun anew: another replay is needed.
        """
        if self._replayed_last is None:
            self._replayed_last = number
            if self._last is None:
                if number == 0:
                    self._blocks.cleared(self._engine)
            elif (number, _digest(payload)) == (self._last, self._digest):
                return True
            else:
                # Or it has sent so many since that it has dropped that one.
                self._forget("restart")
                return False
        elif number != self._replayed_last + 1:
            self._forget("gap")
            return False
        self._replayed_last = number
        self._apply(number, payload)
        return True

    def end_replay(self, *, complete: bool) -> bool:
        """Note the end of a replay, or that it failed; return whether it will do."""
        anew = complete and self._replayed_last is None and self._last is not None
        if anew or not complete:
            self._forget("restart" if anew else "no replay")
        self._any = not complete
        self._overlap = self._last is not None
        return not anew

    def end(self) -> None:
        """Know nothing of the engine any more: it is gone."""
        self.ended = True
        self._blocks.forget(self._engine)

    def _lost(self, reason: str, number: int, payload: bytes) -> bool:
        if self._replays:
            return True
        self._forget(reason)
        return self.take(number, payload)

    def _forget(self, reason: str) -> None:
        self.losses.append(reason)
        self._last = None
        self._any = not self._replays
        self._overlap = False
        self._blocks.begin(self._engine, Knowledge.SOME)

    def _apply(self, number: int, payload: bytes) -> None:
        self._last, self._digest = number, _digest(payload)
        try:
            self.other_size = apply(payload, self._blocks, self._engine) or self.other_size
        except KvEventError:
            # What the batch held is unknown, and a replay would hold the same.
            self.losses.append("malformed")
            self._blocks.begin(self._engine, Knowledge.SOME)


@dataclass(frozen=True, slots=True)
class KvEventSource:
    """One engine's events."""

    feed: KvFeed  # Takes them.
    events: str  # Where it publishes them, as in `tcp://10.0.0.1:5557`.
    replay: str | None  # Where it sends them again; None for nowhere.
    is_wanted: Callable[[], bool]  # Whether its events still matter.
    lost: Callable[[str], None]  # Called with the reason when its index was emptied.


# Takes the events of all sources that come, until it is cancelled.
Subscribe = Callable[["asyncio.Queue[KvEventSource]"], Coroutine[None, None, None]]


def _digest(payload: bytes) -> bytes:
    return blake2b(payload, digest_size=_DIGEST_BYTES).digest()
