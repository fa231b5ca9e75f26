"""The parameters of the two-stage rule."""

from dataclasses import dataclass

from balanceroute.proxy.core.balance import Weights


@dataclass(frozen=True, slots=True)
class TwoStageSettings:
    """The parameters of the rule.

    Attributes:
        weights: F's weights; with a `gamma`, those for a fleet without turnover.
        theta: Free slots that Stage 1 leaves to Stage 2 when the pool exceeds the free slots.
        window: K, the entries that Stage 2 considers.
        patience: Overtakings that offset an overflow of one mean prompt; inf for no credit.
        hold_ns: Time in the pool for which a request may be held, see `hold`.
        prefix_affinity: Tokens of F for a token that a rank need not pull, see `affinity`; 0 for none.
        gamma: The discount of `weights`, lowered as slots turn over; None keeps the weights.
        paper: Use the paper's stages and candidates, without target, credit or reservations.
    """

    weights: Weights
    theta: int
    window: int
    patience: float
    hold_ns: int = 0
    prefix_affinity: float = 0.0
    gamma: float | None = None
    paper: bool = False
