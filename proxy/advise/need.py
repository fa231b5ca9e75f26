"""How many instances of each role a load needs, from how busy those are that there are."""

from dataclasses import dataclass
from math import ceil

from balanceroute.proxy.audit.verdict import Bound, Verdict


@dataclass(frozen=True, slots=True)
class Need:
    """Of one role.

    Attributes:
        now: Instances that there are.
        work: Instances that the present load keeps busy all the time; None if nobody knows.
        wanted: Instances that it would keep busy for the share that is aimed at; None likewise.
        at_least: Whether more may be needed: the role is full, so its load is not seen whole.
    """

    now: int
    work: float | None
    wanted: int | None
    at_least: bool


@dataclass(frozen=True, slots=True)
class Needs:
    """Of both roles, and what bounds the fleet now."""

    verdict: Verdict
    prefillers: Need
    ranks: Need


def needs(
    verdict: Verdict,
    *,
    prefillers: int,
    ranks: int,
    prefill_work: float | None,
    decode_work: float,
    busy: float,
) -> Needs:
    """Return how many instances are wanted.

    Args:
        verdict: What bounds the fleet now.
        prefillers: P.
        ranks: G.
        prefill_work: Prefillers that the load keeps busy all the time.
        decode_work: Ranks that it keeps full all the time, of what runs and waits.
        busy: Share of the time, or of the slots, that is to be used.
    """
    return Needs(
        verdict,
        _need(prefillers, prefill_work, busy, full=verdict.bound is Bound.PREFILL),
        _need(ranks, decode_work, busy, full=verdict.bound is Bound.DECODE),
    )


def _need(now: int, work: float | None, busy: float, *, full: bool) -> Need:
    if work is None:
        return Need(now, None, None, at_least=False)
    wanted = max(1, ceil(round(work / busy, 6)))
    return Need(now, work, max(wanted, now + 1) if full else wanted, at_least=full)
