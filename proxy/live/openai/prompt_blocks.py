"""Hashes of a prompt's blocks, by which a prefiller is known to have its beginning already.

No tokeniser is at hand, so a block is a piece of the prompt's JSON text of fixed length. Two prompts
with equal hashes have equal text up to there, and equal members that a chat template puts before it.
A further turn of a conversation repeats the text of the turns before it, if its client writes JSON in
the same way each time; else it counts as another prompt.
"""

from hashlib import blake2b

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.prompt_keys import FRONT
from balanceroute.proxy.live.openai.shape import PROMPT_MEMBER, Api

# About 500 tokens of English text.
BLOCK_BYTES = 2_048
# Of very long prompts only the beginning is hashed: a million bytes take a millisecond or two.
_MOST_BLOCKS = 512
_HASH_BYTES = 8
_MASK = (1 << 63) - 1
# Engines keep the caches of different salts apart.
_BEFORE = (*FRONT, "cache_salt")


def prompt_blocks(api: Api, body: RequestBody) -> tuple[tuple[int, ...], float]:
    """Return the hashes of a prompt's full blocks, each of all before it too, and a block's share.

    Returns:
        Hashes below 2**63, and what part of the prompt each block is, by bytes; 0 if there is none.
    """
    text = body.value_text(PROMPT_MEMBER[api])
    full = min(len(text) // BLOCK_BYTES, _MOST_BLOCKS)
    if not full:
        return (), 0.0
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
    return tuple(hashes), BLOCK_BYTES / len(text)
