"""Survival read off counts of past outputs: of all, by prompt length, and by what clients expect.

Pr[output > a + h | output > a] is a ratio of two weights of the history. Paper: §C.2.1. Beyond the
longest output seen there is nothing to condition on, and the request is taken to stay: the
conservative anchor.

The history is bounded and decayed: a latest output weighs most. On the public traces a half-life of
1,000 requests lowers the Brier score by 4 % where the outputs drift (Azure's conversations) and costs
at most 0.4 % where they do not.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import ClassVar, Literal, NamedTuple, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from balanceroute.predictors.base import PastRequest, Predictor, RequestFeatures
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS, State
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId

# How many of the past outputs are longer than each age: the source of conditional survival.
#
# Weights may stand for counts, and several groups of outputs lie side by side, a row each.


class RunningCounts:
    """Weights of the outputs longer than each age, by group.

    Args:
        lengths: float64[groups, longest + 1], the weight of the outputs of each length.
    """

    def __init__(self, lengths: NDArray[np.float64]) -> None:
        self._groups, self._width = len(lengths), len(lengths[0])
        # _longer[group, a] is the weight of the outputs longer than a, and 0 at the longest.
        self._longer = np.zeros_like(lengths)
        self._longer[:, :-1] = lengths[:, :0:-1].cumsum(axis=1)[:, ::-1]
        # The rows in one line, zeros after each, so that every window of the asked width exists.
        self._stride = self._width
        self._line = self._longer.ravel()
        # Of the line, by the steps asked for, which are few numbers: a view costs 20 µs to make.
        self._windows: dict[int, NDArray[np.float64]] = {}

    @property
    def longest(self) -> int:
        return self._width - 1

    def after(
        self, groups: NDArray[np.int64], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        """Return the weight of the outputs longer than age + h, float64[n, steps + 1]; O(n x steps).

        Args:
            groups: int64[n], or one group for all.
            ages: int64[n].
            steps: h goes from 0 to it.
        """
        if len(ages) == 1:
            return self.after_one(groups.item(), ages.item(), steps)[None].copy()
        if self._stride < self._width + steps:
            self._reach(steps)
        starts = groups * self._stride + np.minimum(ages, self._width - 1)
        windows = self._windows.get(steps)
        if windows is None:
            windows = self._windows[steps] = sliding_window_view(self._line, steps + 1)
        return windows[starts]

    def after_one(self, group: int, age: int, steps: int) -> NDArray[np.float64]:
        """Return the result of `after` for one age, float64[steps + 1], in a tenth of the time. Read-only."""
        if self._stride < self._width + steps:
            self._reach(steps)
        start = group * self._stride + min(age, self._width - 1)
        return self._line[start : start + steps + 1]

    def _reach(self, steps: int) -> None:
        """Have as many zeros after each row as windows of so many steps need."""
        self._stride = self._width + steps
        line = np.zeros((self._groups, self._stride))
        line[:, : self._width] = self._longer
        self._line = line.ravel()
        self._windows.clear()

    def share_longer(self, output_tokens: int) -> float:
        """Return the share of the first group's weight that is longer than an output."""
        everything = float(self._longer[0, 0])
        if output_tokens >= self._width or not everything:
            return 0.0
        return float(self._longer[0, output_tokens]) / everything


def recency_weights(count: int, half_life: float | None) -> NDArray[np.float64]:
    """Return float64[count], the weights of a history, oldest first: 1 for the latest.

    Args:
        count: Length of the history.
        half_life: Every so many entries the weight halves; None weighs all alike.
    """
    if half_life is None:
        return np.ones(count)
    return np.exp2(np.arange(1 - count, 1) / half_life)


