"""Which requests are accepted at all, and how many may be in flight: overload control.

A driver asks an admission rule before it feeds `RequestArrived`, so that a rejected request never
exists for the scheduler. The number of waiting requests is bounded here and not in the scheduler,
because only the driver can reject one. A rule is a class here and a line in the registry.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import exp, inf
from typing import Protocol

import numpy as np
from msgspec import Struct

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import Ticket
from balanceroute.proxy.core.setting import choice, integer, number, seconds, words


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is rejected, as its client is answered."""

    status: int  # Of the answer.
    reason: str  # For the client.
    retry_after_s: int | None  # When to come again; None for never, as it is.
    cause: str = "overload"  # The reason in a word, of which there are few.


class Load(Struct, frozen=True):
    """How busy the deployment is."""

    waiting: int  # `Scheduler.waiting`, the requests that no engine answers yet.
    # The expected time to first token of the request that arrives; None if it is not known or not
    # measured.
    first_token_ns: float | None = None
    idle: bool = False  # Whether nothing waits or runs.


class Ending(Struct, frozen=True):
    """How an accepted request ended."""

    served: bool  # Whether it was answered in full.
    first_token_ns: int | None  # Time from its arrival to its first token; None if there was none.
    output_tokens: int  # Tokens that were answered.
    prompt_tokens: int = 0  # Of its prompt, as an engine counted them; 0 if none did.
    began: bool = True  # Whether an engine had begun it.


class Admission(Protocol):
    """Decides whether a request is accepted."""

    @property
    def follows(self) -> bool:
        """Whether it learns from accepted requests; if not, drivers need not report them."""
        ...

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        """Return why a request that arrives now is rejected, or None to accept it."""
        ...

    def began(self, ticket: Ticket, now_ns: int) -> None:
        """Note that an accepted request was given to an engine; called once at most for each."""
        ...

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Note how an accepted request ended; called once for each."""
        ...


# `bounded`: requests are accepted until a given number wait.

_TOO_MANY_REQUESTS = 429


class BoundedQueue:
    """Accepts requests until `limit` of them wait.

    Raises:
        ConfigError: A bound is below 1.
    """

    follows = False

    def __init__(self, limit: int, *, retry_after_s: int = 1) -> None:
        for name, value in (("limit", limit), ("retry_after_s", retry_after_s)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        self._limit = limit
        self._retry_after_s = retry_after_s

    def offer(self, ticket: Ticket, load: Load, now_ns: int) -> Refusal | None:
        del ticket, now_ns
        if load.waiting < self._limit:
            return None
        reason = f"{load.waiting} requests wait already"
        return Refusal(_TOO_MANY_REQUESTS, reason, self._retry_after_s)

    def began(self, ticket: Ticket, now_ns: int) -> None:
        """Do nothing."""

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Do nothing: the rule depends on the present load only."""


# When the first token of a request that arrives now is to be expected.
#
# Three parts: the wait before prefill, by the requests ahead in the queue's order and the
# measured rate at which they start; the prefill, by its prompt and the measured time per token;
# and the rest (pool, KV transfer, first step), as it was lately. Those whose first token may be
# the prefiller's have a rest of their own, which is none if it is. All are means, so half of the
# requests take longer.

_S = 1_000_000_000
# Time with a queue that the rate of starts covers, and how much of it is needed to know the rate.
_WINDOW_NS = 10 * _S
_LEAST_NS = 1 * _S
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
    """Measures what the time to first token consists of."""

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
        """Note a first token: what its prefill took, and what came after that; `early` as below."""
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
# It would wait, and be prefilled perhaps, to expire in the end. Refused at once it costs nothing,
# and its client can go elsewhere. Requests without a deadline, and those that arrive while
# nothing waits or runs, are accepted: otherwise a deployment that was slow once would never be
# measured again.

_UNAVAILABLE = 503
_NS_PER_S = 1_000_000_000
_LONGEST_S = 3600


