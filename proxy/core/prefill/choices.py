"""The choices of a prefiller but for `fewest-tokens`; the table of the package says what each does."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, exp, log, log2, tanh
from typing import TYPE_CHECKING

from msgspec import structs

from balanceroute.proxy.core.events import (
    Action,
    EngineLoad,
    Event,
    PrefillDone,
    PrefillerId,
    PrefillerScraped,
    PrefillLost,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    RequestId,
    StartPrefill,
)
from balanceroute.proxy.core.prefill.budgets import (
    PrefillInputs,
    PrefillRequest,
    PrefillView,
    ScoreSettings,
    Turns,
)
from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks
from balanceroute.proxy.core.prefill.prefix_memory import PrefixMemory
from balanceroute.proxy.core.prefill.work import PrefillWork

if TYPE_CHECKING:
    import random


# The scores of TBLB: how good an instance is by its metrics, relative to the other instances.
#
# The formulas are those of its code, also where its documents say otherwise (tests/core/prefill/
# test_scored.py has the cases). With two members the logarithm gives 0.2 and 1.0 however close they are,
# so that a cache use of 0.20 against 0.21 counts as 0.20 against 0.80. An idle member gets less than
# that. A member that is worse in everything may score 0, which excludes it until the next scrape.
#
# Source: https://github.com/f5devcentral/llm-inference-lb, core/score_calculator.py at f254c3e.

Scores = Callable[[Sequence[EngineLoad]], list[float]]
Values = Sequence[float]

_TRANSITION_POINT = 30.0
_LEAST_DEVIATION = 1e-6


def s1_enhanced(weights: Values, loads: Sequence[EngineLoad]) -> list[float]:
    """Return the scores by waiting requests and KV cache use, each in [0, 1]."""
    return _weighted(weights, (minmax(_waiting(loads)), precise_cache(_kv_usage(loads))))


def s2_enhanced(weights: Values, loads: Sequence[EngineLoad]) -> list[float]:
    """Return the scores by waiting requests, KV cache use and running requests, each in [0, 1]."""
    normalised = (
        minmax(_waiting(loads)),
        precise_cache(_kv_usage(loads)),
        precise_running([load.running for load in loads]),
    )
    return _weighted(weights, normalised)


def s2_dynamic_waiting(weights: Values, loads: Sequence[EngineLoad]) -> list[float]:
    """Return the same, where waiting requests weigh more the more there are."""
    waiting = _waiting(loads)
    intensity = tanh(max(waiting) / _TRANSITION_POINT)
    factors = (0.1 + 2.4 * intensity, 1.5 - 1.1 * intensity, 1.4 - 0.8 * intensity)
    shifted = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    scale = sum(weights) / sum(shifted)
    normalised = (
        adaptive_waiting(waiting),
        adaptive_cache(_kv_usage(loads)),
        adaptive([load.running for load in loads]),
    )
    return _weighted([scale * weight for weight in shifted], normalised)


SCORES: dict[str, Callable[[ScoreSettings], Scores]] = {
    "s1-enhanced": lambda settings: partial(s1_enhanced, settings.s1_weights),
    "s2-enhanced": lambda settings: partial(s2_enhanced, settings.s2_weights),
    "s2-dynamic-waiting": lambda settings: partial(s2_dynamic_waiting, settings.s2_dynamic_weights),
}
"""By the names of prefill choices and policies."""


def minmax(values: Values) -> list[float]:
    """Return the values scaled to [0, 1]; all 0 if they are equal."""
    low, high = min(values), max(values)
    return [0.0 if high == low else (value - low) / (high - low) for value in values]


def precise_cache(values: Values) -> list[float]:
    """Return the values scaled to [0.2, 1.0] by their logarithm, or by a sigmoid if one is 0."""
    low, high = min(values), max(values)
    if high == low:
        return [0.5] * len(values)
    if low > 0:
        return [0.2 + 0.8 * log2(value / low) / log2(high / low) for value in values]
    mean, deviation = _moments(values)
    return [0.2 + 0.8 / (1.0 + exp(-2.0 * (value - mean) / (3.0 * deviation))) for value in values]


def precise_running(values: Values) -> list[float]:
    """Return the values plus 1 scaled to [0.15, 0.95] by their logarithm."""
    low, high = min(values) + 1, max(values) + 1
    if high == low:
        return [0.5] * len(values)
    return [0.15 + 0.8 * log2((value + 1) / low) / log2(high / low) for value in values]


def adaptive_waiting(values: Values) -> list[float]:
    """Return `adaptive` of waiting requests, of their logarithm if they differ by a factor of ten."""
    if len(values) > 1 and max(values) > 10 * min(values):
        return adaptive([log(max(1.0, value + 1)) for value in values])
    return adaptive(values)


def adaptive_cache(values: Values) -> list[float]:
    """Return `adaptive` of KV cache use, more sensitive."""
    return adaptive(values, sensitive=True)


def adaptive(values: Values, *, sensitive: bool = False) -> list[float]:
    """Return the values scaled by a sigmoid whose slope and range follow from how they vary."""
    if len(values) == 1:
        return [0.5]
    mean, deviation = _moments(values)
    deviation = deviation or _LEAST_DEVIATION
    variation = deviation / mean if mean > _LEAST_DEVIATION else deviation
    if variation < 0.1:
        sensitivity, low, high = 3.0, 0.4, 0.6
    elif variation < 0.3:
        sensitivity, low, high = 2.0, 0.25, 0.75
    elif variation < 0.8:
        sensitivity, low, high = 1.5, 0.15, 0.85
    else:
        sensitivity, low, high = 1.0, 0.1, 0.9
    if sensitive:
        sensitivity *= 1.5
        low, high = (0.35, 0.65) if variation < 0.2 else (low, high)
    if deviation <= _LEAST_DEVIATION:
        return [(low + high) / 2] * len(values)
    return [
        low + (high - low) * (0.5 + 0.5 * tanh(sensitivity * (value - mean) / deviation / 2))
        for value in values
    ]


def _moments(values: Values) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5


def _weighted(weights: Values, normalised: Sequence[Values]) -> list[float]:
    members = zip(*normalised, strict=True)
    sums = [
        sum(weight * (1.0 - bad) for weight, bad in zip(weights, one, strict=True))
        for one in members
    ]
    return [max(0.0, min(1.0, one)) for one in sums]


def _waiting(loads: Sequence[EngineLoad]) -> list[float]:
    return [load.waiting for load in loads]


def _kv_usage(loads: Sequence[EngineLoad]) -> list[float]:
    return [load.kv_usage for load in loads]


class LeastConn(Turns):
    """The candidate with the fewest prefills and direct sequences; equal ones take turns."""

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        del request
        return self.least(candidates, lambda one: under_way(view, one))


def under_way(view: PrefillView, prefiller: PrefillerId) -> int:
    """Return the number of a prefiller's prefills and sequences of direct requests."""
    return view.prefills[prefiller] + view.direct[prefiller]


