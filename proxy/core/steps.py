"""Measurements of decode steps: the cost of a KV token, the ranks' speeds, and which ranks stand still."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import nsmallest

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from balanceroute.proxy.core.events import RankId

# The measured cost of a KV token in a step: b of T = a + b x max load.

# Steps of one point: a driver that infers steps sees each of them end a little early or late.
_POINT_STEPS = 16
# Points that the fit covers. The envelope of a balanced fleet varies little, so it needs many.
_WINDOW_POINTS = 64
# Before so many points a fit means nothing.
_LEAST_POINTS = 4
# b is known if it exceeds its standard error by this factor.
_CERTAINTY = 2.0


class StepModel:
    """A line through the times of steps over their envelopes; older steps fade out."""

    def __init__(self) -> None:
        self._steps = 0
        self._sum_tokens = self._sum_ns = 0.0
        self._weight = 0.0
        self._tokens = self._ns = 0.0  # Means.
        # Sums of products of deviations from the means: updating these is exact, where differences
        # of plain sums would lose the small variance of a balanced fleet's envelope.
        self._tokens_tokens = self._tokens_ns = self._ns_ns = 0.0

    def observe(self, envelope_tokens: int, step_ns: float) -> None:
        self._steps += 1
        self._sum_tokens += envelope_tokens
        self._sum_ns += step_ns
        if self._steps == _POINT_STEPS:
            self._add(self._sum_tokens / _POINT_STEPS, self._sum_ns / _POINT_STEPS)
            self._steps = 0
            self._sum_tokens = self._sum_ns = 0.0

    def _add(self, envelope_tokens: float, step_ns: float) -> None:
        keep = 1 - 1 / _WINDOW_POINTS
        self._weight = keep * self._weight + 1
        tokens, ns = envelope_tokens - self._tokens, step_ns - self._ns
        self._tokens += tokens / self._weight
        self._ns += ns / self._weight
        after = envelope_tokens - self._tokens
        self._tokens_tokens = keep * self._tokens_tokens + tokens * after
        self._tokens_ns = keep * self._tokens_ns + ns * after
        self._ns_ns = keep * self._ns_ns + ns * (step_ns - self._ns)

    @property
    def ns_per_token(self) -> float | None:
        """The time that one KV token adds to a step, in ns; None while unknown."""
        if self._weight < _LEAST_POINTS or self._tokens_tokens <= 0.0:
            return None
        slope = self._tokens_ns / self._tokens_tokens
        # Rounding may leave a perfect fit a residual below 0.
        residual = max(0.0, self._ns_ns - slope * self._tokens_ns)
        error = (residual / self._weight / self._tokens_tokens) ** 0.5
        return slope if slope > 0.0 and slope >= _CERTAINTY * error else None

    def step_ns(self, envelope_tokens: float) -> float | None:
        """Return the time of a step with such a load, in ns; None while unknown."""
        slope = self.ns_per_token
        if slope is None:
            return None
        return max(0.0, self._ns + slope * (envelope_tokens - self._tokens))


# How fast each rank reads its KV cache, estimated from the times of the fleet's steps.
#
# A step takes T = a + b x max_g c_g L_g, with c_g the **slowness** of rank g. In a balanced fleet the
# slow ranks set every time, so the times do not show how much faster the other ranks are. `LearnedSpeeds`
# keeps the latest steps and fits them again for one rank after the other, with other values of its c_g.
# If one fits better beyond doubt, the rank gets the value nearest to the old one that fits as well as the
# best. If every smaller value fits as well, the rank set no step, and gets a little less than that: the
# policy then gives it more, until it sets some.
#
# The kept steps stay valid whatever the estimate. Their errors may be correlated, as when another process
# takes the machine for a while: the fit differences both sides by that correlation. While no other c_g
# fits better, all ranks count as equally fast, and no decision changes.

# Steps that are kept, one of each so many.
_SAMPLES = 256
_EVERY = 2
# Samples between two reviews, and those before the first.
_REVIEW = 8
_LEAST_SAMPLES = 64
# Samples that are kept back until nothing of that time turned out to be behind, and steps that are
# passed over after that: the live proxy corrects a request once it is five tokens off.
_KEPT_BACK = 4
_PASSED_OVER = 8
# Ranks of one review, which takes some 60 us for each.
_RANKS = 8
# Factors of a c_g to try. The middle one keeps it.
_FACTORS = np.linspace(0.75, 1.25, 21)
_KEPT = len(_FACTORS) // 2
# By how much less the squared errors have to be, in mean squared errors; the square of 5.5 standard
# errors, as many values are tried for many ranks. And by how much they may be more than the least.
_CERTAIN = 30.0
_AS_GOOD = 6.0
# How far below the smallest value that is known to matter.
_BEYOND = 0.05
# Errors below that share of a step are none.
_LEAST_ERROR = 1e-3


class LearnedSpeeds:
    """Learns from the steps of one fleet.

    Args:
        ranks: G, at least 2.
    """

    def __init__(self, ranks: int) -> None:
        # float64[G], 1 on average; None while all count as equally fast.
        self.speeds: NDArray[np.float64] | None = None
        self._slowness = np.ones(ranks)
        # Rings of the same steps: KV tokens of the ranks, and times.
        self._loads = np.zeros((_SAMPLES, ranks))
        self._times_ns = np.zeros(_SAMPLES)
        self._steps = self._samples = self._passed_over = 0
        self._latest: deque[tuple[NDArray[np.int64], float]] = deque()
        self._next = 0  # The rank that is reviewed next.

    def observe(self, loads: NDArray[np.int64], step_ns: float) -> None:
        """Learn from a step: int64[G], KV tokens of the ranks, and its time."""
        self._steps += 1
        if self._passed_over:
            self._passed_over -= 1
            return
        if self._steps % _EVERY:
            return
        self._latest.append((loads, step_ns))
        if len(self._latest) > _KEPT_BACK:
            self._take(*self._latest.popleft())

    def fell_behind(self) -> None:
        """Note that a request was behind the steps: they did not read all that they seemed to."""
        self._latest.clear()
        self._passed_over = _PASSED_OVER

    def _take(self, loads: NDArray[np.int64], step_ns: float) -> None:
        place = self._samples % _SAMPLES
        self._loads[place] = loads
        self._times_ns[place] = step_ns
        self._samples += 1
        if self._samples >= _LEAST_SAMPLES and self._samples % _REVIEW == 0:
            self._review()

    def _review(self) -> None:
        # In order of time.
        count, place = min(self._samples, _SAMPLES), self._samples % _SAMPLES
        loads = np.roll(self._loads, -place, axis=0)[-count:]
        times = np.roll(self._times_ns, -place)[-count:]
        ranks = len(self._slowness)
        changed = False
        for rank in (np.arange(min(_RANKS, ranks)) + self._next) % ranks:
            factor = self._better(int(rank), loads, times)
            if factor is not None:
                self._slowness[rank] *= factor
                changed = True
        self._next = (self._next + _RANKS) % ranks
        if changed:
            speeds = 1.0 / self._slowness
            self.speeds = speeds / speeds.mean()

    def _better(
        self, rank: int, loads: NDArray[np.float64], times: NDArray[np.float64]
    ) -> float | None:
        """Return the factor of a rank's slowness; None to keep it."""
        levels = loads * self._slowness
        correlation = _correlation(levels.max(axis=1), times)
        own = levels[:, rank].copy()
        levels[:, rank] = 0.0
        envelopes = np.maximum(levels.max(axis=1), np.multiply.outer(_FACTORS, own))
        squares = _squares(envelopes, times, correlation)
        squares += len(times) * (_LEAST_ERROR * (1.0 - correlation) * times.mean()) ** 2
        least = squares.min()
        if squares[_KEPT] - least < _CERTAIN * least / len(times):
            return None
        good = squares <= least * (1.0 + _AS_GOOD / len(times))
        factor = float(_FACTORS[good][np.abs(_FACTORS[good] - 1.0).argmin()])
        return factor - _BEYOND if good[0] and factor < 1.0 else factor


