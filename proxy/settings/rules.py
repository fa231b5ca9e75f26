"""The settings of the core's rules: policies, the AIMD limit, the scores of TBLB."""

from dataclasses import dataclass, replace
from math import inf

from balanceroute.proxy.core.admission import POST_4, POST_5, AimdSettings
from balanceroute.proxy.core.policies import (
    GAMMA,
    HORIZON,
    PAPER_BETA,
    PAPER_GAMMA,
    PAPER_HORIZON,
    PAPER_WINDOW,
    PATIENCE_PER_SLOT,
    WINDOW,
    PolicySettings,
)
from balanceroute.proxy.core.prefill import ScoreLimits
from balanceroute.proxy.core.projection import Form
from balanceroute.proxy.core.setting import choice, integer, named, number, part, switch, words

# What has defaults of its own without settings.
_POLICY_DEFAULTS = PolicySettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """The policies' own; see `PolicySettings`."""

    projection: Form | None = choice(
        None,
        "how br-h uses a prediction",
        {"auto": None, **named(Form)},
        shown_default="expected; point with --paper",
    )
    horizon: int | None = integer(
        None,
        "steps that br-h looks ahead",
        0,
        10_000,
        shown_default=f"{HORIZON}; {PAPER_HORIZON} with --paper",
        word="auto",
        metavar="H",
    )
    gamma: float | None = number(
        None,
        "br-h's discount of each step ahead, at most",
        1e-9,
        1,
        shown_default=f"{GAMMA:g}; {PAPER_GAMMA:g} with --paper",
        word="auto",
        metavar="γ",
    )
    alpha: float = number(
        _POLICY_DEFAULTS.alpha,
        "br-h's reward per token that fills a margin",
        1e-9,
        1e9,
        metavar="α",
    )
    beta: float | None = number(
        None,
        "br-h's penalty per token beyond a margin",
        1e-9,
        1e9,
        shown_default=f"G; {PAPER_BETA:g} with --paper",
        word="auto",
        metavar="β",
    )
    theta: int | None = integer(
        None, "free slots left to stage 2", 0, 10**9, shown_default="G", word="auto", metavar="θ"
    )
    window: int | None = integer(
        None,
        "candidates that stage 2 chooses from",
        1,
        10**9,
        shown_default=f"{WINDOW}; {PAPER_WINDOW} with --paper",
        word="auto",
        metavar="K",
    )
    patience: float | None = number(
        None,
        "overtakings that forgive a request one mean prompt of overflow; inf for never",
        1e-9,
        inf,
        shown_default=f"{PATIENCE_PER_SLOT:g} G B",
        word="auto",
    )
    hold_s: float = number(
        _POLICY_DEFAULTS.hold_s,
        "wait for room, while slots abound, of a request too large for every rank; 0 for none",
        0,
        60,
        metavar="S",
    )
    prefix_affinity: float = number(
        _POLICY_DEFAULTS.prefix_affinity,
        "what a prompt token counts that a rank has in its prefix cache and need not pull, in tokens "
        "that a rank idles in one step; 0 for nothing",
        0,
        1000,
        metavar="λ",
    )
    refresh_tokens: int = integer(
        _POLICY_DEFAULTS.refresh_tokens,
        "tokens between two predictions of a request",
        1,
        10**9,
        metavar="M",
    )
    bypass_slots: int = integer(
        _POLICY_DEFAULTS.bypass_slots,
        "requests beyond its batch that br-0-bypass may send to a rank",
        0,
        10**9,
    )
    kv_peak_quantile: float | None = number(
        None,
        "with the KV tokens of a rank known: it takes a request only if this quantile of what its "
        "requests will hold fits, until they end",
        0.5,
        0.999999,
        word="none",
        metavar="Q",
    )
    paper: bool = switch(
        False, "the paper's exact two-stage rule and projection, at its operating point"
    )

    @property
    def settings(self) -> PolicySettings:
        """The same under the policies' own names."""
        return part(PolicySettings, self, horizon_steps=self.horizon, form=self.projection)


# The settings of the limit on requests in flight.

_PRESETS: dict[str, AimdSettings | None] = {"off": None, "post5": POST_5, "post4": POST_4}
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
        words(_PRESETS),
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

    @property
    def settings(self) -> AimdSettings | None:
        """The controller's settings; None without a limit."""
        preset = _PRESETS[self.aimd]
        if preset is None:
            return None
        low = self.aimd_min or min(preset.cap_min, self.aimd_max or preset.cap_min)
        high = self.aimd_max or max(preset.cap_max, low)
        tpot_ms = self.aimd_tpot_ms
        return replace(
            preset,
            target_ns=round(1e9 * self.aimd_ttft_s),
            tpot_target_ns=None if tpot_ms is None else round(1e6 * tpot_ms),
            cap_min=low,
            cap_max=high,
            cap_initial=min(max(preset.cap_initial, low), high),
        )

    @property
    def queue_ttl_s(self) -> float | None:
        """How long requests wait before prefill unless that is set; None without a limit."""
        if self.aimd == "off":
            return None
        return _POST_4_TIMEOUT_S if self.aimd == "post4" else _TIMEOUT_SHARE * self.aimd_ttft_s

    def too_long(self, queue_ttl_s: float, pool_ttl_s: float | None) -> str | None:
        """Return why the target cannot be kept, if requests may wait for longer than it.

        Args:
            queue_ttl_s: How long before prefill.
            pool_ttl_s: How long after it for the first token; None if they do not.
        """
        if self.aimd == "off" or queue_ttl_s + (pool_ttl_s or 0.0) <= self.aimd_ttft_s:
            return None
        pool = "" if pool_ttl_s is None else f" + --pool-ttl-s ({pool_ttl_s:g})"
        return (
            f"requests may wait for longer than --aimd-ttft-s ({self.aimd_ttft_s:g}): --queue-ttl-s "
            f"({queue_ttl_s:g}){pool}"
        )


# The settings of prefill choices by a score.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """Which prefillers are scored at all; see `ScoreLimits`."""

    prefill_waiting_limit: int | None = integer(
        None,
        "with a --prefill-choice by score, requests that may wait on a prefiller",
        0,
        10**6,
        word="none",
    )
    prefill_running_limit: int | None = integer(
        None, "likewise, requests that may run on it", 0, 10**6, word="none"
    )
    prefill_share_limit: float | None = number(
        None,
        "likewise, its share of the requests between two scrapes",
        0.01,
        1,
        shown_default="no limit",
        word="none",
    )

    @property
    def limits(self) -> ScoreLimits:
        """The limits as a choice takes them."""
        return ScoreLimits(
            self.prefill_waiting_limit, self.prefill_running_limit, self.prefill_share_limit
        )
