"""Requests for text: what is checked once their body was read, and the group that takes them."""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, cast

from msgspec import Struct
from msgspec.structs import replace

from balanceroute.proxy.live.frontend.groups import UnknownTaskError, refuse_unlisted, unknown_model
from balanceroute.proxy.live.frontend.refusals import outcome_of
from balanceroute.proxy.live.frontend.request_head import (
    BadHintError,
    allowance_headers,
    expected_output_tokens,
    named_in_body,
    refuse_model,
    session_of,
    urgency_of,
)
from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.continuation import may_begin_early
from balanceroute.proxy.live.openai.errors import JSON_HEADERS, NEVER_AGAIN, error_body
from balanceroute.proxy.live.openai.legs import refuse_if_too_long
from balanceroute.proxy.live.openai.shape import (
    GENERATE,
    RESPONSES,
    Api,
    Shape,
    read_shape,
    read_token_shape,
    refuse_state,
)
from balanceroute.proxy.live.request.leg_settings import check_direct
from balanceroute.proxy.live.request.shared import REASON, SUSPECTED
from balanceroute.proxy.live.scheduling.driver import Arrival, Asked

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from balanceroute.proxy.core.admission import Refusal
    from balanceroute.proxy.live.frontend.groups import Alias, Group, Groups
    from balanceroute.proxy.live.frontend.request_head import KnownHead
    from balanceroute.proxy.live.openai.urgency import Urgency
    from balanceroute.proxy.live.request.shared import SessionContext
    from balanceroute.proxy.live.security import Tenant
    from balanceroute.proxy.live.settings.aliases import AliasConfig
    from balanceroute.proxy.live.telemetry.record import Log, RequestRecord
    from balanceroute.proxy.live.telemetry.request_metrics import RequestMetrics
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers
    from balanceroute.proxy.wire.reply import Late


# A request whose body was read, and how it is refused.


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


# Requests of an alias that go on to the next group while nothing of an answer has been sent.
#
# Each group gets an attempt of its own, with a record of its own. An attempt that is given up is
# over for its group before the next one begins, and whatever comes of it reaches nobody: neither
# the client, nor the log, nor a metric. So a client has one answer, and a request one line.

MODEL_HEADER = b"x-balanceroute-model"
"""Names the model that answers a request of an alias."""

# What the deployment refuses a request for, and not its tenant: see `Refusal.cause`.
_OF_THE_GROUP = frozenset({"", "overload", "deadline"})


