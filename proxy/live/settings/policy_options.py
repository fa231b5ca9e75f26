"""The settings of the policies."""

from dataclasses import dataclass
from math import inf

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
from balanceroute.proxy.core.projection import Form
from balanceroute.proxy.live.settings.setting import (
    choice,
    integer,
    named,
    number,
    part,
    switch,
)

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
