"""Energy lost at the barrier, by a model of two levels.

A rank draws P while it computes and s P while it waits for the others. It waits for the share
w = idle x (1 - a / T) of a step of T = a + b max L: the time a is the same on all ranks. Of the energy
that all ranks draw, (s w) / (1 - (1 - s) w) goes into waiting. s is between two measurements: an
accelerator that polls while it waits draws what it draws in a kernel (s = 1), and one that waits as if
it had next to nothing to do draws 137 of 300 W (H200, https://arxiv.org/abs/2605.11999).
"""

IDLE_SHARES = (137 / 300, 1.0)
"""s, from the least to the most."""


def lost_shares(idle: float, *, base_ms: float, step_ms: float) -> tuple[float, float]:
    """Return the share of the energy that goes into waiting, for each of `IDLE_SHARES`."""
    waiting = idle * (1.0 - base_ms / step_ms)
    low, high = (share * waiting / (1.0 - (1.0 - share) * waiting) for share in IDLE_SHARES)
    return low, high