class _GivenPrompts(Turns):
    """A choice that remembers `index_blocks` blocks of the prompts that it gave each prefiller."""

    def __init__(self, index_blocks: int) -> None:
        super().__init__()
        self.memory = PrefixMemory(index_blocks)


# `lmetric`: LMetric's product of new prefill tokens and batch size.
#
# The tokens that a prefiller would have to compute for the request, times the requests that it
# then works on. The product has no unit and no parameter.
#
# Source: https://arxiv.org/abs/2603.15202.


class LMetric(_GivenPrompts):
    """The candidate with the lowest product; equal ones take turns."""

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        expected = self.memory.expect(request, candidates)
        chosen = self.least(
            candidates,
            lambda one: (request.tokens - expected[one].cached_tokens) * (under_way(view, one) + 1),
        )
        self.memory.add(request, chosen)
        return chosen


# `cache-aware`: vllm-router's rule: the longest cached prefix, unless loads differ a lot.
#
# If the busiest candidate works on over 64 requests more than the least busy one, and on over 1.5
# times as many, the least busy one takes the request. Else the one that was given the longest
# beginning of the prompt does, if that is over 0.3 of it; else the least busy one. Theirs matches
# characters, in a tree that all workers share; here the unit is a block.
#
# Source: https://github.com/vllm-project/router, src/policies/cache_aware.rs at 16917f49522f.

_CACHE_THRESHOLD = 0.3
_BALANCE_ABS_THRESHOLD = 64
_BALANCE_REL_THRESHOLD = 1.5


