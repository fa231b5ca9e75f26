"""The latency that a request would meet in a deployment if it were sent there now."""

from math import inf

from balanceroute.proxy.live.openai.shape import Shape
from balanceroute.proxy.live.scheduling.driver import Driver

_NS_PER_MS = 1e6


class Forecast:
    """Asked for every request that leaves the choice of its model to the proxy.

    The time per output token is that of a step with the present loads, all requests that wait, and this
    one: by the measured line of step times over loads, where steps had enough different loads to
    fit it, else as steps are now. The time to the first token is the wait for a prefiller or for a
    slot, whichever is longer, with the prefill and the first step. What was never measured takes no
    time, so that a group which is new or empty is tried. Requests that wait before prefill count with
    the length of this one.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __call__(self, shape: Shape) -> tuple[float, float]:
        """Return the time per output token and to the first one, in ms; inf if no rank is open."""
        driver, scheduler = self._driver, self._driver.scheduler
        ranks = [rank.id for rank in driver.instances.ranks if rank.open]
        if not ranks:
            return inf, inf
        prompt_tokens = driver.prompt_tokens(shape)
        queued_tokens = scheduler.prefill_queue.waiting * prompt_tokens
        joining = sum(scheduler.prefillers.held_tokens) + queued_tokens + prompt_tokens
        envelope = int(scheduler.ledger.loads[ranks].max()) + joining / len(ranks)
        step_ns = self._step_ns(envelope)
        free = int(scheduler.free_slots()[ranks].sum())
        wait_ns = max(
            self._prefill_ns(queued_tokens, prompt_tokens),
            self._slot_ns(scheduler.waiting + shape.sequences - free),
        )
        return step_ns / _NS_PER_MS, (wait_ns + step_ns) / _NS_PER_MS

    def _step_ns(self, envelope_tokens: float) -> float:
        scheduler, pace = self._driver.scheduler, self._driver.scheduler.leases.pace
        known = None if pace is None else pace.step_model.step_ns(envelope_tokens)
        if known is not None:
            return known
        # An old mean says nothing of a deployment that is empty now.
        return 1e9 * self._driver.decisions.progress.steps.step_s if scheduler.requests else 0.0

    def _prefill_ns(self, queued_tokens: int, prompt_tokens: int) -> float:
        pace = self._driver.scheduler.leases.pace
        per_token_ns = None if pace is None else pace.prefill_ns_per_token
        if pace is None or per_token_ns is None:
            return 0.0
        prefillers = max(1, sum(one.open for one in self._driver.instances.prefillers))
        ahead = (pace.prefilling_tokens + queued_tokens) / prefillers
        return per_token_ns * (ahead + prompt_tokens)

    def _slot_ns(self, missing: int) -> float:
        """Return the time until so many requests have left the ranks."""
        if missing <= 0:
            return 0.0
        pace = self._driver.scheduler.leases.pace
        rate = None if pace is None else pace.departures_per_ns
        return missing / rate if rate else inf
