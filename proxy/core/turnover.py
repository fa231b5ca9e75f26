"""How fast a fleet's slots turn over, and how long requests of a size stay."""

# Steps that the rate covers: some 50 departures with 8 ranks x 16 slots on the Mooncake trace.
_WINDOW_STEPS = 128
# Departures that the stay of a size covers.
_WINDOW_DEPARTURES = 32


class Turnover:
    """Requests that leave a fleet: means at first, exponential averages later.

    It counts departures, not admissions. In steady state they are as many, but the admissions that
    fill an empty fleet say nothing about how long requests stay.

    Attributes:
        per_step: Requests that leave in a step; 0 before the first step.
    """

    def __init__(self) -> None:
        self.per_step = 0.0
        self._steps = 0
        self._left = 0
        # By size class, the number of bits of the KV tokens: departures, and their mean stay.
        self._stays: dict[int, tuple[int, float]] = {}

    def leave(self, kv_tokens: int, steps: int) -> None:
        """Note that a request of `kv_tokens` left its rank after `steps`."""
        self._left += 1
        size = kv_tokens.bit_length()
        count, mean = self._stays.get(size, (0, 0.0))
        count = min(count + 1, _WINDOW_DEPARTURES)
        self._stays[size] = count, mean + (steps - mean) / count

    def step(self) -> None:
        """Advance by one step."""
        self._steps = min(self._steps + 1, _WINDOW_STEPS)
        self.per_step += (self._left - self.per_step) / self._steps
        self._left = 0

    def stay_steps(self, kv_tokens: int) -> float | None:
        """Return the mean stay of requests of about that size; None before the first departure.

        A size that never left is taken for the nearest one that did, of two the smaller.
        """
        if not self._stays:
            return None
        size = kv_tokens.bit_length()
        nearest = min(self._stays, key=lambda known: (abs(known - size), known))
        return self._stays[nearest][1]
