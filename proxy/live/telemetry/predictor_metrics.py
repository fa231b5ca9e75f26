"""Metrics of predictors: their work, their errors, and their saved state."""

from balanceroute.proxy.live.telemetry.registry import TOKENS_BOUNDS, WORK_BOUNDS_S, Registry


class PredictorMetrics:
    """Counts what predictors do."""

    def __init__(self, registry: Registry) -> None:
        self._refreshes = registry.counter("predictor_refreshes", "Predictions renewed.")
        self._state_saves = registry.counter(
            "predictor_state_saves", "Times the predictor's state was to be saved.", "outcome"
        )
        self._state_refusals = registry.counter(
            "predictor_state_refusals", "Saved states of the predictor that could not be used."
        )
        self._refresh = registry.histogram(
            "predictor_refresh_duration_seconds",
            "Time of one batch of refreshed predictions.",
            WORK_BOUNDS_S,
        )
        self._error = registry.histogram(
            "predictor_error_tokens",
            "Distance of a prediction from what the request had left.",
            TOKENS_BOUNDS,
        )
        self._scoring = registry.histogram(
            "predictor_scoring_duration_seconds",
            "Time of asking all predictors, shadows too, for their scores alone.",
            WORK_BOUNDS_S,
        )
        for outcome in ("ok", "failed"):  # An alert finds no data in a sample that is absent.
            self._state_saves.labels(outcome)

    def refreshed(self, count: int, seconds: float) -> None:
        """Count one batch of `count` refreshed predictions and the time it took."""
        self._refreshes.inc(count)
        self._refresh.observe(seconds)

    def error(self, abs_tokens: float) -> None:
        """Count one prediction that has come due, by how many tokens it was off."""
        self._error.observe(abs_tokens)

    def scored(self, seconds: float) -> None:
        """Count one batch of questions to all predictors and the time it took."""
        self._scoring.observe(seconds)

    def state_saved(self, *, ok: bool) -> None:
        """Count one attempt to save what the predictor has learned."""
        self._state_saves.labels("ok" if ok else "failed").inc()

    def state_refused(self) -> None:
        """Count one saved state that could not be used."""
        self._state_refusals.inc()
