"""How many requests may be in flight: a limit per open decode rank, fixed or moved by `aimd`.

A request is in flight from the start of its prefill until it ends or is queued again, so prefill,
pool and decode are all inside the controlled loop. The queue before prefill is outside of it: what
waits there holds nothing. A request is granted a start only while fewer than `cap` x open ranks are
in flight. So a limit that grows takes effect at once, and one that shrinks cancels nothing: it takes
effect as requests end, whatever it was in between.

Only requests whose client got a first token count for the time to it, whoever said it. Errors are fast,
and would raise the limit of a fleet that fails.
"""

from collections import Counter, deque

import numpy as np

from balanceroute.proxy.core.admission.aimd import Aimd, AimdSettings, Decision

# With fewer samples a percentile means nothing.
_LEAST_SAMPLES = 10


class Window:
    """The samples of the last `span_ns`."""

    def __init__(self, span_ns: int) -> None:
        self._span_ns = span_ns
        self._samples: deque[tuple[int, int]] = deque()

    def add(self, value: int, now_ns: int) -> None:
        """Add a sample; times do not go back."""
        self._samples.append((now_ns, value))

    def percentile(self, percent: float, now_ns: int) -> float | None:
        """Return a percentile of the samples in the window; None if they are too few."""
        samples = self._samples
        while samples and samples[0][0] <= now_ns - self._span_ns:
            samples.popleft()
        if len(samples) < _LEAST_SAMPLES:
            return None
        return float(np.percentile([value for _, value in samples], percent))


class Budget:
    """The number of requests in flight that one scheduler may have.

    Args:
        settings: How the limit is moved. A `cap_min` of `cap_max` fixes it.

    Attributes:
        ttft_ns: The p99 time to first token at the last tick; None if it was unknown.
        tpot_ns: The p95 time of a step then; None without a target for it.
        decisions: How often each was taken.
    """

    def __init__(self, settings: AimdSettings) -> None:
        self.ttft_ns: float | None = None
        self.tpot_ns: float | None = None
        self.decisions: Counter[Decision] = Counter()
        self._controller = Aimd(settings)
        self._firsts = Window(settings.window_ns)
        self._steps = Window(settings.window_ns)
        self._next_tick_ns: int | None = None

    @property
    def cap(self) -> int:
        """The limit per rank."""
        return self._controller.cap

    @property
    def next_tick_ns(self) -> int | None:
        """When the limit is next decided on; None before the first `advance`."""
        return self._next_tick_ns

    def room(self, in_flight: int, open_ranks: int) -> int:
        """Return how many further requests may start; 0 or less for none."""
        return self.cap * open_ranks - in_flight

    def first_token(self, ttft_ns: int, now_ns: int) -> None:
        """Note the first token that a client got."""
        self._firsts.add(ttft_ns, now_ns)

    def step(self, duration_ns: int, now_ns: int) -> None:
        """Note the time of a decode step."""
        if self._controller.settings.tpot_target_ns is not None:
            self._steps.add(duration_ns, now_ns)

    def advance(self, now_ns: int, *, demand: bool) -> None:
        """Decide for every tick until now.

        Args:
            now_ns: The time.
            demand: Whether anything was in flight or waited.
        """
        tick_ns = self._controller.settings.tick_ns
        if self._next_tick_ns is None:
            self._next_tick_ns = now_ns + tick_ns
        while self._next_tick_ns <= now_ns:
            self._tick(self._next_tick_ns, demand=demand)
            self._next_tick_ns += tick_ns
            if self.ttft_ns is None and self._next_tick_ns <= now_ns:
                # Nothing came since: every further tick would leave everything as it is.
                missed = (now_ns - self._next_tick_ns) // tick_ns
                self._next_tick_ns += missed * tick_ns

    def _tick(self, now_ns: int, *, demand: bool) -> None:
        self.ttft_ns = self._firsts.percentile(99, now_ns)
        self.tpot_ns = self._steps.percentile(95, now_ns)
        decision = self._controller.decide(self.ttft_ns, demand=demand, tpot_ns=self.tpot_ns)
        self.decisions[decision] += 1
