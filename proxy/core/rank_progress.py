"""Which decode ranks make no tokens while others do, as far as their streams tell.

Whoever reads streams **looks** at them a few times a second and tells of each rank whether any of its
streams moved, and how many of those that stand still would have moved if the rank had made a step. A
rank is **silent** for the time in which it has such streams, none of its streams moved, and another rank
stepped at its usual pace. It **stands still** once that is more than `FLOOR_S` and more than `STEPS`
times the longest gap that its streams had lately: an engine that is slow, or sends several tokens at
once, has long gaps, and so has its limit. The same holds for the gaps of the others: by ranks that say
something every three seconds nobody can tell what happened in the last two.

If no rank steps, none is silent: ranks that share a barrier stop together whoever is at fault. That is
the **standstill** of the fleet.

Time counts as far as the one who looks was there to see it: who stood still himself tells 0 s. So a rank
is never silent because nobody read its streams. Times are float seconds.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nsmallest

from msgspec import Struct

from balanceroute.proxy.core.events import RankId

FLOOR_S = 2.0
"""No rank stands still sooner."""
STEPS = 4
"""Nor within so many of its own gaps."""
# Gaps of a rank that have to be known. Engines that begin compile kernels and capture graphs.
_LEAST_GAPS = 12
# What is left of the longest gap after a look with a shorter one: a half after ten seconds.
_KEPT = 0.983
# A rank steps if its last token is no older than its gaps, or than this.
_USUAL_S = 0.6
_USUAL_GAPS = 1.5
# Looks that are older say nothing of the present.
_STALE_S = 1.5


class Sighting(Struct, frozen=True, array_like=True):
    """One rank in one look.

    Attributes:
        moved: Whether any of its streams brought a token since the last look.
        still: Of those that did not, the streams that bring one with every step as a rule, and which
            somebody reads.
        gap_s: The longest gap of its streams that ended since the last look; 0 if none did.
    """

    rank: RankId
    moved: bool
    still: int
    gap_s: float = 0.0


@dataclass(slots=True)
class _Pace:
    """What is known of one rank."""

    gap_s: float = 0.0
    gaps: int = 0
    moved_s: float = float("-inf")

    def steps(self, now_s: float) -> bool:
        return now_s - self.moved_s <= max(_USUAL_S, _USUAL_GAPS * self.gap_s)


class Stepping:
    """The ranks that step at one moment.

    Args:
        shortest: Of those, the two with the shortest gaps, or as many as there are.
    """

    def __init__(self, shortest: list[tuple[float, RankId]]) -> None:
        self._shortest = shortest

    def gap_beside_s(self, rank: RankId) -> float | None:
        """Return the shortest gap of the other ranks; None if no other steps."""
        return next((gap_s for gap_s, other in self._shortest if other != rank), None)


class RankProgress:
    """The ranks of one fleet.

    Attributes:
        quiet: Whether no rank is silent, as is usual.
    """

    def __init__(self) -> None:
        self.quiet = True
        self._paces: dict[RankId, _Pace] = {}
        # For how long each rank was silent, for how long nothing moved at all, and the last look.
        self._silent_s: dict[RankId, float] = {}
        self._still_s = 0.0
        self._looked_s = float("-inf")

    def look(self, now_s: float, elapsed_s: float, sightings: Iterable[Sighting]) -> None:
        """Take in what is seen now.

        Args:
            now_s: The time.
            elapsed_s: Since the last look; 0 if nobody was there to see what came meanwhile.
            sightings: One for each rank that has a stream.
        """
        still: list[RankId] = []
        moved = False
        for one in sightings:
            if one.moved:
                moved = True
                self._moved(one.rank, one.gap_s, now_s)
            elif one.still:
                still.append(one.rank)
        if not still and self.quiet:
            return
        before, self._silent_s, self._looked_s = self._silent_s, {}, now_s
        stepping = self.stepping(now_s)
        for rank in still:
            counts = stepping.gap_beside_s(rank) is not None
            self._silent_s[rank] = before.get(rank, 0.0) + elapsed_s * counts
        if not still:
            self._still_s = 0.0
        elif not moved:
            self._still_s += elapsed_s
        self.quiet = not self._silent_s

    def _moved(self, rank: RankId, gap_s: float, now_s: float) -> None:
        pace = self._paces.get(rank)
        if pace is None:
            pace = self._paces[rank] = _Pace()
        pace.moved_s = now_s
        if gap_s > 0.0:
            pace.gaps += 1
            pace.gap_s *= _KEPT
            pace.gap_s = max(pace.gap_s, gap_s)
        if not self.quiet:
            self._silent_s.pop(rank, None)
            self._still_s = 0.0

    def begin_anew(self, rank: RankId) -> None:
        """Judge a rank again once it has shown its pace: it was away, or is another engine now."""
        self._paces.pop(rank, None)
        self._silent_s.pop(rank, None)

    def excuse(self) -> None:
        """Let the silence of all ranks begin now: somebody told the engines to wait."""
        self._silent_s.clear()
        self._still_s = 0.0

    def moved_s(self, rank: RankId) -> float:
        """Return when a rank's streams moved last; minus infinity for never."""
        pace = self._paces.get(rank)
        return float("-inf") if pace is None else pace.moved_s

    def silent_s(self, rank: RankId) -> float:
        """Return for how long a rank has been silent."""
        return self._silent_s.get(rank, 0.0)

    def limit_s(self, rank: RankId, now_s: float) -> float | None:
        """Return for how long it may be silent; None if that cannot be told.

        That is while its own pace is not known yet, and while no other rank steps whose pace is.
        """
        return self._limit_s(rank, self.stepping(now_s))

    def _limit_s(self, rank: RankId, stepping: Stepping) -> float | None:
        own_s, others_s = self._gap_s(rank), stepping.gap_beside_s(rank)
        if own_s is None or others_s is None:
            return None
        return max(FLOOR_S, STEPS * own_s, STEPS * others_s)

    def _gap_s(self, rank: RankId) -> float | None:
        """Return the longest gap that a rank had lately; None if its pace is not known."""
        pace = self._paces.get(rank)
        return None if pace is None or pace.gaps < _LEAST_GAPS else pace.gap_s

    def stepping(self, now_s: float) -> Stepping:
        """Return the ranks that step now and whose pace is known. O(G)."""
        gaps = (
            (pace.gap_s, rank)
            for rank, pace in self._paces.items()
            if pace.gaps >= _LEAST_GAPS and pace.steps(now_s)
        )
        return Stepping(nsmallest(2, gaps))

    def standing_still(self, now_s: float, allowance_s: Callable[[RankId], float]) -> list[RankId]:
        """Return the ranks that stand still, those of the longest silence first.

        Args:
            now_s: The time.
            allowance_s: Returns how much longer a rank may be silent: it computes a prompt, say. Only
                asked of ranks that would stand still without.
        """
        found: list[tuple[float, RankId]] = []
        stepping = self.stepping(now_s)
        for rank in self._fresh(now_s):
            limit_s, silent_s = self._limit_s(rank, stepping), self.silent_s(rank)
            if limit_s is None or silent_s < limit_s:
                continue
            if silent_s >= limit_s + allowance_s(rank):
                found.append((-silent_s, rank))
        return [rank for _, rank in sorted(found)]

    def standstill(self, now_s: float, allowance_s: Callable[[RankId], float]) -> int:
        """Return how many ranks stand still if no rank at all steps that has streams; else 0.

        All have to be longer silent than the slowest of them may.
        """
        ranks = self._fresh(now_s)
        if not ranks or any(pace.steps(now_s) for pace in self._paces.values()):
            return 0
        still_s = self._still_s
        gaps = [self._gap_s(rank) for rank in ranks]
        known = [gap_s for gap_s in gaps if gap_s is not None]
        if len(known) < len(gaps):
            return 0
        limit_s = max(FLOOR_S, STEPS * max(known))
        if still_s < limit_s or still_s < limit_s + max(map(allowance_s, ranks)):
            return 0
        return len(ranks)

    def _fresh(self, now_s: float) -> set[RankId]:
        """Return the ranks that are silent, as far as somebody has just looked."""
        return set(self._silent_s) if now_s - self._looked_s <= _STALE_S else set()
