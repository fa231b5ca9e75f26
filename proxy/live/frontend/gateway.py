"""The public HTTP interface: routes (`routes`), keys, bodies; then the driver's.

What the head of a request rules out is rejected before its body is read.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from balanceroute import __version__
from balanceroute.proxy.live.connectors.layerwise import METASERVER_PATH
from balanceroute.proxy.live.frontend.body_queue import BodyQueue
from balanceroute.proxy.live.frontend.model_routes import ModelRoutes, refuse_unlisted
from balanceroute.proxy.live.frontend.refusals import Refusals, outcome_of
from balanceroute.proxy.live.frontend.request_head import (
    BadHintError,
    BadRequestIdError,
    api_key_id,
    check_json_body,
    client_request_id,
    engine_headers,
    expected_output_tokens,
    is_authorised,
    user_agent,
)
from balanceroute.proxy.live.openai.api_error import JSON_HEADERS, error_body
from balanceroute.proxy.live.openai.body import BodyError, RequestBody, is_deep
from balanceroute.proxy.live.openai.context_limit import refuse_if_too_long
from balanceroute.proxy.live.openai.leg_body import engine_body
from balanceroute.proxy.live.openai.routes import Handling, Media, Route, find
from balanceroute.proxy.live.openai.shape import Api, read_shape, refuse_state
from balanceroute.proxy.live.openai.urgency import Urgency, read_deadline_ns, read_level
from balanceroute.proxy.live.request.direct import check_direct
from balanceroute.proxy.live.scheduling.arrival import Arrival
from balanceroute.proxy.live.security.credentials import Secret
from balanceroute.proxy.live.telemetry.metrics import CONTENT_TYPE
from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.wire.messages import Rejection

if TYPE_CHECKING:
    from balanceroute.proxy.core.admission import Refusal
    from balanceroute.proxy.core.events import Eligible
    from balanceroute.proxy.live.engines.served_models import ServedModels
    from balanceroute.proxy.live.frontend.intake import Intake, Pages, RequestCounts
    from balanceroute.proxy.live.frontend.pass_through import PassThrough
    from balanceroute.proxy.live.telemetry.record import Log
    from balanceroute.proxy.wire.http1.heads import RequestHead
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import Headers, Request


_GENERATION: Mapping[bytes, Api] = {api.value.encode(): api for api in Api}
# Of a hand-off: ids and addresses of the blocks of one prompt.
_HAND_OFF_BYTES = 1 << 20
_NOT_FOUND = Rejection(404, "Not Found")
_MODELS = b"/v1/models"
_MODEL = b"/v1/models/"
_BAD_HAND_OFF = Rejection(400, "the hand-off must be a JSON object of moderate depth")
_BAD_REQUEST_ID = Rejection(400, "X-Request-Id must be 1 to 128 of A-Z a-z 0-9 . _ : -")
_UNAUTHORISED = Rejection(401, "Unauthorized", ((b"www-authenticate", b"Bearer"),))


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """How clients are served.

    Attributes:
        engine_key: Bearer token for the engines; None for none.
        pass_authorization: Whether the engines get the client's own.
        max_sequences: The most answers that one request may ask for.
        public_metrics: Whether clients may read the metrics.
        models: The names that are served; empty to leave names and adapters to the engines.
        client_priority: Whether a request may choose its level.
        client_deadline: Whether a request may have a deadline.
        key_is_tenant: Whether each API key is a tenant of the queue.
    """

    api_keys: tuple[Secret, ...] = ()
    engine_key: Secret | None = None
    pass_authorization: bool = True
    max_sequences: int = 128
    public_metrics: bool = True
    models: tuple[str, ...] = ()
    client_priority: bool = False
    client_deadline: bool = False
    key_is_tenant: bool = False


class Gateway:
    """The application behind the public listener."""

    def __init__(
        self,
        intake: "Intake",
        *,
        served: "ServedModels",
        routes: ModelRoutes,
        pass_through: "PassThrough",
        metrics: "RequestCounts",
        pages: "Pages",
        log: "Log",
        settings: GatewaySettings,
        unix_s: Callable[[], float],
    ) -> None:
        self._intake = intake
        self._served = served
        self._routes = routes
        self._metrics = metrics
        self._pages = pages
        self._log = log
        self._settings = settings
        self._unix_s = unix_s
        self.refusals = Refusals(
            metrics=metrics,
            log=log,
            unique=intake.context.unique,
            clock=intake.context.clock,
            unix_s=unix_s,
        )
        self._bodies = BodyQueue()
        self.pass_through = pass_through

    def use_keys(self, api_keys: tuple[Secret, ...], engine_key: Secret | None) -> None:
        """Take these keys, and send this one to the engines, from the next request on."""
        self._settings = replace(self._settings, api_keys=api_keys, engine_key=engine_key)

    def admit(self, head: "RequestHead", peer: str) -> Rejection | None:
        """Return why a request is not served, as far as its head tells."""
        del peer
        if head.path.startswith(METASERVER_PATH):
            return self._admit_hand_off(head)
        route = find(head.path)
        if route is None:
            return _NOT_FOUND
        if route.reason:
            return Rejection(404, f"Not Found: {route.reason}")
        if head.method not in route.methods:
            return Rejection(405, "Method Not Allowed", ((b"allow", route.allow),))
        keys = self._settings.api_keys
        if route.keyed and keys and not is_authorised(head.headers, keys):
            return _UNAUTHORISED
        return check_json_body(head.headers) if route.media is Media.JSON else None

    def __call__(self, request: "Request", reply: "Reply") -> None:
        """Answer a request that was admitted."""
        if request.path.startswith(METASERVER_PATH):
            self._hand_off(request, reply)
            return
        route = find(request.path)
        assert route is not None, "it was not admitted"
        lists = self._routes.differ and request.path == _MODELS
        if lists or route.handling is Handling.OWN:
            self._answer_itself(request, reply)
        else:
            self._serve(route, request, reply)

    def _serve(self, route: Route, request: "Request", reply: "Reply") -> None:
        try:
            given_id = client_request_id(request.headers)
        except BadRequestIdError:
            self._reject(request, reply, _BAD_REQUEST_ID)
            return
        record = RequestRecord(
            given_id or self._intake.context.unique(),
            route.path,
            round(self._intake.context.clock() * 1e9),
            self._unix_s(),
            peer=request.peer,
            api_key_id=api_key_id(request.headers) if self._settings.api_keys else "",
            user_agent=user_agent(request.headers),
        )
        if route.handling is Handling.GENERATION:
            self._generate(request, reply, record)
            return
        go_on = partial(self._pass_through, route, request, reply, record)
        if route.generates or (self._routes.differ and route.media is Media.JSON):
            self._bodies.read(request.body, reply, partial(self._go_on, go_on, reply, record))
        else:
            go_on(None)

    def _pass_through(
        self,
        route: Route,
        request: "Request",
        reply: "Reply",
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
            elif read is not None and route.generates:
                raise read
        except BodyError as error:
            self._refuse(reply, record, 400, str(error), param=error.param)
            return
        model = model if isinstance(model, str) else ""
        eligible = self._routes.eligible(model)
        if self._refuse_model(reply, record, model, eligible, decode=False):
            return
        headers = self._headers(request.headers, record.request_id, route.media)
        among = None if eligible is None else eligible.prefillers
        self.pass_through(replace(request, body=body), reply, headers, record, among)

    def _generate(self, request: "Request", reply: "Reply", record: RequestRecord) -> None:
        # Not the request itself: it would keep the bytes of its body.
        take = partial(self._take, _GENERATION[request.path], request.headers, reply, record)
        done = partial(self._go_on, take, reply, record)
        self._bodies.read(request.body, reply, done, hashed=self._intake.uses_keys)

    def _go_on(
        self,
        take: Callable[[RequestBody | BodyError], None],
        reply: "Reply",
        record: RequestRecord,
        body: RequestBody | BodyError,
    ) -> None:
        """Go on with a request whose body was read. If that fails, this request alone ends."""
        try:
            take(body)
        except Exception as error:
            failures = self._intake.isolation.failures
            failures.report("arrival", error, request_id=record.request_id)
            if reply.started:
                reply.abort()
            else:
                self._refuse(reply, record, 500, "internal error; the proxy's log says more")

    def _take(
        self,
        api: Api,
        headers: "Headers",
        reply: "Reply",
        record: RequestRecord,
        body: RequestBody | BodyError,
    ) -> None:
        """Submit a request whose body was read, or refuse it."""
        try:
            if isinstance(body, BodyError):
                raise body
            refuse_state(api, body)
            shape = read_shape(api, body, max_sequences=self._settings.max_sequences)
            check_direct(shape, self._intake.context.legs.direct)
            urgency = self._urgency(api, headers, body, record.arrived_ns)
        except BodyError as error:
            self._refuse(reply, record, 400, str(error), param=error.param)
            return
        record.model = shape.model[:128]
        record.stream = shape.stream
        record.choices = shape.sequences
        record.max_tokens = shape.max_tokens
        no_model = refuse_unlisted(shape.model, self._settings.models)
        if no_model is not None:
            self._refuse(reply, record, 404, no_model, param="model")
            return
        eligible = self._routes.eligible(shape.model)
        if self._refuse_model(reply, record, shape.model, eligible):
            return
        try:
            expected_tokens = expected_output_tokens(headers)
        except BadHintError as error:
            self._refuse(reply, record, 400, str(error))
            return
        try:
            refuse_if_too_long(api, body, self._served.max_model_len(shape.model))
        except BodyError as error:
            self._refuse(reply, record, 400, str(error), param=error.param)
            return
        tenant = record.api_key_id if self._settings.key_is_tenant else ""
        self._intake.submit(
            Arrival(
                shape,
                eligible,
                expected_tokens,
                urgency,
                tenant,
                body,
                partial(self._headers, headers),
                reply,
                record,
                partial(self._refuse_at_last, reply, record),
            )
        )
        body.forget_values()

    def _refuse_at_last(self, reply: "Reply", record: RequestRecord, refusal: "Refusal") -> None:
        retry_s = refusal.retry_after_s
        self._refuse(reply, record, refusal.status, refusal.reason, retry_s=retry_s)

    def _urgency(self, api: Api, headers: "Headers", body: RequestBody, arrived_ns: int) -> Urgency:
        settings = self._settings
        return Urgency(
            read_level(api, headers, body) if settings.client_priority else 0,
            read_deadline_ns(headers, arrived_ns) if settings.client_deadline else None,
        )

    def _refuse_model(
        self,
        reply: "Reply",
        record: RequestRecord,
        model: str,
        eligible: "Eligible | None",
        *,
        decode: bool = True,
    ) -> bool:
        """Refuse a request whose model no engine can serve now; return whether that is so."""
        refused = self._routes.refuse(model, eligible, decode=decode)
        if refused is None:
            return False
        status, reason = refused
        if status == 404:
            self._refuse(reply, record, 404, reason, param="model")
        else:
            self._refuse(reply, record, status, reason, retry_s=1)
        return True

    def _admit_hand_off(self, head: "RequestHead") -> Rejection | None:
        """Judge a decode engine's call for a prefill. The path is the secret that authorises it."""
        if head.method != b"POST" or self._awaited(head.path) is None:
            return _NOT_FOUND
        if head.content_length is None:
            return Rejection(411, "the hand-off needs a Content-Length")
        if head.content_length > _HAND_OFF_BYTES:
            return Rejection(413, f"the hand-off is over {_HAND_OFF_BYTES} bytes")
        return None

    def _awaited(self, path: bytes) -> Callable[[Mapping[str, Any]], None] | None:
        """Return who takes what a decode rank posts there."""
        return self._intake.context.hand_offs.get(
            path.removeprefix(METASERVER_PATH).decode("ascii", "replace")
        )

    def _hand_off(self, request: "Request", reply: "Reply") -> None:
        awaited = self._awaited(request.path)
        if awaited is None:  # It was given up while the body came.
            self._reject(request, reply, _NOT_FOUND)
            return
        try:
            params = json.loads(request.body)
        except (ValueError, RecursionError):
            params = None
        if not isinstance(params, dict) or is_deep(params):
            self._reject(request, reply, _BAD_HAND_OFF)
        else:
            awaited(params)
            reply.send(200, JSON_HEADERS, b"{}")

    def _headers(self, headers: "Headers", request_id: str, media: Media = Media.JSON) -> "Headers":
        return engine_headers(
            headers,
            request_id=request_id,
            media=media,
            engine_key=self._settings.engine_key,
            keep_key=self._settings.pass_authorization,
        )

    def _reject(self, request: "Request", reply: "Reply", rejection: Rejection) -> None:
        headers, body = self.refusals.render(rejection, request, request.peer)
        reply.send(rejection.status, headers, body)

    def _refuse(
        self,
        reply: "Reply",
        record: RequestRecord,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        headers = [(b"x-request-id", record.request_id.encode())]
        if retry_s is not None:
            headers.append((b"retry-after", b"%d" % retry_s))
        _error(reply, status, message, headers, param=param, endpoint=record.endpoint)
        record.status = status
        record.outcome = outcome_of(status)
        record.reason = message
        record.ended_ns = round(self._intake.context.clock() * 1e9)
        self._metrics.ended(record)
        self._log.request_ended(record)

    def _answer_model(self, request: "Request", reply: "Reply") -> None:
        """Tell of one model what an engine's list of them tells; vLLM has no such route."""
        name = unquote_to_bytes(request.path.removeprefix(_MODEL)).decode("utf-8", "replace")
        model = self._served.find(name)
        if model is None:
            message = f"The model `{name[:128]}` does not exist."
            self._reject(request, reply, Rejection(404, message, param="model"))
            return
        headers = [*JSON_HEADERS, (b"x-request-id", self._intake.context.unique().encode())]
        reply.send(200, headers, json.dumps(model.card, separators=(",", ":")).encode())

    def _answer_itself(self, request: "Request", reply: "Reply") -> None:
        if request.path.startswith(_MODEL):
            self._answer_model(request, reply)
            return
        request_id = (b"x-request-id", self._intake.context.unique().encode())
        json_headers = [*JSON_HEADERS, request_id]
        if request.path == _MODELS:
            page = {"object": "list", "data": self._served.cards()}
            reply.send(200, json_headers, json.dumps(page, separators=(",", ":")).encode())
            return
        if request.path in (b"/health", b"/ping"):
            reply.send(200, [request_id], b"")
        elif request.path == b"/ready":
            if self._intake.ready:
                reply.send(200, [request_id], b"")
            else:
                _error(reply, 503, "not ready", [request_id, (b"retry-after", b"1")])
        elif request.path == b"/version":
            reply.send(200, json_headers, b'{"version":"%b"}' % __version__.encode())
        elif request.path == b"/load":
            answer = partial(_answer_load, reply, json_headers)
            self._pages.load(self.pass_through.in_flight, answer)
        elif self._settings.public_metrics:
            headers = [(b"content-type", CONTENT_TYPE.encode()), request_id]
            self._pages.metrics(partial(reply.send, 200, headers))
        else:
            self._reject(request, reply, _NOT_FOUND)


def _answer_load(reply: "Reply", headers: "Headers", load: int) -> None:
    reply.send(200, headers, b'{"server_load":%d}' % load)


def _error(
    reply: "Reply",
    status: int,
    message: str,
    headers: "Headers | None" = None,
    *,
    param: str | None = None,
    endpoint: str = "",
) -> None:
    body = error_body(status, message, param=param, endpoint=endpoint)
    reply.send(status, JSON_HEADERS + (headers or []), body)
