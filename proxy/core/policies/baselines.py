"""Policies that count, draw or take turns, and the rules of other routers.

The first is `jsq`: join the shortest queue, the default of the serving stacks.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.config import UNLIMITED
from balanceroute.proxy.core.events import EngineLoad, RankId, RequestId
from balanceroute.proxy.core.policies.oldest_first import OldestFirst
from balanceroute.proxy.core.prefill.choices import Scores
from balanceroute.proxy.core.projection import Balance, Weights
from balanceroute.proxy.core.ranks import Assignment, BoundRequest, Fleet, lowest
from balanceroute.proxy.core.waiting import Pool, PoolEntry

if TYPE_CHECKING:
    import random

    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.core.prediction import OutputPredictor


def shortest_queue(fleet: Fleet, entry: PoolEntry) -> int | None:
    """Return the rank with the fewest slots taken, on a tie the lowest."""
    return lowest(fleet.bound, fleet.allowed(entry))


def least_kv(fleet: Fleet, entry: PoolEntry) -> int | None:
    """Return the rank with the least load, on a tie the lowest."""
    return lowest(fleet.loads, fleet.allowed(entry))


class PowerOfTwo:
    """Draws two different ranks and takes the one with fewer taken slots; on a tie the lower."""

    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        ranks: list[int] = np.flatnonzero(fleet.allowed(entry)).tolist()
        drawn = self._rng.sample(ranks, min(2, len(ranks)))
        return min(drawn, key=lambda rank: (int(fleet.bound[rank]), rank), default=None)


# `random`: every rank with the same probability.


class RandomRank:
    def __init__(self, rng: "random.Random") -> None:
        self._rng = rng

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        ranks = np.flatnonzero(fleet.allowed(entry))
        return int(ranks[self._rng.randrange(len(ranks))]) if len(ranks) else None


class RoundRobin:
    """Takes the ranks in turn; one that is closed to a request is skipped."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        is_allowed = fleet.allowed(entry)
        ranks = len(is_allowed)
        for turn in range(self._next, self._next + ranks):
            rank = turn % ranks
            if is_allowed[rank]:
                self._next = (rank + 1) % ranks
                return rank
        return None


# `br-0-bypass`: BR-0 without the pool, for the earliest start of the KV transfer.
#
# When its prefill ends the request goes to a rank at once, scored on the virtual load: all bound
# requests, running or not. A rank may hold a few requests beyond its batch, so that their KV transfer
# overlaps with the decoding of its batch. With one request at a time there is no subset to choose, and
# the rule is Stage 1 of BR-0. Paper: §D.6.


class BestScore:
    """Chooses the rank with room where BR-0's F is best.

    Args:
        prefix_affinity: See `PolicySettings`.
    """

    def __init__(self, prefix_affinity: float = 0.0) -> None:
        self._prefix_affinity = prefix_affinity

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        open_ranks = fleet.open_to(entry)
        if not open_ranks.any():
            return None
        weights = Weights(np.ones(1), alpha=1.0, beta=float(len(fleet.loads)))
        ahead = fleet.loads.astype(np.float64)[:, None]
        balance = Balance(ahead, weights, np.ones(1), speeds=fleet.speeds)
        worth = None
        if self._prefix_affinity and fleet.keeping is not None:
            worth = self._prefix_affinity * np.array(fleet.keeping.of(entry).tokens, np.float64)
        return balance.best_rank(entry.kv_tokens, open_ranks, worth)


# `dynamo-kv`: the cost of NVIDIA Dynamo's KV router for a decode pool.
#
# A rank costs the KV blocks of its requests, each request's weighted by the share of its expected
# output that is still to come, as of its last whole block. Without an expected length the weight
# is 1. Their weight of active requests and their sampling temperature are 0 by default, so
# neither is here; nor is credit for cached prefixes, which they switch off for a decode pool.
#
# Source: https://github.com/ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector/default.rs at
# 07a6c9ce3bb0 (the cost), lib/kv-router/src/sequences/single.rs at 04df1c42f2fe (which blocks
# decay).

