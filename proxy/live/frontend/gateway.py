"""The public HTTP interface: routes (`routes`), keys, bodies; then the driver's.

What the head of a request rules out is rejected before its body is read.
"""

import asyncio
import json
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from msgspec import structs

from balanceroute import __version__
from balanceroute.proxy.core.admission import Refusal
from balanceroute.proxy.live.connectors import METASERVER_PATH
from balanceroute.proxy.live.frontend.groups import (
    MODEL_HEADER,
    Asking,
    Group,
    Groups,
    deny_model,
    refuse_unlisted,
    unknown_alone,
    unknown_model,
)
from balanceroute.proxy.live.frontend.refusals import Refusals
from balanceroute.proxy.live.frontend.request_head import (
    EVERYBODY,
    JSON_LINE,
    KEY_IS_GONE,
    NOT_FOUND,
    UNAUTHORISED,
    BadHintError,
    Clients,
    KnownHead,
    client_request_id,
    engine_lines,
    expected_output_tokens,
    given_keys,
    key_headers,
    know,
    named_in_body,
    refuse_model,
    refuse_route,
    session_of,
    trace_headers,
    urgency_of,
)
from balanceroute.proxy.live.openai.body import (
    SMALL_BYTES,
    BodyError,
    RequestBody,
    is_deep,
    read_in_slices,
)
from balanceroute.proxy.live.openai.errors import JSON_HEADERS, dump_escaped, error_body
from balanceroute.proxy.live.openai.form_body import refuse_internal_parts
from balanceroute.proxy.live.openai.legs import engine_body, refuse_if_too_long
from balanceroute.proxy.live.openai.routes import (
    GENERATION,
    JSON,
    LIVE,
    METRICS,
    OWN,
    READY,
    Media,
    Route,
    exact_path,
)
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
from balanceroute.proxy.live.scheduling.driver import Arrival
from balanceroute.proxy.live.security import Secret, Tenant
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.live.telemetry.metrics import CONTENT_TYPE
from balanceroute.proxy.live.telemetry.record import Log, RequestRecord, Tracer, read_parent
from balanceroute.proxy.live.telemetry.request_metrics import RequestMetrics
from balanceroute.proxy.wire.http1.heads import RequestHead, encode_fields
from balanceroute.proxy.wire.http1.pump import Pump
from balanceroute.proxy.wire.http1.server import Reply
from balanceroute.proxy.wire.messages import Headers, HttpRequest, Rejection

if TYPE_CHECKING:
    from balanceroute.proxy.live.frontend.aliases import Alias


# The large bodies that are being read: a slice at a time, and all of them in turn.
#
# Neither one body of many megabytes nor many of them at a time may hold the event loop for long:
# it also relays every stream.

Done = Callable[[RequestBody | BodyError], None]
_Reading = Generator[None, None, RequestBody]


def read_at_once(data: bytes) -> RequestBody | BodyError:
    try:
        return RequestBody(data)
    except BodyError as error:
        return _untraced(error)


def _untraced(error: BodyError) -> BodyError:
    """Return an error that is handed on: its traceback would keep the body, and frames that keep it."""
    error.__context__ = None
    return error.with_traceback(None)


class BodyQueue:
    """Reads bodies.

    Args:
        pump: Has the native library; None to read in Python.
    """

    def __init__(self, pump: Pump | None = None) -> None:
        self._pump = pump
        self._queue: deque[tuple[_Reading, Reply, Done]] = deque()
        self._scheduled = False

    def read(self, data: bytes, waiting: Reply, done: Done, *, hashed: bool = False) -> None:
        """Read a body; call `done`, at once if it is small, and not if the client is gone."""
        if len(data) > SMALL_BYTES:
            reading = read_in_slices(data, hashed=hashed, pump=self._pump)
            self._read_on(reading, waiting, done)
        else:
            done(read_at_once(data))

    def _read_on(self, reading: _Reading, waiting: Reply, done: Done) -> None:
        result: RequestBody | BodyError
        try:
            next(reading)
        except StopIteration as end:
            result = end.value
        except BodyError as error:
            result = _untraced(error)
        else:
            self._queue.append((reading, waiting, done))
            if not self._scheduled:
                self._scheduled = True
                asyncio.get_running_loop().call_soon(self._next)
            return
        done(result)

    def _next(self) -> None:
        """Read one slice of the body whose turn it is."""
        self._scheduled = False
        reading, waiting, done = self._queue.popleft()
        if self._queue:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)
        if not waiting.closed:
            self._read_on(reading, waiting, done)


