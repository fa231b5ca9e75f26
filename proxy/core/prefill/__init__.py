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
from functools import partial
from types import ModuleType

from balanceroute.proxy.core.prefill.budgets import (
    FewestTokens,
    MakePrefillChoice,
    PrefillChoice,
    Prefillers,
    PrefillInputs,
    PrefillRequest,
    PrefillView,
    ScoreSettings,
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


def _load() -> ModuleType:
    """Return the module of the choices other than the default; it loads at its first use."""
    from balanceroute.proxy.core.prefill import choices  # noqa: PLC0415

    return choices


def _scored(name: str, inputs: PrefillInputs) -> PrefillChoice:
    choice: PrefillChoice = _load().Scored(name, inputs)
    return choice


# The choices that use the scraped metrics of the prefillers.
_SCORED = ("s1-enhanced", "s2-enhanced", "s2-dynamic-waiting")
USING_LOADS = frozenset(_SCORED)

PREFILL_CHOICES: dict[str, Callable[[PrefillInputs], PrefillChoice]] = {
    "fewest-tokens": lambda _: FewestTokens(),
    "least-conn": lambda _: _load().LeastConn(),
    "round-robin": lambda _: _load().PrefillRoundRobin(),
    "random": lambda inputs: _load().RandomOne(inputs.rng),
    "power-of-two": lambda inputs: _load().PrefillPowerOfTwo(inputs.rng),
    **{name: partial(_scored, name) for name in _SCORED},
    "prefix-aware": lambda inputs: _load().PrefixAware(inputs.index_blocks, inputs.engine_blocks),
    "sticky": lambda _: _load().Sticky(),
    "cache-aware": lambda inputs: _load().CacheAware(inputs.index_blocks),
    "lmetric": lambda inputs: _load().LMetric(inputs.index_blocks),
}

# The choices that use the blocks of prompts.
USING_BLOCKS = frozenset({"prefix-aware", "sticky", "cache-aware", "lmetric"})
# The choices that use the cache events of prefillers.
USING_EVENTS = frozenset({"prefix-aware"})
