"""The work that each prefiller still has to do, and how long it takes, as measured."""

from collections import defaultdict
from math import exp

from balanceroute.proxy.core.events import PrefillerId, RequestId

# Prefills that the fit covers.
_WINDOW = 256
# Mean times of a prefill that a utilisation covers.
_WINDOW_MEANS = 64
# Before so many of its own, a prefiller counts as fast as all together.
_LEAST = 16
# How far the fit is drawn to the line through zero: as by prompts that vary by a fifth of their mean.
# Prompts of one length alone do not show a token's time.
_PRIOR = 0.2**2


class ServiceModel:
    """A line through the times of prefills over their tokens; older ones fade out."""

    def __init__(self) -> None:
        self.weight = 0.0  # Prefills that count.
        self.mean_ns = self._tokens = 0.0  # Their mean time.
        # Sums of products of deviations from the means.
        self._tokens_tokens = self._tokens_ns = 0.0

    def observe(self, tokens: int, ns: int) -> None:
        keep = 1 - 1 / _WINDOW
        self.weight = keep * self.weight + 1
        apart_tokens, apart_ns = tokens - self._tokens, ns - self.mean_ns
        self._tokens += apart_tokens / self.weight
        self.mean_ns += apart_ns / self.weight
        after = tokens - self._tokens
        self._tokens_tokens = keep * self._tokens_tokens + apart_tokens * after
        self._tokens_ns = keep * self._tokens_ns + apart_ns * after

    @property
    def line(self) -> tuple[float, float]:
        """The time of a prefill of no token, and of each token, in ns; neither is negative."""
        if self._tokens <= 0.0:
            return self.mean_ns, 0.0
        ratio = self.mean_ns / self._tokens
        prior = _PRIOR * self.weight * self._tokens**2
        slope = (self._tokens_ns + prior * ratio) / (self._tokens_tokens + prior)
        # A line through the mean; one that is steeper than through zero has no base.
        slope = min(max(slope, 0.0), ratio)
        return self.mean_ns - slope * self._tokens, slope


class _Queue:
    """The prefills of one prefiller: tokens to compute, by request, in order."""

    def __init__(self) -> None:
        self.model = ServiceModel()
        self.jobs: dict[RequestId, int] = {}
        self.tokens = 0
        self.since_ns = 0  # When the first one began.
        self.busy = 0.0  # Share of the time lately, until `busy_ns`.
        self.busy_ns = 0

    def note_busy(self, now_ns: int, window_ns: float) -> float:
        """Bring the share up to date, before what it has changes, and return it."""
        # Before the first prefill has given a mean time, there is no "lately".
        keep = exp((self.busy_ns - now_ns) / window_ns) if window_ns else 1.0
        self.busy = keep * self.busy + (1.0 - keep) * bool(self.jobs)
        self.busy_ns = now_ns
        return self.busy


class PrefillWork:
    """The work of all prefillers. It assumes that each computes its prompts in turn."""

    def __init__(self) -> None:
        self._queues: defaultdict[PrefillerId, _Queue] = defaultdict(_Queue)
        self._all = ServiceModel()
        self._places: dict[RequestId, PrefillerId] = {}

    def begin(self, request: RequestId, prefiller: PrefillerId, tokens: int, now_ns: int) -> None:
        """Note a prefill of `tokens` that are not cached."""
        queue = self._queues[prefiller]
        queue.note_busy(now_ns, self._window_ns)
        if not queue.jobs:
            queue.since_ns = now_ns
        queue.jobs[request] = tokens
        queue.tokens += tokens
        self._places[request] = prefiller

    def end(self, request: RequestId, computed_tokens: int | None, now_ns: int) -> None:
        """Note that a prefill ended.

        Args:
            request: The request; nothing happens if it has none.
            computed_tokens: Those that it computed; None if it was lost.
        """
        prefiller = self._places.pop(request, None)
        if prefiller is None:
            return
        queue = self._queues[prefiller]
        queue.note_busy(now_ns, self._window_ns)
        first = next(iter(queue.jobs)) == request
        queue.tokens -= queue.jobs.pop(request)
        if computed_tokens is not None and first:
            for model in (queue.model, self._all):
                model.observe(computed_tokens, now_ns - queue.since_ns)
        if first or computed_tokens is not None:
            queue.since_ns = now_ns

    @property
    def mean_ns(self) -> float:
        """The mean time of a prefill; 0 before the first."""
        return self._all.mean_ns

    @property
    def token_ns(self) -> float:
        """The time that a token adds on any prefiller, in ns; 0 before the first prefill."""
        return self._all.line[1]

    def service_ns(self, prefiller: PrefillerId, tokens: int) -> float:
        """Return how long a prefiller takes for `tokens`; before the first prefill, their number."""
        base, slope = self._line(prefiller)
        return base + slope * tokens

    def wait_ns(self, prefiller: PrefillerId, now_ns: int) -> float:
        queue = self._queues[prefiller]
        if not queue.jobs:
            return 0.0
        base, slope = self._line(prefiller)
        total = base * len(queue.jobs) + slope * queue.tokens
        if not self._all.weight:
            return total
        first = base + slope * next(iter(queue.jobs.values()))
        return total - min(first, now_ns - queue.since_ns)

    def utilisation(self, prefiller: PrefillerId, now_ns: int) -> float:
        """Return the share of the time that a prefiller was busy lately."""
        return self._queues[prefiller].note_busy(now_ns, self._window_ns)

    @property
    def _window_ns(self) -> float:
        return _WINDOW_MEANS * self._all.mean_ns

    def _line(self, prefiller: PrefillerId) -> tuple[float, float]:
        own = self._queues[prefiller].model
        if own.weight >= _LEAST:
            return own.line
        return self._all.line if self._all.weight else (0.0, 1.0)
