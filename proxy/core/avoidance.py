"""Which instances a request may go to, given those that have lost it.

A request that an instance lost goes to another one, even if it has to wait there: a retry on a broken
instance gains nothing. But it never waits for a closed instance. If no other one is open, losses are
ignored, the earliest first: if both of two ranks lost it, it goes to the one that lost it earlier.
"""

from collections.abc import Sequence
from typing import TypeVar

_Id = TypeVar("_Id", bound=int)


def with_loss(lost_on: tuple[_Id, ...], instance: _Id) -> tuple[_Id, ...]:
    """Return `lost_on`, the earliest loss first, with one more loss."""
    return (*(other for other in lost_on if other != instance), instance)


def allowed(is_open: Sequence[bool], lost_on: Sequence[int]) -> list[bool]:
    """Return for each instance whether the request may go there.

    Args:
        is_open: For each instance whether it takes new requests.
        lost_on: The instances that lost the request, the earliest loss first.
    """
    for ignored in range(len(lost_on)):
        left = list(is_open)
        for instance in lost_on[ignored:]:
            left[instance] = False
        if any(left):
            return left
    return list(is_open)