def shrunk(
    counts: NDArray[np.float64], fallback: NDArray[np.float64], weight: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """Return the survival that a group's counts suggest, drawn towards a fallback.

    (N(a + h) + c S(h | a)) / (N(a) + c): of the outputs that reached the age, c more are imagined that
    go on as the fallback says. Beyond the group's longest output only the fallback is left.

    Args:
        counts: float64[n, steps + 1], N(a + h); the result takes its place.
        fallback: float64[n, steps + 1], S(h | a).
        weight: c, positive; one for all, or float64[n, 1].
    """
    reached = counts[:, :1] + weight
    counts += weight * fallback
    counts /= reached
    return counts


# Survival by prompt length: requests with prompts of about the same length are taken to be alike.
#
# The buckets are quantiles of the prompt lengths seen, moved as the history moves. Paper: §C.2.1,
# per-prompt-class memorisation.
#
# How far they are trusted is measured: where prompts say nothing of outputs, two outputs in a row
# lie as far apart within a bucket as anywhere, in ranks, and the fallback is left to speak.

# Outputs longer than that are not counted by age: the counts take 8 bytes per bucket and age.
LONGEST = 2**16
# The buckets are made anew when the history has grown by one part in so many.
_REBUILD_PARTS = 50
_FIRST_PAIRS = 1_024
# So many of the latest pairs decide how far the buckets are trusted, and never less than by this.
_JUDGED = 2_000
_IMAGINED = 50.0
_LEAST_LIKENESS = 0.01


class LengthBuckets:
    """Learns pairs of prompt and output lengths; remembers the latest `capacity` of them.

    Memory: 16 bytes a pair, and 8 bytes x buckets x the longest output, at most `LONGEST`.

    Args:
        buckets: How many, at least 1.
        weight: How many outputs the fallback stands for where a bucket's outputs are all alike, see
            `shrunk`; the more of them, the less alike they are.
        capacity: Bound of the history.
        half_life: Every so many requests a pair's weight halves.
        judged: Whether it is measured how much alike they are; else they are taken to be.
    """

    def __init__(
        self,
        *,
        buckets: int,
        weight: float,
        capacity: int,
        half_life: float,
        judged: bool = True,
    ) -> None:
        self._buckets = buckets
        self._weight = weight
        self._capacity = capacity
        self._half_life = half_life
        self._judged = judged
        # A ring of (prompt, output); `_added` in all.
        self._pairs = np.zeros((min(_FIRST_PAIRS, capacity), 2), np.int64)
        self._added = 0
        self._unseen = 0
        # The longest prompt of each bucket but the last.
        self._edges: NDArray[np.int64] = np.zeros(0, np.int64)
        self._edge_list: list[int] = []  # To look one up takes a tenth of the time.
        self._counts = RunningCounts(np.zeros((1, 1)))
        self.fallback_weight = weight  # How many outputs the fallback stands for now.

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        """Learn of a request that ended by itself."""
        place = self._added % self._capacity
        if place == len(self._pairs):
            more = min(len(self._pairs), self._capacity - len(self._pairs))
            self._pairs = np.concatenate([self._pairs, np.zeros((more, 2), np.int64)])
        # One by one: a pair would be made an array first.
        self._pairs[place, 0] = prompt_tokens
        self._pairs[place, 1] = output_tokens
        self._added += 1
        self._unseen += 1
        if self._unseen * _REBUILD_PARTS > min(self._added, self._capacity):
            self._rebuild()

    def extend(self, pairs: NDArray[np.int64]) -> None:
        """Learn many pairs at once, int64[n, 2], the oldest first; they replace all earlier ones."""
        pairs = pairs[-self._capacity :]
        room = max(len(pairs), min(_FIRST_PAIRS, self._capacity))
        self._pairs = np.zeros((room, 2), np.int64)
        self._pairs[: len(pairs)] = pairs
        self._added = len(pairs)
        if self._added:
            self._rebuild()

    def history(self) -> NDArray[np.int64]:
        """Return the pairs remembered, int64[n, 2], oldest first."""
        if self._added <= self._capacity:
            return self._pairs[: self._added].copy()
        return np.roll(self._pairs, -(self._added % self._capacity), axis=0)

    def survival(
        self,
        prompts: NDArray[np.int64],
        ages: NDArray[np.int64],
        steps: int,
        fallback: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return the survival of each request, float64[n, steps + 1].

        Args:
            prompts: int64[n], prompt lengths.
            ages: int64[n].
            steps: h goes from 0 to it.
            fallback: float64[n, steps + 1], the survival regardless of the prompt.
        """
        buckets = self._edges.searchsorted(prompts)
        counts = self._counts.after(buckets, ages, steps)
        if self._counts.longest == LONGEST:
            # The counts end before the outputs do: no word on windows that reach over the end.
            counts[ages + steps >= LONGEST] = 0.0
        return shrunk(counts, fallback, self.fallback_weight)

    def survival_of_one(
        self, prompt: int, age: int, steps: int, fallback: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the result of `survival` for one request, float64[steps + 1], as is `fallback`."""
        weight = self.fallback_weight
        survival = weight * fallback
        if self._counts.longest < LONGEST or age + steps < LONGEST:
            bucket = bisect_left(self._edge_list, prompt)
            counts = self._counts.after_one(bucket, age, steps)
            survival += counts
            weight += counts.item(0)
        survival /= weight
        return survival

    def _rebuild(self) -> None:
        self._unseen = 0
        history = self.history()
        prompts, outputs = history[:, 0], np.minimum(history[:, 1], LONGEST)
        # Quantiles among the lengths themselves; equal ones leave some buckets empty.
        ranks = np.arange(1, self._buckets) * len(prompts) // self._buckets
        self._edges = np.sort(prompts)[ranks]
        self._edge_list = self._edges.tolist()
        buckets = np.searchsorted(self._edges, prompts)
        width = int(outputs.max()) + 1
        lengths = np.bincount(
            buckets * width + outputs,
            recency_weights(len(history), self._half_life),
            minlength=self._buckets * width,
        )
        self._counts = RunningCounts(lengths.reshape(-1, width).astype(np.float64, copy=False))
        if self._judged:
            alike = _likeness(buckets[-_JUDGED:], outputs[-_JUDGED:])
            self.fallback_weight = self._weight / max(alike, _LEAST_LIKENESS)


def _likeness(buckets: NDArray[np.int64], outputs: NDArray[np.int64]) -> float:
    """Return how much closer in rank two outputs in a row lie within a bucket than anywhere, 0 to 1."""
    ranks = np.searchsorted(np.sort(outputs), outputs)
    order = np.argsort(buckets, kind="stable")
    within = np.abs(np.diff(ranks[order]))[np.diff(buckets[order]) == 0]
    anywhere = np.abs(np.diff(ranks))
    # A few pairs imagined that are as far apart as any.
    apart = within.sum() + _IMAGINED * anywhere.mean() if anywhere.any() else 0.0
    if not apart:
        return 1.0
    return float(1.0 - apart / ((len(within) + _IMAGINED) * anywhere.mean()))


KIND = "survival"
MAX_CAPACITY = 1_000_000
MAX_HALF_LIFE = 1e9
_ONE_GROUP = np.zeros(1, np.int64)


class Survival:
    """Learns from every finished request; remembers the latest `capacity` of them.

    Args:
        history: Output lengths known beforehand, oldest first.
        capacity: Bound of the history.
        half_life: Every so many requests an output's weight halves; None weighs all of the history
            alike.

    Raises:
        ConfigError: An option is out of range.
    """

    uses_keys: ClassVar[bool] = False

    def __init__(
        self,
        history: Iterable[int] = (),
        *,
        capacity: int = 20_000,
        half_life: float | None = 1_000.0,
    ) -> None:
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ConfigError(f"capacity must be in 1..{MAX_CAPACITY}, not {capacity}")
        if half_life is not None and not 0 < half_life <= MAX_HALF_LIFE:
            raise ConfigError(f"half_life must be in 0..{MAX_HALF_LIFE:g}, not {half_life}")
        bounded = (min(output_tokens, MAX_OUTPUT_TOKENS) for output_tokens in history)
        self._history: deque[int] = deque(bounded, maxlen=capacity)
        self._capacity = capacity
        self._half_life = half_life
        self._unseen = 0
        self._counts = self._count()

    @classmethod
    def of_past(cls, past: Iterable[PastRequest]) -> Self:
        """Return one that has learned from requests, in the order in which they ended."""
        ended = sorted(past, key=attrgetter("finished_s"))
        return cls(request.output_tokens for request in ended)

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note nothing."""

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        del requests
        if len(ages) == 1:  # Every admission asks for one.
            of_one = self._counts.after_one(0, ages.item(), steps)
            alone = of_one.item(0)
            return (of_one / alone if alone > 0 else np.ones(steps + 1))[None]
        survival = self._counts.after(_ONE_GROUP, ages, steps)
        now = survival[:, 0].copy()
        known = now > 0
        now[~known] = 1.0
        survival /= now[:, None]
        survival[~known] = 1.0
        return survival

    def share_longer(self, output_tokens: int) -> float:
        """Return the share of the history that is longer than an output; its age plays no part."""
        return self._counts.share_longer(output_tokens)

    def observe(self, request: RequestId, output_tokens: int) -> None:
        del request
        self._history.append(min(output_tokens, MAX_OUTPUT_TOKENS))
        self._unseen += 1
        if self._unseen * _REBUILD_PARTS > len(self._history):
            self._counts = self._count()
            self._unseen = 0

    def forget(self, request: RequestId) -> None:
        """Nothing was noted."""

    def state(self) -> State:
        return State(
            KIND,
            {
                "capacity": self._capacity,
                "half_life": self._half_life,
                "history": list(self._history),
            },
        )

    @classmethod
    def from_state(cls, state: State) -> Self:
        """Return a predictor with the same history.

        Raises:
            StateError: The state cannot be of this predictor.
        """
        half_life = None
        if state.value("half_life") is not None:
            half_life = state.number("half_life", least=1e-9, most=MAX_HALF_LIFE)
        return cls(
            state.outputs("history").tolist(),
            capacity=state.integer("capacity", least=1, most=MAX_CAPACITY),
            half_life=half_life,
        )

    def _count(self) -> RunningCounts:
        if not self._history:
            return RunningCounts(np.zeros((1, 1)))
        history = np.fromiter(self._history, np.int64, len(self._history))
        weights = recency_weights(len(history), self._half_life)
        return RunningCounts(np.bincount(history, weights)[None].astype(np.float64, copy=False))


# The outputs that clients expect of their own requests, set against the outputs of such requests.
#
# A **hint** is a number of tokens that the client states. It need not be right: it only has to distinguish
# requests. Requests with hints of about one size count as alike. Their prediction is drawn towards another
# predictor's, by a measured weight (`LengthBuckets`). So classes (100 for short, 5,000 for long) do as well
# as estimates, and with worthless hints the other predictor decides.
#
# Without one, a request's `max_tokens` is its hint where answers alike habitually reach it
# (`LimitHabits`). Those are judged apart, among themselves: what clients state is of another
# kind.

# Whether answers habitually reach the limits that their requests set.
#
# Most clients set `max_tokens` far above what they expect, so a limit says little. Some set it to
# what they get: rollouts of a fixed length, completions of a line, benchmarks. Which of the two
# it is shows in the answers to requests alike: with the same limit, and the same key if requests
# have keys.

# Answers alike before anything is assumed of the next one.
LEAST_ANSWERS = 8
# A limit counts from this share of answers on that reached it.
_LEAST_SHARE = 0.5
# Latest answers alike that the share is of, about.
_LATEST = 64
# Most groups of requests alike; that which was not used for longest yields. Some 300 bytes each.
_GROUPS = 20_000
# As of `ExactMatch`: of more keys, the least specific are left out.
_MAX_KEYS = 8
_NO_KEYS = (None,)


class LimitHabits:
    """Counts the answers that reached their limits, by limit and key and by limit alone."""

    def __init__(self) -> None:
        # How many answers, and the share that reached the limit. A limit alone has key None.
        self._groups: OrderedDict[tuple[int, int | None], tuple[int, float]] = OrderedDict()

    def is_habit(self, max_tokens: int, keys: tuple[int, ...]) -> bool:
        """Return whether at least half of the recent answers alike reached this limit.

        The most specific key of which enough answers are known decides, else the limit alone.

        Args:
            keys: Of the request, the most specific first.
        """
        for key in (*keys[:_MAX_KEYS], None) if keys else _NO_KEYS:
            group = self._groups.get((max_tokens, key))
            if group is not None and group[0] >= LEAST_ANSWERS:
                return group[1] >= _LEAST_SHARE
        return False

    def learn(self, max_tokens: int, keys: tuple[int, ...], output_tokens: int) -> None:
        """Learn from an answer that ended by itself, or at its limit."""
        reached = float(output_tokens >= max_tokens)
        for key in (*keys[:_MAX_KEYS], None) if keys else _NO_KEYS:
            group = max_tokens, key
            answers, share = self._groups.pop(group, (0, 0.0))
            answers = min(answers + 1, _LATEST)
            self._groups[group] = answers, share + (reached - share) / answers
        while len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)


# As of `ExactMatch` for the lengths of prompts.
_BUCKETS = 32
_BUCKET_WEIGHT = 3.0
_HALF_LIFE = 3_000.0
_HISTORY = 20_000


HintSource = Literal["client", "limit"]
"""Where a hint comes from."""


class Hint(NamedTuple):
    """A number of tokens that distinguishes requests."""

    tokens: int
    source: HintSource


class Hinted:
    """Corrects another predictor by hints; without any it only passes on.

    What it learned is not part of a predictor's file.

    Args:
        predictor: The other one; knows `past` already.
        past: Requests known beforehand; learned in their order.
    """

    def __init__(self, predictor: Predictor, past: Iterable[PastRequest] = ()) -> None:
        self._predictor = predictor
        self._habits = LimitHabits()
        # Of the active requests with a limit, and of those with a hint.
        self._limited: dict[RequestId, RequestFeatures] = {}
        self._hints: dict[RequestId, Hint] = {}
        self._outputs: dict[HintSource, LengthBuckets] = {}
        for request in past:
            features = request.features
            self._learn(features, self._hint(features), request.output_tokens)

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        self._predictor.begin(request, features)
        if features.max_tokens is None:
            self._limited.pop(request, None)
        else:
            self._limited[request] = features
        hint = self._hint(features)
        if hint is None:
            self._hints.pop(request, None)
        else:
            self._hints[request] = hint

    def hint_of(self, request: RequestId) -> Hint | None:
        return self._hints.get(request)

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        survival = self._predictor.survival(requests, ages, steps)
        hints = self._hints
        if not hints:
            return survival
        if len(requests) == 1:  # Every admission asks for one, of which no rows are to be picked.
            hint = hints.get(requests[0])
            alike = None if hint is None else self._outputs.get(hint.source)
            if hint is not None and alike is not None:
                of_one = alike.survival_of_one(hint.tokens, ages.item(), steps, survival[0])
                survival = of_one[None]
            return survival
        for source, outputs in self._outputs.items():
            rows = [
                row
                for row, request in enumerate(requests)
                if request in hints and hints[request].source == source
            ]
            if rows:
                stated = np.array([hints[requests[row]].tokens for row in rows], np.int64)
                survival[rows] = outputs.survival(stated, ages[rows], steps, survival[rows])
        return survival

    def observe(self, request: RequestId, output_tokens: int) -> None:
        self._predictor.observe(request, output_tokens)
        features, hint = self._limited.pop(request, None), self._hints.pop(request, None)
        self._learn(features, hint, output_tokens)

    def forget(self, request: RequestId) -> None:
        self._predictor.forget(request)
        self._limited.pop(request, None)
        self._hints.pop(request, None)

    def learn(self, hint: Hint, output_tokens: int) -> None:
        """Learn the output for a hint, of a request that ended by itself."""
        outputs = self._outputs.get(hint.source)
        if outputs is None:
            outputs = self._outputs[hint.source] = LengthBuckets(
                buckets=_BUCKETS,
                weight=_BUCKET_WEIGHT,
                capacity=_HISTORY,
                half_life=_HALF_LIFE,
                # How often answers reached a limit shows its worth. A single limit, as is usual, distinguishes
                # nothing.
                judged=hint.source == "client",
            )
        outputs.add(hint.tokens, output_tokens)

    def _hint(self, features: RequestFeatures) -> Hint | None:
        if features.expected_tokens is not None:
            return Hint(features.expected_tokens, "client")
        limit = features.max_tokens
        if limit is not None and self._habits.is_habit(limit, features.keys):
            return Hint(limit, "limit")
        return None

    def _learn(
        self, features: RequestFeatures | None, hint: Hint | None, output_tokens: int
    ) -> None:
        if features is not None and features.max_tokens is not None:
            self._habits.learn(features.max_tokens, features.keys, output_tokens)
        if hint is not None:
            self.learn(hint, output_tokens)