class FallBack:
    """Has one request answered by the first group that does.

    Args:
        asking: The request, as its client sent it.
        groups: Who may answer, best first.
        config: The alias.
        submit: Gives a request to a group, or refuses it.
        context: The clock.
    """

    def __init__(
        self,
        asking: Asking,
        groups: "Iterator[Group]",
        config: "AliasConfig",
        submit: "Callable[[Asking, Group], None]",
        context: "SessionContext",
    ) -> None:
        self._asking = asking
        self._groups = groups
        self._config = config
        self._submit = submit
        self._context = context
        self._attempt: ModelAttempt | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> bool:
        """Ask the first group; return whether there is one."""
        group = next(self._groups, None)
        if group is not None:
            self._try(group)
        return group is not None

    def failed(self, attempt: "ModelAttempt", status: int) -> bool:
        """Go on to the next group, if such an answer is a reason to and there is one."""
        why = str(status)
        if status == 504:
            why = "timeout"
        known = why in self._config.fall_back and attempt.record.refused_for in _OF_THE_GROUP
        return known and self._go_on(attempt, why)

    def over(self) -> None:
        """Stay with the attempt that answers now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_on(self, attempt: "ModelAttempt", why: str) -> bool:
        group = None if attempt.inner.closed else next(self._groups, None)
        if group is None:
            return False
        self.over()
        attempt.give_up()
        record = self._asking.record
        record.fall_backs = (*record.fall_backs, (attempt.record.group, why))
        if attempt.inner.commented:
            record.status = 200  # Which its client has, whatever comes of it.
        self._try(group)
        return True

    def _try(self, group: "Group") -> None:
        asking = self._asking
        attempt = self._attempt = ModelAttempt(self, asking.reply, copy(asking.record))
        after_s = self._config.fall_back_after_s
        if after_s is not None and asking.record.stream:
            self._timer = self._context.call_later(after_s, self._late)
        # What a reply tells of itself is read alone.
        reply = cast("Reply", attempt)
        self._submit(asking.attempt(group.model, reply, attempt.record), group)

    def _late(self) -> None:
        self._timer = None
        if self._attempt is not None and not self._attempt.inner.started:
            self._go_on(self._attempt, "timeout")


class ModelAttempt:
    """What one group has for a client: see `Reply`.

    Attributes:
        inner: The client.
        record: The attempt's own.
    """

    def __init__(self, chain: FallBack, inner: "Reply", record: "RequestRecord") -> None:
        self.inner = inner
        self.record = record
        self._chain = chain
        self._given_up = False
        self._on_closed: Callable[[], None] | None = None

    def give_up(self) -> None:
        """End it for its group, as if its client had left, and let nothing more through."""
        self._given_up = self.record.superseded = True
        self.inner.on_pause = self.inner.on_resume = self.inner.on_closed = None
        left, self._on_closed = self._on_closed, None
        if left is not None:
            left()

    # What a group sees of the client.

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._given_up or self.inner.closed

    @property
    def started(self) -> bool:
        """Whether the head was sent."""
        return not self._given_up and self.inner.started

    @property
    def written(self) -> int:
        """Bytes that were sent."""
        return self.inner.written

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly."""
        return not self._given_up and self.inner.paused

    @property
    def more_headers(self) -> "Headers":
        """Of the answer."""
        return self.inner.more_headers

    @more_headers.setter
    def more_headers(self, headers: "Headers") -> None:
        if not self._given_up:
            self.inner.more_headers = headers

    @property
    def on_closed(self) -> Callable[[], None] | None:
        """Called if the client leaves, and if the attempt is given up."""
        return self._on_closed

    @on_closed.setter
    def on_closed(self, call: Callable[[], None] | None) -> None:
        self._on_closed = call
        if not self._given_up:
            self.inner.on_closed = call

    @property
    def on_pause(self) -> Callable[[], None] | None:
        """See `Reply`."""
        return self.inner.on_pause

    @on_pause.setter
    def on_pause(self, call: Callable[[], None] | None) -> None:
        if not self._given_up:
            self.inner.on_pause = call

    @property
    def on_resume(self) -> Callable[[], None] | None:
        """See `Reply`."""
        return self.inner.on_resume

    @on_resume.setter
    def on_resume(self, call: Callable[[], None] | None) -> None:
        if not self._given_up:
            self.inner.on_resume = call

    def release_body(self) -> None:
        """See `Reply`."""
        if not self._given_up:
            self.inner.release_body()

    def send(self, status: int, headers: "Headers", body: bytes) -> None:
        """Send a whole answer, unless another group is to give one."""
        if not self._given_up and not self._chain.failed(self, status):
            self._chain.over()
            self.inner.send(status, headers, body)

    def start(self, status: int, headers: "Headers") -> None:
        """Begin a stream, which is this group's to its end."""
        if not self._given_up:
            self._chain.over()
            self.inner.start(status, headers)

    @property
    def commented(self) -> bool:
        """Whether the client has the head of a stream, though the answer may still be any group's."""
        return self.inner.commented

    def comment(self, headers: "Headers", data: bytes, late: "Late") -> None:
        """See `Reply`; another group may still answer."""
        if not self._given_up:
            if not self.inner.commented:  # Who answers is not said before it is known.
                told = self.inner.more_headers
                self.inner.more_headers = [one for one in told if one[0] != MODEL_HEADER]
            self.inner.comment(headers, data, late)

    def write(self, data: bytes) -> None:
        """See `Reply`."""
        if not self._given_up:
            self.inner.write(data)

    def end(self) -> None:
        """See `Reply`."""
        if not self._given_up:
            self.inner.end()

    def abort(self) -> None:
        """See `Reply`."""
        if not self._given_up:
            self._chain.over()
            self.inner.abort()


