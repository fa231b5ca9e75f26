"""The KV cache events of an engine as they come: msgpack, in every form that vLLM has sent.

A batch is an array or a map, and so is each event in it. Fields that are not known are ignored, so that
later versions can add some. Blocks of further cache groups and on other tiers than the GPU do not count,
nor do those of an adapter of which the number alone is told.

Source: https://github.com/vllm-project/vllm, vllm/distributed/kv_events.py at v0.32.0.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks, mixed_in

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
    # With sliding windows some blocks of a prompt are left out, and which ones is not told.
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
        ValueError: It is not told of each block.
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
    """Return whether an event is of blocks in the engine's memory, and tells what they depend on."""
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
