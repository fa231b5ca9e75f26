"""The admission rules by name.

| name | rule |
| --- | --- |
| `bounded` | requests are accepted until a given number wait |
| `early` | and if their first token can be expected before its deadline |

Each of them can be within the limits of tenants, see `tenants`.
"""

from collections.abc import Callable

from balanceroute.proxy.core.admission.rules import (
    POST_4,
    POST_5,
    Admission,
    Aimd,
    AimdOptions,
    AimdSettings,
    BoundedQueue,
    Budget,
    Decision,
    EarlyRefusal,
    Ending,
    FirstTokens,
    Load,
    Refusal,
)
from balanceroute.proxy.core.admission.tenants import Allowance, Rate, TenantLimits, Tenants

__all__ = [
    "ADMISSIONS",
    "EXPECTING",
    "POST_4",
    "POST_5",
    "Admission",
    "Aimd",
    "AimdOptions",
    "AimdSettings",
    "Allowance",
    "BoundedQueue",
    "Budget",
    "Decision",
    "EarlyRefusal",
    "Ending",
    "FirstTokens",
    "Load",
    "Rate",
    "Refusal",
    "TenantLimits",
    "Tenants",
]

ADMISSIONS: dict[str, Callable[[int], Admission]] = {
    "bounded": BoundedQueue,
    "early": lambda limit: EarlyRefusal(BoundedQueue(limit)),
}
"""Each takes the number of requests that may wait."""
EXPECTING = frozenset({"early"})
"""Those that use `Load.first_token_ns`."""
