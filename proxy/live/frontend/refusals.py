"""Refusals of requests before anything is done for them: answered, counted, logged.

That is so wherever it is refused: by the HTTP server (malformed, too large, too slow), on its head
(route, method, key, media type), or for its body.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from balanceroute.proxy.core.admission import Admission, Allowance, Refusal, TenantLimits
from balanceroute.proxy.live.connectors import METASERVER_PATH
from balanceroute.proxy.live.frontend.request_head import (
    allowance_headers,
    client_request_id,
    user_agent,
)
from balanceroute.proxy.live.openai.errors import JSON_HEADERS, NEVER_AGAIN, error_body
from balanceroute.proxy.live.openai.routes import exact_path
from balanceroute.proxy.live.request.shared import REASON, SUSPECTED, SessionContext
from balanceroute.proxy.live.security import Tenant
from balanceroute.proxy.live.telemetry.record import Log, Outcome, RequestRecord, Tracer
from balanceroute.proxy.live.telemetry.request_metrics import RequestMetrics
from balanceroute.proxy.live.telemetry.snapshot import TenantState
from balanceroute.proxy.wire.http1.heads import RequestHead
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Rejection

if TYPE_CHECKING:
    from balanceroute.proxy.core.admission.tenants import Tenants


BURST = 100
"""Lines of refused requests that may be logged at once."""

PER_S = 10.0
"""Lines of refused requests a second that may be logged for ever."""

_REPORT_S = 60.0
_log = logging.getLogger(__name__)
# 502 is for prompts under which engines died: nothing is done for them either.
_REFUSED = frozenset({429, 502, 503})
# What the proxy does not know of HTTP is asked by the client, not failed by the proxy.
_NOT_OURS = frozenset({501, 505})
# What sets the limits of the server's own refusals.
_SET_BY = {
    413: " (--body-limit-bytes)",
    414: " (--target-limit-bytes)",
    431: " (--header-limit-bytes, --header-limit)",
}


@dataclass(frozen=True, slots=True)
class Limited(Rejection):
    """A request that a limit refuses; `cause` as in `Refusal`."""

    cause: str = ""


class RefusedLog:
    """Logs refused requests, as many as the limits allow: a flood of them must not fill the disk."""

    def __init__(self, write: Callable[[RequestRecord], None]) -> None:
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._allowed = float(BURST)
        self._counted_s = self._loop.time()
        self._left_out = 0
        self._timer: asyncio.TimerHandle | None = None

    def take(self, record: RequestRecord) -> None:
        """Write one line, or count it; the count is logged within a minute."""
        now_s = self._loop.time()
        self._allowed = min(BURST, self._allowed + (now_s - self._counted_s) * PER_S)
        self._counted_s = now_s
        if self._allowed >= 1.0:
            self._allowed -= 1.0
            self._write(record)
            return
        self._left_out += 1
        if self._timer is None:
            self._timer = self._loop.call_later(_REPORT_S, self.report)

    def report(self) -> None:
        """Log how many lines were left out since the last report, if any were."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._left_out:
            fields = {"count": self._left_out}
            _log.warning("refused requests were left out of the log", extra={"fields": fields})
            self._left_out = 0