class CacheAware(_GivenPrompts):
    """The candidate with the longest cached prefix or the fewest requests."""

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        busy = {prefiller: under_way(view, prefiller) for prefiller in candidates}
        most, least = max(busy.values()), min(busy.values())
        expected = self.memory.expect(request, candidates)
        longest = max(found.cached_tokens for found in expected.values())
        imbalanced = most - least > _BALANCE_ABS_THRESHOLD and most > _BALANCE_REL_THRESHOLD * least
        if imbalanced or longest <= _CACHE_THRESHOLD * request.tokens:
            chosen = self.least(candidates, busy.__getitem__)
        else:
            chosen = self.least(candidates, lambda one: -expected[one].cached_tokens)
        self.memory.add(request, chosen)
        return chosen


class PrefillPowerOfTwo:
    """Of two candidates drawn uniformly, the one that works on fewer requests."""

    observer = None

    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        del request
        drawn = self._rng.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=lambda prefiller: under_way(view, prefiller))


# `prefix-aware`: where a request's prefill delays all requests least, cached prefixes counted.
#
# A prefiller that is behind by w and needs s for the request's tokens that are not in its cache
# has it done in R = w + s. Those that come to it until its queue is empty have to wait s longer.
# At a utilisation of u, its own lately, and a mean service time of m they are R / m x u / (1 - u)
# in number, so the sum of the delays is
#
#     R x (1 + s / m x u / (1 - u)).
#
# All times are measured. A cached prefix is worth the work that it saves and no more: a prefiller
# that is behind by more than that loses the conversation to another.

# Bounds of u. Where half of the requests share a prefix of 20k tokens, TTFT p99 is 5.3 s if u is 0.8 for
# all: their one prefiller is behind for long before another one computes the prefix. It is 2.3 s so. On
# the Mooncake trace it is the same within 2 %, but without the lower bound fewer prefixes are found.
_LEAST_BUSY, _MOST_BUSY = 0.6, 0.9
_ENDS = (PrefillDone, PrefillLost, RequestFinished, RequestFailed, RequestCancelled)


class PrefixAware:
    """The candidate with the lowest sum of delays; equal ones take turns.

    Args:
        index_blocks: Blocks that are remembered of each prefiller.
        engine_blocks: The blocks that prefillers report; None if the proxy does not listen.
    """

    def __init__(self, index_blocks: int, engine_blocks: EngineBlocks | None = None) -> None:
        self.observer = self._observe
        self.memory = PrefixMemory(index_blocks, engine_blocks)
        self._work = PrefillWork()
        self._turns = Turns()

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        del view
        work, now_ns = self._work, request.now_ns
        expected = self.memory.expect(request, candidates)

        def cost(prefiller: PrefillerId) -> float:
            uncached = request.tokens - expected[prefiller].cached_tokens
            service_ns = work.service_ns(prefiller, uncached)
            busy = min(max(work.utilisation(prefiller, now_ns), _LEAST_BUSY), _MOST_BUSY)
            delayed = busy / (1.0 - busy) * service_ns / work.mean_ns if work.mean_ns else 0.0
            return (work.wait_ns(prefiller, now_ns) + service_ns) * (1.0 + delayed)

        chosen = self._turns.least(candidates, cost)
        found = expected[chosen]
        self.memory.add(request, chosen)
        self.memory.watch(request, chosen, found)
        work.begin(request.request, chosen, request.tokens - found.cached_tokens, now_ns)
        return chosen

    def _observe(self, event: Event, _actions: Sequence[Action], now_ns: int) -> None:
        if isinstance(event, _ENDS):
            done = event if isinstance(event, PrefillDone) else None
            computed = None if done is None else done.prompt_tokens - (done.cached_tokens or 0)
            self.memory.ended(event.request, done)
            self._work.end(event.request, computed, now_ns)


# `random`: a prefiller drawn at random.


class RandomOne:
    observer = None

    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        del request, view
        return self._rng.choice(candidates)


class PrefillRoundRobin:
    """The first candidate after the last one chosen, in the order of their numbers."""

    observer = None

    def __init__(self) -> None:
        self._last = -1

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        del request, view
        later = [prefiller for prefiller in candidates if prefiller > self._last]
        self._last = (later or candidates)[0]
        return PrefillerId(self._last)


# `sticky`: a conversation stays on one prefiller, by rendezvous hashing, whatever its load.
#
# What other routers do with a session's id. Without one the second block of the prompt stands for
# the conversation: the first one is often a system prompt that all share. Of several candidates
# the one with the highest hash of conversation and prefiller takes it, so that a prefiller more
# or less moves only its own conversations.
#
# Source: https://github.com/vllm-project/router, src/policies/rendezvous_hash.rs at 292889ebe341.

