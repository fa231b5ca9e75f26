"""Processes that are killed in a run of several: which, when, and for how long they are gone."""

import random
from dataclasses import dataclass

# A process is begun again within this time.
_DOWN_S = (0.05, 1.5)
# A scheduler process that lives so long has made again what others have removed.
_MADE_AGAIN_S = 1.5


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill.

    Attributes:
        at_s: When, from the beginning of the run.
        relay: Which relay; None for the scheduler process.
        down_s: How long until another process takes its place.
    """

    at_s: float
    relay: int | None
    down_s: float


def draw_kills(rng: random.Random, *, relays: int, span_s: float) -> list[Kill]:
    """Return kills in the first part of a run, so that all processes are back at its end."""
    return sorted(
        (
            Kill(
                rng.uniform(0.02, 0.8) * span_s,
                rng.choice([*range(relays), None]),
                rng.uniform(*_DOWN_S),
            )
            for _ in range(rng.randint(1, 5))
        ),
        key=lambda kill: kill.at_s,
    )


def draw_clean_ups(rng: random.Random, kills: list[Kill], *, span_s: float) -> list[float]:
    """Return when the folder of the processes is cleaned by others; often never.

    Not while there is no scheduler process, or so shortly before that nobody knows the orders any more.
    """
    drawn = [rng.uniform(0.02, 0.8) * span_s for _ in range(rng.choice([0, 1, 1, 2]))]
    gone = [
        (kill.at_s - _MADE_AGAIN_S, kill.at_s + kill.down_s + _MADE_AGAIN_S)
        for kill in kills
        if kill.relay is None
    ]
    return [at_s for at_s in drawn if not any(least <= at_s <= most for least, most in gone)]
