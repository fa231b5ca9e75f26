"""The prefill choices by name.

| name | rule |
| --- | --- |
| `fewest-tokens` | the prefiller that holds the fewest KV tokens; equal ones take turns |
"""

from balanceroute.proxy.core.prefill.base import MakePrefillChoice, PrefillChoice, PrefillView
from balanceroute.proxy.core.prefill.budgets import Prefillers
from balanceroute.proxy.core.prefill.fewest_tokens import FewestTokens

__all__ = [
    "PREFILL_CHOICES",
    "FewestTokens",
    "MakePrefillChoice",
    "PrefillChoice",
    "PrefillView",
    "Prefillers",
]

PREFILL_CHOICES: dict[str, MakePrefillChoice] = {"fewest-tokens": FewestTokens}
