"""Which requests are accepted at all, and how many may be in flight: overload control.

A driver asks an admission rule before it feeds `RequestArrived`, so that a rejected request never
exists for the scheduler. The number of waiting requests is bounded here and not in the scheduler,
because only the driver can reject one. A rule is a class here and a line in the registry.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import NamedTuple, Protocol

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
    waiting: int  # `Scheduler.waiting`, the requests that no engine answers yet.
    # The expected time to first token of the request that arrives; None if unknown.
    first_token_ns: float | None = None
    idle: bool = False  # Whether nothing waits or runs.


class Ending(Struct, frozen=True):
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
        """Note that an engine got an accepted request; called once at most for each."""
        ...

    def ended(self, ticket: Ticket, ending: Ending, now_ns: int) -> None:
        """Note how an accepted request ended; called once for each."""
        ...


@dataclass(frozen=True, slots=True)
class Rate:
    """How much a tenant may take.

    Raises:
        ConfigError: One of them is below 1.
    """

    per_minute: int  # In the long run.
    burst: int  # At once, after a pause.

    def __post_init__(self) -> None:
        for name in ("per_minute", "burst"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """A tenant's limits; None is no limit."""

    requests: Rate | None = None  # Requests.
    tokens: Rate | None = None  # Tokens of prompts and answers.
    concurrency: int | None = None  # Requests in flight.
    queue_limit: int | None = None  # Those of them that no engine has begun.


class Allowance(NamedTuple):
    """The rest of a rate."""

    limit: int  # The burst.
    remaining: int  # Available now, at least 0.
    reset_ns: int  # Time until all of it may be.


# `bounded`: requests are accepted until a given number wait.

_TOO_MANY_REQUESTS = 429
_NS_PER_S = 1_000_000_000


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AimdSettings:
    """The settings of the controller of a limit per decode rank.

    Raises:
        ConfigError: A value is out of range; the message begins with its name.
    """

    target_ns: int = 2 * _NS_PER_S  # Of the p99 time to first token.
    # Of the p95 time of a decode step, which is the time per output token: a longer one, too, means that
    # the limit is too high. None for no such guard.
    tpot_target_ns: int | None = None
    window_ns: int = 10 * _NS_PER_S  # Time that the percentiles cover.
    tick_ns: int = 5 * _NS_PER_S  # Time between two decisions.
    band: float = 0.2  # Around a target, as a share of it.
    cooldown_ticks: int = 3  # Ticks without a change after a decrease.
    cap_min: int = 32  # The lowest limit.
    cap_max: int = 256  # The highest limit.
    cap_initial: int = 64  # The first limit.
    factor: float = 0.75  # A decrease multiplies the limit by it.
    step_down: int = 0  # And then subtracts this.

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
        """Return these settings with a first limit, or the nearest allowed one."""
        return replace(self, cap_initial=min(max(cap, self.cap_min), self.cap_max))


POST_5 = AimdSettings()
"""Multiplicative decrease and a high floor, for an acquire timeout of half the target."""
POST_4 = AimdSettings(
    window_ns=30 * _NS_PER_S, cap_min=16, cap_max=128, cap_initial=64, factor=1.0, step_down=4
)
"""Subtractive decrease and a long window, for an acquire timeout of 30 s."""


# The settings of a limit on the requests in flight, which `overload.py` enforces.

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
            where: Returns the name of a setting for messages.

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
    UNKNOWN = "unknown"
    COOLDOWN = "cooldown"
    DECREASE = "decrease"
    INCREASE = "increase"
    HOLD = "hold"
