"""The predictors of BR-H, in one simulated run.

A run's predictor starts with the requests before its segment and learns from those that finish, as in
a proxy that has served them. A trained predictor starts with its file.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import structs

from balanceroute.predictors import (
    Hinted,
    NoPrediction,
    Oracle,
    Predictor,
    RequestFeatures,
    Survival,
)
from balanceroute.predictors.files import load
from balanceroute.predictors.hinted import Hint
from balanceroute.predictors.outside import Checked
from balanceroute.predictors.registry import KINDS, train
from balanceroute.predictors.traced import past_requests
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import RequestId
from balanceroute.proxy.core.outside import outside_name
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.sim.workload import Workload

Forecast = Callable[[Workload, PolicySettings], Predictor]
"""Makes the predictor of one run."""


def _oracle(workload: Workload, _: PolicySettings) -> Predictor:
    outputs = [request.output_tokens for request in workload.requests]
    return Oracle({RequestId(i): tokens for i, tokens in enumerate(outputs)})


def _trained(kind: str, workload: Workload, settings: PolicySettings) -> Predictor:
    try:
        return train(kind, past_requests(workload.history), horizon_steps=settings.steps_ahead)
    except ConfigError as error:
        raise ConfigError(f"{error}: --known N has it learn from the first N") from None


def _survival(workload: Workload, _: PolicySettings | None = None) -> Predictor:
    # In the order of arrival, as for all figures that are published.
    return Survival(request.output_tokens for request in workload.history)


class _Thirds(Hinted):
    """Is told of each request whether its output is in the short, middle or long third."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(_survival(workload))
        played = [request.output_tokens for request in workload.requests]
        known = [request.output_tokens for request in workload.history]
        thirds = np.quantile(known + played, [1 / 3, 2 / 3])
        # A hint is the limit of a third: numbers that only tell them apart.
        limits = np.append(np.rint(thirds).astype(np.int64), max(known + played))
        self._third = limits[np.searchsorted(thirds, played)].tolist()
        for third, output in zip(
            limits[np.searchsorted(thirds, known)].tolist(), known, strict=True
        ):
            self.learn(Hint(third, "client"), output)

    def begin(self, request: RequestId, features: RequestFeatures) -> None:
        """Note the third as the hint."""
        super().begin(request, structs.replace(features, expected_tokens=self._third[request]))


def _none(_: Workload, __: PolicySettings) -> Predictor:
    return NoPrediction()


FORECASTS: dict[str, Forecast] = {
    **{kind: partial(_trained, kind) for kind in KINDS},
    "survival": _survival,
    "thirds": lambda workload, _: _Thirds(workload),
    "oracle": _oracle,
    "none": _none,
}


def _outside(name: str, workload: Workload) -> Predictor:
    predictor = Checked(name)
    # Behind those of the run.
    for number, past in enumerate(past_requests(workload.history), len(workload.requests)):
        predictor.begin(RequestId(number), past.features)
        predictor.observe(RequestId(number), past.output_tokens)
    return predictor


def forecast_called(word: str) -> Forecast:
    """Return one of `FORECASTS`, or that of a trained predictor's file or of one from outside.

    Raises:
        ConfigError: Neither is called so.
    """
    if word in FORECASTS:
        return FORECASTS[word]
    path = Path(word)
    if not path.is_file():
        outside = outside_name("predictors", word)
        if outside is not None:
            return lambda workload, _: _outside(outside, workload)
        raise ConfigError(f"{word!r} is no file, and none of {', '.join(FORECASTS)}")
    # Read for every run: what it learns in one must not be known in the next.
    return lambda _, __: load(path)
