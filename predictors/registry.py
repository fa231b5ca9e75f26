"""The predictors that learn, by name: to add one is a file, and its line in `KINDS`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from balanceroute.predictors import gbdt_training
from balanceroute.predictors.base import PastRequest
from balanceroute.predictors.exact_match import ExactMatch
from balanceroute.predictors.gbdt import Gbdt
from balanceroute.predictors.gbdt_trees import require_lightgbm
from balanceroute.predictors.state import Savable, State
from balanceroute.predictors.survival import Survival
from balanceroute.proxy.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """How predictors of one kind are made.

    Attributes:
        restored: Returns one that has learned what a state says; see `Savable.from_state`.
        trained: Returns one that has learned from requests of the past; takes what `train` takes.
        untrained: Returns one that has learned nothing; None if it has to be trained.
        require: Raises `ConfigError` if a library that it needs is not installed.
    """

    restored: Callable[[State], Savable]
    trained: Callable[..., Savable]
    untrained: Callable[[], Savable] | None = None
    require: Callable[[], object] = lambda: None


KINDS = {
    "survival": Kind(
        Survival.from_state, lambda past, **_: Survival.of_past(past), untrained=Survival
    ),
    "exact-match": Kind(
        ExactMatch.from_state, lambda past, **_: ExactMatch(past), untrained=ExactMatch
    ),
    "gbdt": Kind(Gbdt.from_state, gbdt_training.train, require=require_lightgbm),
}
"""By the name on the command line, which is the `kind` of their states too."""


def train(
    kind: str,
    past: Sequence[PastRequest],
    *,
    horizon_steps: int = 40,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda _stage, _share: None,
) -> Savable:
    """Return a predictor that has learned from requests of the past.

    Args:
        kind: One of `KINDS`.
        past: The requests, in any order.
        horizon_steps: How far ahead a learned model is fitted; the others need not know.
        seed: Of what is drawn.
        progress: Called with the stage and the share of it that is done.

    Raises:
        ConfigError: The kind is unknown, a library that it needs is not installed, or the requests
            do not suffice.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of predictor: {kind!r}; known: {', '.join(KINDS)}")
    return KINDS[kind].trained(past, horizon_steps=horizon_steps, seed=seed, progress=progress)
