"""The routing policies by name.

| name | binds | rule |
| --- | --- | --- |
| `random` | early | a rank drawn at random, uniformly |
| `round-robin` | early | the ranks in turn |
| `power-of-two` | early | the shorter queue of two drawn ranks |
| `jsq` | early | the rank with the fewest slots taken |
| `least-kv` | early | the rank with the fewest KV tokens |
| `fifo` | late | the oldest request to the least-loaded rank with a free slot |
| `br-0` | late | two-stage rule on the present step |
| `br-0-bypass` | early, bounded | BR-0's score, one request at a time |
| `br-h` | late | two-stage rule over a horizon, with predictions |
| `dynamo-kv` | early | fewest KV blocks, decayed towards the expected end (Dynamo) |
| `smg-least-load` | early | shortest queue in seconds, plus KV pressure (SMG) |
| `s1-enhanced`, `s2-enhanced`, `s2-dynamic-waiting` | early | drawn by a score (TBLB) |
| `llmd-token-load` | early | fewest expected output tokens, in three buckets (llm-d) |

`module:function` is a policy from outside this package.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from balanceroute.proxy.core.config import is_outside, made
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.policies.oldest_first import OldestFirst, least_kv_with_room
from balanceroute.proxy.core.policies.own_trajectory import OwnTrajectory
from balanceroute.proxy.core.policies.stage_2 import choose_subsets, choose_subsets_of_largest
from balanceroute.proxy.core.policies.two_stage import TwoStage, TwoStageSettings, ignore_stage
from balanceroute.proxy.core.prefill import ScoreSettings
from balanceroute.proxy.core.projection import Form, Projection, Weights
from balanceroute.proxy.core.ranks import Assignment, Fleet, Policy
from balanceroute.proxy.core.setting import check_ranges, choice, integer, named, number, switch
from balanceroute.proxy.core.subset import discounts
from balanceroute.proxy.core.waiting import PoolEntry

if TYPE_CHECKING:
    import random

    from balanceroute.proxy.core.prediction import OutputPredictor

__all__ = [
    "POLICIES",
    "PREDICTING",
    "Assignment",
    "Fleet",
    "OldestFirst",
    "Policy",
    "PolicyInputs",
    "PolicySettings",
    "PoolEntry",
    "is_outside",
    "make_policy",
    "predicts",
    "skill_share",
]


# Chosen on the public traces: from 0.75 to 1.5 the p99 wait rises from 24 to 26 s.
PATIENCE_PER_SLOT = 1.25
# From 32 on the saturated results are the same within their errors.
WINDOW = 64
HORIZON, GAMMA = 40, 0.8
# The paper's operating point.
PAPER_HORIZON, PAPER_GAMMA, PAPER_BETA, PAPER_WINDOW = 80, 0.9, 48.0, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The parameters of the policies. None selects the default, or with `paper` what the paper has."""

    form: Form | None = choice(
        None,
        "how br-h uses a prediction",
        {"auto": None, **named(Form)},
        shown_default="expected; point with --paper",
        name="projection",
    )
    horizon_steps: int | None = integer(
        None,
        "steps that br-h looks ahead",
        0,
        10_000,
        shown_default=f"{HORIZON}; {PAPER_HORIZON} with --paper",
        word="auto",
        metavar="H",
        name="horizon",
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
        1.0,
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
        2.0,
        "wait for room, while slots abound, of a request too large for every rank; 0 for none",
        0,
        60,
        metavar="S",
    )
    prefix_affinity: float = number(
        0.0,
        "what a prompt token counts that a rank has in its prefix cache and need not pull, in tokens "
        "that a rank idles in one step; 0 for nothing",
        0,
        1000,
        metavar="λ",
    )
    refresh_tokens: int = integer(
        20,
        "tokens between two predictions of a request",
        1,
        10**9,
        metavar="M",
    )
    bypass_slots: int = integer(
        2,
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

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def steps_ahead(self) -> int:
        if self.horizon_steps is not None:
            return self.horizon_steps
        return PAPER_HORIZON if self.paper else HORIZON

    def resolved(self, *, ranks: int, batch_limit: int) -> "PolicySettings":
        """Return the settings with every None replaced by its default for the fleet."""
        default = Form.POINT if self.paper else Form.EXPECTED
        return replace(
            self,
            horizon_steps=self.steps_ahead,
            # Zeros were rejected above, so `or` replaces None only.
            gamma=self.gamma or (PAPER_GAMMA if self.paper else GAMMA),
            beta=self.beta or (PAPER_BETA if self.paper else float(ranks)),
            window=self.window or (PAPER_WINDOW if self.paper else WINDOW),
            theta=ranks if self.theta is None else self.theta,
            patience=self.patience or PATIENCE_PER_SLOT * ranks * batch_limit,
            form=self.form or default,
        )


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    ranks: int  # All that have numbers.
    batch_limit: int  # B.
    settings: PolicySettings  # The parameters.
    rng: "random.Random"  # Seeded generator for the randomised baselines.
    predictor: "OutputPredictor"  # The predictor of the policies in `PREDICTING`.
    # Called with the name of each dispatch stage as it ends.
    on_stage: Callable[[str], None] = ignore_stage
    rank_kv_tokens: int | None = None  # KV tokens that fit on a rank; None for no limit.
    # The ranks that are not removed, of which parameters are multiples; None for all.
    serving: int | None = None
    scores: ScoreSettings = ScoreSettings()  # For policies by a score.

    @property
    def fleet_size(self) -> int:
        """G without removed ranks, whose numbers are never used again."""
        return self.ranks if self.serving is None else max(1, self.serving)


def _two_stage(
    inputs: PolicyInputs,
    weights: Weights,
    projection: Projection | None,
    gamma: float | None = None,
    own_trajectory: OwnTrajectory | None = None,
) -> TwoStage:
    chosen = inputs.settings
    assert chosen.theta is not None
    assert chosen.patience is not None
    assert chosen.window is not None
    settings = TwoStageSettings(
        weights=weights,
        theta=chosen.theta,
        window=chosen.window,
        patience=chosen.patience,
        hold_ns=0 if chosen.paper else round(chosen.hold_s * 1e9),
        prefix_affinity=0.0 if chosen.paper else chosen.prefix_affinity,
        gamma=gamma,
        paper=chosen.paper,
    )
    stage_2 = choose_subsets_of_largest if chosen.paper else choose_subsets
    return TwoStage(settings, projection, stage_2, inputs.on_stage, own_trajectory)


def _br_0(inputs: PolicyInputs) -> Policy:
    # With these weights F is minus the change of the total imbalance. Paper: §3.1, Eq. 1.
    weights = Weights(np.ones(1), alpha=1.0, beta=float(inputs.fleet_size))
    return _two_stage(inputs, weights, None)


def _br_h(inputs: PolicyInputs) -> Policy:
    settings = inputs.settings
    assert settings.beta is not None
    assert settings.form is not None
    assert settings.gamma is not None
    steps = discounts(settings.steps_ahead, settings.gamma)
    weights = Weights(steps, alpha=settings.alpha, beta=settings.beta)
    # Without steps ahead there is nothing to project.
    if settings.steps_ahead == 0:
        return _two_stage(inputs, weights, None)
    projection = Projection(
        ranks=inputs.ranks,
        horizon_steps=settings.steps_ahead,
        refresh_tokens=settings.refresh_tokens,
        predictor=inputs.predictor,
        form=settings.form,
    )
    if settings.paper:
        # The paper's discount is constant; ours falls with the turnover.
        return _two_stage(inputs, weights, projection)
    own_trajectory = OwnTrajectory(projection, inputs.predictor, inputs.on_stage)
    return _two_stage(inputs, weights, projection, settings.gamma, own_trajectory)


def _baselines() -> ModuleType:
    """Return the module of the policies for comparison; it loads at its first use."""
    from balanceroute.proxy.core.policies import baselines  # noqa: PLC0415

    return baselines


def _early(choose: Callable[[Fleet, PoolEntry], int | None]) -> Policy:
    return OldestFirst(choose, slots_beyond_batch=None)


def _scored(name: str, inputs: PolicyInputs) -> Policy:
    from balanceroute.proxy.core.prefill.choices import SCORES  # noqa: PLC0415

    scores = SCORES[name](inputs.scores)
    return _early(_baselines().ScoredRank(scores, inputs.rng, inputs.batch_limit))


POLICIES: dict[str, Callable[[PolicyInputs], Policy]] = {
    "random": lambda inputs: _early(_baselines().RandomRank(inputs.rng)),
    "round-robin": lambda _: _early(_baselines().RoundRobin()),
    "power-of-two": lambda inputs: _early(_baselines().PowerOfTwo(inputs.rng)),
    "jsq": lambda _: _early(_baselines().shortest_queue),
    "least-kv": lambda _: _early(_baselines().least_kv),
    # No slots beyond the batch is late binding: a request leaves the pool only for a free slot.
    "fifo": lambda _: OldestFirst(least_kv_with_room, slots_beyond_batch=0),
    "br-0": _br_0,
    "br-0-bypass": lambda inputs: OldestFirst(
        _baselines().BestScore(inputs.settings.prefix_affinity),
        slots_beyond_batch=inputs.settings.bypass_slots,
    ),
    "br-h": _br_h,
    "dynamo-kv": lambda inputs: _baselines().LeastCharged(
        _baselines().decayed_blocks, predictor=inputs.predictor
    ),
    "smg-least-load": lambda inputs: _baselines().LeastCharged(
        _baselines().queued_s, pressure=_baselines().kv_pressure(inputs.rank_kv_tokens)
    ),
    "s1-enhanced": lambda inputs: _scored("s1-enhanced", inputs),
    "s2-enhanced": lambda inputs: _scored("s2-enhanced", inputs),
    "s2-dynamic-waiting": lambda inputs: _scored("s2-dynamic-waiting", inputs),
    "llmd-token-load": lambda inputs: _baselines().LeastCharged(
        _baselines().bucket_tokens, predictor=inputs.predictor
    ),
}

# Of a policy.
_MEMBERS = ("slots_beyond_batch", "projection", "next_decision_ns", "dispatch")
# The policies that use the predictor.
PREDICTING = frozenset({"br-h", "dynamo-kv", "llmd-token-load"})


def predicts(name: str) -> bool:
    """Return whether a policy uses the predictor, or may use it."""
    return name in PREDICTING or is_outside(name)


def skill_share(policy: Policy) -> float | None:
    """Return how much of a prediction counts, 0 to 1; None if the policy does not weigh it."""
    share: float | None = getattr(policy, "skill_share", None)
    return share


def make_policy(name: str, inputs: PolicyInputs) -> Policy:
    """Return the policy called `name`, one of `POLICIES` or `module:function`.

    Raises:
        ConfigError: No policy has that name, or the function makes none.
    """
    if name not in POLICIES and not is_outside(name):
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(POLICIES)}")
    settings = inputs.settings.resolved(ranks=inputs.fleet_size, batch_limit=inputs.batch_limit)
    inputs = replace(inputs, settings=settings)
    policy = POLICIES[name](inputs) if name in POLICIES else made("policy", name, _MEMBERS, inputs)
    quantile, capacity = settings.kv_peak_quantile, inputs.rank_kv_tokens
    # A policy that binds early ignores memory: requests queue in the engine.
    if quantile is None or capacity is None or policy.slots_beyond_batch is None:
        return policy
    from balanceroute.proxy.core.policies.within_peak import WithinPeak  # noqa: PLC0415

    return WithinPeak(
        policy, inputs.predictor, ranks=inputs.ranks, capacity=capacity, quantile=quantile
    )
