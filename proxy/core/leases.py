"""What follows from the leases of KV caches: how many to hold, and what a late entry may cost.

**Pool limit.** What the ranks admit in a sixth of a lease: enough to choose from, and in order of
arrival nobody waits for longer, so that much of the lease is left when an entry is passed over. It
is what they admit in 10 s at most: a deeper pool only holds more memory of the prefillers. Prefills
that run count too, so what the ranks admit during a prefill comes on top, as far as that is no
longer than the wait.

A **deep** pool is what they admit in half of the usable lease, but in 15 s at most. Clients who get
their first token when the prefill ends no longer wait for a place in it. Half is as much as leaves
most entries a rank that they fit before they are late: where more than that waits in the pool, late
entries and repeated prefills take over. Before the rate is known, each slot counts as left once in
the usable lease, or as often as in the first window, which counts too few: a pool that grew only then
would keep the first minute's clients waiting. That may be more than prefillers hold: until then each takes
no more KV tokens than fit there, where engines tell how many do.

**Late entries.** An entry is late after three quarters of its lease (`time_limits`). Then it is
forced into the rank where it costs least, or its lease is left to end and it is prefilled again,
whichever costs less rank time:

* Forced with an overflow of x tokens, it lengthens every step by b x at first, until the rank has
  shed the overflow. A rank sheds r tokens per step, those of the requests that leave it. So the sum
  over the steps is b x^2 / 2r, and all G ranks wait that long.
* Prefilled again, it takes its service time s from one of P prefillers. A prefiller feeds G / P
  ranks. Others need the share u of its time in which it is busy, so that is worth u s G / P. And it
  comes later, by the wait for a prefiller, its service and possibly another lease; a request has
  one of B slots, so a delay of d counts d / B.

So forcing costs less up to x = sqrt(2 r cost / (G b)).
"""

from collections.abc import Mapping
from math import ceil, inf, sqrt

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.config import SchedulerConfig
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.lifecycle import Request
from balanceroute.proxy.core.pace import Pace
from balanceroute.proxy.core.policies.base import UNLIMITED
from balanceroute.proxy.core.pool import Pool, PoolEntry

# Leases of a request that may be left to end. From then on it is forced in, so that it is served
# within three leases and their prefills.
MOST_LAPSES = 2
_POOL_SHARE = 1 / 6
_LONGEST_WAIT_NS = 10_000_000_000
_DEEP_SHARE = 1 / 2
_LONGEST_DEEP_WAIT_NS = 15_000_000_000
# A choice among fewer entries costs balance at any rate.
_LEAST_POOL = 24
_POOL_PER_PREFILLER = 2


class Leases:
    """The leases of one scheduler's requests.

    Args:
        requests: All requests of the scheduler, by id.

    Attributes:
        pace: What was measured; None if KV caches are kept for ever.
        pool_limit: As set, or as derived from the last measurement; None for no limit.
    """

    def __init__(self, config: SchedulerConfig, requests: Mapping[RequestId, Request]) -> None:
        self.pace: Pace | None = None
        self._requests = requests
        self.reconfigure(config)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Follow another configuration."""
        self._config = config
        if config.lease_ns is None:
            self.pace = None
        elif self.pace is None:
            self.pace = Pace(config.lease_ns)
        self.pool_limit = self._pool_limit()

    def step(self, duration_ns: int | None, loads: NDArray[np.int64]) -> None:
        """Note a step; see `Pace.step`."""
        if self.pace is not None:
            self.pace.step(duration_ns, loads)

    def prefill_began(self, request: Request, now_ns: int) -> None:
        """Note that a prefiller has begun a request, which need not be a prefill alone."""
        if self.pace is not None and request.decode:
            assert request.prefiller is not None
            tokens = request.prompt_tokens
            self.pace.prefill_began(request.request, request.prefiller, tokens, now_ns)

    def prefill_ended(self, request: RequestId, now_ns: int, prompt_tokens: int = 0) -> None:
        """Note that a prefill runs no longer, if it did; see `Pace.prefill_ended`."""
        if self.pace is not None:
            self.pace.prefill_ended(request, now_ns, prompt_tokens)

    def tick(self, now_ns: int, *, waiting: bool) -> None:
        """Note a tick, see `Pace.tick`, and derive the limit anew."""
        if self.pace is not None:
            self.pace.tick(now_ns, waiting=waiting)
            self.pool_limit = self._pool_limit()

    def room(self, held: int) -> int:
        """Return how many prefills may start while `held` requests are in prefill or in the pool."""
        return UNLIMITED if self.pool_limit is None else self.pool_limit - held

    @property
    def prefiller_kv_tokens(self) -> int | None:
        """KV tokens that one prefiller may hold; None for no limit."""
        config, pace = self._config, self.pace
        if config.prefiller_kv_tokens is not None or not config.deep_pool:
            return config.prefiller_kv_tokens
        known = pace is not None and pace.steady_departures_per_ns is not None
        return None if known else config.prefiller_memory_tokens

    def judge(self, pool: Pool, now_ns: int) -> None:
        """Set how much overflow each late entry may cost."""
        # A deadline that was set holds at any cost.
        if self.pace is None or self._config.deadline_ns is not None:
            return
        for entry in pool.overdue(now_ns):
            entry.overflow_limit = self._overflow_limit(entry, self.pace)

    def _pool_limit(self) -> int | None:
        config, pace = self._config, self.pace
        if config.pool_limit is not None or config.lease_ns is None or pace is None:
            return config.pool_limit
        least = max(_LEAST_POOL, config.ranks, _POOL_PER_PREFILLER * config.prefillers)
        if config.deep_pool:
            usable_ns = max(config.lease_ns - config.lease_margin_ns, config.lease_ns / 2)
            wait_ns = min(_DEEP_SHARE * usable_ns, _LONGEST_DEEP_WAIT_NS)
            rate = pace.steady_departures_per_ns
            if rate is None:
                rate = max(self._slots / usable_ns, pace.departures_per_ns or 0.0)
        else:
            wait_ns = min(_POOL_SHARE * config.lease_ns, _LONGEST_WAIT_NS)
            rate = pace.departures_per_ns
            if rate is None:
                return least
        return max(least, ceil(rate * (wait_ns + min(wait_ns, pace.prefill_ns))))

    @property
    def _slots(self) -> int:
        """All slots of the ranks."""
        limits = self._config.rank_batch_limits
        return self._config.ranks * self._config.batch_limit if limits is None else sum(limits)

    def _overflow_limit(self, entry: PoolEntry, pace: Pace) -> float:
        """Return the overflow, in tokens, up to which a late entry is forced in; inf if unknown."""
        config, request = self._config, self._requests[entry.request]
        token_ns, left = pace.step_model.ns_per_token, pace.tokens_left_per_step
        prefill_ns = pace.prefill_ns_per_token
        if token_ns is None or left is None or prefill_ns is None:
            return inf
        if request.lapses >= MOST_LAPSES or request.prefilled_ns is None:
            return inf
        assert entry.lease_ends_ns is not None
        service_ns = prefill_ns * entry.prompt_tokens
        queue_ns = prefill_ns * pace.prefilling_tokens / config.prefillers
        late_ns = queue_ns + service_ns + entry.lease_ends_ns - request.prefilled_ns
        needed = pace.busy_prefillers / config.prefillers
        cost_ns = needed * service_ns * config.ranks / config.prefillers
        cost_ns += late_ns / config.batch_limit
        return sqrt(2 * left / config.ranks * cost_ns / (config.ranks * token_ns))
