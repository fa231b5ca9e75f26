"""Exact match: what requests with the same key emitted, most specific key first.

Paper: §C.2.1, per-prompt-class memorisation. A request is predicted from the outputs that its keys
had before (the same request again, the next turn of a conversation, another prompt with the same
template), drawn towards those of prompts of about its length, and these towards all outputs:

    keys, the most specific last  <-  bucket of prompt length  <-  all outputs

Each stage answers (N(a + h) + c S(h | a)) / (N(a) + c) with its own counts N and the stage before as
S, so that every stage has its say by as many outputs as it has, and none once a request has outlived
them all; c is the larger, the less a stage has been found to tell. A less specific key is used only if
it has at least twice the outputs of the more specific one: else both mostly stand for the same
requests, which would count double.

All is learned from requests that ended, and all is bounded. See `KeyTable` and `LengthBuckets` for how
far each is trusted. Defaults were tuned on the first halves of the public traces.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import PastRequest, RequestFeatures
from balanceroute.predictors.key_table import KeyRecords, KeyTable
from balanceroute.predictors.length_buckets import LengthBuckets
from balanceroute.predictors.running_counts import shrunk
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS, State, StateError, packed
from balanceroute.predictors.survival import Survival
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId

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
# A key that is trusted less than this is not used at all; see `KeyTable.trust`.
_LEAST_TRUST = 0.1
# Requests predicted at a time: what is made in between stays in the caches.
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
        self._table = KeyTable(capacity=capacity, depth=depth)
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
        """Note a request's keys and prompt length."""
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
        """Drop what was noted of a request."""
        row = self._row_of.pop(request, None)
        if row is not None:
            del self._features[request]
            self._free.append(row)

    def state(self) -> State:
        """Return what was learned, and nothing of active requests."""
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