class Generation:
    """Gives each request to the group of its model, or refuses it.

    Args:
        groups: Those of the listener.
        aliases: Names that stand for several models.
        refusals: Refuse requests.
        max_sequences: The most answers that one request may ask for.
        engine_lines: Returns the header lines of every engine leg, given what is known of the client's
            head, its headers, and what the engines are to call the request.
    """

    def __init__(
        self,
        groups: "Groups",
        aliases: "Mapping[str, Alias]",
        refusals: LateRefusals,
        *,
        max_sequences: int,
        engine_lines: "Callable[[KnownHead, Headers, str], bytes]",
    ) -> None:
        self._groups = groups
        self._aliases = aliases
        self._refusals = refusals
        self._max_sequences = max_sequences
        self._engine_lines = engine_lines

    def take(
        self,
        api: Api,
        headers: "Headers",
        reply: "Reply",
        record: "RequestRecord",
        body: RequestBody | BodyError,
        *,
        tenant: "Tenant",
        known: "KnownHead",
    ) -> None:
        """Submit a request whose body was read, or refuse it."""
        if isinstance(body, BodyError):
            self._refusals.refuse(reply, record, 400, str(body), param=body.param)
            return
        try:
            shape = self._shape(api, body, record)
            urgency = urgency_of(tenant, api, headers, body, record.arrived_ns)
        except BodyError as error:
            self._refusals.refuse(reply, record, 400, str(error), param=error.param)
            return
        asking = Asking(
            self._refusals, tenant, api, shape, urgency, known, headers, body, reply, record
        )
        suspects = self._groups.context.suspects
        unknown = refuse_model(tenant, shape.model) if tenant.models else None
        if unknown is not None:
            asking.deny(*unknown, param="model")
        elif suspects.prompts and suspects.refuses(suspects.of(api.value, body)):
            self._refusals.suspected(reply, record)
        elif shape.model in self._aliases:
            self._choose(asking, self._aliases[shape.model])
        else:
            group = self._groups.find(shape.model)
            if group is None:
                asking.deny(*unknown_model(shape.model), param="model")
            elif group.models and (unlisted := refuse_unlisted(shape.model, group.models)):
                asking.deny(*unlisted, param="model")
            else:
                self._submit(asking, group)
        body.forget_values()

    def _choose(self, asking: Asking, alias: "Alias") -> None:
        """Give a request to one of an alias's groups, or refuse it."""
        record = asking.record
        record.alias = alias.config.name
        try:
            record.task = alias.task(asking.headers, asking.tenant, record.endpoint)
        except UnknownTaskError as error:
            asking.deny(400, str(error))
            return
        groups = alias.choose(record.task, asking.shape)
        if alias.config.fall_back:
            context = self._groups.context
            begun = FallBack(asking, groups, alias.config, self._submit, context).begin()
        else:
            group = next(groups, None)
            begun = group is not None
            if group is not None:
                self._submit(asking.for_model(group.model), group)
        if not begun:
            asking.deny(503, f"no group of `{record.alias}` takes requests", retry_s=1)

    def _submit(self, asking: Asking, group: "Group") -> None:
        """Give a request to a group, or refuse it."""
        shape, headers, tenant, record = asking.shape, asking.headers, asking.tenant, asking.record
        record.group, rare = group.name, asking.known.rare
        eligible = group.routes.eligible(shape.model) if group.routes.differ else None
        refused = None if eligible is None else group.routes.refuse(shape.model, eligible)
        if refused is not None:
            deny_model(asking.deny, *refused)
            return
        longest = group.served.max_model_len(shape.model)
        if shape.api is RESPONSES and group.intake.context.connector.facts.recomputes:
            # The response of a rank that hands the request back is that of one which has ended.
            shape = replace(shape, direct=shape.direct or shape.api.value)
        try:
            if shape.direct:
                check_direct(shape, group.intake.context.legs.direct)
            hinted = b"x-expected-output-tokens" in rare
            expected_tokens = expected_output_tokens(headers) if hinted else None
            if longest is not None:
                refuse_if_too_long(asking.api, asking.body, longest)
        except BadHintError as error:
            asking.deny(400, str(error))
            return
        except BodyError as error:
            asking.deny(400, str(error), param=error.param)
            return
        name = tenant.name or (record.api_key_id if group.key_is_tenant else "")
        session = session_of(asking.known.session or named_in_body(asking.body), name)
        early = (
            group.intake.context.legs.asks_early
            and not (shape.direct or group.intake.context.connector.facts.decode_first)
            and may_begin_early(shape, asking.body.values) is not None
        )
        group.intake.submit(
            Arrival(
                Asked(
                    *(shape, eligible, expected_tokens, asking.urgency, name, session, early),
                    adapter=shape.model in group.served.adapters,
                ),
                asking.body,
                partial(self._engine_lines, asking.known, headers),
                asking.reply,
                record,
                asking.limit,
            )
        )
        if record.superseded:  # Refused, and another group was asked.
            return
        self._refusals.tell_allowances(asking.reply, record)
        if record.alias:
            asking.reply.more_headers.append((MODEL_HEADER, shape.model.encode()))

    def _shape(self, api: Api, body: RequestBody, record: "RequestRecord") -> Shape:
        """Return what a request asks for, and note it. Raises BodyError."""
        refuse_state(api, body)
        if api is GENERATE:
            shape = read_token_shape(body, max_sequences=self._max_sequences)
        else:
            shape = read_shape(api, body, max_sequences=self._max_sequences)
        record.model = shape.model[:128]
        record.stream = shape.stream
        record.choices = shape.sequences
        record.max_tokens = shape.max_tokens
        return shape


def deny_model(deny: Callable[..., None], status: int, reason: str) -> None:
    """Refuse a request whose model no engine can serve now."""
    if status == 404:
        deny(404, reason, param="model")
    else:
        deny(status, reason, retry_s=1)