# Decode engines' calls for a prefill: which ones are taken, and by which request.
#
# The path is the secret that authorises a call.

# Ids and addresses of the blocks of one prompt.
_MOST_BYTES = 1 << 20
_BAD = Rejection(400, "the hand-off must be a JSON object of moderate depth")


class HandOffs:
    """Takes what decode ranks post."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def admit(self, head: RequestHead) -> Rejection | None:
        """Return why a call is not taken, as far as its head shows."""
        if head.method != b"POST" or self._awaited(head.path) is None:
            return NOT_FOUND
        if head.content_length is None:
            return Rejection(411, "the hand-off needs a Content-Length")
        if head.content_length > _MOST_BYTES:
            return Rejection(413, f"the hand-off is over {_MOST_BYTES} bytes")
        return None

    def take(self, request: HttpRequest, reply: Reply) -> Rejection | None:
        """Take a call that was admitted, and answer it; or return why it is refused."""
        awaited = self._awaited(request.path)
        if awaited is None:  # It was given up while the body came.
            return NOT_FOUND
        try:
            params = json.loads(request.body)
        except (ValueError, RecursionError):
            params = None
        if not isinstance(params, dict) or is_deep(params):
            return _BAD
        awaited(params)
        reply.send(200, JSON_HEADERS, b"{}")
        return None

    def _awaited(self, path: bytes) -> Callable[[Mapping[str, Any]], None] | None:
        """Return what takes a decode rank's post there."""
        transfer = path.removeprefix(METASERVER_PATH).decode("ascii", "replace")
        for group in self._groups:
            awaited = group.intake.context.hand_offs.get(transfer)
            if awaited is not None:
                return awaited
        return None


# The pages about models that the proxy answers itself.

MODELS = b"/v1/models"
"""The path of the list; those of single models are below it."""

_MODEL = b"/v1/models/"


def model_page(
    path: bytes, groups: Groups, aliases: Collection[str], tenant: Tenant
) -> bytes | Rejection:
    """Return the list of the models that a tenant may use, or its entry of one of them.

    vLLM has no route for the latter.
    """
    if path == MODELS:
        cards = [*map(_card, aliases), *(one for group in groups for one in group.cards())]
        allowed = [one for one in cards if refuse_model(tenant, one["id"]) is None]
        return dump_escaped({"object": "list", "data": allowed})
    name = unquote_to_bytes(path.removeprefix(_MODEL)).decode("utf-8", "replace")
    if name in aliases and refuse_model(tenant, name) is None:
        return dump_escaped(_card(name))
    group = groups.find(name)
    model = None if group is None else group.served.find(name)
    if model is None or refuse_model(tenant, name) is not None:
        return Rejection(404, f"The model `{name[:128]}` does not exist.", param="model")
    return dump_escaped(model.card)


def _card(alias: str) -> Mapping[str, Any]:
    return {"id": alias, "object": "model", "created": 0, "owned_by": "balanceroute"}


_GENERATION: Mapping[bytes, Api] = {api.value.encode(): api for api in Api}


# The most answers that one request may ask for.
_MOST_SEQUENCES = 128


