"""The latest outputs of recurring keys: a bounded table that drops what was not used for longest.

Each key has a ring of its last `depth` outputs. A slot is a row of the table; slot 0 stands for "no
such key" and stays empty. Zeros mark the free places of a ring, so that they count as no output.

An output of 300 tokens says that the next one is about as long, not that it is exactly so: each counts
as several points spread evenly around it, a fifth of it to either side, but no further than its
distance from the output before. So a key whose answers are always the same is trusted to the token.

A key is trusted the more, the less its outputs move from one to the next, in ranks among all outputs
and compared with how these move. A key that all requests have in common moves just as they do, and is
hardly trusted: otherwise a few dozen outputs would replace thousands.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FIRST_SLOTS = 1_024
_SPREAD = 0.2
# Of a few outputs each counts as many points, for the answers are to change smoothly with the age.
_FEW = 8
_MANY_POINTS = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
_FEW_POINTS = np.linspace(-1.0, 1.0, 4, dtype=np.float32)
# A key's moves are relative: 1 is as all outputs move. So it is taken to start with, for so many.
_FIRST_MOVE = 0.6
_FIRST_MOVES = 10.0
# Moves remembered, about.
_MOVES = 256.0
# Trust stays positive, since it divides.
_LEAST_TRUST = 0.02


@dataclass(frozen=True, slots=True)
class KeyRecords:
    """The content of a table, a row for each key, that which was not used for longest first.

    Attributes:
        keys: uint64[n].
        held: int32[n], how many outputs are kept of each.
        outputs: int32[sum of held], those of the first key, of the second and so on, oldest first.
        spreads: int32[sum of held], how far each output is spread to either side.
        moves: float64[n], sum of the latest moves.
        weights: float64[n], how many moves that sum stands for.
    """

    keys: NDArray[np.uint64]
    held: NDArray[np.int32]
    outputs: NDArray[np.int32]
    spreads: NDArray[np.int32]
    moves: NDArray[np.float64]
    weights: NDArray[np.float64]


class KeyTable:
    """At most `capacity` keys.

    Memory: 8 x depth + 32 bytes a key in the arrays, and some 250 in the dictionary.
    """

    def __init__(self, *, capacity: int, depth: int) -> None:
        self._capacity = capacity
        self._depth = depth
        # The key that was not used for longest comes first.
        self._slot_of: OrderedDict[int, int] = OrderedDict()
        slots = min(_FIRST_SLOTS, capacity + 1)
        self._key_of = np.zeros(slots, np.uint64)
        # In float32 all output lengths are exact, and nothing needs to be converted when asked.
        self._outputs = np.zeros((slots, depth), np.float32)
        self._spreads = np.zeros((slots, depth), np.float32)
        # Outputs ever added; the place of the next one modulo the depth.
        self._added = np.zeros(slots, np.int64)
        self._moves = np.zeros(slots)
        self._weights = np.ones(slots)

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._slot_of)

    def use(self, key: int) -> int:
        """Return the slot of a key, which counts as used now; in a full table another key yields."""
        slot = self._slot_of.get(key)
        if slot is not None:
            self._slot_of.move_to_end(key)
            return slot
        if len(self._slot_of) >= self._capacity:
            slot = self._slot_of.popitem(last=False)[1]
            self._outputs[slot] = 0
            self._spreads[slot] = 0
            self._added[slot] = 0
        else:
            slot = len(self._slot_of) + 1
            if slot == len(self._added):
                self._grow(min(2 * slot, self._capacity + 1))
        self._slot_of[key] = slot
        self._key_of[slot] = key
        self._moves[slot] = _FIRST_MOVE * _FIRST_MOVES
        self._weights[slot] = _FIRST_MOVES
        return slot

    def add(self, key: int, output_tokens: int, move_from: Callable[[int], float]) -> None:
        """Add the latest output of a key, which counts as used now.

        Args:
            key: The key.
            output_tokens: The output.
            move_from: Returns how far the output lies from another, relative to how far any two do.
        """
        slot = self.use(key)
        added = int(self._added[slot])
        spread = int(_SPREAD * output_tokens)
        if added:
            before = int(self._outputs[slot, (added - 1) % self._depth])
            spread = min(spread, abs(output_tokens - before))
            weight = float(self._weights[slot])
            decay = 1.0 - 1.0 / _MOVES if weight > _MOVES else 1.0
            self._moves[slot] = self._moves[slot] * decay + move_from(before)
            self._weights[slot] = weight * decay + 1.0
        self._outputs[slot, added % self._depth] = output_tokens
        self._spreads[slot, added % self._depth] = spread
        self._added[slot] = added + 1

    def keys_of(self, slots: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the key that each slot is of now."""
        return self._key_of[slots]

    def added(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many outputs of each slot's key there were; the ring may hold fewer."""
        return self._added[slots]

    def trust(self, slots: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return how much each slot's key is trusted: 1 at first, up to 2.5, down to 0.02."""
        move = self._moves[slots] / self._weights[slots]
        return np.maximum((1.0 - move) / (1.0 - _FIRST_MOVE), _LEAST_TRUST)

    def counts(
        self, slots: NDArray[np.int64], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return how many of each slot's outputs are longer than age + h, float64[n, steps + 1].

        Args:
            slots: int64[n].
            ages: int64[n].
            steps: h goes from 0 to it.
        """
        # A ring that never got beyond its first places is the usual case, and has no others.
        few = self._added[slots] <= _FEW
        if few.all():
            return self._counts(slots, ages, steps, _FEW, _MANY_POINTS)
        if not few.any():
            return self._counts(slots, ages, steps, self._depth, _FEW_POINTS)
        counts = np.empty((len(slots), steps + 1))
        counts[few] = self._counts(slots[few], ages[few], steps, _FEW, _MANY_POINTS)
        many = ~few
        counts[many] = self._counts(slots[many], ages[many], steps, self._depth, _FEW_POINTS)
        return counts

    def _counts(
        self,
        slots: NDArray[np.int64],
        ages: NDArray[np.int64],
        steps: int,
        places: int,
        offsets: NDArray[np.float32],
    ) -> NDArray[np.float64]:
        """Return what `counts` does, of the first places of each ring."""
        # Bins from the right: the sums then run over the points that are longer. Half a bin more,
        # so that cutting off the fraction rounds to the nearest.
        bins = (ages + (steps + 1.5)).astype(np.float32)[:, None] - self._outputs[slots, :places]
        points = offsets[:, None, None] * self._spreads[slots, :places]
        points += bins
        np.maximum(points, 0.0, out=points)
        np.minimum(points, steps + 1.0, out=points)
        # A row of bins for each request.
        width = steps + 2
        places_in_line = points.astype(np.int64)
        places_in_line += width * np.arange(len(slots))[:, None]
        longer = np.bincount(places_in_line.ravel(), minlength=width * len(slots))
        sums = longer.reshape(-1, width).cumsum(axis=1)
        return np.asarray(sums[:, -2::-1] * (1.0 / len(offsets)))

    def records(self) -> KeyRecords:
        """Return the keys of which there was an output."""
        slots = np.fromiter(self._slot_of.values(), np.int64, len(self._slot_of))
        slots = slots[self._added[slots] > 0]
        added = self._added[slots]
        held = np.minimum(added, self._depth).astype(np.int32)
        outputs, spreads = self._outputs[slots], self._spreads[slots]
        # The oldest is at the next one's place in a ring that is full; others begin at the front.
        full = np.flatnonzero(added > self._depth)
        places = (added[full, None] + np.arange(self._depth)) % self._depth
        outputs[full] = np.take_along_axis(outputs[full], places, axis=1)
        spreads[full] = np.take_along_axis(spreads[full], places, axis=1)
        kept = np.arange(self._depth, dtype=np.int32) < held[:, None]
        return KeyRecords(
            keys=self._key_of[slots],
            held=held,
            outputs=outputs[kept].astype(np.int32),
            spreads=spreads[kept].astype(np.int32),
            moves=self._moves[slots],
            weights=self._weights[slots],
        )

    def restore(self, records: KeyRecords) -> None:
        """Fill an empty table; of too many keys or outputs the latest are taken."""
        most = slice(max(0, len(records.keys) - self._capacity), None)
        keys, held = records.keys[most], records.held[most]
        slots = np.arange(1, len(keys) + 1)
        self._grow(max(len(self._added), len(keys) + 1))
        # Of each key the last `depth`, counted from the end of its part.
        ends = np.cumsum(records.held, dtype=np.int64)[most]
        kept = np.minimum(held, self._depth)
        places = np.arange(self._depth)
        taken = places < kept[:, None]
        sources = (ends - kept)[:, None] + places
        for array, values in ((self._outputs, records.outputs), (self._spreads, records.spreads)):
            rows = np.zeros((len(keys), self._depth), np.float32)
            rows[taken] = values[sources[taken]]
            array[slots] = rows
        self._key_of[slots] = keys
        self._added[slots] = kept
        self._moves[slots] = records.moves[most]
        self._weights[slots] = records.weights[most]
        self._slot_of = OrderedDict(zip(keys.tolist(), slots.tolist(), strict=True))

    def _grow(self, slots: int) -> None:
        more = slots - len(self._added)
        self._key_of = np.pad(self._key_of, (0, more))
        self._outputs = np.pad(self._outputs, ((0, more), (0, 0)))
        self._spreads = np.pad(self._spreads, ((0, more), (0, 0)))
        self._added = np.pad(self._added, (0, more))
        self._moves = np.pad(self._moves, (0, more))
        self._weights = np.pad(self._weights, (0, more), constant_values=1.0)