# Their default block.
BLOCK_TOKENS = 16


def decayed_blocks(bound: BoundRequest, expected_output: float | None) -> float:
    held = bound.kv_tokens // bound.slots
    prompt = held - bound.age
    blocks = -(-held // BLOCK_TOKENS)
    weight = 1.0
    # They look whenever a block is added: at its first token.
    emitted = (blocks - 1) * BLOCK_TOKENS + 1 - prompt
    if expected_output is not None and emitted > 0:
        weight = max(0.0, 1.0 - emitted / max(expected_output, 1.0))
    return weight * blocks * bound.slots


# `llmd-token-load`: the token load scorer of the llm-d router with its output-length buckets.
#
# A request is charged a flat number of output tokens from its admission to its end, by its
# bucket. The prompt counts on the prefiller alone. Their buckets follow from the client's body
# (thinking, tools, a low `max_tokens`); here an expected length stands for these signs. Without
# one the bucket is unknown, and the rule is `jsq`.
#
# Source: https://github.com/llm-d/llm-d-router, pkg/epp/framework/plugins/, the files
# scheduling/scorer/tokenload/token_load.go at 1b30d10f8006 and
# requestcontrol/dataproducer/inflightload/README.md at 2f1de8c05071.

# Charges of the buckets, and the lengths that bound them.
_SHORT_TOKENS, _UNKNOWN_TOKENS, _LONG_TOKENS = 100, 1_000, 4_096
_SHORT_BELOW, _LONG_FROM = 500, 2_000


def bucket_tokens(bound: BoundRequest, expected_output: float | None) -> float:
    if expected_output is None or _SHORT_BELOW <= expected_output < _LONG_FROM:
        tokens = _UNKNOWN_TOKENS
    else:
        tokens = _SHORT_TOKENS if expected_output < _SHORT_BELOW else _LONG_TOKENS
    return tokens * bound.slots


# `smg-least-load`: the `least_load` rule of the Shepherd Model Gateway (SMG).
#
# A rank costs the time to drain its queue, and a barrier on its KV usage k: queued tokens /
# throughput + 0.15 s x k / (1 - k). Queued are the tokens of requests that have not joined the
# batch. Without a known limit of the KV cache the barrier is so low that it only decides between equal
# queues.
#
# Source: https://github.com/lightseekorg/smg, model_gateway/src/policies/least_load.rs at
# 3bb34d0257fb.

# Their defaults: tokens/s of an engine that does not report its throughput, the weight of the barrier
# in seconds, and the highest usage.
_THROUGHPUT = 2_000.0
_PRESSURE_S = 0.15
_HIGHEST_USAGE = 0.999


def queued_s(bound: BoundRequest, expected_output: float | None) -> float:
    del expected_output
    return 0.0 if bound.started else bound.kv_tokens / _THROUGHPUT


def kv_pressure(rank_kv_tokens: int | None) -> Callable[[Fleet], NDArray[np.float64]]:
    """Return the barrier of ranks with so many KV tokens, float64[G] in seconds."""
    capacity = UNLIMITED if rank_kv_tokens is None else rank_kv_tokens

    def pressure(fleet: Fleet) -> NDArray[np.float64]:
        usage = np.minimum(fleet.loads / capacity, _HIGHEST_USAGE)
        return np.asarray(_PRESSURE_S * usage / (1.0 - usage))

    return pressure


# `s1-enhanced`, `s2-enhanced`, `s2-dynamic-waiting`: TBLB's scores, of the ledger's own loads.
#
# A rank is drawn with the probability of its score's share; see `proxy/core/prefill/choices.py`.
# Requests beyond a rank's batch count as waiting. The ledger is never old, so there is nothing to
# add to it.
#
# Source: https://github.com/f5devcentral/llm-inference-lb, core/scheduler.py at f254c3e.


class ScoredRank:
    """Draws a rank by its score for each request; the shortest queue if none scores above 0."""

    def __init__(self, scores: Scores, rng: "random.Random", batch_limit: int) -> None:
        self._scores = scores
        self._rng = rng
        self._batch_limit = batch_limit

    def __call__(self, fleet: Fleet, entry: PoolEntry) -> int | None:
        ranks = np.flatnonzero(fleet.allowed(entry)).tolist()
        if not ranks:
            return None
        bound = [int(fleet.bound[rank]) for rank in ranks]
        loads = [
            EngineLoad(
                waiting=max(0, slots - self._batch_limit),
                running=min(slots, self._batch_limit),
                # Only its relation to the other ranks' usage matters.
                kv_usage=float(fleet.loads[rank]),
            )
            for rank, slots in zip(ranks, bound, strict=True)
        ]
        scores = self._scores(loads)
        if not any(scores):
            return shortest_queue(fleet, entry)
        rank: int = self._rng.choices(ranks, scores)[0]
        return rank


# The base of other routers' rules: each request is charged to its rank, the cheapest rank is
# next.
#
# These rules bind early and take requests in order. Their charges need facts of single requests
# that `Fleet` does not sum: it offers the bound requests, and each round sums its own charge.
# That costs O(bound requests) a round, more than our own policies, which these are compared with.

# Steps ahead that are asked for; a request that probably runs longer has no known end.
_MOST_STEPS = 8_192

Charge = Callable[[BoundRequest, float | None], float]
"""The cost of a request on its rank, given its expected output tokens; None if they are unknown."""


class LeastCharged:
    """Takes the rank with the lowest sum of charges; on a tie the lowest rank.

    Args:
        charge: The charge of each bound request.
        predictor: Stands for the output length that a client of such a router states; None if the
            charge does not depend on it.
        pressure: Returns float64[G], a further cost of each rank; None for none.
    """

    projection = None
    next_decision_ns = None
    slots_beyond_batch = None

    def __init__(
        self,
        charge: Charge,
        *,
        predictor: "OutputPredictor | None" = None,
        pressure: Callable[[Fleet], NDArray[np.float64]] | None = None,
    ) -> None:
        self._charge = charge
        self._predictor = predictor
        self._pressure = pressure
        # Of the requests that were bound in the last round, or are offered in this one.
        self._expected: dict[RequestId, float | None] = {}

    def dispatch(self, fleet: Fleet, pool: Pool, now_ns: int) -> list[Assignment]:
        charges = np.zeros(len(fleet.loads))
        before, self._expected = self._expected, {}
        for bound in fleet.requests():
            if bound.request in before:
                self._expected[bound.request] = before[bound.request]
            charges[bound.rank] += self._charge_of(bound)

        def choose(fleet: Fleet, entry: PoolEntry) -> int | None:
            costs = charges if self._pressure is None else charges + self._pressure(fleet)
            rank = lowest(costs, fleet.allowed(entry))
            if rank is not None:
                slots = entry.slots
                bound = BoundRequest(
                    entry.request, RankId(rank), entry.kv_tokens, slots, entry.age, started=False
                )
                charges[rank] += self._charge_of(bound)
            return rank

        in_order = OldestFirst(choose, slots_beyond_batch=self.slots_beyond_batch)
        return in_order.dispatch(fleet, pool, now_ns)

    def _charge_of(self, bound: BoundRequest) -> float:
        return self._charge(bound, self._expected_output(bound))

    def _expected_output(self, bound: BoundRequest) -> float | None:
        if self._predictor is None:
            return None
        # Once for each request, as a client states it once.
        if bound.request not in self._expected:
            ages = np.array([bound.age])
            survival = self._predictor.survival([bound.request], ages, _MOST_STEPS)[0]
            ends = survival[-1] <= 0.5
            expected = bound.age + float(survival[:-1].sum()) if ends else None
            self._expected[bound.request] = expected
        return self._expected[bound.request]
