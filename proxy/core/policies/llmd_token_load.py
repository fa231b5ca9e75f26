"""`llmd-token-load`: the token load scorer of the llm-d router with its output-length buckets.

A request is charged a flat number of output tokens from its admission to its end, by its bucket. The
prompt counts on the prefiller alone. Their buckets follow from the client's body (thinking, tools, a
low `max_tokens`); here an expected length stands for these signs. Without one the bucket is unknown,
and the rule is `jsq`.

Source: https://github.com/llm-d/llm-d-router, pkg/epp/framework/plugins/, the files
scheduling/scorer/tokenload/token_load.go at 1b30d10f8006 and
requestcontrol/dataproducer/inflightload/README.md at 2f1de8c05071.
"""

from balanceroute.proxy.core.ledger import BoundRequest

# Charges of the buckets, and the lengths that bound them.
_SHORT_TOKENS, _UNKNOWN_TOKENS, _LONG_TOKENS = 100, 1_000, 4_096
_SHORT_BELOW, _LONG_FROM = 500, 2_000


def bucket_tokens(bound: BoundRequest, expected_output: float | None) -> float:
    """Return the output tokens that a request is charged."""
    if expected_output is None or _SHORT_BELOW <= expected_output < _LONG_FROM:
        tokens = _UNKNOWN_TOKENS
    else:
        tokens = _SHORT_TOKENS if expected_output < _SHORT_BELOW else _LONG_TOKENS
    return tokens * bound.slots
