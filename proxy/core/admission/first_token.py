"""When the first token of a request that arrives now is to be expected.

Three parts: the wait before prefill, by the requests ahead in the queue's order and the measured rate
at which they start; the prefill, by its prompt and the measured time per token; and the rest (pool, KV
transfer, first step), as it was lately. Those whose first token may be the prefiller's have a rest of
their own, which is none if it is. All are means, so half of the requests take longer.
"""

from math import exp

_S = 1_000_000_000
# Time with a queue that the rate of starts covers, and how much of it is needed to know the rate.
_WINDOW_NS = 10 * _S
_LEAST_NS = 1 * _S
# Requests that the other means cover.
_WINDOW_REQUESTS = 64


class _Mean:
    """A mean at first, an exponential average later; None before the first value."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, _WINDOW_REQUESTS)
        before = value if self.value is None else self.value
        self.value = before + (value - before) / self._count


class FirstTokens:
    """Measures what the time to first token consists of."""

    def __init__(self) -> None:
        # Starts of requests that had waited, and the time in which any waited; both decay.
        self._starts = self._backlog_ns = 0.0
        self._since_ns: int | None = None
        self._prefill_ns_per_token = _Mean()
        self._rest_ns = {early: _Mean() for early in (False, True)}

    def advance(self, now_ns: int, *, waiting: bool) -> None:
        """Note the time; `waiting` is whether anything waited before prefill until now."""
        since_ns, self._since_ns = self._since_ns, now_ns
        if waiting and since_ns is not None:
            passed_ns = now_ns - since_ns
            keep = exp(-passed_ns / _WINDOW_NS)
            self._starts *= keep
            # The integral of the weights, so that a steady rate is measured without bias.
            self._backlog_ns = keep * self._backlog_ns + _WINDOW_NS * (1 - keep)

    def started(self) -> None:
        """Note that a request that had waited before prefill waits no longer."""
        self._starts += 1

    def came(self, prompt_tokens: int, prefill_ns: int, rest_ns: int, *, early: bool) -> None:
        """Note a first token: what its prefill took, and what came after that; `early` as below."""
        self._prefill_ns_per_token.add(prefill_ns / prompt_tokens)
        self._rest_ns[early].add(rest_ns)

    def expected_ns(self, prompt_tokens: int, ahead: int, *, early: bool) -> float | None:
        """Return the expected time to first token; None while too little was measured.

        Args:
            prompt_tokens: Of the request.
            ahead: The requests that will start before it.
            early: Whether its first token may be the prefiller's.
        """
        per_token_ns, rest_ns = self._prefill_ns_per_token.value, self._rest_ns[early].value
        if per_token_ns is None or rest_ns is None:
            return None
        wait_ns = 0.0
        if ahead:
            if self._backlog_ns < _LEAST_NS or not self._starts:
                return None
            # It starts with the start after theirs.
            wait_ns = (ahead + 1) * self._backlog_ns / self._starts
        return wait_ns + per_token_ns * prompt_tokens + rest_ns