_MASK = (1 << 64) - 1


class Sticky:
    """The candidate with the highest hash; without session and blocks, of the request's id."""

    observer = None

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        del view
        ticket = request.ticket
        blocks = ticket.blocks or (request.request,)
        conversation = ticket.session or blocks[min(1, len(blocks) - 1)]
        return max(candidates, key=lambda prefiller: _mix(conversation, prefiller))


def _mix(conversation: int, prefiller: int) -> int:
    """Return 64 bits that depend on both evenly (the finaliser of SplitMix64)."""
    bits = (conversation + (prefiller + 1) * 0x9E3779B97F4A7C15) & _MASK
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
    return bits ^ bits >> 31


# `s1-enhanced`, `s2-enhanced`, `s2-dynamic-waiting`: prefillers drawn by a score of their
# metrics.
#
# As TBLB does: a member is drawn with the probability of its score's share; one that scores 0 is
# not; without any, the one with the fewest requests is taken. One of which nothing was scraped
# yet scores 0.001. Different from TBLB, and off by default: limits that exclude a member before
# it is scored, and a limit to its share of the requests between two scrapes. Always different:
# what was sent to a member since its scrape counts as waiting there, and what ended since no
# longer.
#
# Source: https://github.com/f5devcentral/llm-inference-lb, core/scheduler.py at f254c3e.

_UNKNOWN_SCORE = 0.001


class Scored:
    def __init__(self, name: str, inputs: PrefillInputs) -> None:
        self.observer = self._observe
        self._scores = SCORES[name](inputs.scores)
        self._rng = inputs.rng
        self._limits = inputs.scores
        self._turns = Turns()
        self._scraped: dict[PrefillerId, EngineLoad] = {}
        # Since the last scrape of each: requests begun less those ended, and requests given.
        self._since: defaultdict[PrefillerId, int] = defaultdict(int)
        self._given: defaultdict[PrefillerId, int] = defaultdict(int)
        self._places: dict[RequestId, PrefillerId] = {}

    def choose(
        self, request: PrefillRequest, candidates: Sequence[PrefillerId], view: PrefillView
    ) -> PrefillerId:
        del request
        scores = self._scored([one for one in candidates if self._within_limits(one)])
        if len(scores) == 1:
            (chosen,) = scores
        elif scores:
            (chosen,) = self._rng.choices(list(scores), list(scores.values()))
        else:
            chosen = self._turns.least(candidates, lambda one: under_way(view, one))
        self._given[chosen] += 1
        return chosen

    def _scored(self, members: Sequence[PrefillerId]) -> dict[PrefillerId, float]:
        known = [one for one in members if one in self._scraped]
        scores = dict.fromkeys(members, _UNKNOWN_SCORE)
        if known:
            scores |= zip(known, self._scores([self._load(one) for one in known]), strict=True)
        return {one: score for one, score in scores.items() if score > 0.0}

    def _load(self, prefiller: PrefillerId) -> EngineLoad:
        load = self._scraped[prefiller]
        waiting = load.waiting + self._since[prefiller]
        running = max(0.0, load.running + min(0.0, waiting))
        return structs.replace(load, waiting=max(0.0, waiting), running=running)

    def _within_limits(self, prefiller: PrefillerId) -> bool:
        limits = self._limits
        if limits.prefill_share_limit is not None:
            most = ceil(limits.prefill_share_limit * (sum(self._given.values()) + 1))
            if self._given[prefiller] >= max(1, most):
                return False
        if prefiller not in self._scraped:
            return True
        load = self._load(prefiller)
        return (
            limits.prefill_waiting_limit is None or load.waiting <= limits.prefill_waiting_limit
        ) and (limits.prefill_running_limit is None or load.running <= limits.prefill_running_limit)

    def _observe(self, event: Event, actions: Sequence[Action], _now_ns: int) -> None:
        if isinstance(event, PrefillerScraped):
            self._scraped[event.prefiller] = event.load
            self._since[event.prefiller] = self._given[event.prefiller] = 0
        elif isinstance(event, _ENDS):
            place = self._places.pop(event.request, None)
            if place is not None:
                self._since[place] -= 1
        for action in actions:
            if isinstance(action, StartPrefill):
                self._places[action.request] = action.prefiller
                self._since[action.prefiller] += 1
