"""The paper's stages, where ours differ. Paper: Algorithms 2 and 3."""

from balanceroute.proxy.core.policies.two_stage.candidates import sizes
from balanceroute.proxy.core.policies.two_stage.round import Round
from balanceroute.proxy.core.pool import PoolEntry


def fill_longest_queues(work: Round) -> None:
    """Stage 1: the rank with most free slots takes the entry with the best F."""
    fleet = work.fleet
    while len(work.pool) and fleet.free_slots.sum() > work.settings.theta:
        rank = int(fleet.free_slots.argmax())  # On a tie the lowest.
        room = fleet.room(rank)
        candidates = [e for e in work.allowed(rank) if e.kv_tokens <= room]
        if not candidates:
            return
        scores = work.balance.scores(rank, sizes(candidates))
        work.admit(candidates[int(scores.argmax())], rank)


def largest(work: Round, rank: int) -> list[PoolEntry]:
    """Return the candidates of Stage 2: the K largest entries that may go to `rank`."""
    by_size = sorted(work.allowed(rank), key=lambda e: (-e.kv_tokens, e.request))
    return by_size[: work.settings.window]
