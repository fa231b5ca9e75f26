"""The prediction of times to first token, and the limit of requests in flight; both are off by default."""

from collections import Counter, deque
from math import exp

import numpy as np

from balanceroute.proxy.core.admission.rules import (
    Admission,
    AimdSettings,
    Decision,
    Ending,
    Load,
    Refusal,
)
from balanceroute.proxy.core.events import Ticket

_NS_PER_S = 1_000_000_000

# The expected time to first token of a request that arrives now.
#
# Three parts: the wait before prefill, by the requests ahead in the queue's order and the measured rate of
# starts; the prefill, by its prompt and the measured time per token; and the rest (pool, KV transfer, first
# step), as it was lately. Requests whose first token may come from the prefiller have a mean rest of their
# own, to which such a token adds 0. All are means, so half of the requests take longer.

# Time with a queue that the rate of starts covers, and how much of it is needed to know the rate.
_WINDOW_NS = 10 * _NS_PER_S
_LEAST_NS = 1 * _NS_PER_S
# Requests that the other means cover.
_WINDOW_REQUESTS = 64


class _Mean:
    """A mean at first, an exponential average later; None before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, _WINDOW_REQUESTS)
        before = value if self.value is None else self.value
        self.value = before + (value - before) / self._count


class FirstTokens:
    """Measures the parts of the time to first token."""

    def __init__(self) -> None:
        # Starts of requests that had waited, and the time in which any waited; both decay.
        self._starts = self._backlog_ns = 0.0
        self._since_ns: int | None = None
        self._prefill_ns_per_token = _Mean()
        self._rest_ns = {early: _Mean() for early in (False, True)}

    def advance(self, now_ns: int, *, waiting: bool) -> None:
        """Note the time; `waiting` is whether anything waited before prefill until now."""
        since_ns, self._since_ns = self._since_ns, now_ns
        if waiting and since_ns is not None:
            passed_ns = now_ns - since_ns
            keep = exp(-passed_ns / _WINDOW_NS)
            self._starts *= keep
            # The integral of the weights, so that a steady rate is measured without bias.
            self._backlog_ns = keep * self._backlog_ns + _WINDOW_NS * (1 - keep)

    def started(self) -> None:
        """Note that a request that had waited before prefill waits no longer."""
        self._starts += 1

    def came(self, prompt_tokens: int, prefill_ns: int, rest_ns: int, *, early: bool) -> None:
        """Note a first token: the time of its prefill, and the rest after that; `early` as below."""
        self._prefill_ns_per_token.add(prefill_ns / prompt_tokens)
        self._rest_ns[early].add(rest_ns)

    def expected_ns(self, prompt_tokens: int, ahead: int, *, early: bool) -> float | None:
        """Return the expected time to first token; None while too little was measured.

        Args:
            prompt_tokens: Of the request.
            ahead: The requests that will start before it.
            early: Whether its first token may be the prefiller's.
        """
        per_token_ns, rest_ns = self._prefill_ns_per_token.value, self._rest_ns[early].value
        if per_token_ns is None or rest_ns is None:
            return None
        wait_ns = 0.0
        if ahead:
            if self._backlog_ns < _LEAST_NS or not self._starts:
                return None
            # It starts with the start after theirs.
            wait_ns = (ahead + 1) * self._backlog_ns / self._starts
        return wait_ns + per_token_ns * prompt_tokens + rest_ns


# `early`: a request that cannot have its first token in time is refused at once.
#
# It would wait, and perhaps be prefilled, to expire in the end. A refusal costs nothing, and its client can
# go elsewhere. The rule accepts requests without a deadline, and those that arrive while nothing waits or
# runs: otherwise a deployment that was slow once would never be measured again.

_UNAVAILABLE = 503
_LONGEST_S = 3600


class EarlyRefusal:
    """Refuses requests whose first token would come too late.

    Args:
        within: A rule that decides first.
    """

    def __init__(self, within: Admission) -> None:
        self._within = within
        self.follows = within.follows

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        refusal = self._within.offer(ticket, load, now_ns)
        expected_ns = load.first_token_ns
        if refusal is not None or ticket.deadline_ns is None or expected_ns is None:
            return refusal
        left_ns = ticket.deadline_ns - now_ns
        if load.idle or expected_ns <= left_ns:
            return None
        reason = (
            f"the first token is expected in {expected_ns / _NS_PER_S:.1f} s, "
            f"and due in {max(0, left_ns) / _NS_PER_S:.1f} s"
        )
        # If no request comes meanwhile, the queue is by so much shorter then.
        retry_s = min(-(-int(expected_ns - left_ns) // _NS_PER_S), _LONGEST_S)
        return Refusal(_UNAVAILABLE, reason, max(1, retry_s), cause="deadline")

    def began(self, ticket: Ticket, now_ns: int) -> None:
        self._within.began(ticket, now_ns)

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        self._within.ended(ticket, ending, now_ns)


# How many requests may be in flight: a limit per open decode rank, fixed or moved by `aimd`.
#
# A request is in flight from the start of its prefill until it ends or is queued again, so
# prefill, pool and decode are all inside the controlled loop. The queue before prefill is outside
# of it: a request there holds nothing. A request may start only while fewer than `cap` x open ranks are in
# flight. So a higher limit takes effect at once, and a lower one as requests end: it cancels none.
#
# Only requests whose client got a first token, from a rank or a prefiller, count for the time to it. Errors
# are fast, and would raise the limit of a fleet that fails.


class Aimd:
    """The controller: no clock, no measurement."""

    def __init__(self, settings: AimdSettings) -> None:
        self.settings = settings
        self.cap = settings.cap_initial  # The limit.
        self._cooldown = 0

    def decide(
        self, ttft_ns: float | None, *, demand: bool, tpot_ns: float | None = None
    ) -> Decision:
        """Move the limit.

        Args:
            ttft_ns: The p99 time to first token; None if it is unknown.
            demand: Whether anything is in flight or waits.
            tpot_ns: The p95 time of a step; None if it is unknown, or without a target for it.
        """
        settings = self.settings
        if ttft_ns is None:
            return Decision.UNKNOWN
        if self._cooldown:
            self._cooldown -= 1
            return Decision.COOLDOWN
        # Relative to their targets: the worse one counts.
        excess = ttft_ns / settings.target_ns
        if settings.tpot_target_ns is not None and tpot_ns is not None:
            excess = max(excess, tpot_ns / settings.tpot_target_ns)
        if excess > 1 + settings.band:
            lower = int(self.cap * settings.factor) - settings.step_down
            self.cap = max(settings.cap_min, lower)
            self._cooldown = settings.cooldown_ticks
            return Decision.DECREASE
        if excess < 1 - settings.band and demand:
            self.cap = min(settings.cap_max, self.cap + 1)
            return Decision.INCREASE
        return Decision.HOLD


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
        settings: Of the controller. A `cap_min` of `cap_max` fixes the limit.
    """

    def __init__(self, settings: AimdSettings) -> None:
        # The p99 time to first token at the last tick; None if it was unknown.
        self.ttft_ns: float | None = None
        # The p95 time of a step then; None without a target for it.
        self.tpot_ns: float | None = None
        self.decisions: Counter[Decision] = Counter()  # How often each was taken.
        self._controller = Aimd(settings)
        self._firsts = Window(settings.window_ns)
        self._steps = Window(settings.window_ns)
        self._next_tick_ns: int | None = None

    @property
    def cap(self) -> int:
        return self._controller.cap

    @property
    def ttft_target_ns(self) -> int:
        """The target of the p99 time to first token."""
        return self._controller.settings.target_ns

    @property
    def next_tick_ns(self) -> int | None:
        """When `advance` next decides on the limit; None before the first call."""
        return self._next_tick_ns

    def room(self, in_flight: int, open_ranks: int) -> int:
        """Return how many further requests may start; 0 or less for none."""
        return self.cap * open_ranks - in_flight

    def first_token(self, ttft_ns: int, now_ns: int) -> None:
        self._firsts.add(ttft_ns, now_ns)

    def step(self, duration_ns: int, now_ns: int) -> None:
        if self._controller.settings.tpot_target_ns is not None:
            self._steps.add(duration_ns, now_ns)

    def advance(self, now_ns: int, *, demand: bool) -> None:
        """Decide for every tick until now.

        Args:
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
