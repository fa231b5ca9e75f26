"""Hashes of a prompt's blocks, by which a prefiller is known to have its beginning already.

No tokeniser is at hand, so a block is a piece of the prompt's JSON text of fixed length; or where
prefillers tell of their blocks, and the prompt is token ids, a piece of so many. Two prompts
with equal hashes have equal text up to there, and equal members that a chat template puts before it.
A further turn of a conversation repeats the text of the turns before it, if its client writes JSON in
the same way each time; else it counts as another prompt.
"""

from array import array
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import structs

from balanceroute.proxy.core.events import Ticket
from balanceroute.proxy.core.prefill.engine_blocks import named, token_hashes
from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.prompt_keys import FRONT
from balanceroute.proxy.live.openai.shape import PROMPT_MEMBER, TAKES_IDS, Api

# About 500 tokens of English text.
BLOCK_BYTES = 2_048
# Of very long prompts only the beginning is hashed: a million bytes take a millisecond or two.
_MOST_BLOCKS = 512
_MOST_BYTES = _MOST_BLOCKS * BLOCK_BYTES
_HASH_BYTES = 8
_MASK = (1 << 63) - 1
# Engines keep the caches of different salts apart.
_BEFORE = (*FRONT, "cache_salt")
# What makes engines compute or keep other blocks than those of the ids.
_NOT_ALONE = ("cache_salt", "prompt_embeds", "truncate_prompt_tokens")
SESSION_MEMBER = frozenset({"session_id"})
"""A client's own name for it, which engines prefer to that in a header."""
_FLAT = msgspec.json.Decoder(list[int])
_NESTED = msgspec.json.Decoder(list[list[int]])


class PromptBlocks(NamedTuple):
    """The full blocks of a prompt.

    Attributes:
        hashes: Of each and of all before it too, below 2**63.
        share: What part of the prompt each is; 0 if there is none.
        of_tokens: Whether they are blocks of token ids; see `token_hashes`.
    """

    hashes: tuple[int, ...] = ()
    share: float = 0.0
    of_tokens: bool = False

    def of(self, ticket: Ticket) -> Ticket:
        """Return the ticket of a request that has this prompt."""
        return structs.replace(
            ticket,
            blocks=self.hashes,
            block_tokens=self.share * ticket.prompt_tokens,
            token_blocks=self.of_tokens,
        )


def prompt_blocks(api: Api, body: RequestBody, token_block: int = 0) -> PromptBlocks:
    """Return the blocks of a prompt; time is linear in it.

    Args:
        api: The endpoint.
        body: The request.
        token_block: Tokens of a block where the prompt is token ids; 0 for blocks of text alone.
    """
    if token_block and api in TAKES_IDS:
        found = _token_blocks(body, PROMPT_MEMBER[api], token_block)
        if found is not None:
            return found
    text = body.value_text(PROMPT_MEMBER[api])
    full = min(len(text) // BLOCK_BYTES, _MOST_BLOCKS)
    if not full:
        return PromptBlocks()
    hasher = blake2b(api.value.encode(), digest_size=_HASH_BYTES)
    for name in _BEFORE:
        if body.is_given(name):
            # No JSON text holds a NUL, so no two sequences of members are one text.
            hasher.update(b"\0")
            hasher.update(body.fingerprint(name))
    hasher.update(b"\0\0")
    hashes = []
    for begin in range(0, full * BLOCK_BYTES, BLOCK_BYTES):
        hasher.update(text[begin : begin + BLOCK_BYTES])
        hashes.append(int.from_bytes(hasher.digest()) & _MASK)
    return PromptBlocks(tuple(hashes), BLOCK_BYTES / len(text))


def prompt_name(api: Api, body: RequestBody, ticket: Ticket) -> bytes:
    """Return the header line by which an engine's KV cache events name a prompt; empty if it needs none.

    Source: https://github.com/vllm-project/vllm, vllm/entrypoints/generate/base/serving.py at v0.32.0.
    """
    if not ticket.blocks or ticket.token_blocks:
        return b""
    length = len(body.value_text(PROMPT_MEMBER[api])) / BLOCK_BYTES
    return b"x-session-id: %b\r\n" % named(ticket.blocks, length).encode()


def _token_blocks(body: RequestBody, name: str, token_block: int) -> PromptBlocks | None:
    """Return the blocks of one prompt of token ids; None if it is something else."""
    summary = body.summary(name)
    if summary.elements == summary.integers > 0:
        count, read = summary.integers, _read_flat
    elif summary.elements == summary.arrays == 1:
        count, read = summary.inner, _read_nested
    else:
        return None
    if any(map(body.is_given, _NOT_ALONE)):
        return None
    text: bytes | memoryview = body.value_text(name)
    if len(text) > _MOST_BYTES:
        closed = b"]" * (1 if summary.integers else 2)
        text = bytes(text[:_MOST_BYTES]).rpartition(b",")[0] + closed
    try:
        ids = np.frombuffer(array("q", read(text)), np.int64)
    except (msgspec.MsgspecError, OverflowError):
        return None  # Ids that no engine takes.
    if not ids.size:
        return None
    return PromptBlocks(token_hashes(ids, token_block), token_block / count, True)


def _read_flat(text: bytes | memoryview) -> list[int]:
    return _FLAT.decode(text)


def _read_nested(text: bytes | memoryview) -> list[int]:
    (ids,) = _NESTED.decode(text)
    return ids
