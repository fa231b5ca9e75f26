"""The admission rules by name.

| name | rule |
| --- | --- |
| `bounded` | requests are accepted until a given number wait |
"""

from collections.abc import Callable

from balanceroute.proxy.core.admission.base import Admission, Ending, Load, Refusal
from balanceroute.proxy.core.admission.bounded import BoundedQueue

__all__ = ["ADMISSIONS", "Admission", "BoundedQueue", "Ending", "Load", "Refusal"]

ADMISSIONS: dict[str, Callable[[int], Admission]] = {"bounded": BoundedQueue}
"""Each takes the number of requests that may wait."""
