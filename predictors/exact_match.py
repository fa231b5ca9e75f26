"""Exact match: what requests with the same key emitted, most specific key first.

Paper: §C.2.1, per-prompt-class memorisation. A request is predicted from the outputs that its keys
had before (the same request again, the next turn of a conversation, another prompt with the same
template), drawn towards those of prompts of about its length, and these towards all outputs:

    keys, the most specific last  <-  bucket of prompt length  <-  all outputs

Each stage answers (N(a + h) + c S(h | a)) / (N(a) + c) with its own counts N and the stage before as
S, so that every stage counts by its number of outputs, and not at all once a request has outlived them
all; c is the larger, the less informative a stage has proved. A less specific key is used only if it has
at least twice the outputs of the more specific one: else both mostly stand for the same requests, which
would count double.

All is learned from requests that ended, and all is bounded. See `KeyRecordTable` and `LengthBuckets` for how
far each is trusted. Defaults were tuned on the first halves of the public traces.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import PastRequest, RequestFeatures
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS, State, StateError, packed
from balanceroute.predictors.survival import LengthBuckets, Survival, shrunk
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId

# The latest outputs of recurring keys: a bounded table that drops the least recently used.
#
# Each key has a ring of its last `depth` outputs. A slot is a row of the table; slot 0 stands for
# "no such key" and stays empty. Zeros mark the free places of a ring, so that they count as no
# output.
#
# An output of 300 tokens says that the next one is about as long, not that it is exactly so: each
# counts as several points spread evenly around it, a fifth of it to either side, but no further
# than its distance from the output before. So a key whose answers are always the same is trusted
# to the token.
#
# A key is trusted the more, the less its outputs move from one to the next, in ranks among all
# outputs and compared with how these move. A key that all requests have in common moves just as
# they do, and is hardly trusted: otherwise a few dozen outputs would replace thousands.

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
_KEY_MOVES = 256.0
# Trust stays positive, since it divides.
_LEAST_KEY_TRUST = 0.02


@dataclass(frozen=True, slots=True)
class KeyRecords:
    """The content of a table, a row for each key, that which was not used for longest first."""

    keys: NDArray[np.uint64]  # uint64[n].
    held: NDArray[np.int32]  # int32[n], how many outputs are kept of each.
    # int32[sum of held], those of the first key, of the second and so on, oldest first.
    outputs: NDArray[np.int32]
    spreads: NDArray[np.int32]  # int32[sum of held], how far each output is spread to either side.
    moves: NDArray[np.float64]  # float64[n], sum of the latest moves.
    weights: NDArray[np.float64]  # float64[n], how many moves that sum stands for.


class KeyRecordTable:
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
            move_from: Returns how far the output lies from another, relative to how far any two do.
        """
        slot = self.use(key)
        added = int(self._added[slot])
        spread = int(_SPREAD * output_tokens)
        if added:
            before = int(self._outputs[slot, (added - 1) % self._depth])
            spread = min(spread, abs(output_tokens - before))
            weight = float(self._weights[slot])
            decay = 1.0 - 1.0 / _KEY_MOVES if weight > _KEY_MOVES else 1.0
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
        return np.maximum((1.0 - move) / (1.0 - _FIRST_MOVE), _LEAST_KEY_TRUST)

    def counts(
        self, slots: NDArray[np.int64], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return how many of each slot's outputs are longer than age + h, float64[n, steps + 1].

        Args:
            slots: int64[n].
            ages: int64[n].
            steps: h goes from 0 to it.
        """
        # The usual case: a ring that never got beyond its first places.
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
        """Return the result of `counts` for the first places of each ring."""
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
        # The oldest is at the next one's place in a full ring; in another one it is at the front.
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


KIND = "exact-match"
MAX_CAPACITY = 1_000_000
MAX_DEPTH = 256
# Keys used of a request; of more, the least specific are left out.
MAX_KEYS = 8

_KEY_WEIGHT = 1.5
_BUCKETS = 32
_BUCKET_WEIGHT = 3.0
_HALF_LIFE = 3_000.0
_HISTORY = 20_000
_MAX_PROMPT_TOKENS = 2**40
# A less specific key must have so many times the outputs.
_MORE_OUTPUTS = 2
# A key that is trusted less than this is not used at all; see `KeyRecordTable.trust`.
_LEAST_TRUST = 0.1
# Requests predicted at a time: the intermediate arrays stay in the caches.
_BLOCK = 256
# How far an output lies from the one before, in ranks: two drawn alike differ by a third. An average of
# about so many.
_UNRELATED_MOVE = 1 / 3
_MOVES = 1_024.0
# With outputs that all are the same there is nothing to tell keys apart by.
_LEAST_MOVE = 0.01


class ExactMatch:
    """Learns from every finished request, by its keys and its prompt length.

    Memory: some 550 bytes a key, and a megabyte for the lengths, more by 512 bytes for each token of
    the longest output over some 2,000, up to 32 MiB.

    Args:
        past: Requests known beforehand; learned in the order in which they ended.
        capacity: Most keys; the one that was not used for longest yields. A request brings up to
            `MAX_KEYS`.
        depth: Outputs kept of each key.
        least: Outputs that a key must have had to be used at all.

    Raises:
        ConfigError: An option is out of range.
    """

    uses_keys: ClassVar[bool] = True

    def __init__(
        self,
        past: Iterable[PastRequest] = (),
        *,
        capacity: int = 50_000,
        depth: int = 32,
        least: int = 1,
    ) -> None:
        for name, value, most in (
            ("capacity", capacity, MAX_CAPACITY),
            ("depth", depth, MAX_DEPTH),
            ("least", least, MAX_CAPACITY),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name} must be in 1..{most}, not {value}")
        self._options = {"capacity": capacity, "depth": depth, "least": least}
        self._least = least
        self._marginal = Survival(capacity=_HISTORY, half_life=_HALF_LIFE)
        self._lengths = LengthBuckets(
            buckets=_BUCKETS, weight=_BUCKET_WEIGHT, capacity=_HISTORY, half_life=_HALF_LIFE
        )
        self._table = KeyRecordTable(capacity=capacity, depth=depth)
        # The latest outputs' average move, as a sum and its weight, and the latest rank.
        self._moves, self._moved = _UNRELATED_MOVE, 1.0
        self._rank = 0.5
        # Per-request state, a row each. Row 0 is of requests never begun: no keys, no prompt. A slot
        # is the key's as long as the table says so, since a full table gives it to another key.
        self._features: dict[RequestId, RequestFeatures] = {}
        self._row_of: dict[RequestId, int] = {}
        self._free: list[int] = []
        self._prompts = np.zeros(1, np.int64)
        self._slots = np.zeros((1, MAX_KEYS), np.int64)
        self._keys = np.zeros((1, MAX_KEYS), np.uint64)
        for request in sorted(past, key=attrgetter("finished_s")):
            self._learn(request.features, request.output_tokens)

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        row = self._row_of.get(request)
        if row is None:
            if not self._free:
                self._grow()
            row = self._row_of[request] = self._free.pop()
        keys = features.keys[:MAX_KEYS]
        self._features[request] = features
        self._prompts[row] = features.prompt_tokens
        self._slots[row] = 0
        for place, key in enumerate(keys):
            self._slots[row, place] = self._table.use(key)
            self._keys[row, place] = key

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return the conditional survival of each request; O(n x (steps + outputs of a key))."""
        row_of = self._row_of
        rows = np.array([row_of.get(request, 0) for request in requests], np.int64)
        survival = self._marginal.survival(requests, ages, steps)
        for begin in range(0, len(rows), _BLOCK):
            block = slice(begin, begin + _BLOCK)
            self._refine(survival[block], rows[block], ages[block], steps)
        return survival

    def observe(self, request: RequestId, output_tokens: int) -> None:
        """Add one output to the request's keys, to its bucket and to all; nothing if never begun."""
        features = self._features.get(request)
        if features is not None:
            self._learn(features, output_tokens)
            self.forget(request)

    def forget(self, request: RequestId) -> None:
        row = self._row_of.pop(request, None)
        if row is not None:
            del self._features[request]
            self._free.append(row)

    def state(self) -> State:
        """Return the learned counts, and nothing of active requests."""
        records, history = self._table.records(), self._lengths.history()
        return State(
            KIND,
            {
                **self._options,
                "prompts": history[:, 0].tolist(),
                "outputs": history[:, 1].tolist(),
                "moves": self._moves,
                "moved": self._moved,
                "rank": self._rank,
                "keys": packed(records.keys),
                "key_held": packed(records.held),
                "key_outputs": packed(records.outputs),
                "key_spreads": packed(records.spreads),
                "key_moves": packed(records.moves),
                "key_moved": packed(records.weights),
            },
        )

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Return a predictor that has learned the same.

        Raises:
            StateError: The state cannot be of this predictor.
        """
        depth = state.integer("depth", least=1, most=MAX_DEPTH)
        predictor = cls(
            capacity=state.integer("capacity", least=1, most=MAX_CAPACITY),
            depth=depth,
            least=state.integer("least", least=1, most=MAX_CAPACITY),
        )
        prompts = state.integers("prompts", least=0, most=_MAX_PROMPT_TOKENS)
        outputs = state.outputs("outputs")
        if len(prompts) != len(outputs):
            raise StateError("fields 'prompts' and 'outputs' must be of the same length")
        predictor._lengths.extend(np.stack([np.array(prompts, np.int64), outputs], axis=1))
        predictor._marginal = Survival(outputs.tolist(), capacity=_HISTORY, half_life=_HALF_LIFE)
        predictor._moves = state.number("moves", least=0.0, most=2 * _MOVES)
        predictor._moved = state.number("moved", least=1.0, most=2 * _MOVES)
        predictor._rank = state.number("rank", least=0.0, most=1.0)
        predictor._table.restore(_key_records(state, depth))
        return predictor

    def _learn(self, features: RequestFeatures, output_tokens: int) -> None:
        output_tokens = min(output_tokens, MAX_OUTPUT_TOKENS)
        rank = self._marginal.share_longer(output_tokens)
        unit = max(self._moves / self._moved, _LEAST_MOVE)

        def move_from(other: int) -> float:
            return abs(rank - self._marginal.share_longer(other)) / unit

        for key in features.keys[:MAX_KEYS]:
            self._table.add(key, output_tokens, move_from)
        decay = 1.0 - 1.0 / _MOVES if self._moved > _MOVES else 1.0
        self._moves = self._moves * decay + abs(rank - self._rank)
        self._moved = self._moved * decay + 1.0
        self._rank = rank
        self._marginal.observe(RequestId(0), output_tokens)
        self._lengths.add(features.prompt_tokens, output_tokens)

    def _refine(
        self,
        survival: NDArray[np.float64],
        rows: NDArray[np.int64],
        ages: NDArray[np.int64],
        steps: int,
    ) -> None:
        """Turn the survival regardless of the request into that of each, float64[n, steps + 1]."""
        survival[:] = self._lengths.survival(self._prompts[rows], ages, steps, survival)
        slots = self._slots[rows]
        slots[self._table.keys_of(slots) != self._keys[rows]] = 0
        trust = self._table.trust(slots)
        self._choose(slots, trust)
        # All that is used at once, then from the least specific to the most.
        used, places = slots.nonzero()
        if not len(used):
            return
        counts = self._table.counts(slots[used, places], ages[used], steps)
        weights = (_KEY_WEIGHT / trust[used, places])[:, None]
        for place in range(int(places.max()), -1, -1):
            (here,) = (places == place).nonzero()
            if len(here):
                which = used[here]
                survival[which] = shrunk(counts[here], survival[which], weights[here])

    def _choose(self, slots: NDArray[np.int64], trust: NDArray[np.float64]) -> None:
        """Set the keys that are not used to 0, in int64[n, MAX_KEYS]."""
        added = self._table.added(slots)
        slots[(added < self._least) | (trust < _LEAST_TRUST)] = 0
        needed = np.zeros(len(slots), np.int64)
        for place in np.flatnonzero(slots.any(axis=0)).tolist():
            here = added[:, place] * (slots[:, place] > 0)
            used = here > needed
            slots[:, place] *= used
            np.copyto(needed, _MORE_OUTPUTS * here - 1, where=used)

    def _grow(self) -> None:
        rows = len(self._prompts)
        more = max(rows, 64)
        self._free.extend(range(rows, rows + more))
        self._prompts = np.pad(self._prompts, (0, more))
        self._slots = np.pad(self._slots, ((0, more), (0, 0)))
        self._keys = np.pad(self._keys, ((0, more), (0, 0)))


def _key_records(state: State, depth: int) -> KeyRecords:
    """Return the table's content.

    Raises:
        StateError: The fields do not fit together.
    """
    keys = state.packed("keys", np.uint64, least=0, most=2.0**64)
    held = state.packed("key_held", np.int32, least=1, most=depth)
    outputs, spreads = (
        state.packed(name, np.int32, least=0, most=MAX_OUTPUT_TOKENS)
        for name in ("key_outputs", "key_spreads")
    )
    moves = state.packed("key_moves", np.float64, least=0.0, most=1e9)
    moved = state.packed("key_moved", np.float64, least=1.0, most=1e9)
    if not len(keys) == len(held) == len(moves) == len(moved):
        raise StateError("fields 'keys', 'key_held', 'key_moves' and 'key_moved' differ in length")
    if len(np.unique(keys)) != len(keys):
        raise StateError("field 'keys' must not hold a key twice")
    if not held.sum(dtype=np.int64) == len(outputs) == len(spreads):
        raise StateError("'key_outputs' and 'key_spreads' must be as long as 'key_held' tells")
    return KeyRecords(keys, held, outputs, spreads, moves, moved)
