"""Which of a few requests to admit together: Stage 2's subsets, and the F-score that weighs them.

The score is concave in the total, so of all reachable totals only two can be best: the largest up
to the score's peak and the smallest beyond it. Four exact solvers find these *neighbours* and
agree on everything, the subset included; `best_subset` takes the cheapest for the input.

Of the subsets with equal total the one with fewest items counts, then the lexicographically
smallest tuple of indices: with candidates in order of arrival that favours the older ones.

Paper: §3.2, §D.4. It probes two totals for BR-0 only and enumerates for BR-H; two suffice for both.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import comb, exp, inf
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Subsets of up to three items, by a look-up of the third for every two.
#
# For two items of a sorted list the best third is next to the remaining total, behind the second. So n**2
# / 2 look-ups, each for three items, replace n**3 / 6 sums.

MOST_ITEMS = 3
# Above every total, with room to add one without overflow.
BEYOND = 1 << 60


class Triples:
    """The sizes in ascending order, behind two empty places: so two items or one are three, too.

    Args:
        sizes: KV tokens.
        max_items: 1 to 3.
    """

    def __init__(self, sizes: Sequence[int], max_items: int) -> None:
        values = np.array(sizes, np.int64)
        order = values.argsort(kind="stable")
        # The last one stands for none.
        self._values = np.concatenate(([0, 0], values[order], [BEYOND]))
        self._places = np.concatenate(([-1, -1], order))
        self._first, self._second = _pairs(len(sizes) + 2, max_items)
        self._sums = self._values[self._first] + self._values[self._second]

    def totals_next_to(self, floor: int) -> tuple[int, int]:
        """Return the largest total up to `floor`, 0 if none is, and the smallest beyond it."""
        values, least = self._values, self._second + 1
        beyond = values[:-1].searchsorted(floor - self._sums, side="right")
        self._below = np.where(beyond > least, self._sums + values[beyond - 1], 0)
        self._above = self._sums + values[np.maximum(beyond, least)]
        return int(self._below.max()), int(self._above.min())

    def indices(self, total: int, floor: int) -> tuple[int, ...]:
        """Return the preferred subset of a total that `totals_next_to` found."""
        (hits,) = ((self._below if total <= floor else self._above) == total).nonzero()
        first, second = self._first[hits], self._second[hits]
        # Of equal sizes the first behind the second, which has the lowest index.
        third = self._values.searchsorted(total - self._sums[hits])
        third = np.maximum(third, second + 1)
        rows = self._places[np.array([first, second, third])]
        rows.sort(axis=0)
        # An empty place is -1: the fewest items come first, then the lowest indices.
        best = np.lexsort(rows[::-1])[0]
        return tuple(index for index in rows[:, best].tolist() if index >= 0)


@lru_cache(maxsize=64)
def _pairs(places: int, max_items: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the first and the second of up to `max_items`, of which two places at most are empty."""
    # Two items have one empty place before them, and one item has both.
    seconds = [np.arange(1, 2 if max_items == 1 else places)]
    firsts = [np.zeros(len(seconds[0]), np.intp)]
    if max_items == 3:
        first, second = np.triu_indices(places - 2, 1)
        firsts.append(first + 2)
        seconds.append(second + 2)
    return np.concatenate(firsts), np.concatenate(seconds)


class Subset(NamedTuple):
    total: int  # Sum of their sizes, in KV tokens.
    indices: tuple[int, ...]  # Their positions, ascending.


class Neighbours(NamedTuple):
    """The reachable totals next to a peak."""

    below: Subset  # The largest total up to the peak; at least the empty subset's, 0.
    above: Subset | None  # The smallest total beyond the peak; None if there is none.


EMPTY = Subset(0, ())
# A subset of a table is a mask of one machine word.
_MAX_TABLE_SIZES = 64
# Above this the sums exceed a core's own cache (512 KiB), and a row costs four times as much.
_MAX_ENUMERATED = 1 << 14
# A row takes 25 bytes, so that 64 cached tables stay under 110 MB, and under 1 MB for windows of 16.
_MAX_CACHED_ROWS = 1 << 16

