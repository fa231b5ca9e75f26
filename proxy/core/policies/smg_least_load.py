"""`smg-least-load`: the `least_load` rule of the Shepherd Model Gateway (SMG).

A rank costs the time to drain its queue, and a barrier on its KV usage k: queued tokens / throughput +
0.15 s x k / (1 - k). Queued are the tokens of requests that have not joined the batch. Where no limit
of the KV cache is known, the barrier is so low that it only decides between equal queues.

Source: https://github.com/lightseekorg/smg, model_gateway/src/policies/least_load.rs at 3bb34d0257fb.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from balanceroute.proxy.core.ledger import BoundRequest
from balanceroute.proxy.core.policies.base import UNLIMITED, Fleet

# Their defaults: tokens/s of an engine that does not report its throughput, the weight of the barrier
# in seconds, and the highest usage.
_THROUGHPUT = 2_000.0
_PRESSURE_S = 0.15
_HIGHEST_USAGE = 0.999


def queued_s(bound: BoundRequest, expected_output: float | None) -> float:
    """Return the seconds that a request adds to its rank's queue."""
    del expected_output
    return 0.0 if bound.started else bound.kv_tokens / _THROUGHPUT


def kv_pressure(rank_kv_tokens: int | None) -> Callable[[Fleet], NDArray[np.float64]]:
    """Return the barrier of ranks with so many KV tokens, float64[G] in seconds."""
    capacity = UNLIMITED if rank_kv_tokens is None else rank_kv_tokens

    def pressure(fleet: Fleet) -> NDArray[np.float64]:
        usage = np.minimum(fleet.loads / capacity, _HIGHEST_USAGE)
        return np.asarray(_PRESSURE_S * usage / (1.0 - usage))

    return pressure
