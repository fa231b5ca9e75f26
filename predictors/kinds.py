"""The predictors that learn, by name: to add one is a file, and its line in `KINDS`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from balanceroute.predictors.base import PastRequest
from balanceroute.predictors.state import Savable, State
from balanceroute.predictors.survival import Survival
from balanceroute.proxy.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    # Returns one that has learned what a state says; see `Savable.from_state`.
    restored: Callable[[State], Savable]
    # Returns one that has learned from requests of the past; takes what `train` takes.
    trained: Callable[..., Savable]
    # Returns one that has learned nothing; None if it has to be trained.
    untrained: Callable[[], Savable] | None = None
    # Raises `ConfigError` if a library that it needs is not installed.
    require: Callable[[], object] = lambda: None


# Here, so that no other module imports them.


def _restored_exact_match(state: State) -> Savable:
    from balanceroute.predictors.exact_match import ExactMatch  # noqa: PLC0415

    return ExactMatch.from_state(state)


def _exact_match(past: Sequence[PastRequest] = (), **_: object) -> Savable:
    from balanceroute.predictors.exact_match import ExactMatch  # noqa: PLC0415

    return ExactMatch(past)


def _restored_gbdt(state: State) -> Savable:
    from balanceroute.predictors.gbdt import Gbdt  # noqa: PLC0415

    return Gbdt.from_state(state)


def _trained_gbdt(past: Sequence[PastRequest], **options: Any) -> Savable:
    from balanceroute.predictors.gbdt_training import train  # noqa: PLC0415

    return train(past, **options)


def _require_lightgbm() -> object:
    from balanceroute.predictors.gbdt import require_lightgbm  # noqa: PLC0415

    return require_lightgbm()


KINDS = {
    "survival": Kind(
        Survival.from_state, lambda past, **_: Survival.of_past(past), untrained=Survival
    ),
    "exact-match": Kind(_restored_exact_match, _exact_match, untrained=_exact_match),
    "gbdt": Kind(_restored_gbdt, _trained_gbdt, require=_require_lightgbm),
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
        horizon_steps: How far ahead a learned model is fitted; other kinds ignore it.
        progress: Called with the stage and the share of it that is done.

    Raises:
        ConfigError: The kind is unknown, a library that it needs is not installed, or the requests
            do not suffice.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown kind of predictor: {kind!r}; known: {', '.join(KINDS)}")
    return KINDS[kind].trained(past, horizon_steps=horizon_steps, seed=seed, progress=progress)
