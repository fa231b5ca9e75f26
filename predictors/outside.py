"""Predictors from outside this package: a function that takes nothing and returns a `Predictor`."""

from balanceroute.predictors.base import Predictor
from balanceroute.proxy.core.outside import made

_MEMBERS = ("survival", "begin", "observe", "forget")


def outside_predictor(name: str) -> Predictor:
    """Return what `module:function` makes.

    Raises:
        ConfigError: There is no such function, or it makes no predictor.
    """
    predictor: Predictor = made("predictor", name, _MEMBERS)
    return predictor