class Refusals:
    """Answers, counts and logs refused requests.

    Args:
        allowances: Returns the rest of a tenant's rates.
    """

    def __init__(
        self,
        context: SessionContext,
        *,
        metrics: RequestMetrics,
        log: Log,
        tenant_of: Callable[[Headers], str],
        allowances: Callable[[str], Mapping[str, Allowance]],
        unix_s: Callable[[], float],
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self.log = RefusedLog(log.request_ended)
        self._metrics, self._served_log = metrics, log
        self._tenant_of = tenant_of
        self._allowances = allowances
        self._unique, self._clock = context.unique, context.clock
        self._unix_s = unix_s

    # On the head of a request, or by the HTTP server.

    def render(
        self, rejection: Rejection, head: RequestHead | HttpRequest | None, peer: str
    ) -> tuple[Headers, bytes]:
        """Note a refused request; return the headers and the body of its answer."""
        record = self._record(head, peer)
        message = rejection.message
        if not isinstance(rejection, Limited) and record.endpoint != METASERVER_PATH.decode():
            message += _SET_BY.get(rejection.status, "")
        record.status = rejection.status
        record.outcome = outcome_of(rejection.status)
        record.reason = message
        if isinstance(rejection, Limited):
            record.refused_for = rejection.cause
        self._metrics.ended(record)
        self.log.take(record)
        return (
            [*JSON_HEADERS, (b"x-request-id", record.request_id.encode()), *rejection.headers],
            error_body(
                rejection.status,
                message,
                param=rejection.param,
                endpoint=record.endpoint,
            ),
        )

    def _record(self, head: RequestHead | HttpRequest | None, peer: str) -> RequestRecord:
        now_ns = round(self._clock() * 1e9)
        request_id, unkept_id, endpoint, agent, tenant = "", "", "", "", ""
        if head is not None:
            request_id, unkept_id = client_request_id(head.headers)
            # The rest of the path is the secret that authorises a hand-off.
            path = exact_path(head.path)
            known = METASERVER_PATH if path.startswith(METASERVER_PATH) else path
            endpoint = known.decode("latin-1")
            agent = user_agent(head.headers)
            tenant = self._tenant_of(head.headers)
        record = RequestRecord(
            request_id or self._unique(),
            endpoint,
            now_ns,
            self._unix_s(),
            ended_ns=now_ns,
            peer=peer,
            user_agent=agent,
            tenant=tenant,
            client_request_id=unkept_id,
        )
        if self._tracer is not None and head is not None:
            self._tracer.begin(head.headers, record)
        return record

    # Once its body came.

    def refuse(
        self,
        reply: Reply,
        record: RequestRecord,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_s: int | None = None,
        for_good: bool = False,
    ) -> None:
        """Refuse a request; `param` names its wrong member. `for_good` as in `ClientAnswer.fail`."""
        headers = [(b"x-request-id", record.request_id.encode())]
        if retry_s is not None:
            headers.append((b"retry-after", b"%d" % retry_s))
        if for_good:
            headers.append(NEVER_AGAIN)
        body = error_body(status, message, param=param, endpoint=record.endpoint)
        reply.send(status, [*JSON_HEADERS, *headers], body)
        if record.superseded:  # Another group is asked instead.
            return
        record.status = 200 if reply.commented else status
        record.outcome = outcome_of(status)
        record.reason = message
        record.ended_ns = round(self._clock() * 1e9)
        self._metrics.ended(record)
        self._served_log.request_ended(record)

    def suspected(self, reply: Reply, record: RequestRecord) -> None:
        """Refuse a request whose prompt may be what kills engines."""
        record.refused_for = SUSPECTED
        self.refuse(reply, record, 502, REASON, for_good=True)

    def limit(self, reply: Reply, record: RequestRecord, refusal: Refusal) -> None:
        self.add_allowances(reply, record)
        record.refused_for = refusal.cause
        retry_s = refusal.retry_after_s
        self.refuse(reply, record, refusal.status, refusal.reason, retry_s=retry_s)

    def add_allowances(self, reply: Reply, record: RequestRecord) -> None:
        """Add the rest of a tenant's rates to the answer's headers."""
        allowances = self._allowances(record.tenant)
        reply.more_headers = allowance_headers(allowances) if allowances else []


def outcome_of(status: int) -> Outcome:
    if status in _REFUSED:
        return Outcome.REJECTED
    if status < 500 or status in _NOT_OURS:
        return Outcome.CLIENT_ERROR
    return Outcome.INTERNAL_ERROR


# What the tenants of one deployment may ask for, as the file of tenants said last.

_NO_ALLOWANCES: Mapping[str, Allowance] = {}


class Tenancy:
    """The tenants' limits around an admission rule, if there are tenants.

    Args:
        within: What the deployment as a whole accepts.
        tenants: Empty if there are none.
        beside: Of another deployment: each tenant has one account for both.
    """

    def __init__(
        self,
        within: Admission,
        tenants: Iterable[Tenant],
        now_ns: Callable[[], int],
        *,
        beside: "Tenancy | None" = None,
    ) -> None:
        self._known = {one.name: one for one in tenants}
        self._now_ns = now_ns
        self._tenants = self._limited(within, beside) if self._known else None
        self.admission: Admission = self._tenants or within  # For the driver.

    def _limited(self, within: Admission, beside: "Tenancy | None") -> "Tenants":
        from balanceroute.proxy.core.admission.tenants import Tenants  # noqa: PLC0415

        other = None if beside is None else beside._tenants
        accounts = None if other is None else other.accounts
        return Tenants(within, self._limits, self._now_ns(), accounts)

    def change(self, tenants: Iterable[Tenant]) -> None:
        """Take other tenants and limits; see `Tenants.change`."""
        if self._tenants is not None:
            self._known = {one.name: one for one in tenants}
            self._tenants.change(self._limits, self._now_ns())

    @property
    def _limits(self) -> dict[str, TenantLimits]:
        return {name: one.limits for name, one in self._known.items()}

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

    def ended_alone(self, record: RequestRecord) -> None:
        if self._tenants is not None:
            tokens = record.prompt_tokens + record.output_tokens
            self._tenants.ended_alone(record.tenant, tokens, self._now_ns())

    def allowances(self, tenant: str) -> Mapping[str, Allowance]:
        account = None if self._tenants is None else self._tenants.accounts.get(tenant)
        return _NO_ALLOWANCES if account is None else account.allowances(self._now_ns())

    def states(self) -> list[TenantState]:
        if self._tenants is None:
            return []
        # A removed tenant has no share, and is here until its last request has ended.
        weights = {name: one.weight for name, one in self._known.items()}
        all_weights = sum(weights.values()) or 1.0
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
                share=weights.get(name, 0.0) / all_weights,
            )
            for name, account in self._tenants.accounts.items()
        ]
