"""The measured rate at which a fleet's slots turn over."""

# Steps that the average covers: some 50 departures with 8 ranks x 16 slots on the Mooncake trace.
_WINDOW_STEPS = 128


class Turnover:
    """Requests that leave a rank, per step: the mean at first, an exponential average later.

    It counts departures, not admissions. In steady state they are as many, but the admissions that
    fill an empty fleet say nothing about how long requests stay.

    Attributes:
        per_rank_step: The rate, in requests per rank and step; 0 before the first step.
    """

    def __init__(self, ranks: int) -> None:
        self.per_rank_step = 0.0
        self._ranks = ranks
        self._steps = 0
        self._left = 0

    def leave(self) -> None:
        """Note that a request left its rank."""
        self._left += 1

    def step(self) -> None:
        """Advance by one step."""
        self._steps = min(self._steps + 1, _WINDOW_STEPS)
        self.per_rank_step += (self._left / self._ranks - self.per_rank_step) / self._steps
        self._left = 0