# (sizes, max_items, peak, max_total) -> Neighbours; see `neighbours` for the arguments.
Solver = Callable[[Sequence[int], int, float, int | None], Neighbours]


def best_subset(
    sizes: Sequence[int],
    max_items: int,
    peak: float,
    score: Callable[[int], float],
    *,
    max_total: int | None = None,
) -> Subset:
    """Return the subset whose total scores best.

    Args:
        sizes: KV tokens of each candidate, positive, oldest first.
        max_items: Free slots of the rank.
        peak: Where `score` is largest, in KV tokens, at least 0; may be inf. On a plateau its right
            end, so that a tie goes to the larger total.
        score: Concave in the total. Called for the two neighbours of the peak at most.
        max_total: Free KV tokens of the rank; None for no limit.

    Returns:
        The best subset; the empty one, which scores 0, if no other scores above 0.
    """
    below, above = neighbours(sizes, max_items, peak, max_total)
    best, best_score = EMPTY, 0.0
    for subset in (below, above):
        if subset is not None and subset.indices:
            subset_score = score(subset.total)
            # `>=`: on a tie the larger total, which leaves fewer requests waiting.
            if subset_score > 0.0 and subset_score >= best_score:
                best, best_score = subset, subset_score
    return best


def neighbours(
    sizes: Sequence[int], max_items: int, peak: float, max_total: int | None
) -> Neighbours:
    """Return the reachable totals next to `peak`, with the solver that is cheapest for the input.

    Args:
        sizes: KV tokens of each candidate, positive.
        max_items: Most candidates in a subset.
        peak: KV tokens, at least 0; may be inf.
        max_total: Largest total allowed, in KV tokens; None for no limit.
    """
    if max_items <= 0:
        return Neighbours(EMPTY, None)
    single = _single_items(sizes, peak, max_total)
    if max_items == 1:
        return single
    # Beyond the peak a subset with an item that is itself beyond the peak cannot beat that item
    # alone. So only items up to the peak are combined, and only totals under `single.above` count.
    limit = peak if max_total is None else min(peak, max_total)
    positions = [index for index, size in enumerate(sizes) if size <= limit]
    if len(positions) < 2:
        return single
    small = [sizes[index] for index in positions]
    below_top = max_total if single.above is None else single.above.total - 1
    below, above = _combine(small, max_items, limit, below_top)
    return Neighbours(
        Subset(below.total, tuple(positions[index] for index in below.indices)),
        Subset(above.total, tuple(positions[index] for index in above.indices))
        if above is not None
        else single.above,
    )


def _single_items(sizes: Sequence[int], peak: float, max_total: int | None) -> Neighbours:
    """Return the neighbours among the empty subset and single items; plain Python, O(n)."""
    limit, above_total = (peak, inf) if max_total is None else (min(peak, max_total), max_total + 1)
    below_total = 0
    below_index = above_index = -1
    for index, size in enumerate(sizes):
        if size <= limit:
            if size > below_total:
                below_total, below_index = size, index
        elif size < above_total:
            above_total, above_index = size, index
    return Neighbours(
        Subset(below_total, (below_index,)) if below_index >= 0 else EMPTY,
        Subset(int(above_total), (above_index,)) if above_index >= 0 else None,
    )


def _combine(sizes: list[int], max_items: int, peak: float, max_total: int | None) -> Neighbours:
    """Return the neighbours for sizes that are all up to the peak, of which there are two or more.

    The solvers take most of the time of `neighbours`, so the input is reduced before one runs.
    """
    ascending = sorted(sizes)
    total = sum(ascending[-max_items:])
    if total <= peak:
        # No subset is larger, so nothing lies beyond the peak.
        largest = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))[:max_items]
        return Neighbours(Subset(total, tuple(sorted(largest))), None)
    # If not even the c + 1 smallest fit under the peak, no subset of c + 1 does; and a subset of
    # more than c + 1 stays beyond the peak without one of its items, so it is not the smallest.
    slots = min(max_items, len(sizes))
    needed = 1 + sum(partial <= peak for partial in accumulate(ascending[: slots - 1]))
    solver, max_items = _cheapest_solver(sizes, needed, slots, peak)
    return solver(sizes, max_items, peak, max_total)


