"""The requests of one relay that one engine answers alone, as far as their tenants' limits go."""

from collections import Counter
from typing import TYPE_CHECKING

from balanceroute.proxy.live.processes.to_relay import AloneAnswered
from balanceroute.proxy.live.telemetry.record import RequestRecord

if TYPE_CHECKING:
    from balanceroute.proxy.live.frontend.tenancy import Tenancy
    from balanceroute.proxy.live.processes.from_relay import AskAlone


class AloneRequests:
    """Counts them, so that none counts for ever if its relay dies."""

    def __init__(self, tenancy: "Tenancy") -> None:
        self._tenancy = tenancy
        self._running: Counter[str] = Counter()  # By tenant.

    def offer(self, asked: "AskAlone") -> AloneAnswered:
        """Return whether one is taken, and what is left of its tenant's rates."""
        refusal = self._tenancy.refuse_alone(asked.tenant)
        allowances = dict(self._tenancy.allowances(asked.tenant))
        if refusal is None:
            self._running[asked.tenant] += 1
            return AloneAnswered(asked.question, allowances=allowances)
        return AloneAnswered(
            asked.question,
            refusal.status,
            refusal.reason,
            refusal.retry_after_s,
            refusal.cause,
            allowances,
        )

    def ended(self, record: RequestRecord) -> None:
        """Note the end of one, if this scheduler process took it."""
        if self._running[record.tenant]:
            self._running[record.tenant] -= 1
            self._tenancy.ended_alone(record)

    def gone(self) -> None:
        """Note the end of all, whose relay is gone."""
        for tenant in self._running.elements():
            self._tenancy.ended_alone(RequestRecord("", "", 0, 0.0, tenant=tenant))
        self._running.clear()
