"""The prefill choices by name.

| name | rule |
| --- | --- |
| `fewest-tokens` | the prefiller that holds the fewest KV tokens; equal ones take turns |
| `least-conn` | the prefiller that works on the fewest requests; equal ones take turns |
| `round-robin` | the prefillers in turn |
| `random` | a prefiller drawn at random, uniformly |
| `power-of-two` | the less busy of two drawn prefillers |
| `s1-enhanced` | drawn by a score of waiting requests and KV cache use (TBLB) |
| `s2-enhanced` | the same, running requests too (TBLB) |
| `s2-dynamic-waiting` | the same, waiting requests weigh more the more there are (TBLB) |
| `prefix-aware` | where its prefill delays all requests least, cached prefixes counted |
| `sticky` | a conversation's own prefiller, by rendezvous hashing |
| `cache-aware` | the longest cached prefix unless loads differ a lot (vllm-router) |
| `lmetric` | the lowest product of uncached tokens and requests under way (LMetric) |
"""

from collections.abc import Callable

from balanceroute.proxy.core.prefill.budgets import (
    MakePrefillChoice,
    PrefillChoice,
    Prefillers,
    PrefillInputs,
    PrefillRequest,
    PrefillView,
    ScoreSettings,
)
from balanceroute.proxy.core.prefill.choices import (
    SCORES,
    CacheAware,
    FewestTokens,
    LeastConn,
    LMetric,
    PrefillPowerOfTwo,
    PrefillRoundRobin,
    PrefixAware,
    RandomOne,
    Scored,
    Sticky,
)

__all__ = [
    "PREFILL_CHOICES",
    "USING_BLOCKS",
    "USING_EVENTS",
    "USING_LOADS",
    "FewestTokens",
    "MakePrefillChoice",
    "PrefillChoice",
    "PrefillInputs",
    "PrefillRequest",
    "PrefillView",
    "Prefillers",
    "ScoreSettings",
]

PREFILL_CHOICES: dict[str, Callable[[PrefillInputs], PrefillChoice]] = {
    "fewest-tokens": lambda _: FewestTokens(),
    "least-conn": lambda _: LeastConn(),
    "round-robin": lambda _: PrefillRoundRobin(),
    "random": lambda inputs: RandomOne(inputs.rng),
    "power-of-two": lambda inputs: PrefillPowerOfTwo(inputs.rng),
    "s1-enhanced": lambda inputs: Scored("s1-enhanced", inputs),
    "s2-enhanced": lambda inputs: Scored("s2-enhanced", inputs),
    "s2-dynamic-waiting": lambda inputs: Scored("s2-dynamic-waiting", inputs),
    "prefix-aware": lambda inputs: PrefixAware(inputs.index_blocks, inputs.engine_blocks),
    "sticky": lambda _: Sticky(),
    "cache-aware": lambda inputs: CacheAware(inputs.index_blocks),
    "lmetric": lambda inputs: LMetric(inputs.index_blocks),
}

# The choices that use what was scraped of the prefillers.
USING_LOADS = frozenset(SCORES)
# The choices that use the blocks of prompts.
USING_BLOCKS = frozenset({"prefix-aware", "sticky", "cache-aware", "lmetric"})
# The choices that use what prefillers tell of their caches.
USING_EVENTS = frozenset({"prefix-aware"})