def _fit(
    envelopes: NDArray[np.float64], times: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return both sides without their means, and the slope, at least 0, of each row of envelopes."""
    envelopes = envelopes - envelopes.mean(axis=-1, keepdims=True)
    times = times - times.mean()
    spread = np.maximum((envelopes**2).sum(axis=-1), 1.0)
    return envelopes, times, np.maximum(envelopes @ times, 0.0) / spread


def _correlation(envelopes: NDArray[np.float64], times: NDArray[np.float64]) -> float:
    """Return how errors follow those before them, 0 to 0.99."""
    envelopes, times, slope = _fit(envelopes, times)
    errors = times - slope * envelopes
    total = float(errors @ errors)
    if total <= 1e-6 * float(times @ times):
        return 0.0
    return min(max(float(errors[1:] @ errors[:-1]) / total, 0.0), 0.99)


def _squares(
    envelopes: NDArray[np.float64], times: NDArray[np.float64], correlation: float
) -> NDArray[np.float64]:
    """Return the squared errors of a line through the times over each row of envelopes, summed."""
    envelopes = envelopes[:, 1:] - correlation * envelopes[:, :-1]
    envelopes, times, slope = _fit(envelopes, times[1:] - correlation * times[:-1])
    return np.asarray(((times - slope[:, None] * envelopes) ** 2).sum(axis=1))


# Which decode ranks make no tokens while other ranks do, judged by their streams.
#
# The reader of streams **looks** at them a few times a second. It reports for each rank whether any of its
# streams moved, and how many of the still ones would have moved in a step. A rank is **silent** while it
# has such still streams, none of its streams moves, and another rank steps at its usual pace. It **stands
# still** once its silence exceeds `FLOOR_S`, and `STEPS` times the longest recent gap of its streams: an
# engine that is slow, or sends several tokens at once, has long gaps and a long limit. The same holds for
# the shortest gap of the other ranks: tokens every three seconds do not show what happened in the last two.
#
# If no rank steps, none is silent: ranks that share a barrier stop together whichever is at fault. That is
# the **standstill** of the fleet.
#
# Only time in which the reader looked counts: after a pause of its own it reports 0 s. So a rank is never
# silent because the proxy did not read its streams. Times are float seconds.

FLOOR_S = 2.0
"""No rank stands still sooner."""
STEPS = 4
"""Nor within so many of its own gaps."""
UNKNOWN_S = 4.0
"""The limit of a rank without known gaps: it may have to compile kernels, or send in bursts."""
# Gaps from which the pace of a rank is known: an engine that begins compiles kernels and captures graphs.
_LEAST_GAPS = 12
# The factor of the longest gap at a look with a shorter one: a half after ten seconds.
_FADE = 0.983
# A rank steps if its last token is no older than its gaps, or than this.
_USUAL_S = 0.6
_USUAL_GAPS = 1.5
# An older look says nothing of the present.
_STALE_S = 1.5


class Sighting(Struct, frozen=True, array_like=True):
    rank: RankId
    moved: bool  # Whether any of its streams brought a token since the last look.
    # The still streams that usually bring a token with every step, and whose client reads them.
    still: int
    # The longest gap of its streams that ended since the last look; 0 if none did.
    gap_s: float = 0.0


@dataclass(slots=True)
class _Pace:
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
    def __init__(self) -> None:
        self.quiet = True  # Whether no rank is silent, as is usual.
        self._paces: dict[RankId, _Pace] = {}
        # For how long each rank was silent, for how long nothing moved at all, and the last look.
        self._silent_s: dict[RankId, float] = {}
        self._still_s = 0.0
        self._looked_s = float("-inf")

    def look(self, now_s: float, elapsed_s: float, sightings: Iterable[Sighting]) -> None:
        """Note a look at all ranks.

        Args:
            elapsed_s: Since the last look; 0 if the reader did not look in time.
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
            pace.gap_s *= _FADE
            pace.gap_s = max(pace.gap_s, gap_s)
        if not self.quiet:
            self._silent_s.pop(rank, None)
            self._still_s = 0.0

    def begin_anew(self, rank: RankId) -> None:
        """Judge a rank again once it has shown its pace: it was away, or is another engine now."""
        self._paces.pop(rank, None)
        self._silent_s.pop(rank, None)

    def excuse(self) -> None:
        """Let the silence of all ranks begin now: the proxy had the engines wait."""
        self._silent_s.clear()
        self._still_s = 0.0

    def moved_s(self, rank: RankId) -> float:
        """Return when a rank's streams moved last; minus infinity for never."""
        pace = self._paces.get(rank)
        return float("-inf") if pace is None else pace.moved_s

    def steps(self, rank: RankId, now_s: float) -> bool:
        """Return whether a rank has just made a token, by its own pace."""
        pace = self._paces.get(rank)
        return pace is not None and pace.steps(now_s)

    def silent_s(self, rank: RankId) -> float:
        return self._silent_s.get(rank, 0.0)

    def first_limit_s(self, rank: RankId) -> float:
        """Return for how long a rank with no stream may be silent of the first tokens of new ones.

        By its own pace; one that has not shown it may have to compile first, or send in bursts.
        """
        own_s = self._gap_s(rank)
        return UNKNOWN_S if own_s is None else max(FLOOR_S, STEPS * own_s)

    def limit_s(self, rank: RankId, now_s: float) -> float | None:
        """Return for how long a rank may be silent.

        None while its own pace is unknown, or while no other rank of known pace steps.
        """
        return self._limit_s(rank, self.stepping(now_s))

    def _limit_s(self, rank: RankId, stepping: Stepping) -> float | None:
        own_s, other_s = self._gap_s(rank), stepping.gap_beside_s(rank)
        if own_s is None or other_s is None:
            return None
        return max(FLOOR_S, STEPS * own_s, STEPS * other_s)

    def _gap_s(self, rank: RankId) -> float | None:
        """Return a rank's longest recent gap; None while its pace is unknown."""
        pace = self._paces.get(rank)
        return None if pace is None or pace.gaps < _LEAST_GAPS else pace.gap_s

    def stepping(self, now_s: float) -> Stepping:
        """Return the ranks of known pace that step now. O(G)."""
        gaps = (
            (pace.gap_s, rank)
            for rank, pace in self._paces.items()
            if pace.gaps >= _LEAST_GAPS and pace.steps(now_s)
        )
        return Stepping(nsmallest(2, gaps))

    def stalled(self, now_s: float, allowance_s: Callable[[RankId], float]) -> list[RankId]:
        """Return the ranks that stand still, those of the longest silence first.

        Args:
            allowance_s: Returns how much longer a rank may be silent, as while it computes a prompt. Called
                only for ranks beyond their limit.
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
        """Return how many ranks stand still together; 0 if any rank steps.

        The silence has to exceed the limit of the slowest of them.
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
        """Return the silent ranks; none if the last look is old."""
        return set(self._silent_s) if now_s - self._looked_s <= _STALE_S else set()