class EarlyRefusal:
    """Refuses what comes too late.

    Args:
        within: Asked first.
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
# of it: what waits there holds nothing. A request is granted a start only while fewer than `cap`
# x open ranks are in flight. So a limit that grows takes effect at once, and one that shrinks
# cancels nothing: it takes effect as requests end, whatever it was in between.
#
# Only requests whose client got a first token count for the time to it, whoever said it. Errors
# are fast, and would raise the limit of a fleet that fails.


@dataclass(frozen=True, slots=True, kw_only=True)
class AimdSettings:
    """How a limit per decode rank is moved.

    Raises:
        ConfigError: A value is out of range; the message begins with its name.
    """

    target_ns: int = 2 * _S  # Of the p99 time to first token.
    # Of the p95 time of a decode step, which is the time per output token: above it the limit is
    # too high as well. None for no such guard.
    tpot_target_ns: int | None = None
    window_ns: int = 10 * _S  # Time that the percentiles cover.
    tick_ns: int = 5 * _S  # Time between two decisions.
    band: float = 0.2  # Around a target, as a share of it.
    cooldown_ticks: int = 3  # Ticks without a change after a decrease.
    cap_min: int = 32  # The lowest limit.
    cap_max: int = 256  # The highest limit.
    cap_initial: int = 64  # The first limit.
    factor: float = 0.75  # The limit is multiplied by it to decrease.
    step_down: int = 0  # What is taken off after that.

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("target_ns", self.target_ns, 1, inf),
            ("tpot_target_ns", self.tpot_target_ns or 1, 1, inf),
            ("window_ns", self.window_ns, 1, inf),
            ("tick_ns", self.tick_ns, 1, inf),
            ("band", self.band, 0, 1),
            ("cooldown_ticks", self.cooldown_ticks, 0, inf),
            ("cap_min", self.cap_min, 1, inf),
            ("cap_max", self.cap_max, self.cap_min, inf),
            ("cap_initial", self.cap_initial, self.cap_min, self.cap_max),
            ("factor", self.factor, 0, 1),
            ("step_down", self.step_down, 0, inf),
        ):
            if not least <= value <= most:
                raise ConfigError(f"{name} is {value}, must be from {least} to {most}")

    def beginning_at(self, cap: int) -> "AimdSettings":
        """Return these with a limit to begin with, or the nearest that they allow."""
        return replace(self, cap_initial=min(max(cap, self.cap_min), self.cap_max))


POST_5 = AimdSettings()
"""Multiplicative decrease and a high floor, for an acquire timeout of half the target."""
POST_4 = AimdSettings(
    window_ns=30 * _S, cap_min=16, cap_max=128, cap_initial=64, factor=1.0, step_down=4
)
"""Subtractive decrease and a long window, for an acquire timeout of 30 s."""


# The settings.

_PRESETS = {"post5": POST_5, "post4": POST_4}
# Of a request before prefill: with the limit half of the target, and what `post4` goes with.
_TIMEOUT_SHARE = 0.5
_POST_4_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AimdOptions:
    """A limit on the requests in flight; see `AimdSettings`. None is the preset's own."""

    aimd: str = choice(
        "off",
        "limit the requests in flight per open rank, prefill and pool included, and move the limit "
        "by the p99 time to first token: post5 multiplies, post4 subtracts",
        words(("off", *_PRESETS)),
    )
    aimd_ttft_s: float = number(2.0, "target of the p99 time to first token", 0.001, 1e6)
    aimd_tpot_ms: float | None = number(
        None, "a target of the p95 time of a decode step too", 0.001, 1e6, word="none"
    )
    aimd_min: int | None = integer(
        None,
        "the least limit; that of --aimd-max fixes it",
        1,
        10**6,
        shown_default="32; 16 with post4",
        word="auto",
    )
    aimd_max: int | None = integer(
        None,
        "the largest limit",
        1,
        10**6,
        shown_default="256; 128 with post4",
        word="auto",
    )
    aimd_first: int | None = integer(
        None, "the first limit", 1, 10**6, shown_default="64, or the nearest allowed", word="auto"
    )
    aimd_tick_s: float = seconds(5.0, "between two changes of the limit", 0.1, 600)
    aimd_window_s: float | None = number(
        None,
        "how far back the percentiles look",
        0.1,
        600,
        shown_default="10; 30 with post4",
        word="auto",
        metavar="S",
    )
    aimd_band: float = number(
        0.2, "how far from its target a percentile moves nothing, as a share of it", 0, 0.99
    )
    aimd_cooldown: int = integer(3, "ticks without a change after a decrease", 0, 1000)
    aimd_factor: float | None = number(
        None,
        "by what a decrease multiplies the limit",
        0.01,
        1,
        shown_default="0.75; 1 with post4",
        word="auto",
    )
    aimd_step: int | None = integer(
        None,
        "what a decrease takes off besides",
        0,
        10**6,
        shown_default="0; 4 with post4",
        word="auto",
    )

    @property
    def settings(self) -> AimdSettings | None:
        """The controller's settings, which `check` has passed; None without a limit."""
        return None if self.aimd == "off" else self._controller()

    def check(self, where: Callable[[str], str]) -> None:
        """Check the settings that depend on each other.

        Args:
            where: Returns what to call a setting.

        Raises:
            ConfigError: Two of them exclude each other.
        """
        low, high = self.aimd_min, self.aimd_max
        if low is not None and high is not None and low > high:
            raise ConfigError(f"{where('aimd_min')} is {low}, beyond --aimd-max ({high})")
        if self.aimd == "off":
            return
        moved = self._controller()
        if self.aimd_first not in (None, moved.cap_initial):
            allowed = f"from {moved.cap_min} (--aimd-min) to {moved.cap_max} (--aimd-max)"
            raise ConfigError(f"{where('aimd_first')} is {self.aimd_first}, must be {allowed}")
        if moved.factor == 1 and moved.step_down == 0:
            reason = "a decrease would change nothing: give an --aimd-step above 0 too"
            raise ConfigError(f"{where('aimd_factor')} is 1, and {reason}")

    def _controller(self) -> AimdSettings:
        preset = _PRESETS[self.aimd]
        low = self.aimd_min or min(preset.cap_min, self.aimd_max or preset.cap_min)
        high = self.aimd_max or max(preset.cap_max, low)
        tpot_ms, window_s = self.aimd_tpot_ms, self.aimd_window_s
        return AimdSettings(
            target_ns=round(1e9 * self.aimd_ttft_s),
            tpot_target_ns=None if tpot_ms is None else round(1e6 * tpot_ms),
            window_ns=preset.window_ns if window_s is None else round(1e9 * window_s),
            tick_ns=round(1e9 * self.aimd_tick_s),
            band=self.aimd_band,
            cooldown_ticks=self.aimd_cooldown,
            cap_min=low,
            cap_max=high,
            cap_initial=min(max(self.aimd_first or preset.cap_initial, low), high),
            factor=self.aimd_factor or preset.factor,
            step_down=preset.step_down if self.aimd_step is None else self.aimd_step,
        )

    @property
    def queue_ttl_s(self) -> float | None:
        """How long requests wait before prefill unless that is set; None without a limit."""
        if self.aimd == "off":
            return None
        return _POST_4_TIMEOUT_S if self.aimd == "post4" else _TIMEOUT_SHARE * self.aimd_ttft_s


class Decision(Enum):
    """What a tick did, and why."""

    UNKNOWN = "unknown"
    COOLDOWN = "cooldown"
    DECREASE = "decrease"
    INCREASE = "increase"
    HOLD = "hold"


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
        settings: How the limit is moved. A `cap_min` of `cap_max` fixes it.
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
        """The limit per rank."""
        return self._controller.cap

    @property
    def ttft_target_ns(self) -> int:
        """What the p99 time to first token is to keep."""
        return self._controller.settings.target_ns

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
