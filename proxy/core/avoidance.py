"""Which instances a request may go to, given those that have lost it.

A request that an engine lost goes elsewhere, also if it has to wait there: trying a broken instance
again gains nothing. But it never waits for an instance that is closed. So when no other one is open,
losses are forgiven, the earliest first: of two ranks that both lost it, it goes to the other.
"""

from collections.abc import Sequence
from typing import TypeVar

_Id = TypeVar("_Id", bound=int)


def with_loss(lost_on: tuple[_Id, ...], instance: _Id) -> tuple[_Id, ...]:
    """Return `lost_on`, the earliest loss first, with one more loss."""
    return (*(one for one in lost_on if one != instance), instance)


def allowed(is_open: Sequence[bool], lost_on: Sequence[int]) -> list[bool]:
    """Return for each instance whether the request may go there.

    Args:
        is_open: For each instance whether it takes anything new.
        lost_on: The instances that lost the request, the earliest loss first.
    """
    for forgiven in range(len(lost_on)):
        left = list(is_open)
        for instance in lost_on[forgiven:]:
            left[instance] = False
        if any(left):
            return left
    return list(is_open)