class Gateway:
    """The application behind the public listener."""

    def __init__(
        self,
        groups: Groups,
        *,
        metrics: RequestMetrics,
        page_of_metrics: Callable[[], bytes],
        log: Log,
        config: ProxyConfig,
        clients: Clients,
        unix_s: Callable[[], float],
        tracer: Tracer | None,
    ) -> None:
        self._groups = groups
        self._aliases: Mapping[str, Alias] = {}
        if config.aliases:
            from balanceroute.proxy.live.frontend.aliases import make_aliases  # noqa: PLC0415

            self._aliases = make_aliases(config.aliases, groups, groups.context.clock)
        self._page_of_metrics = page_of_metrics
        # What pickers read, which needs no key; None where the settings want none.
        self.page_of_unit: Callable[[], bytes] | None = None
        self._engine_key = config.credentials.engine_key
        self._pass_authorization = config.pass_authorization
        self._public_metrics = config.listening.public_metrics
        self._key_line = encode_fields(key_headers(self._engine_key))
        self._clients = clients
        self._unix_s = unix_s
        self._tracer = tracer
        self._clock, self._unique = groups.context.clock, groups.context.unique
        self._forbids = groups.first.intake.forbids  # See `DriverSettings`.
        self.refusals = Refusals(
            groups.context,
            metrics=metrics,
            log=log,
            tenant_of=lambda headers: self._tenant_of(headers).name,
            allowances=lambda tenant: groups.first.tenancy.allowances(tenant),  # noqa: PLW0108 - it changes.
            unix_s=unix_s,
            tracer=tracer,
        )
        self._hand_offs = HandOffs(groups)
        self._bodies = BodyQueue(groups.context.pump)

    def use_keys(self, clients: Clients, engine_key: Secret | None) -> None:
        """Check clients by `clients`, and send this key to the engines, from the next request on."""
        self._clients = clients
        self._engine_key = engine_key
        self._key_line = encode_fields(key_headers(engine_key))

    def admit(self, head: RequestHead, peer: str) -> Rejection | None:
        """Return why a request is not served, as far as its head shows."""
        del peer
        known = self._known(head)
        route, tenant = known.route, known.tenant
        if route is None and head.path.startswith(METASERVER_PATH):
            return self._hand_offs.admit(head)
        if known.rejection is not None:
            return None if self._for_picker(head, known) else known.rejection
        assert route is not None, "it would be rejected"
        assert tenant is not None, "it would be rejected"
        if route.handling is OWN:
            return None
        # Not at the cost of reading a body that is refused in any case.
        if self._forbids is not None and (reason := self._forbids()):
            return Rejection(503, reason, ((b"retry-after", b"1"),))
        return self._groups.first.tenancy.refuse_early(tenant.name)

    def __call__(self, request: HttpRequest, reply: Reply) -> None:
        known = self._known(request)
        route = known.route
        if route is None:
            refused = self._hand_offs.take(request, reply)
            if refused is not None:
                self._reject(request, reply, refused)
            return
        tenant = known.tenant or EVERYBODY
        request.path = exact_path(request.path)
        lists = request.path == MODELS and self._by_model(tenant)
        if lists or route.handling is OWN:
            self._answer_itself(request, reply)
        else:
            self._serve(known, route, tenant, request, reply)

    def owner(self, headers: Headers) -> Tenant | None:
        """Return the tenant of a request with these headers; None if it must not be served."""
        return self._clients.find(headers)

    def is_client(self, headers: Headers) -> bool:
        """Return whether headers have a key, and it is a client's."""
        keys = given_keys(headers)
        return self._clients.has_keys and bool(keys) and self._clients.find(headers) is not None

    def _known(self, head: RequestHead | HttpRequest) -> KnownHead:
        """Return the checked head, by the keys that there are now."""
        known: KnownHead | None = head.learned.facts
        if known is None or known.clients is not self._clients:
            keep_key = self._pass_authorization and self._engine_key is None
            known = head.learned.facts = know(head, self._clients, keep_key=keep_key)
        return known

    def _for_picker(self, head: RequestHead | HttpRequest, known: KnownHead) -> bool:
        """Return whether a request without a key is for what pickers read, which needs none."""
        return (
            self.page_of_unit is not None
            and known.rejection is UNAUTHORISED
            and exact_path(head.path) == METRICS
            and not given_keys(head.headers)
        )

    def _serve(
        self,
        known: KnownHead,
        route: Route,
        tenant: Tenant,
        request: HttpRequest,
        reply: Reply,
    ) -> None:
        rare = known.rare
        given_id, unkept_id = "", ""
        if b"x-request-id" in rare:
            given_id, unkept_id = client_request_id(request.headers)
        record = RequestRecord(
            given_id or self._unique(),
            route.path,
            int(self._clock() * 1e9 + 0.5),  # `round` takes three times as long.
            self._unix_s(),
            peer=request.peer,
            api_key_id=known.api_key_id,
            user_agent=known.user_agent,
            tenant=tenant.name,
        )
        if unkept_id:
            record.client_request_id = unkept_id
        if self._tracer is not None:
            request.headers = self._tracer.begin(request.headers, record)
        elif b"traceparent" in rare and (parent := read_parent(request.headers)) is not None:
            record.trace_id = parent.trace_id
        if route.handling is GENERATION:
            self._generate(request, reply, record)
            return
        go_on = partial(self._pass_through, route, request, reply, record)
        if route.generates or (self._by_model(tenant) and route.media is JSON):
            self._bodies.read(request.body, reply, partial(self._go_on, go_on, reply, record))
        else:
            go_on(None)

    def _pass_through(
        self,
        route: Route,
        request: HttpRequest,
        reply: Reply,
        record: RequestRecord,
        read: RequestBody | BodyError | None,
    ) -> None:
        """Give a request to one engine; `read` is its body if the engine generates text.

        Or if engines serve different models: then what cannot be read has no model.
        """
        body, model = request.body, None
        try:
            if isinstance(read, RequestBody):
                model = read.values.get("model")
                body = engine_body(body, read) if route.generates else body
            elif route.media is Media.FORM:
                refuse_internal_parts(request.headers, body)
            elif read is not None and route.generates:
                self.refusals.refuse(reply, record, 400, str(read), param=read.param)
                return
        except BodyError as error:
            self.refusals.refuse(reply, record, 400, str(error), param=error.param)
            return
        model = model if isinstance(model, str) else ""
        refused = refuse_route(self._known(request).tenant, route, model)
        group = self._groups.find(model)
        if refused is None and group is None:
            refused = unknown_alone(route, model, is_alias=model in self._aliases)
        if refused is not None or group is None:
            assert refused is not None
            self.refusals.refuse(reply, record, *refused)
            return
        record.group = group.name
        eligible = group.routes.eligible(model)
        refused = group.routes.refuse(model, eligible, decode=False)
        if refused is not None:
            deny_model(partial(self.refusals.refuse, reply, record), *refused)
            return
        kind = JSON_LINE
        if route.media is Media.FORM:  # Which names the boundary.
            kind = encode_fields([one for one in request.headers if one[0] == b"content-type"])
        lines = self._lines(self._known(request), request.headers, record.request_id, kind)
        among = None if eligible is None else eligible.prefillers
        request = structs.replace(request, body=body)

        refusal = group.tenancy.refuse_alone(record.tenant)
        if self._forbids is not None and (reason := self._forbids()):
            refusal = Refusal(503, reason, 1)
        if refusal is not None:
            self.refusals.limit(reply, record, refusal)
            return
        self.refusals.add_allowances(reply, record)
        group.pass_through(request, reply, lines, record, among)

    def _generate(self, request: HttpRequest, reply: Reply, record: RequestRecord) -> None:
        api, body = _GENERATION[request.path], request.body
        if len(body) > SMALL_BYTES:
            # Not the request itself: it would keep the bytes of its body.
            take = partial(self._take, api, structs.replace(request, body=b""), reply, record)
            self._bodies.read(body, reply, take, hashed=self._groups.uses_keys)
        else:
            self._take(api, request, reply, record, read_at_once(body))

    def _go_on(
        self,
        take: Callable[[RequestBody | BodyError], None],
        reply: Reply,
        record: RequestRecord,
        body: RequestBody | BodyError,
    ) -> None:
        """Go on with a request whose body was read. If that fails, this request alone ends."""
        try:
            take(body)
        except Exception as error:
            self._crash(reply, record, error)

    def _crash(self, reply: Reply, record: RequestRecord, error: Exception) -> None:
        failures = self._groups.first.intake.isolation.failures
        failures.report("arrival", error, request_id=record.request_id)
        if reply.started:
            reply.abort()
        else:
            self.refusals.refuse(reply, record, 500, "internal error; the proxy's log says more")

    def _take(
        self,
        api: Api,
        request: HttpRequest,
        reply: Reply,
        record: RequestRecord,
        body: RequestBody | BodyError,
    ) -> None:
        """Have a request served whose body was read, unless its key is gone; see `_go_on`."""
        try:
            known = self._known(request)
            if known.tenant is None:
                self.refusals.refuse(reply, record, *KEY_IS_GONE)
            else:
                headers, tenant = request.headers, known.tenant
                self._submit_read(api, headers, reply, record, body, tenant=tenant, known=known)
        except Exception as error:
            self._crash(reply, record, error)

    def _submit_read(
        self,
        api: Api,
        headers: Headers,
        reply: Reply,
        record: RequestRecord,
        body: RequestBody | BodyError,
        *,
        tenant: Tenant,
        known: KnownHead,
    ) -> None:
        if isinstance(body, BodyError):
            self.refusals.refuse(reply, record, 400, str(body), param=body.param)
            return
        try:
            shape = self._shape(api, body, record)
            urgency = urgency_of(tenant, api, headers, body, record.arrived_ns)
        except BodyError as error:
            self.refusals.refuse(reply, record, 400, str(error), param=error.param)
            return
        asking = Asking(
            self.refusals, tenant, api, shape, urgency, known, headers, body, reply, record
        )
        suspects = self._groups.context.suspects
        unknown = refuse_model(tenant, shape.model) if tenant.models else None
        if unknown is not None:
            asking.deny(*unknown, param="model")
        elif suspects.prompts and suspects.refuses(suspects.of(api.value, body)):
            self.refusals.suspected(reply, record)
        elif shape.model in self._aliases:
            self._aliases[shape.model].answer(asking, self._submit)
        else:
            group = self._groups.find(shape.model)
            if group is None:
                asking.deny(*unknown_model(shape.model), param="model")
            elif group.models and (unlisted := refuse_unlisted(shape.model, group.models)):
                asking.deny(*unlisted, param="model")
            else:
                self._submit(asking, group)
        body.forget_values()

    def _submit(self, asking: Asking, group: Group) -> None:
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
            shape = structs.replace(shape, direct=shape.direct or shape.api.value)
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
        context = group.intake.context
        early = (
            context.resuming is not None
            and context.legs.asks_early
            and not (shape.direct or context.connector.decode_first)
            and context.resuming.may_begin_early(shape, asking.body.values) is not None
        )
        group.intake.submit(
            Arrival(
                *(shape, eligible, expected_tokens, asking.urgency, name, session, early),
                shape.model in group.served.adapters,
                asking.body,
                partial(self._lines, asking.known, headers),
                asking.reply,
                record,
                asking.limit,
            )
        )
        if record.superseded:  # Refused, and another group was asked.
            return
        self.refusals.add_allowances(asking.reply, record)
        if record.alias:
            asking.reply.more_headers.append((MODEL_HEADER, shape.model.encode()))

    def _shape(self, api: Api, body: RequestBody, record: RequestRecord) -> Shape:
        """Return what a request asks for, and note it. Raises BodyError."""
        refuse_state(api, body)
        if api is GENERATE:
            shape = read_token_shape(body, max_sequences=_MOST_SEQUENCES)
        else:
            shape = read_shape(api, body, max_sequences=_MOST_SEQUENCES)
        record.model = shape.model[:128]
        record.stream = shape.stream
        record.choices = shape.sequences
        record.max_tokens = shape.max_tokens
        return shape

    def _by_model(self, tenant: Tenant) -> bool:
        """Return whether it matters which model a request names that one engine answers."""
        groups = self._groups
        return groups.several or groups.first.routes.differ or bool(tenant.models)

    def _tenant_of(self, headers: Headers) -> Tenant:
        return self._clients.find(headers) or EVERYBODY

    def _lines(
        self, known: KnownHead, headers: Headers, request_id: str, kind: bytes = JSON_LINE
    ) -> bytes:
        """Return the header lines of every engine leg, written once for all of them."""
        lines = engine_lines(request_id, self._key_line, known.lines, kind=kind)
        if known.rare or self._tracer is not None:
            lines += encode_fields(trace_headers(headers))
        return lines

    def _reject(self, request: HttpRequest, reply: Reply, rejection: Rejection) -> None:
        headers, body = self.refusals.render(rejection, request, request.peer)
        reply.send(rejection.status, headers, body)

    def _metrics_for(self, request: HttpRequest) -> bytes:
        unit = b"" if self.page_of_unit is None else self.page_of_unit()
        with_all = self._public_metrics and self._clients.find(request.headers) is not None
        return unit + self._page_of_metrics() if with_all else unit

    def _answer_itself(self, request: HttpRequest, reply: Reply) -> None:
        request_id = (b"x-request-id", self._groups.context.unique().encode())
        json_headers = [*JSON_HEADERS, request_id]
        if request.path == MODELS or request.path.startswith(_MODEL):
            tenant = self._tenant_of(request.headers)
            page = model_page(request.path, self._groups, self._aliases, tenant)
            if isinstance(page, Rejection):
                self._reject(request, reply, page)
            else:
                reply.send(200, json_headers, page)
            return
        if request.path in LIVE:
            reply.send(200, [request_id], b"")
        elif request.path in READY:
            if self._groups.ready:
                reply.send(200, [request_id], b"")
            else:
                reason = "" if self._forbids is None else self._forbids()
                body = error_body(503, reason or "not ready")
                reply.send(503, [*json_headers, (b"retry-after", b"1")], body)
        elif request.path == b"/version":
            reply.send(200, json_headers, b'{"version":"%b"}' % __version__.encode())
        elif request.path == b"/load":
            reply.send(200, json_headers, b'{"server_load":%d}' % self._groups.load)
        elif self._public_metrics or self.page_of_unit is not None:
            headers = [(b"content-type", CONTENT_TYPE.encode()), request_id]
            reply.send(200, headers, self._metrics_for(request))
        else:
            self._reject(request, reply, NOT_FOUND)