def _cheapest_solver(
    sizes: Sequence[int], needed: int, slots: int, peak: float
) -> tuple[Solver, int]:
    """Return the solver with the lowest estimated cost, and the `max_items` to call it with.

    The estimate depends on the input only. Costs are microseconds, fitted to single calls on one core
    of an AMD EPYC: 2 to 64 prompts of 1k to 120k tokens, 2 to 64 slots. The constant terms are the
    interpreter's, the rest the arrays'. A wrong estimate costs time and never changes the result.
    In practice enumeration serves a few thousand subsets, the search for a third item more of them in
    three slots, halves those of more slots over at most some 30 candidates, and bits the rest.

    Args:
        sizes: KV tokens of each candidate.
        needed: Most members that a neighbour of the peak can have.
        slots: Most members allowed, at least `needed`.
        peak: KV tokens.
    """
    num = len(sizes)
    bits = num * needed * (peak + max(sizes))
    choices: list[tuple[float, Solver, int]] = [(10.0 + bits / 35_000, reachable_bitset, needed)]
    if num <= _MAX_TABLE_SIZES:
        choices.append((_halves_us(num, needed), meet_in_the_middle, needed))
        # With a slot for every candidate the halves need not check the number of members.
        choices.append((_halves_us(num, slots), meet_in_the_middle, slots))
        if needed <= MOST_ITEMS:
            choices.append((25.0 + num * num / 150, third_of_two, needed))
        rows = _num_subsets(num, needed)
        if rows <= _MAX_ENUMERATED:
            choices.append((10.0 + rows / 300, enumerate_subsets, needed))
    _, solver, max_items = min(choices, key=itemgetter(0))
    return solver, max_items


def _halves_us(num: int, max_items: int) -> float:
    half = num - num // 2
    searches = min(num - half, max_items) - max(0, max_items - half) + 1
    return 25.0 + 6.0 * searches + _num_subsets(half, min(half, max_items)) / 11


@lru_cache(maxsize=1024)
def _num_subsets(num: int, max_items: int) -> int:
    """Return how many subsets of `num` items have at most `max_items` members."""
    return sum(comb(num, k) for k in range(max_items + 1))


def enumerate_subsets(
    sizes: Sequence[int], max_items: int, peak: float, max_total: int | None
) -> Neighbours:
    """Solve by summing every subset: O(subsets) vectorised; at most 64 sizes."""
    max_items, floor, ceiling = _integer_bounds(sizes, max_items, peak, max_total)
    table = _subset_table(len(sizes), max_items)
    sums = table.sums(sizes)
    # Rows are in order of preference, and argmax and argmin return the first of equals.
    row = int(np.where(sums <= floor, sums, -1).argmax())
    below = Subset(int(sums[row]), table.indices(row))
    row = int(np.where((sums > floor) & (sums <= ceiling), sums, ceiling + 1).argmin())
    total = int(sums[row])
    above = Subset(total, table.indices(row)) if floor < total <= ceiling else None
    return Neighbours(below, above)


def meet_in_the_middle(
    sizes: Sequence[int], max_items: int, peak: float, max_total: int | None
) -> Neighbours:
    """Solve by pairing the subsets of two halves: O(m log m) for m subsets of a half.

    At most 64 sizes.
    """
    max_items, floor, ceiling = _integer_bounds(sizes, max_items, peak, max_total)
    halves = _Halves(sizes, max_items)
    below, above = halves.totals_next_to(floor)
    return Neighbours(
        Subset(below, halves.indices(below)),
        Subset(above, halves.indices(above)) if above <= ceiling else None,
    )


