"""Arrivals that a choice of a model is trained and judged on.

Source: Jha and Chuppala, "Quality-of-Service Aware LLM Serving", sections 5.1.1 to 5.1.3.
"""

from collections.abc import Iterator

import numpy as np

LEAST_RATE, LARGEST_RATE = 0.25, 48.0  # Requests a second.
_PHASE_REQUESTS = (20, 400)


def stable(rate_per_s: float, requests: int, random: np.random.Generator) -> Iterator[float]:
    """Yield the gaps of a Poisson process, in ms."""
    for gap in random.exponential(1e3 / rate_per_s, requests):
        yield float(gap)


def bursty(requests: int, random: np.random.Generator) -> Iterator[float]:
    """Yield the gaps of a process whose rate changes after some requests, both drawn, in ms."""
    left = requests
    while left:
        phase = min(left, int(random.integers(*_PHASE_REQUESTS)))
        yield from stable(float(random.uniform(LEAST_RATE, LARGEST_RATE)), phase, random)
        left -= phase
