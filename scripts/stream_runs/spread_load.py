"""Requests of three classes, spread over some seconds; see stream_orders.py."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from balanceroute.proxy.testing.virtual.datagrams import ThinLinkSettings

REQUESTS = 90
LINK = ThinLinkSettings(bits_per_s=5e6, delay_s=0.025, loss=0.005)


@dataclass(frozen=True)
class Kind:
    """A class of requests."""

    name: str
    size: int
    due_s: float
    urgency: int


KINDS = (
    Kind("real-time", 8_000, 1.0, 2),
    Kind("free", 8_000, 2.0, 3),
    Kind("long", 102_400, 7.0, 3),
)


@dataclass(frozen=True)
class Planned:
    """A request, and when it is sent."""

    kind: Kind
    at_s: float


def plan(seed: int, spread_s: float, count: int = REQUESTS) -> list[Planned]:
    """Return the requests of a seed, by time."""
    rng = random.Random(seed)
    drawn = [Planned(rng.choice(KINDS), rng.uniform(0.0, spread_s)) for _ in range(count)]
    return sorted(drawn, key=lambda one: one.at_s)


def shares(took: Sequence[tuple[Kind, float]]) -> dict[str, float]:
    """Return the share of each class that was in time, in percent."""
    found = {}
    for kind in KINDS:
        times = [time_s for one, time_s in took if one is kind]
        found[kind.name] = 100 * fmean(time_s <= kind.due_s for time_s in times)
    return found