def third_of_two(
    sizes: Sequence[int], max_items: int, peak: float, max_total: int | None
) -> Neighbours:
    """Solve by looking up the third item for every two: O(n**2 log n) vectorised.

    At most three items.
    """
    max_items, floor, ceiling = _integer_bounds(sizes, max_items, peak, max_total)
    assert max_items <= MOST_ITEMS
    if max_items == 0:
        return Neighbours(EMPTY, None)
    triples = Triples(sizes, max_items)
    below, above = triples.totals_next_to(floor)
    return Neighbours(
        Subset(below, triples.indices(below, floor)) if below else EMPTY,
        Subset(above, triples.indices(above, floor)) if above <= ceiling else None,
    )


def reachable_bitset(
    sizes: Sequence[int], max_items: int, peak: float, max_total: int | None
) -> Neighbours:
    """Solve with one bit per reachable total: O(n x max_items x (peak + largest size) / 64).

    Any number of sizes, but the snapshots take n x max_items x (peak + largest size) / 16 bytes:
    megabytes for a window of tens of prompts, gigabytes for tens of prompts of a million tokens.

    Paper: §D.4. Two departures: the bits end where no total can matter, and the items are added
    from the last to the first, so that backtracking finds the preferred subset.
    """
    max_items, floor, ceiling = _integer_bounds(sizes, max_items, peak, max_total)
    # The smallest total beyond the peak is at most peak + largest size: take items away from any
    # subset beyond the peak, one by one; the last total before they fit was beyond the peak by less
    # than the item then removed. And a subset of a kept subset has a smaller total, so is kept too.
    kept = (1 << (min(ceiling, floor + max(sizes, default=0)) + 1)) - 1
    # Bit t of reach[k]: some k of the items seen add up to t.
    reach = [1] + [0] * max_items
    snapshots = [reach]
    for size in reversed(sizes):
        reach = [1, *(same | (fewer << size & kept) for fewer, same in pairwise(reach))]
        snapshots.append(reach)
    snapshots.reverse()  # snapshots[i] has seen sizes[i:].
    below, below_items = 0, 0
    above, above_items = ceiling + 1, 0
    up_to_peak = (1 << (floor + 1)) - 1
    for num_items, totals in enumerate(reach):
        # Only a strictly better total may take more items.
        largest = (totals & up_to_peak).bit_length() - 1
        if largest > below:
            below, below_items = largest, num_items
        beyond = totals >> (floor + 1)
        smallest = floor + (beyond & -beyond).bit_length()
        if beyond and smallest < above:
            above, above_items = smallest, num_items
    return Neighbours(
        Subset(below, _backtrack(snapshots, sizes, below, below_items)),
        Subset(above, _backtrack(snapshots, sizes, above, above_items)) if above_items else None,
    )


def _backtrack(
    snapshots: list[list[int]], sizes: Sequence[int], total: int, num_items: int
) -> tuple[int, ...]:
    """Return the lexicographically smallest `num_items` indices that add up to `total`."""
    indices: list[int] = []
    for index, size in enumerate(sizes):
        if num_items == 0:
            break
        # Taking the earliest item that leaves a reachable rest is what makes it the smallest.
        if size <= total and snapshots[index + 1][num_items - 1] >> (total - size) & 1:
            indices.append(index)
            total -= size
            num_items -= 1
    assert total == 0
    return tuple(indices)


def _integer_bounds(
    sizes: Sequence[int], max_items: int, peak: float, max_total: int | None
) -> tuple[int, int, int]:
    """Return the solvers' inputs: items, largest total below, largest total at all."""
    assert peak >= 0.0
    ceiling = sum(sizes) if max_total is None else max(0, min(max_total, sum(sizes)))
    floor = ceiling if peak >= ceiling else int(peak)
    return max(0, min(max_items, len(sizes))), floor, ceiling


