"""Whether an attempt that failed is followed by another, and which engine the failure counts against."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct

from balanceroute.proxy.live.request.failures import Blame, Failure, Next, What, triage
from balanceroute.proxy.live.request.reports import LegFailed, PullFailed
from balanceroute.proxy.live.telemetry.record import Leg

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RequestId
    from balanceroute.proxy.live.request.holding import Attempt
    from balanceroute.proxy.live.request.leg_settings import LegSettings
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


class Recovery(Struct, eq=False):
    """What one request has been through."""

    _number: "RequestId"
    _host: "Host"
    _legs: "LegSettings"
    _tries: dict[Leg, int] = {}
    _broken: int = 0  # Engines that broke off under it and live.

    def begin(self, leg: Leg) -> None:
        """Count an attempt."""
        self._tries[leg] = self._tries.get(leg, 0) + 1

    def may_try_again(self, leg: Leg) -> bool:
        """Return whether one more attempt is left, if the retry budget allows it too."""
        return self._tries.get(leg, 0) < self._legs.retry_attempts

    def after(
        self, attempt: "Attempt", failure: Failure, *, stream_open: bool, deaths: int
    ) -> Retry | None:
        """End the attempt, blame whom the rules blame, and return how to go on; None if nothing mends it.

        The retry budget is not asked yet.

        Args:
            attempt: What failed.
            failure: How.
            stream_open: Whether the client has the head of its answer.
            deaths: How many engines died under its prompt, this one included.
        """
        attempt.fail(failure)  # What failed may be the answer, not the connection.
        pair = attempt.pair
        host, leg, engine = self._host, attempt.leg, attempt.engine
        if leg is not Leg.PREFILL and failure.what is What.BROKEN and not failure.is_death:
            self._broken += 1
        rule = triage(
            leg,
            failure,
            stream_open=stream_open,
            continuable=stream_open and attempt.continuable,
            pulls=pair is not None,
            offers=attempt.offers,
            deaths=deaths + self._broken,
        )
        if rule.close_idle:
            engine.endpoint.close_idle()
        if rule.blame is Blame.ENGINE:
            blamed = failure.blamed or engine.target
            host.report(LegFailed(blamed, failure.fault, failure.reason))
        elif rule.blame is Blame.PULL and pair is not None:
            prefiller, rank = pair
            host.report(
                PullFailed(self._number, prefiller.id, rank.id, failure.fault, failure.reason)
            )
        if failure.what is What.STALE:
            self._tries[leg] -= 1  # Once, as the next legs go on new connections.
        if rule.then in (Next.RELAY, Next.FAIL) or not self.may_try_again(leg):
            return None
        tried, legs = self._tries[leg], self._legs
        # A rank that fails again, with another prefiller, is at fault itself. One that hangs is slow to.
        same_rank = failure.what is not What.TIMED_OUT and tried == 1
        return Retry(
            rule.then,
            same_rank,
            min(legs.retry_backoff_limit_s, legs.retry_backoff_s * 2 ** (tried - 1)),
        )
