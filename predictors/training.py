"""Predictors trained on requests of the past, by name."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from balanceroute.predictors.base import PastRequest
from balanceroute.predictors.exact_match import ExactMatch
from balanceroute.predictors.gbdt_trees import require_lightgbm
from balanceroute.predictors.state import Savable
from balanceroute.predictors.survival import Survival
from balanceroute.proxy.core.errors import ConfigError

KINDS = ("survival", "exact-match", "gbdt")
"""The predictors that can be trained."""


def require(kind: str) -> None:
    """Find out whether a kind can be trained here, before a trace is read for it.

    Raises:
        ConfigError: A library that it needs is not installed.
    """
    if kind == "gbdt":
        require_lightgbm()


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
        progress: Told the stage and the share of it that is done.

    Raises:
        ConfigError: The kind is unknown, a library that it needs is not installed, or the requests
            do not suffice.
    """
    match kind:
        case "survival":
            return survival_of(past)
        case "exact-match":
            return ExactMatch(past)
        case "gbdt":
            # Here alone: its library is an extra.
            from balanceroute.predictors import gbdt_training  # noqa: PLC0415

            return gbdt_training.train(
                past, horizon_steps=horizon_steps, seed=seed, progress=progress
            )
        case _:
            raise ConfigError(f"unknown kind of predictor: {kind!r}; known: {', '.join(KINDS)}")


def survival_of(past: Sequence[PastRequest]) -> Survival:
    """Return the empirical survival of requests, learned in the order in which they ended."""
    ended = sorted(past, key=attrgetter("finished_s"))
    return Survival(request.output_tokens for request in ended)
