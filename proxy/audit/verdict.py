"""What bounds a fleet: prefill, decode, or the barrier between its ranks."""

from dataclasses import dataclass
from enum import Enum

# Beyond these shares a role has no reserve, or the barrier's loss is worth a change.
_BUSY = 0.9
_WORTH_IT = 0.1


class Bound(Enum):
    """What there is too little of."""

    PREFILL = "prefill"
    DECODE = "decode"
    BARRIER = "barrier"  # Ranks are full, and wait for one another.
    NOTHING = "nothing"


MEANINGS = {
    Bound.PREFILL: "prefill: prefillers are busy, and ranks have free slots",
    Bound.DECODE: "decode: the ranks are full and evenly loaded",
    Bound.BARRIER: "the barrier: the ranks are full, and wait for the fullest at every step",
    Bound.NOTHING: "nothing: both roles have reserves",
}
"""In words."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What bounds a fleet, and the ratio of its roles that would not.

    Attributes:
        bound: What.
        prefillers_per_rank: At which both roles would be equally busy; None where one did nothing.
    """

    bound: Bound
    prefillers_per_rank: float | None


def judge(
    *, prefillers: int, ranks: int, prefill_busy: float | None, slots_share: float, idle: float
) -> Verdict:
    """Return what bounds a fleet.

    Args:
        prefillers: P.
        ranks: G.
        prefill_busy: Mean share of prefillers that have work; None if nobody knows.
        slots_share: Mean share of the ranks' slots in use.
        idle: Share of rank time lost at the barrier.
    """
    if slots_share >= _BUSY:
        bound = Bound.BARRIER if idle >= _WORTH_IT else Bound.DECODE
    elif prefill_busy is not None and prefill_busy >= _BUSY:
        bound = Bound.PREFILL
    else:
        bound = Bound.NOTHING
    wanted = None
    if prefill_busy and slots_share:
        wanted = prefillers * prefill_busy / (ranks * slots_share)
    return Verdict(bound, wanted)
