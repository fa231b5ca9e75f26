"""Whether an attempt that failed is followed by another, and whom the failure is told."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from balanceroute.proxy.live.request.failures import Blame, Failure, Next, What, triage
from balanceroute.proxy.live.telemetry.record import Leg

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.live.engines.faults import Fault
    from balanceroute.proxy.live.request.holding import Attempt
    from balanceroute.proxy.live.request.session_host import Host


@dataclass(frozen=True, slots=True)
class Retry:
    """How a request goes on after a failure.

    Attributes:
        then: What it is to try next.
        same_rank: Whether the rank that failed may be tried again.
        delay_s: How long it waits before.
    """

    then: Next
    same_rank: bool
    delay_s: float


class Recovery:
    """What one request has been through."""

    __slots__ = ("_deaths", "_host", "_number", "_tries")

    def __init__(self, number: "RequestId", host: "Host") -> None:
        self._number = number
        self._host = host
        self._tries: dict[Leg, int] = {}
        self._deaths = 0  # Engines that broke off under it.

    def begin(self, leg: Leg) -> None:
        """Count an attempt."""
        self._tries[leg] = self._tries.get(leg, 0) + 1

    def may_leave(self, leg: Leg, fault: "Fault") -> bool:
        """Return whether an attempt may be given up for another one, and count that as a retry."""
        again = self._tries.get(leg, 0) < self._host.legs.retry_attempts
        return again and self._host.may_retry(leg.value, fault)

    def after(self, attempt: "Attempt", failure: Failure, *, stream_open: bool) -> Retry | None:
        """Blame whom the rules blame, and return how to go on; None if nothing mends it.

        Args:
            attempt: What failed.
            failure: How.
            stream_open: Whether the client has the head of its answer.
        """
        pair = attempt.pair
        host, leg, engine = self._host, attempt.leg, attempt.engine
        self._deaths += leg is not Leg.PREFILL and failure.what is What.BROKEN
        rule = triage(
            leg,
            failure,
            stream_open=stream_open,
            pulls=pair is not None,
            offers=attempt.offers,
            deaths=self._deaths,
        )
        if rule.close_idle:
            engine.endpoint.close_idle()
        if rule.blame is Blame.ENGINE:
            host.leg_failed(failure.blamed or engine.target, failure.fault, failure.reason)
        elif rule.blame is Blame.PULL and pair is not None:
            host.transfers.failed(self._number, *pair, failure.fault, failure.reason)
        # A trial is the proxy's own doing, and what follows a verdict goes to those who are able.
        free = pair is not None and pair[0].kv_trial
        tried, legs = self._tries[leg], host.legs
        if rule.then in (Next.RELAY, Next.FAIL) or tried >= legs.retry_attempts:
            return None
        if not host.may_retry(leg.value, failure.fault, free=free):
            return None
        # A rank that fails again, with another prefiller, is at fault itself. One that hangs is slow to.
        same_rank = failure.what is not What.TIMED_OUT and tried == 1
        return Retry(
            rule.then,
            same_rank,
            min(legs.retry_backoff_limit_s, legs.retry_backoff_s * 2 ** (tried - 1)),
        )
