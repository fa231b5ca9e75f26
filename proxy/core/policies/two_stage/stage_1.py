"""Stage 1, slots abound: only the rank of each request is open.

Every pooled request gets a slot now, or in a moment, see `hold`. The largest goes first, the classic
rule for even sums, each to the rank where its F is best.
"""

from balanceroute.proxy.core.policies.two_stage.hold import is_held
from balanceroute.proxy.core.policies.two_stage.round import Round
from balanceroute.proxy.core.pool import PoolEntry


def place_overdue(work: Round, now_ns: int) -> None:
    """Admit entries past their deadline, oldest first, each where it scores best."""
    # The deadline bounds the wait of entries that never fit, whatever it costs in balance; near the
    # end of a lease it does so only up to what a repeated prefill costs. Affinity may not raise that.
    work.place(work.pool.overdue(now_ns))


def place_all(work: Round, now_ns: int, *, may_hold: bool) -> int | None:
    """Admit the oldest entries, the largest of them first.

    Returns:
        When the first hold ends; None if no entry is held.
    """
    free = work.fleet.free
    # If all entries fit, there is nothing to choose. Otherwise the last theta slots are left to
    # Stage 2, which chooses the entries as well.
    fits = work.pool.slots <= free
    entries = _oldest(work, free if fits else max(0, free - work.settings.theta))
    entries.sort(key=largest_first)
    if not (fits and may_hold):
        work.place(entries, affinity=work.affinity)
        return None
    held = work.place(
        entries, lambda entry, rank: is_held(work, entry, rank, now_ns), work.affinity
    )
    if not held:
        return None
    return min(entry.since_ns for entry in held) + work.settings.hold_ns


def largest_first(entry: PoolEntry) -> tuple[int, int]:
    """Return the key of the order of placement; ties go by arrival."""
    return -entry.kv_tokens, entry.request


def _oldest(work: Round, slots: int) -> list[PoolEntry]:
    """Return the oldest entries that together need at most `slots` slots."""
    entries: list[PoolEntry] = []
    for entry in work.pool.first(slots):
        slots -= entry.slots
        if slots < 0:
            break
        entries.append(entry)
    return entries