class _SubsetTable:
    """The subsets of `num` indices with at most `max_items` members, one a row.

    Rows are in order of preference: fewest members first, then lexicographic. A row of k members is
    its parent (the row without its last member) and that last member, so that summing costs one
    addition a row.
    """

    def __init__(self, num: int, max_items: int) -> None:
        assert num <= _MAX_TABLE_SIZES
        indices = np.arange(num)
        bits = np.left_shift(np.uint64(1), (num - 1 - indices).astype(np.uint64))
        self._levels: list[tuple[NDArray[np.intp], NDArray[np.intp]]] = []
        lasts = np.array([-1])
        masks = [np.zeros(1, np.uint64)]
        for _ in range(max_items):
            children = num - 1 - lasts
            parents = np.repeat(np.arange(len(lasts)), children)
            # Children of one parent count up from its last member + 1.
            first_child = np.cumsum(children) - children
            lasts = np.arange(len(parents)) - (first_child - lasts - 1)[parents]
            self._levels.append((parents, lasts))
            masks.append(masks[-1][parents] | bits[lasts])
        sizes = [len(level) for level in masks]
        # int8[rows], members.
        self.num_items: NDArray[np.int8] = np.repeat(np.arange(len(sizes), dtype=np.int8), sizes)
        # uint64[rows], a bit per member, index 0 the most significant. Among subsets of equal size
        # a larger mask is a lexicographically smaller tuple.
        self.masks: NDArray[np.uint64] = np.concatenate(masks)
        self._num = num

    def sums(self, sizes: Sequence[int]) -> NDArray[np.int64]:
        """Return int64[rows], the total of each row."""
        values = np.array(sizes, dtype=np.int64)
        levels = [np.zeros(1, np.int64)]
        for parents, lasts in self._levels:
            levels.append(levels[-1][parents] + values[lasts])
        return np.concatenate(levels)

    def indices(self, row: int) -> tuple[int, ...]:
        """Return the members of a row, ascending."""
        mask = int(self.masks[row])
        indices: list[int] = []
        while mask:
            highest = mask.bit_length()
            indices.append(self._num - highest)
            mask ^= 1 << (highest - 1)
        return tuple(indices)


def _subset_table(num: int, max_items: int) -> _SubsetTable:
    if _num_subsets(num, max_items) > _MAX_CACHED_ROWS:
        return _SubsetTable(num, max_items)
    return _cached_table(num, max_items)


# A table depends on two small numbers only, so that a running router reuses a few tables.
_cached_table = lru_cache(maxsize=64)(_SubsetTable)


class _SortedSums:
    """The subset sums of one half of the sizes, ascending, and within a sum by preference.

    Attributes:
        table: The subsets.
        sums: int64[rows], KV tokens.
        rows: int64[rows], the table's row of each sum.
        num_items: int8[rows], members of each row.
    """

    def __init__(self, sizes: Sequence[int], max_items: int) -> None:
        self.table = _subset_table(len(sizes), min(max_items, len(sizes)))
        num_rows = len(self.table.num_items)
        # One sort by sum * rows + row. It fits 63 bits: a table that fits the memory has fewer than
        # 2**30 rows, and sums stay below 2**33.
        keys = self.table.sums(sizes) * num_rows + np.arange(num_rows)
        keys.sort()
        self.sums, self.rows = np.divmod(keys, num_rows)
        self.num_items = self.table.num_items[self.rows]


