"""The admission rules by name.

| name | rule |
| --- | --- |
| `bounded` | everyone is let in until so many requests wait |
"""

from collections.abc import Callable

from balanceroute.proxy.core.admission.base import Admission, Ending, Load, Refusal
from balanceroute.proxy.core.admission.bounded import BoundedQueue

__all__ = ["ADMISSIONS", "Admission", "BoundedQueue", "Ending", "Load", "Refusal"]

ADMISSIONS: dict[str, Callable[[int], Admission]] = {"bounded": BoundedQueue}
"""Each is made from the number of requests that may wait."""
