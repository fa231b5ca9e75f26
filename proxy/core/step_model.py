"""The measured cost of a KV token in a step: b of T = a + b x max load."""

# Steps of one point: a driver that infers steps sees each of them end a little early or late.
_POINT_STEPS = 16
# Points that the fit covers. The envelope of a balanced fleet varies little, so it needs many.
_WINDOW_POINTS = 64
# Before so many points a fit means nothing.
_LEAST_POINTS = 4
# b is known if it exceeds its standard error by this factor.
_CERTAINTY = 2.0


class StepModel:
    """A line through the times of steps over their envelopes; older steps fade out."""

    def __init__(self) -> None:
        self._steps = 0
        self._sum_tokens = self._sum_ns = 0.0
        self._weight = 0.0
        self._tokens = self._ns = 0.0  # Means.
        # Sums of products of deviations from the means: updating these is exact, where differences
        # of plain sums would lose the small variance of a balanced fleet's envelope.
        self._tokens_tokens = self._tokens_ns = self._ns_ns = 0.0

    def observe(self, envelope_tokens: int, step_ns: float) -> None:
        """Learn from one step."""
        self._steps += 1
        self._sum_tokens += envelope_tokens
        self._sum_ns += step_ns
        if self._steps == _POINT_STEPS:
            self._add(self._sum_tokens / _POINT_STEPS, self._sum_ns / _POINT_STEPS)
            self._steps = 0
            self._sum_tokens = self._sum_ns = 0.0

    def _add(self, envelope_tokens: float, step_ns: float) -> None:
        keep = 1 - 1 / _WINDOW_POINTS
        self._weight = keep * self._weight + 1
        tokens, ns = envelope_tokens - self._tokens, step_ns - self._ns
        self._tokens += tokens / self._weight
        self._ns += ns / self._weight
        after = envelope_tokens - self._tokens
        self._tokens_tokens = keep * self._tokens_tokens + tokens * after
        self._tokens_ns = keep * self._tokens_ns + ns * after
        self._ns_ns = keep * self._ns_ns + ns * (step_ns - self._ns)

    @property
    def ns_per_token(self) -> float | None:
        """What one KV token adds to a step, in ns; None while it is not known."""
        if self._weight < _LEAST_POINTS or self._tokens_tokens <= 0.0:
            return None
        slope = self._tokens_ns / self._tokens_tokens
        # Rounding may leave a perfect fit a residual below 0.
        residual = max(0.0, self._ns_ns - slope * self._tokens_ns)
        error = (residual / self._weight / self._tokens_tokens) ** 0.5
        return slope if slope > 0.0 and slope >= _CERTAINTY * error else None

    def step_ns(self, envelope_tokens: float) -> float | None:
        """Return what a step with such a load takes, in ns; None while it is not known."""
        slope = self.ns_per_token
        if slope is None:
            return None
        return max(0.0, self._ns + slope * (envelope_tokens - self._tokens))