class _Halves:
    """The older and the newer half of the sizes.

    Args:
        sizes: KV tokens, at most 64.
        max_items: Most members of a subset of the whole.
    """

    def __init__(self, sizes: Sequence[int], max_items: int) -> None:
        self._middle = len(sizes) // 2
        self._max_items = max_items
        self._old = _SortedSums(sizes[: self._middle], max_items)
        self._new = _SortedSums(sizes[self._middle :], max_items)

    def totals_next_to(self, floor: int) -> tuple[int, int]:
        """Return the largest total up to `floor` and the smallest beyond (huge if none is)."""
        old, new = self._old, self._new
        below, above = 0, BEYOND
        most_old, most_new = int(old.num_items.max()), int(new.num_items.max())
        # Old subsets that leave room for every new one go in one block, the rest by their size.
        num_old = min(max(0, self._max_items - most_new), most_old)
        sums = old.sums if num_old == most_old else old.sums[old.num_items <= num_old]
        while True:
            room = self._max_items - num_old
            partners = new.sums if room >= most_new else new.sums[new.num_items <= room]
            # A sentinel on either side, so that every position exists.
            partners = np.concatenate(([-BEYOND], partners, [BEYOND]))
            # Ascending sums keep the search local, which halves its time on large tables.
            positions = np.searchsorted(partners, floor - sums, side="right")
            below = max(below, int((sums + partners[positions - 1]).max()))
            above = min(above, int((sums + partners[positions]).min()))
            if num_old == most_old:
                return below, above
            num_old += 1
            sums = old.sums[old.num_items == num_old]

    def indices(self, total: int) -> tuple[int, ...]:
        """Return the preferred subset of a total that `totals_next_to` found."""
        old, new = self._old, self._new
        wanted = total - old.sums
        # The first row of a sum is its preferred one.
        partners = np.searchsorted(new.sums[:-1], wanted, side="left")
        pairs = np.flatnonzero(new.sums[partners] == wanted)
        partners = partners[pairs]
        num_items = old.num_items[pairs] + new.num_items[partners]
        fewest = np.flatnonzero(num_items == num_items.min())
        # Of equally many items the larger mask of the old half comes first lexicographically,
        # whatever its number of members: the first difference decides, and a set bit is the lower
        # index.
        best = fewest[old.table.masks[old.rows[pairs[fewest]]].argmax()]
        old_indices = old.table.indices(int(old.rows[pairs[best]]))
        new_indices = new.table.indices(int(new.rows[partners[best]]))
        return old_indices + tuple(self._middle + index for index in new_indices)


# The F-score: the effect on imbalance of admitting more load to one rank.
#
# Pure functions on primitives and arrays. A *total* is the summed load of the admitted set, a
# *margin* the distance of a rank's load below the envelope; both are KV tokens and never
# negative. F depends on a set only through its total, and in the total it is concave and
# piecewise linear: the subset solvers rely on nothing else.
#
# Paper: §3.1, Eq. 1 (one step); §4.1, Eq. 2 (horizon).

# Of a sum of some hundred floats, relative.
_ROUNDING = 1e-12

Loads = NDArray[np.int64] | Sequence[int]


def imbalance_tokens(loads: Loads) -> int:
    """Return how far the heaviest rank is above the lightest, in KV tokens.

    Args:
        loads: int64[ranks], KV tokens; at least one rank.
    """
    return int(max(loads) - min(loads))


def idle_tokens(loads: Loads) -> int:
    """Return the KV tokens that the ranks lack, summed, compared with the heaviest rank.

    Divided by ranks x heaviest it is the share of rank time that is idle at the barrier. It is the
    paper's total imbalance I (§3.1); the F-score of an admission is minus its change.

    Args:
        loads: int64[ranks], KV tokens; at least one rank.
    """
    return int(len(loads) * max(loads) - sum(loads))


def discounts(horizon_steps: int, gamma: float) -> NDArray[np.float64]:
    """Return float64[horizon_steps + 1], the weight gamma**h of each step ahead.

    Args:
        horizon_steps: H, at least 0.
        gamma: In [0, 1]; 0 leaves the present step only.
    """
    assert horizon_steps >= 0
    assert 0.0 <= gamma <= 1.0
    return np.power(gamma, np.arange(horizon_steps + 1, dtype=np.float64))


def lasting_discount(gamma: float, departures_per_rank_step: float) -> float:
    """Return gamma, or the probability that a margin lasts one more step if that is lower.

    A margin is the difference of two ranks' loads. The projection of it holds only until one of them
    frees a slot: from then on it depends on a request that has not been chosen yet. With Poisson
    departures at rate a, neither frees a slot in one step with probability e**(-2 a). Rounded to
    hundredths, so that it rarely changes.

    Args:
        gamma: In [0, 1].
        departures_per_rank_step: At least 0.
    """
    assert departures_per_rank_step >= 0.0
    return min(gamma, round(exp(-2.0 * departures_per_rank_step), 2))


