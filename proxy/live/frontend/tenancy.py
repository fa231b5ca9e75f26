"""What the tenants of one deployment may ask for, as the file of tenants said last."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from balanceroute.proxy.core.admission import Admission, Allowance, Refusal, TenantLimits, Tenants
from balanceroute.proxy.live.frontend.clients import allowance_headers
from balanceroute.proxy.live.frontend.refusals import Limited
from balanceroute.proxy.live.security.credentials import Tenant
from balanceroute.proxy.live.telemetry.snapshot import TenantState

if TYPE_CHECKING:
    from balanceroute.proxy.live.telemetry.record import RequestRecord

_NO_ALLOWANCES: Mapping[str, Allowance] = {}


class Tenancy:
    """The tenants' limits around an admission rule, if there are tenants.

    Args:
        within: What the deployment as a whole accepts.
        tenants: Empty if there are none.
        now_ns: The loop's time.
        beside: Of another deployment: each tenant has one account for both.

    Attributes:
        admission: For the driver.
    """

    def __init__(
        self,
        within: Admission,
        tenants: Iterable[Tenant],
        now_ns: Callable[[], int],
        *,
        beside: "Tenancy | None" = None,
    ) -> None:
        limits = _limits(tenants)
        other: Tenants | None = None if beside is None else beside._tenants
        accounts = None if other is None else other.accounts
        self._tenants: Tenants | None = (
            Tenants(within, limits, now_ns(), accounts) if limits else None
        )
        self.admission: Admission = self._tenants or within
        self._now_ns = now_ns

    def change(self, tenants: Iterable[Tenant]) -> None:
        """Take other tenants and limits; see `Tenants.change`."""
        if self._tenants is not None:
            self._tenants.change(_limits(tenants), self._now_ns())

    def refuse_early(self, tenant: str) -> Limited | None:
        """Return why a request is rejected before its body is read, or None."""
        if self._tenants is None:
            return None
        refusal = self._tenants.refuse_early(tenant, self._now_ns())
        if refusal is None:
            return None
        headers = allowance_headers(self.allowances(tenant))
        if refusal.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % refusal.retry_after_s))
        return Limited(refusal.status, refusal.reason, tuple(headers), cause=refusal.cause)

    def refuse_alone(self, tenant: str) -> Refusal | None:
        """Return why a request that one engine answers alone is rejected, or None; see `Tenants`."""
        if self._tenants is None:
            return None
        return self._tenants.offer_alone(tenant, self._now_ns())

    def ended_alone(self, record: "RequestRecord") -> None:
        """Note the end of such a request that was accepted."""
        if self._tenants is not None:
            tokens = record.prompt_tokens + record.output_tokens
            self._tenants.ended_alone(record.tenant, tokens, self._now_ns())

    def allowances(self, tenant: str) -> Mapping[str, Allowance]:
        """Return what is left of a tenant's rates; empty without tenants."""
        account = None if self._tenants is None else self._tenants.accounts.get(tenant)
        return _NO_ALLOWANCES if account is None else account.allowances(self._now_ns())

    def states(self) -> list[TenantState]:
        """Return where each tenant stands."""
        if self._tenants is None:
            return []
        return [
            TenantState(
                name,
                in_flight=account.in_flight.count,
                waiting=account.waiting.count,
                remaining={
                    unit: allowance.remaining
                    for unit, allowance in account.allowances(self._now_ns()).items()
                },
                limits=account.limits,
            )
            for name, account in self._tenants.accounts.items()
        ]


def _limits(tenants: Iterable[Tenant]) -> dict[str, TenantLimits]:
    return {one.name: one.limits for one in tenants}
