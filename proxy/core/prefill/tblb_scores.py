"""The scores of TBLB: how good an instance is by its metrics, relative to the others.

The formulas are the source's own, also where its documents say otherwise (tests/core/prefill/
test_scored.py has the cases). With two members the logarithm gives 0.2 and 1.0 however close they are,
so that a cache use of 0.20 against 0.21 counts as 0.20 against 0.80; an idle member gets less than that;
and one that is worse in everything may score 0, which excludes it until the next scrape.

Source: https://github.com/f5devcentral/llm-inference-lb, core/score_calculator.py at f254c3e.
"""

from collections.abc import Callable, Sequence
from math import exp, log, log2, tanh

from balanceroute.proxy.core.events import EngineLoad

Scores = Callable[[Sequence[EngineLoad]], list[float]]
Values = Sequence[float]

# Weights of waiting, KV cache and running requests, as the source suggests.
_S1_WEIGHTS = (0.1, 0.9)
_S2_WEIGHTS = (0.5, 0.5, 0.0)
_DYNAMIC_WEIGHTS = (0.4, 0.3, 0.3)
_TRANSITION_POINT = 30.0
_LEAST_DEVIATION = 1e-6


def s1_enhanced(loads: Sequence[EngineLoad]) -> list[float]:
    """Return the scores by waiting requests and KV cache use, each in [0, 1]."""
    return _weighted(_S1_WEIGHTS, (minmax(_waiting(loads)), precise_cache(_kv_usage(loads))))


def s2_enhanced(loads: Sequence[EngineLoad]) -> list[float]:
    """Return the scores by waiting requests, KV cache use and running requests, each in [0, 1]."""
    normalised = (
        minmax(_waiting(loads)),
        precise_cache(_kv_usage(loads)),
        precise_running([load.running for load in loads]),
    )
    return _weighted(_S2_WEIGHTS, normalised)


def s2_dynamic_waiting(loads: Sequence[EngineLoad]) -> list[float]:
    """Return the same, where waiting requests weigh more the more there are."""
    waiting = _waiting(loads)
    intensity = tanh(max(waiting) / _TRANSITION_POINT)
    w_a, w_b, w_g = _DYNAMIC_WEIGHTS
    weights = (
        w_a * (0.1 + 2.4 * intensity),
        w_b * (1.5 - 1.1 * intensity),
        w_g * (1.4 - 0.8 * intensity),
    )
    scale = sum(_DYNAMIC_WEIGHTS) / sum(weights)
    normalised = (
        adaptive_waiting(waiting),
        adaptive_cache(_kv_usage(loads)),
        adaptive([load.running for load in loads]),
    )
    return _weighted([scale * weight for weight in weights], normalised)


def minmax(values: Values) -> list[float]:
    """Return the values scaled to [0, 1]; all 0 if they are equal."""
    low, high = min(values), max(values)
    return [0.0 if high == low else (value - low) / (high - low) for value in values]


def precise_cache(values: Values) -> list[float]:
    """Return the values scaled to [0.2, 1.0] by their logarithm, or by a sigmoid if one is 0."""
    low, high = min(values), max(values)
    if high == low:
        return [0.5] * len(values)
    if low > 0:
        return [0.2 + 0.8 * log2(value / low) / log2(high / low) for value in values]
    mean, deviation = _moments(values)
    return [0.2 + 0.8 / (1.0 + exp(-2.0 * (value - mean) / (3.0 * deviation))) for value in values]


def precise_running(values: Values) -> list[float]:
    """Return the values plus 1 scaled to [0.15, 0.95] by their logarithm."""
    low, high = min(values) + 1, max(values) + 1
    if high == low:
        return [0.5] * len(values)
    return [0.15 + 0.8 * log2((value + 1) / low) / log2(high / low) for value in values]


def adaptive_waiting(values: Values) -> list[float]:
    """Return `adaptive` of waiting requests, of their logarithm if they differ by a factor of ten."""
    if len(values) > 1 and max(values) > 10 * min(values):
        return adaptive([log(max(1.0, value + 1)) for value in values])
    return adaptive(values)


def adaptive_cache(values: Values) -> list[float]:
    """Return `adaptive` of KV cache use, more sensitive."""
    return adaptive(values, sensitive=True)


def adaptive(values: Values, *, sensitive: bool = False) -> list[float]:
    """Return the values scaled by a sigmoid whose slope and range follow from how they vary."""
    if len(values) == 1:
        return [0.5]
    mean, deviation = _moments(values)
    deviation = deviation or _LEAST_DEVIATION
    variation = deviation / mean if mean > _LEAST_DEVIATION else deviation
    if variation < 0.1:
        sensitivity, low, high = 3.0, 0.4, 0.6
    elif variation < 0.3:
        sensitivity, low, high = 2.0, 0.25, 0.75
    elif variation < 0.8:
        sensitivity, low, high = 1.5, 0.15, 0.85
    else:
        sensitivity, low, high = 1.0, 0.1, 0.9
    if sensitive:
        sensitivity *= 1.5
        low, high = (0.35, 0.65) if variation < 0.2 else (low, high)
    if deviation <= _LEAST_DEVIATION:
        return [(low + high) / 2] * len(values)
    return [
        low + (high - low) * (0.5 + 0.5 * tanh(sensitivity * (value - mean) / deviation / 2))
        for value in values
    ]


def _moments(values: Values) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5


def _weighted(weights: Values, normalised: Sequence[Values]) -> list[float]:
    members = zip(*normalised, strict=True)
    sums = [
        sum(weight * (1.0 - bad) for weight, bad in zip(weights, one, strict=True))
        for one in members
    ]
    return [max(0.0, min(1.0, one)) for one in sums]


def _waiting(loads: Sequence[EngineLoad]) -> list[float]:
    return [load.waiting for load in loads]


def _kv_usage(loads: Sequence[EngineLoad]) -> list[float]:
    return [load.kv_usage for load in loads]