def f_score(
    totals: ArrayLike, kinks: NDArray[np.float64], penalties: NDArray[np.float64], *, reward: float
) -> NDArray[np.float64]:
    """Score admitting each of `totals` to one rank; O(n x k).

    F(s) = reward * s - sum over k of penalties[k] * max(s - kinks[k], 0). The paper's F has one kink
    per step, the margin; the kink of BR-0 has one penalty per rank, and F is minus the change of
    `idle_tokens`. Paper: §3.1, Eq. 1; §4.1, Eq. 2.

    Args:
        totals: float64[n] or int64[n], KV tokens.
        kinks: float64[k], KV tokens, none negative.
        penalties: float64[k], how much the slope falls at each kink, none negative.
        reward: The slope at 0, at least 0.

    Returns:
        float64[n]. One kink is exact for whole tokens and coefficients; with more the order of
        summation is the linear-algebra library's, so the last bit may depend on n.
    """
    admitted = np.asarray(totals, dtype=np.float64)
    # The paper's BR-0, and the case that has to be exact: no sum over kinks.
    if len(kinks) == 1:
        overflow = np.maximum(admitted - kinks, 0.0)
        return np.asarray(reward * admitted - penalties * overflow)
    overflow = np.subtract.outer(admitted, kinks)
    np.maximum(overflow, 0.0, out=overflow)
    score: NDArray[np.float64] = reward * admitted - overflow @ penalties
    return score


class FCurve:
    """F of one rank, as `f_score` has it, for one total at a time.

    O(k log k) to make, O(log k) for each total. The sums are those of the kinks below a total, so the
    last bits may differ from `f_score`; with whole tokens and coefficients both are exact.

    Args:
        kinks: float64[k], KV tokens, none negative.
        penalties: float64[k], none negative.
        reward: At least 0.
    """

    def __init__(
        self, kinks: NDArray[np.float64], penalties: NDArray[np.float64], *, reward: float
    ) -> None:
        order = kinks.argsort()
        kinks, penalties = kinks[order], penalties[order]
        passed = penalties.cumsum()
        self._reward = reward
        # Arrays: a few totals are scored, and lists of all kinks would cost more than that.
        self._kinks = kinks
        self._passed: NDArray[np.float64] = passed
        self._moments: NDArray[np.float64] = (penalties * kinks).cumsum()
        # Right of s the slope of F is the reward minus the penalties of the kinks <= s. It only falls,
        # so F peaks where it first turns negative: at a weighted quantile of the kinks. A slope that
        # is 0 but for rounding is 0, in whatever order the penalties were summed.
        kink = int(passed.searchsorted(reward * (1.0 + _ROUNDING), side="right"))
        # The total at which F is largest, at least 0. On a plateau its right end, so that "the
        # largest reachable total up to the peak" is also the fullest of the best ones. inf where
        # the slope never turns negative.
        self.peak = kinks.item(kink) if kink < len(kinks) else inf

    def score(self, total: float) -> float:
        """Return F of `total` KV tokens."""
        last = int(self._kinks.searchsorted(total)) - 1
        if last < 0:
            return self._reward * total
        return self._reward * total - (self._passed.item(last) * total - self._moments.item(last))


def excess(
    totals: NDArray[np.float64], kinks: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return by how much each total exceeds each row's kinks, a weighted sum; O(r (n + k log n)).

    That is the sum over k of weights[k] * max(s - kinks[r, k], 0), from two sums over the kinks below
    each total: of the weights, and of their products with the kinks.

    Args:
        totals: float64[n], KV tokens, ascending.
        kinks: float64[r, k], KV tokens, none negative.
        weights: float64[k], none negative.

    Returns:
        float64[r, n]; 0 without rounding where no kink with a weight is below the total.
    """
    rows, places = len(kinks), len(totals) + 1
    # The first total that reaches each kink; the last place is that of the kinks beyond all totals.
    first = totals.searchsorted(kinks)
    first += np.arange(0, rows * places, places)[:, None]
    counted = first.ravel()
    of_kinks = np.empty_like(kinks)
    of_kinks[:] = weights
    sums = [
        np.bincount(counted, values.ravel(), rows * places).reshape(rows, places)[:, :-1]
        for values in (of_kinks, kinks * weights)
    ]
    slopes, moments = (one.cumsum(axis=1) for one in sums)
    slopes *= totals
    slopes -= moments
    return slopes
