"""Hashes of blocks of token ids, each of all that comes before it too.

The proxy's own: an engine's hashes cannot be computed without its seed. They are the coefficients of
one polynomial, so that a piece of a prompt can be continued from the hash before it without a loop.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from operator import mul

import msgspec
import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
# Tickets hold hashes below 2**63.
HASH_MASK = (1 << 63) - 1
_FACTOR = 0x9E3779B97F4A7C15
_encode = msgspec.msgpack.Encoder().encode
_INVERSE = pow(_FACTOR, -1, 1 << 64)


def chain(
    tokens: NDArray[np.int64], block_tokens: int, before: int, extras: Sequence[int] = ()
) -> NDArray[np.uint64]:
    """Return the hashes of all full blocks, uint64[n].

    Args:
        tokens: Token ids.
        block_tokens: Tokens of a block.
        before: The hash of the block before the first one; 0 at the start of a prompt.
        extras: 64 bits of each block that depends on more than its tokens; empty if none does.
    """
    count = len(tokens) // block_tokens
    blocks = tokens[: count * block_tokens].astype(np.uint64).reshape(count, block_tokens)
    own = (blocks + np.uint64(1)) @ _multipliers(block_tokens)
    own = (own ^ (own >> np.uint64(29))) * np.uint64(_FACTOR)
    own ^= own >> np.uint64(32)
    if len(extras):
        own += np.array(extras, np.uint64)
    # S[n] = S[n-1] * f + own[n], solved for S[n] by dividing by f**n.
    factors, inverses = _powers(_FACTOR, count), _powers(_INVERSE, count)
    sums = np.cumsum(own * inverses, dtype=np.uint64) + np.uint64(before)
    return np.asarray(factors * sums, np.uint64)


def chain_one(tokens: Sequence[int], before: int, extra: int = 0) -> int:
    """Return the same hash of one full block; of so few a loop is quicker."""
    multipliers = _plain_multipliers(len(tokens))
    own: int = sum(map(mul, multipliers, tokens)) + _plain_sum(len(tokens)) & _MASK
    own = (own ^ own >> 29) * _FACTOR & _MASK
    own ^= own >> 32
    return before * _FACTOR + own + extra & _MASK


def mixed_in(keys: object) -> int:
    """Return a hash of what an engine mixes into a block's hash beside its tokens; 0 for nothing.

    Raises:
        TypeError: It is nothing that MessagePack can say.
        RecursionError: It is nested too deeply.
    """
    return int.from_bytes(blake2b(_encode(keys), digest_size=8).digest()) if keys else 0


def token_hashes(tokens: NDArray[np.int64], block_tokens: int) -> tuple[int, ...]:
    """Return the hashes of a prompt's full blocks as tickets have them, below 2**63."""
    hashes = chain(tokens, block_tokens, 0) & np.uint64(HASH_MASK)
    return tuple(hashes.tolist())


def _powers(factor: int, count: int) -> NDArray[np.uint64]:
    """Return factor**1 to factor**count modulo 2**64."""
    return np.cumprod(np.full(count, factor, np.uint64), dtype=np.uint64)


@cache
def _plain_multipliers(count: int) -> tuple[int, ...]:
    return tuple(_multipliers(count).tolist())


@cache
def _plain_sum(count: int) -> int:
    return sum(_plain_multipliers(count))


@cache
def _multipliers(count: int) -> NDArray[np.uint64]:
    """Return odd numbers without a pattern (SplitMix64)."""
    found = []
    for number in range(1, count + 1):
        bits = number * _FACTOR & _MASK
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
        found.append((bits ^ bits >> 31) | 1)
    return np.array(found, np.uint64)
