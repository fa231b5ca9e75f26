"""Tells during a simulation that its latencies can no longer be within the targets."""

from bisect import bisect_left
from dataclasses import dataclass
from math import inf

from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.sim.service_log import ServiceLog
from balanceroute.proxy.sim.workload import Workload

# Requests that finish in the measured time before a run is stopped, so that its figures say what bounds it.
_LEAST = 50


@dataclass(frozen=True, slots=True)
class Slo:
    """What is to hold of the latencies.

    Attributes:
        ttft_p99_s: At most; the 99th percentile of the times to the first token.
        tpot_p95_s: At most; the 95th percentile of the mean times between tokens.
    """

    ttft_p99_s: float = inf
    tpot_p95_s: float = inf


class MissWatch(ServiceLog):
    """The account of a run that may be stopped.

    Args:
        workload: The load, in open loop; a request's id is its place.
        slo: The targets.
    """

    def __init__(self, workload: Workload, slo: Slo) -> None:
        super().__init__(workload.requests)
        self._arrivals_ns = workload.arrivals_ns()
        self._slo = slo
        self._since_ns: int | None = None
        # Of the requests that arrive in the measured time: late first tokens, slow answers, and how many
        # of each are too many, whatever comes.
        self._late = self._slow = 0
        self._too_late = self._too_slow = inf
        self._left = _LEAST

    @property
    def misses(self) -> bool:
        """Whether the targets are missed, however well it goes on."""
        missed = self._late >= self._too_late or self._slow >= self._too_slow
        return missed and self._left <= 0

    def open(self, now_ns: int) -> None:
        """See `ServiceLog`."""
        super().open(now_ns)
        self._since_ns = now_ns
        measured = self._requests[bisect_left(self._arrivals_ns, now_ns) :]
        self._too_late = beyond(len(measured), 99)
        self._too_slow = beyond(sum(one.output_tokens > 1 for one in measured), 95)

    def first_token(self, request: RequestId, now_ns: int) -> None:
        """See `ServiceLog`."""
        super().first_token(request, now_ns)
        if self._is_measured(request):
            took_s = (now_ns - self._times[request].arrived_ns) / 1e9
            self._late += took_s > self._slo.ttft_p99_s

    def finish(self, request: RequestId, now_ns: int) -> None:
        """See `ServiceLog`."""
        super().finish(request, now_ns)
        gaps = self._requests[request].output_tokens - 1
        if self._since_ns is None or not gaps:
            return
        self._left -= self._closed is None
        first_ns = self._times[request].first_ns
        if first_ns is not None and self._is_measured(request):
            self._slow += (now_ns - first_ns) / gaps / 1e9 > self._slo.tpot_p95_s

    def _is_measured(self, request: RequestId) -> bool:
        return self._since_ns is not None and self._times[request].arrived_ns >= self._since_ns


def beyond(values: int, percent: int) -> int:
    """Return how many of at most `values` values beyond a limit put the percentile beyond it.

    A percentile lies between two of the sorted values, of which the lower one has place
    (values - 1) x percent / 100, rounded down. It is beyond the limit if that one is.
    """
    return values - (values - 1) * percent // 100
