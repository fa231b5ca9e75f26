"""A request whose body was read, and how it is refused."""

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from balanceroute.proxy.live.frontend.clients import allowance_headers
from balanceroute.proxy.live.frontend.refusals import outcome_of
from balanceroute.proxy.live.openai.api_error import JSON_HEADERS, NEVER_AGAIN, error_body
from balanceroute.proxy.live.request.suspects import REASON, SUSPECTED

if TYPE_CHECKING:
    from balanceroute.proxy.core.admission import Refusal
    from balanceroute.proxy.live.frontend.groups import Groups
    from balanceroute.proxy.live.frontend.known_head import KnownHead
    from balanceroute.proxy.live.openai.body import RequestBody
    from balanceroute.proxy.live.openai.shape import Api, Shape
    from balanceroute.proxy.live.openai.urgency import Urgency
    from balanceroute.proxy.live.security.credentials import Tenant
    from balanceroute.proxy.live.telemetry.record import Log, RequestRecord
    from balanceroute.proxy.live.telemetry.request_metrics import RequestMetrics
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers


class LateRefusals:
    """Answers, counts and logs requests that are refused after their body came."""

    def __init__(self, groups: "Groups", metrics: "RequestMetrics", log: "Log") -> None:
        self._groups = groups
        self._metrics = metrics
        self._log = log

    def refuse(
        self,
        reply: "Reply",
        record: "RequestRecord",
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_s: int | None = None,
        for_good: bool = False,
    ) -> None:
        """Refuse a request; `param` names what is wrong of it. `for_good` as in `ClientAnswer.fail`."""
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
        record.ended_ns = round(self._groups.context.clock() * 1e9)
        self._metrics.ended(record)
        self._log.request_ended(record)

    def suspected(self, reply: "Reply", record: "RequestRecord") -> None:
        """Refuse a request whose prompt may be what kills engines."""
        record.refused_for = SUSPECTED
        self.refuse(reply, record, 502, REASON, for_good=True)

    def limit(self, reply: "Reply", record: "RequestRecord", refusal: "Refusal") -> None:
        """Refuse a request for a limit."""
        self.tell_allowances(reply, record)
        record.refused_for = refusal.cause
        retry_s = refusal.retry_after_s
        self.refuse(reply, record, refusal.status, refusal.reason, retry_s=retry_s)

    def tell_allowances(self, reply: "Reply", record: "RequestRecord") -> None:
        """Have the answer say what is left of a tenant's rates."""
        allowances = self._groups.first.tenancy.allowances(record.tenant)
        reply.more_headers = allowance_headers(allowances) if allowances else []


class Asking(Struct, eq=False):
    """One request that is to be generated.

    Attributes:
        known: What follows from its head.
        headers: The client's.
    """

    refusals: LateRefusals
    tenant: "Tenant"
    api: "Api"
    shape: "Shape"
    urgency: "Urgency"
    known: "KnownHead"
    headers: "Headers"
    body: "RequestBody"
    reply: "Reply"
    record: "RequestRecord"

    def for_model(self, model: str) -> "Asking":
        """Have engines asked for another model than the client named; return itself."""
        self.shape = replace(self.shape, model=model)
        self.body.model = model
        return self

    def attempt(self, model: str, reply: "Reply", record: "RequestRecord") -> "Asking":
        """Return the same for engines that are asked for this model, with an answer of its own."""
        return replace(self, reply=reply, record=record).for_model(model)

    def deny(
        self, status: int, reason: str, *, param: str | None = None, retry_s: int | None = None
    ) -> None:
        """Refuse it."""
        self.refusals.refuse(self.reply, self.record, status, reason, param=param, retry_s=retry_s)

    def limit(self, refusal: "Refusal") -> None:
        """Refuse it for a limit."""
        self.refusals.limit(self.reply, self.record, refusal)
