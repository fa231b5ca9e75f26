"""Causal features of requests: known before they decode, or from requests that had ended by then.

Training walks the past through the very class that serving updates, so both see the same numbers.
When a request begins, all but its age is settled and kept as one row of numbers, a *snapshot*; a
question is then a gather of snapshots and some arithmetic on arrays.

There are four groups of features; the first two are the paper's (§C.2.1):

* the request's: its age, its prompt, the tokens that it may still emit;
* the load's: exponentially weighted means and rolling windows of recent outputs;
* the marginal's: a prediction by age alone;
* its kin's: the latest outputs of requests like it, in four degrees of likeness, and of those among them
  that reached its age.
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, islice
from math import log2, nan, sqrt
from operator import mul
from typing import Self

import numpy as np
from numpy.typing import NDArray

from balanceroute.predictors.base import RequestFeatures
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS, State, StateError
from balanceroute.predictors.survival import RunningCounts

# The distribution of past outputs as tables over the age: what the trees correct, and fall back
# on.
#
# Both stages of the learned predictor start from a prediction by age alone, and keep it where the
# features carry no information. Counts are smoothed towards those of the average age, so that a tail of
# few outputs does not count as certainty.

CAPACITY = 20_000
"""Outputs remembered."""

# The tables are rebuilt when the history has grown by one part in so many.
_REBUILD_PARTS = 50
# How many requests of the average age are added to those of each age.
_PRIOR_REQUESTS = 2.0
_ONE_GROUP = np.zeros(1, np.int64)


class Marginal:
    """Learns from every finished request; remembers the latest `CAPACITY` of them.

    Args:
        horizon_steps: H, at least 1.
        history: Output lengths known beforehand, oldest first.
    """

    def __init__(self, horizon_steps: int, history: Iterable[int] = ()) -> None:
        self.horizon_steps = horizon_steps
        self._history: deque[int] = deque(history, maxlen=CAPACITY)
        self._unseen = 0
        self._rebuild()

    @property
    def history(self) -> list[int]:
        """The output lengths remembered, oldest first."""
        return list(self._history)

    @property
    def about_to_change(self) -> bool:
        """Whether the next output changes the answers; between such outputs they stay the same."""
        held = min(len(self._history) + 1, CAPACITY)
        return (self._unseen + 1) * _REBUILD_PARTS > held

    def observe(self, output_tokens: int) -> None:
        due = self.about_to_change
        self._history.append(min(output_tokens, MAX_OUTPUT_TOKENS))
        self._unseen += 1
        if due:
            self._rebuild()

    def log_odds(self, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float64[n], the log odds of finishing within H more steps."""
        return np.asarray(self._log_odds[np.minimum(ages, len(self._log_odds) - 1)])

    def remaining(self, ages: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return float64[n], the mean steps left of those that finish within H, in (0, H]."""
        return np.asarray(self._remaining[np.minimum(ages, len(self._remaining) - 1)])

    def running(self, ages: NDArray[np.int64], steps: int) -> NDArray[np.float64]:
        """Return float64[n, steps + 1], how many outputs are longer than age + 0, 1, .. steps."""
        return self._counts.after(_ONE_GROUP, ages, steps)

    def survival(self, ages: NDArray[np.int64], steps: int) -> NDArray[np.float64]:
        """Return float64[n, steps + 1], the conditional survival; beyond all outputs seen it is 1."""
        running = self.running(ages, steps)
        now = running[:, :1]
        survival = np.ones_like(running)
        np.divide(running, now, out=survival, where=now > 0)
        return survival

    def _rebuild(self) -> None:
        self._unseen = 0
        horizon = self.horizon_steps
        outputs = np.fromiter(self._history, np.int64) if self._history else np.zeros(1, np.int64)
        self._counts = RunningCounts(np.bincount(outputs).astype(np.float64)[None])
        ages = self._counts.longest + 1
        running = self.running(np.zeros(1, np.int64), ages + horizon)[0]
        ended = running[:ages] - running[horizon : horizon + ages]
        # E[R; R <= H] is the sum over h < H of Pr[h < R <= H].
        sums = np.concatenate([[0.0], running.cumsum()])
        steps = sums[horizon : horizon + ages] - sums[:ages]
        steps -= horizon * running[horizon : horizon + ages]
        all_ended = ended.sum()
        # Half a request on each side, so that neither chance is ever 0.
        prior_chance = (all_ended + 0.5) / (running.sum() + 1.0)
        prior_mean = steps.sum() / all_ended if all_ended else horizon / 2
        chance = (ended + _PRIOR_REQUESTS * prior_chance) / (running[:ages] + _PRIOR_REQUESTS)
        self._log_odds = np.asarray(np.log(chance / (1.0 - chance)), np.float64)
        self._remaining = np.asarray(
            (steps + _PRIOR_REQUESTS * prior_mean) / (ended + _PRIOR_REQUESTS), np.float64
        )


MAX_HORIZON_STEPS = 10_000

_HALF_LIVES = (16, 256)
_WINDOW = 512
# Outputs kept of each group of kin, and groups kept of each degree of kin.
_DEPTH = 32
_GROUPS = 20_000
# Prompts whose lengths differ by less than a tenth or so are alike.
_BUCKETS_PER_DOUBLING = 8
# The marginal's answer counts as much as so many kin.
_PRIOR_KIN = 2.0
# Prompts of about the same length, of the same length, with the same most specific known key, and
# with the same known key that is next to it.
_KIN = ("bucket", "length", "key", "next_key")
_MAX_PROMPT_TOKENS = 2**31
_LEAST_KEY, _MOST_KEY = -(2**63), 2**64 - 1

_ASKED = ("age", "marginal_log_odds", "marginal_remaining")
_SETTLED = (
    "prompt_tokens",
    "tokens_allowed",
    *(f"output_ewma_{half_life}" for half_life in _HALF_LIVES),
    "output_mean",
    "output_std",
    "prompt_mean",
    "known_keys",
    *(f"{kin}_{value}" for kin in _KIN for value in ("count", "mean", "std", "last")),
)

NAMES = (
    *_ASKED,
    *_SETTLED,
    *(f"{kin}_{value}" for value in ("longer", "finish", "remaining") for kin in _KIN),
)
"""The columns of the trees' input, in order."""

LOG_ODDS, REMAINING = NAMES.index("marginal_log_odds"), NAMES.index("marginal_remaining")
"""The columns that the trees of the two stages correct."""

SNAPSHOT_WIDTH = len(_SETTLED) + len(_KIN) * _DEPTH
"""Numbers in a snapshot."""

_ALLOWED = NAMES.index("tokens_allowed")


class Features:
    """The statistics of ended requests, by which features predict new ones."""

    def __init__(self, horizon_steps: int) -> None:
        self.marginal = Marginal(horizon_steps)
        self._ewmas = [_Ewma(half_life) for half_life in _HALF_LIVES]
        self._outputs = _Window()
        self._prompts = _Window()
        self._buckets = _Kin()
        self._lengths = _Kin()
        self._keys = _Kin()
        # The load's features, until something ends.
        self._load: list[float] | None = None

    def snapshot(self, features: RequestFeatures) -> list[float]:
        """Return a request's features now, `SNAPSHOT_WIDTH` numbers; NaN for an unknown one."""
        if self._load is None:
            ewmas = [ewma.value for ewma in self._ewmas]
            self._load = [*ewmas, *self._outputs.moments(), self._prompts.moments()[0]]
        known = [outputs for key in features.keys if (outputs := self._keys.outputs(key))]
        kin = (
            self._buckets.outputs(_bucket(features.prompt_tokens)),
            self._lengths.outputs(features.prompt_tokens),
            known[0] if known else (),
            known[1] if len(known) > 1 else (),
        )
        allowed = nan if features.max_tokens is None else float(features.max_tokens)
        row = [float(features.prompt_tokens), allowed, *self._load, float(len(known))]
        for outputs in kin:
            count = len(outputs)
            total, squares = sum(outputs), sum(map(mul, outputs, outputs))
            last = float(outputs[-1]) if outputs else nan
            row += (float(count), *_moments(count, total, squares), last)
        for outputs in kin:
            row += outputs
            # Never longer than an age, so that these count as no output.
            row += [0.0] * (_DEPTH - len(outputs))
        return row

    def observe(self, features: RequestFeatures, output_tokens: int) -> None:
        """Learn that a request ended by itself after `output_tokens` tokens a sequence."""
        output_tokens = min(output_tokens, MAX_OUTPUT_TOKENS)
        prompt_tokens = min(features.prompt_tokens, _MAX_PROMPT_TOKENS)
        self.marginal.observe(output_tokens)
        for ewma in self._ewmas:
            ewma.add(output_tokens)
        self._outputs.add(output_tokens)
        self._prompts.add(prompt_tokens)
        self._buckets.add(_bucket(prompt_tokens), output_tokens)
        self._lengths.add(prompt_tokens, output_tokens)
        for key in features.keys:
            self._keys.add(key, output_tokens)
        self._load = None

    def matrix(
        self, snapshots: NDArray[np.float64], ages: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the trees' input, float64[n, features], with the columns of `NAMES`.

        Args:
            snapshots: float64[n, `SNAPSHOT_WIDTH`].
            ages: int64[n], tokens emitted so far.
        """
        count, kin = len(ages), len(_KIN)
        settled = len(_SETTLED)
        matrix = np.empty((count, len(NAMES)))
        matrix[:, 0] = ages
        matrix[:, LOG_ODDS] = log_odds = self.marginal.log_odds(ages)
        matrix[:, REMAINING] = mean = self.marginal.remaining(ages)
        matrix[:, len(_ASKED) : len(_ASKED) + settled] = snapshots[:, :settled]
        matrix[:, _ALLOWED] -= ages
        left = snapshots[:, settled:].reshape(count, kin, _DEPTH) - ages[:, None, None]
        longer = left > 0.0
        soon = longer & (left <= self.marginal.horizon_steps)
        num_longer = np.count_nonzero(longer, axis=2)
        num_soon = np.count_nonzero(soon, axis=2)
        steps = np.einsum("ijk,ijk->ij", left, soon)
        chance = 1.0 / (1.0 + np.exp(-log_odds[:, None]))
        first = len(_ASKED) + settled
        matrix[:, first : first + kin] = num_longer
        matrix[:, first + kin : first + 2 * kin] = (num_soon + _PRIOR_KIN * chance) / (
            num_longer + _PRIOR_KIN
        )
        matrix[:, first + 2 * kin :] = (steps + _PRIOR_KIN * mean[:, None]) / (
            num_soon + _PRIOR_KIN
        )
        return matrix

    def fields(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "horizon_steps": self.marginal.horizon_steps,
            "history": self.marginal.history,
            "window_outputs": list(self._outputs.values),
            "window_prompts": list(self._prompts.values),
        }
        for half_life, ewma in zip(_HALF_LIVES, self._ewmas, strict=True):
            fields[f"ewma_{half_life}_total"] = ewma.total
            fields[f"ewma_{half_life}_weight"] = ewma.weight
        for name, kin in (
            ("bucket", self._buckets),
            ("length", self._lengths),
            ("key", self._keys),
        ):
            fields |= kin.fields(name)
        return fields

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Return the features whose `fields` a state has.

        Raises:
            StateError: The state cannot be of features.
        """
        features = cls(state.integer("horizon_steps", least=1, most=MAX_HORIZON_STEPS))
        history = state.outputs("history").tolist()
        _bound("history", history, CAPACITY)
        features.marginal = Marginal(features.marginal.horizon_steps, history)
        outputs = state.outputs("window_outputs").tolist()
        prompts = state.integers("window_prompts", least=0, most=_MAX_PROMPT_TOKENS)
        _bound("window_outputs", outputs, _WINDOW)
        if len(prompts) != len(outputs):
            raise StateError("fields 'window_outputs' and 'window_prompts' must be equally long")
        features._outputs, features._prompts = _Window(outputs), _Window(prompts)
        features._ewmas = [
            _Ewma(
                half_life,
                state.number(f"ewma_{half_life}_total", least=0.0),
                state.number(f"ewma_{half_life}_weight", least=0.0),
            )
            for half_life in _HALF_LIVES
        ]
        most_bucket = _bucket(_MAX_PROMPT_TOKENS)
        features._buckets = _Kin.from_state(state, "bucket", least=0, most=most_bucket)
        features._lengths = _Kin.from_state(state, "length", least=0, most=_MAX_PROMPT_TOKENS)
        features._keys = _Kin.from_state(state, "key", least=_LEAST_KEY, most=_MOST_KEY)
        return features


class _Ewma:
    """An exponentially weighted mean that is not biased towards its start."""

    def __init__(self, half_life: float, total: float = 0.0, weight: float = 0.0) -> None:
        self._keep = 0.5 ** (1.0 / half_life)
        self.total = total
        self.weight = weight

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else nan

    def add(self, value: int) -> None:
        self.total = self.total * self._keep + value
        self.weight = self.weight * self._keep + 1.0


class _Window:
    """The last `_WINDOW` values and their sums: integers, which do not drift as values leave."""

    def __init__(self, values: Sequence[int] = ()) -> None:
        self.values: deque[int] = deque()
        self._total = 0
        self._squares = 0
        for value in values:
            self.add(value)

    def add(self, value: int) -> None:
        if len(self.values) == _WINDOW:
            oldest = self.values.popleft()
            self._total -= oldest
            self._squares -= oldest * oldest
        self.values.append(value)
        self._total += value
        self._squares += value * value

    def moments(self) -> tuple[float, float]:
        """Return the mean and the standard deviation."""
        return _moments(len(self.values), self._total, self._squares)


class _Kin:
    """The last `_DEPTH` outputs of each of the `_GROUPS` groups that something ended in last."""

    def __init__(self) -> None:
        self._outputs: OrderedDict[int, list[int]] = OrderedDict()

    def outputs(self, group: int) -> Sequence[int]:
        return self._outputs.get(group, ())

    def add(self, group: int, output_tokens: int) -> None:
        outputs = self._outputs.get(group)
        if outputs is None:
            self._outputs[group] = [output_tokens]
            if len(self._outputs) > _GROUPS:
                self._outputs.popitem(last=False)
            return
        self._outputs.move_to_end(group)
        outputs.append(output_tokens)
        if len(outputs) > _DEPTH:
            del outputs[0]

    def fields(self, name: str) -> dict[str, object]:
        """Return the groups, the number of outputs of each, and those of all one after another."""
        return {
            f"{name}_groups": list(self._outputs),
            f"{name}_counts": list(map(len, self._outputs.values())),
            f"{name}_outputs": list(chain.from_iterable(self._outputs.values())),
        }

    @classmethod
    def from_state(cls, state: State, name: str, *, least: int, most: int) -> Self:
        """Read a result of `fields`; the groups are in least..most.

        Raises:
            StateError: It cannot come from `fields`.
        """
        groups = state.integers(f"{name}_groups", least=least, most=most)
        counts = state.integers(f"{name}_counts", least=1, most=_DEPTH)
        outputs = state.outputs(f"{name}_outputs").tolist()
        _bound(f"{name}_groups", groups, _GROUPS)
        if len(set(groups)) != len(groups):
            raise StateError(f"field '{name}_groups' names a group twice")
        if len(counts) != len(groups) or sum(counts) != len(outputs):
            raise StateError(f"fields '{name}_groups', '.._counts' and '.._outputs' do not match")
        kin = cls()
        rest = iter(outputs)
        for group, count in zip(groups, counts, strict=True):
            kin._outputs[group] = list(islice(rest, count))
        return kin


def _bucket(prompt_tokens: int) -> int:
    return int(_BUCKETS_PER_DOUBLING * log2(max(prompt_tokens, 1)))


def _moments(count: int, total: int, squares: int) -> tuple[float, float]:
    """Return the mean and the standard deviation of so many integers; NaN if there are none."""
    if not count:
        return nan, nan
    return total / count, sqrt(count * squares - total * total) / count


def _bound(name: str, values: Collection[int], most: int) -> None:
    if len(values) > most:
        raise StateError(f"field {name!r} holds {len(values)} values, over {most}")
