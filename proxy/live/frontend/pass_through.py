"""Requests that any single engine can answer: they go to a prefiller and back, as they are.

Prefillers, because a decode rank that is busy with them would hold up the whole fleet's step. Each
prefiller works on so many of them at a time; the others wait here, so many of them, in order of arrival.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from balanceroute.proxy.live.engines.instances import Instances
from balanceroute.proxy.live.frontend.single_exchange import SingleExchange
from balanceroute.proxy.live.frontend.tenancy import Tenancy
from balanceroute.proxy.live.request.reports import LegFailed, LegSucceeded
from balanceroute.proxy.live.request.retry_budget import RetryBudget
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import PrefillerId
    from balanceroute.proxy.live.engines.faults import Fault
    from balanceroute.proxy.live.engines.instances import Prefiller, Target
    from balanceroute.proxy.live.scheduling.driver import Driver
    from balanceroute.proxy.live.telemetry.record import Log, RequestRecord
    from balanceroute.proxy.live.telemetry.request_metrics import RequestMetrics
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers, Request


@dataclass(frozen=True, slots=True)
class PassThroughLimits:
    """How many requests are taken.

    Attributes:
        per_prefiller: Those that one prefiller works on at a time.
        waiting: Those that wait for a prefiller, in the whole proxy.
    """

    per_prefiller: int = 64
    waiting: int = 4096


class PassThrough:
    """Sends each request to the prefiller that works on the fewest.

    Args:
        intake: Refuses requests when it drains, and takes the reports on engines.
        metrics: Told of every request that ended.
        retried: Told of every leg that is sent again, and why.
        log: Told of every request that ended.
    """

    def __init__(
        self,
        instances: Instances,
        intake: "Driver",
        *,
        tenancy: Tenancy,
        metrics: "RequestMetrics",
        retried: Callable[[str, str], None],
        log: "Log",
        limits: PassThroughLimits,
    ) -> None:
        self.clock = intake.context.clock
        self.call_later = intake.context.call_later
        self.legs = intake.context.legs
        self.suspects = intake.context.suspects
        self._instances = instances
        self._intake = intake
        self._tenancy = tenancy
        self._metrics = metrics
        self._retried = retried
        self._log = log
        self._limits = limits
        self._retries = RetryBudget()
        self._waiting: dict[SingleExchange, None] = {}
        self._running: dict[SingleExchange, Prefiller] = {}
        self._busy: Counter[Prefiller] = Counter()
        self._turn = 0

    @property
    def in_flight(self) -> int:
        """Requests not answered yet."""
        return len(self._running) + len(self._waiting)

    def __call__(
        self,
        request: "Request",
        reply: "Reply",
        headers: "Headers",
        record: "RequestRecord",
        among: "frozenset[PrefillerId] | None",
    ) -> None:
        """Answer one request that `Tenancy.refuse_alone` let in.

        `among` are the only prefillers that can; None for all.
        """
        self._retries.earn()
        exchange = SingleExchange(self, request, reply, headers, record, among=among)
        prefiller = self._free(None, among)
        if reply.closed:
            exchange.client_left()
        elif self._intake.draining:
            exchange.refuse(503, "the proxy is shutting down")
        elif exchange.refused:
            exchange.refuse_suspect()
        elif prefiller is not None:
            self._start(exchange, prefiller)
        elif not self._instances.up(among):
            exchange.refuse(503, "no prefiller is up")
        elif len(self._waiting) >= self._limits.waiting:
            exchange.refuse(429, f"{self._limits.waiting} requests wait for a prefiller already")
        else:
            self._waiting[exchange] = None

    def lost(self, target: "Target") -> None:
        """Move what an engine that is quarantined has not begun to answer."""
        for exchange, prefiller in list(self._running.items()):
            if prefiller.target == target:
                exchange.engine_lost()

    # What an exchange does.

    def again(self, exchange: SingleExchange, fault: "Fault") -> bool:
        """Send a request that failed to another prefiller; return whether there is one for it."""
        failed = self._running[exchange]
        other = self._free(failed, exchange.among)
        if other is None or other is failed or not self._retries.spend():
            return False
        self._retried("single_engine", fault.value)
        exchange.record.retries += 1
        self._stop(exchange)
        self._start(exchange, other)
        return True

    def failed(self, target: "Target", fault: "Fault", reason: str) -> None:
        """Report a failure of an engine to the health checks."""
        self._intake.report(LegFailed(target, fault, reason))

    def succeeded(self, target: "Target") -> None:
        """Report an answer of an engine to the health checks."""
        self._intake.report(LegSucceeded(target))

    def crashed(self, exchange: SingleExchange, error: Exception) -> None:
        """End a request whose handling failed: a 500, or a cut body, and nothing held."""
        isolation, record = self._intake.isolation, exchange.record
        isolation.failures.report("leg", error, request_id=record.request_id)
        if record.outcome is None:
            isolation.run("leg", exchange.crash)
        if exchange in self._running:
            self._stop(exchange)
        isolation.run("leg", self._begin_waiting)

    def ended(self, exchange: SingleExchange, outcome: Outcome, reason: str) -> None:
        """Note that a request is over, and begin the next one that waits."""
        record = exchange.record
        record.outcome, record.reason = outcome, reason
        record.ended_ns = round(self.clock() * 1e9)
        ran = exchange in self._running
        if ran:
            self._stop(exchange)
        else:
            self._waiting.pop(exchange, None)
        self._tenancy.ended_alone(record)
        self._metrics.passed_through(record)
        self._log.request_ended(record)
        if ran:
            self._begin_waiting()

    # Turns.

    def _begin_waiting(self) -> None:
        busy = set()
        for exchange in tuple(self._waiting):
            among = exchange.among
            if among in busy or exchange not in self._waiting:
                continue
            prefiller = self._free(None, among)
            if exchange.refused:
                exchange.refuse_suspect()
            elif prefiller is not None:
                del self._waiting[exchange]
                self._start(exchange, prefiller)
            elif not self._instances.up(among):
                exchange.refuse(503, "no prefiller is up")
            elif among is None:
                return  # No prefiller has room.
            else:
                busy.add(among)

    def _free(
        self, other_than: "Prefiller | None", among: "frozenset[PrefillerId] | None"
    ) -> "Prefiller | None":
        """Return the prefiller that works on the fewest; equal ones take turns."""
        free = [p for p in self._instances.up(among) if self._busy[p] < self._limits.per_prefiller]
        free = [p for p in free if p is not other_than] or free
        if not free:
            return None
        self._turn += 1
        first = self._turn % len(free)
        return min(free[first:] + free[:first], key=self._busy.__getitem__)

    def _start(self, exchange: SingleExchange, prefiller: "Prefiller") -> None:
        self._running[exchange] = prefiller
        self._busy[prefiller] += 1
        exchange.send(prefiller)

    def _stop(self, exchange: SingleExchange) -> None:
        prefiller = self._running.pop(exchange)
        self._busy[prefiller] -= 1
        if not self._busy[prefiller]:
            del self._busy[prefiller]
