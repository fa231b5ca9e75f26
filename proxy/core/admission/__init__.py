"""The admission rules by name.

| name | rule |
| --- | --- |
| `bounded` | requests are accepted until a given number wait |
| `early` | and if their first token is expected before its deadline |

Each of them also works within the limits of tenants, see `tenants`.
"""

from collections.abc import Callable

from balanceroute.proxy.core.admission.rules import (
    POST_4,
    POST_5,
    Admission,
    AimdOptions,
    AimdSettings,
    Allowance,
    BoundedQueue,
    Decision,
    Ending,
    Load,
    Rate,
    Refusal,
    TenantLimits,
)

__all__ = [
    "ADMISSIONS",
    "EXPECTING",
    "POST_4",
    "POST_5",
    "Admission",
    "AimdOptions",
    "AimdSettings",
    "Allowance",
    "BoundedQueue",
    "Decision",
    "Ending",
    "Load",
    "Rate",
    "Refusal",
    "TenantLimits",
]


def _early(limit: int) -> Admission:
    from balanceroute.proxy.core.admission.overload import EarlyRefusal  # noqa: PLC0415

    return EarlyRefusal(BoundedQueue(limit))


ADMISSIONS: dict[str, Callable[[int], Admission]] = {
    "bounded": BoundedQueue,
    "early": _early,
}
"""Each takes the number of requests that may wait."""
EXPECTING = frozenset({"early"})
"""Those that use `Load.first_token_ns`."""
