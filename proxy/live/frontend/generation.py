"""Requests for text: what is checked once their body was read, and the group that takes them."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from balanceroute.proxy.live.frontend.aliases import UnknownTaskError
from balanceroute.proxy.live.frontend.asking import Asking, LateRefusals
from balanceroute.proxy.live.frontend.clients import refuse_model, urgency_of
from balanceroute.proxy.live.frontend.conversation import named_in_body, session_of
from balanceroute.proxy.live.frontend.fall_back import MODEL_HEADER, FallBack
from balanceroute.proxy.live.frontend.groups import unknown_model
from balanceroute.proxy.live.frontend.model_routes import refuse_unlisted
from balanceroute.proxy.live.frontend.request_head import (
    BadHintError,
    expected_output_tokens,
)
from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.context_limit import refuse_if_too_long
from balanceroute.proxy.live.openai.first_token import may_begin_early
from balanceroute.proxy.live.openai.shape import Api, Shape, read_shape, refuse_state
from balanceroute.proxy.live.openai.token_shape import read_token_shape
from balanceroute.proxy.live.request.direct import check_direct
from balanceroute.proxy.live.scheduling.arrival import Arrival, Asked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from balanceroute.proxy.live.frontend.aliases import Alias
    from balanceroute.proxy.live.frontend.groups import Group, Groups
    from balanceroute.proxy.live.frontend.known_head import KnownHead
    from balanceroute.proxy.live.security.credentials import Tenant
    from balanceroute.proxy.live.telemetry.record import RequestRecord
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers

# Up to Python 3.11 each look at a member of an enumeration is a call.
_GENERATE, _RESPONSES = Api.GENERATE, Api.RESPONSES


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
        if shape.api is _RESPONSES and group.intake.context.connector.facts.recomputes:
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
        if api is _GENERATE:
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
