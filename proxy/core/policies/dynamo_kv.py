"""`dynamo-kv`: the cost of NVIDIA Dynamo's KV router for a decode pool.

A rank costs the KV blocks of its requests, each request's weighted by the share of its expected
output that is still to come, as of its last whole block. Without an expected length the weight is 1.
Their weight of active requests and their sampling temperature are 0 by default, so neither is here;
nor is credit for cached prefixes, which they switch off for a decode pool.

Source: https://github.com/ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector/default.rs at
07a6c9ce3bb0 (the cost), lib/kv-router/src/sequences/single.rs at 04df1c42f2fe (which blocks decay).
"""

from balanceroute.proxy.core.ledger import BoundRequest

# Their default block.
BLOCK_TOKENS = 16


def decayed_blocks(bound: BoundRequest, expected_output: float | None) -> float:
    """Return the weighted KV blocks of a request."""
    held = bound.kv_tokens // bound.slots
    prompt = held - bound.age
    blocks = -(-held // BLOCK_TOKENS)
    weight = 1.0
    # They look whenever a block is added: at its first token.
    emitted = (blocks - 1) * BLOCK_TOKENS + 1 - prompt
    if expected_output is not None and emitted > 0:
        weight = max(0.0, 1.0 - emitted / max(expected_output, 1.0))
    return weight * blocks * bound.slots
