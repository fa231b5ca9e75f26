"""An endpoint picker for gateways: it says where each request goes, and reads no answer.

The protocol is that of the Gateway API Inference Extension (its proposal 004), over Envoy's ext_proc: one
gRPC stream for each HTTP request, `FULL_DUPLEX_STREAMED`. The head of a request is answered once its
engine is chosen, so a gateway holds a request as long as it has no answer. Two ways to split prefill and
decode: llm-d's Coordinator sends a call for each of them, and its sidecar takes both engines from one.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as rpc
from envoy.type.v3 import http_status_pb2
from google.protobuf import struct_pb2, wrappers_pb2
from msgspec import Struct, structs

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.core.events import Eligible
from balanceroute.proxy.live.engines.instances import Prefiller, Rank
from balanceroute.proxy.live.frontend.gateway import Gateway
from balanceroute.proxy.live.frontend.groups import Groups
from balanceroute.proxy.live.frontend.request_head import (
    BadHintError,
    client_request_id,
    expected_output_tokens,
    named_in_body,
    named_in_head,
    refuse_model,
    session_of,
    urgency_of,
)
from balanceroute.proxy.live.openai.body import SMALL_BYTES, BodyError, RequestBody, read_in_slices
from balanceroute.proxy.live.openai.errors import JSON_HEADERS, error_body
from balanceroute.proxy.live.openai.shape import (
    Api,
    Shape,
    read_shape,
    read_token_shape,
)
from balanceroute.proxy.live.scheduling.driver import Driver
from balanceroute.proxy.live.selection import (
    Asked,
    Selection,
    SelectionRefusedError,
    Selector,
    endpoint_of,
)
from balanceroute.proxy.live.settings.config import ProxyConfig
from balanceroute.proxy.wire.http1.incoming_request import IncomingBody
from balanceroute.proxy.wire.messages import (
    BodyBudget,
    Headers,
    MalformedError,
    ServerLimits,
    bracketed,
    first_value,
)

_Engine = TypeVar("_Engine")

# Of the protocol: where a request goes, where it may go, and where it went.
_DESTINATION = "x-gateway-destination-endpoint"
_SUBSET = "x-gateway-destination-endpoint-subset"
_SERVED = "x-gateway-destination-endpoint-served"
_METADATA, _HINTS = "envoy.lb", "envoy.lb.subset_hint"
# Of its conformance tests.
_TEST_CHOICE, _TEST_SERVED = b"test-epp-endpoint-selection", "x-conformance-test-served-endpoint"
# Of llm-d.
_PROFILE, _PREFER, _IF_CACHED = b"epp-profile", b"prefer", b"if-available"
_PREFILLER, _DP_RANK = "x-prefiller-host-port", "x-data-parallel-rank"
# Headers that engines or sidecars would obey from any sender: the proxy takes none from a client.
_INTERNAL = (
    *(_PREFILLER, _DP_RANK, "x-data-parallel-host-port"),
    *("x-encoder-hosts-ports", "x-kv-cache-source-host-port"),
)
_APIS = {api.value.encode(): api for api in Api}
_MOST_SEQUENCES = 128
_MOST_HINTS = 4096
_MOST_STREAMS = 20_000
# Envoy gives no other as a picker's answer.
_STATUSES = frozenset(http_status_pb2.StatusCode.values())
_FULL_DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3
_WATCH_S = 1.0
_GRACE_S = 1.0
_PIECE_BYTES = 1 << 20  # Of a body, in one message.


class Head(Struct, frozen=True):
    """A request's head, as a gateway sends it before the body."""

    method: bytes
    path: bytes  # Before `?`.
    headers: Headers  # Without pseudo-headers.
    hints: frozenset[str] | None  # The only endpoints, or hosts, that it may go to; None for all.


class Picked(Struct, frozen=True):
    """Where a request goes."""

    endpoints: tuple[str, ...]  # The chosen one, then those that the gateway tries next.
    headers: tuple[tuple[str, str], ...] = ()  # Further headers for its engine.
    selection: Selection | None = None  # What it holds; None for nothing.
    is_prefill: bool = False  # Whether only its prompt is computed there.


class Choices:
    """Chooses for each request.

    Args:
        gateway: Whose clients, and whose words for what is refused, it has.
    """

    def __init__(
        self,
        config: ProxyConfig,
        groups: Groups,
        gateway: Gateway,
        unix_s: Callable[[], float],
    ) -> None:
        self._settings, self._groups, self._gateway = config.gateway, groups, gateway
        self.tests = config.gateway.pick_test_header  # Whether conformance tests say where to go.
        self.selector = Selector(groups, gateway.refusals, unix_s)

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self._groups.ready

    def reads_body(self, head: Head) -> bool:
        """Return whether the choice for a request depends on its body."""
        return head.path in _APIS and head.method == b"POST"

    async def pick(self, head: Head, body: bytes) -> Picked:
        """Choose, which may take long. Raises SelectionRefusedError: it goes nowhere."""
        allowed = self._allowed(head)
        if not self.reads_body(head):
            return self._any(allowed)
        asked = await self._asked(head, body, allowed)
        if self._settings.pick == "sidecar":
            return await self._pair(head, asked)
        profile = first_value(head.headers, _PROFILE) or b"decode"
        if profile == b"prefill":
            return await self._prefill(head, asked)
        if profile == b"decode":
            return await self._decode(head, asked)
        if profile == b"encode":
            raise self.refusal(501, "EPP-Profile: encode: this picker has no encoders")
        raise self.refusal(400, "EPP-Profile: must be prefill or decode")

    def refusal(self, status: int, reason: str) -> SelectionRefusedError:
        return SelectionRefusedError(status, reason, list(JSON_HEADERS), error_body(status, reason))

    def crashed(self, error: Exception) -> SelectionRefusedError:
        """Return the answer to a request whose handling failed, which is counted and logged."""
        self._groups.first.intake.isolation.failures.report("arrival", error)
        return self.refusal(500, "internal error; the picker's log says more")

    # The phases.

    async def _prefill(self, head: Head, asked: Asked) -> Picked:
        """Choose who computes a prompt; the decode call says how long the answer may be."""
        assert asked.shape is not None
        asked = structs.replace(asked, shape=structs.replace(asked.shape, max_tokens=None))
        selection = self.selector.select(asked)
        engine = await _or_cancel(selection, selection.prefiller())
        if engine is None:
            selection.cancel()
            raise self.refusal(
                503, "its rank is to compute this prompt: --local-prefill-tokens is on"
            )
        return self._picked(engine, selection, asked, is_prefill=True)

    async def _decode(self, head: Head, asked: Asked) -> Picked:
        assert asked.shape is not None
        if _IF_CACHED in _tokens(head.headers, _PREFER):
            raise self.refusal(412, "nobody knows whether a rank has this prompt")
        selection = self.selector.find(asked.request_id)
        if selection is not None and selection.claimed:
            raise self.refusal(409, "the request id is in use")
        if selection is not None and not self._may_be_any(asked.eligible):
            selection.cancel()  # It was to be for any rank.
            selection = None
        if selection is None:
            # Its prefill is not known here: this process began after it, or it needs none.
            tokens = self._pulled_tokens(asked)
            shape = structs.replace(asked.shape, prompt_tokens=tokens) if tokens else asked.shape
            selection = self.selector.select(structs.replace(asked, shape=shape, prefilled=True))
        else:
            selection.revise(asked.shape.max_tokens, asked.expected_tokens)
            selection.prefilled(self._pulled_tokens(asked))
        engine = await _or_cancel(selection, selection.rank())
        return self._picked(engine, selection, asked)

    def _pulled_tokens(self, asked: Asked) -> int | None:
        """Return the length of a prompt, to a block, by what its rank is to pull; None if that is unknown."""
        assert asked.shape is not None
        assert asked.body is not None
        group = self._groups.find(asked.shape.model)
        paces = None if group is None else group.intake.paces
        tokens = 0 if paces is None else paces.block_tokens or 0
        return asked.shape.prompt_tokens or tokens * _blocks(asked.body) or None

    async def _pair(self, head: Head, asked: Asked) -> Picked:
        """Choose both engines now: the rank before its KV cache is there."""
        selection = self.selector.select(asked)
        selection.begins_by_itself = False
        prefiller = await _or_cancel(selection, selection.prefiller())
        rank = await _or_cancel(selection, selection.rank())
        picked = self._picked(rank, selection, asked)
        if prefiller is None:
            return picked
        header = (_PREFILLER, endpoint_of(prefiller))
        return structs.replace(picked, headers=(header, *picked.headers))

    def _any(self, allowed: Eligible | None) -> Picked:
        """Choose for a request that is no generation: the open rank with the fewest requests."""
        ranks = [rank for _, rank in self._open_ranks(allowed)]
        if not ranks:
            raise self.refusal(503, "no decode rank is open")
        return Picked(
            tuple(dict.fromkeys(map(endpoint_of, ranks)))[: 1 + self._settings.pick_fallbacks]
        )

    def _picked(
        self,
        engine: Prefiller | Rank,
        selection: Selection,
        asked: Asked,
        *,
        is_prefill: bool = False,
    ) -> Picked:
        """Return an engine, and other ones that may do the same if it refuses."""
        endpoints = [endpoint_of(engine)]
        headers: tuple[tuple[str, str], ...] = ()
        if isinstance(engine, Rank):
            more: Iterator[Prefiller | Rank] = (one for _, one in self._open_ranks(asked.eligible))
            if engine.header is not None:
                # By its address alone another rank would be asked for the same number.
                headers, more = ((_DP_RANK, engine.header.decode()),), iter(())
        else:
            group = self._group(asked.model)
            more = (
                one
                for one in group.instances.prefillers
                if one.open and (asked.eligible is None or one.id in asked.eligible.prefillers)
            )
        endpoints += [place for one in more if (place := endpoint_of(one)) != endpoints[0]]
        found = tuple(dict.fromkeys(endpoints))[: 1 + self._settings.pick_fallbacks]
        return Picked(found, headers, selection, is_prefill)

    def _open_ranks(self, allowed: Eligible | None) -> list[tuple[int, Rank]]:
        """Return the open ranks and how many requests each has, the emptiest first."""
        found = [
            (int(group.intake.scheduler.ledger.bound[rank.id]), rank)
            for group in self._groups
            for rank in group.intake.instances.ranks
            if rank.open and rank.header is None and (allowed is None or rank.id in allowed.ranks)
        ]
        return sorted(found, key=lambda one: one[0])

    def _group(self, model: str) -> Driver:
        group = self._groups.find(model)
        assert group is not None, "its request was taken"
        return group.intake

    # What a request says.

    def _allowed(self, head: Head) -> Eligible | None:
        """Return the engines that the gateway, or a conformance test, allows; None for all."""
        hints = head.hints
        if self.tests:
            named = _tokens(head.headers, _TEST_CHOICE)
            if named:
                hints = frozenset(one.decode("latin-1") for one in named)
        if hints is None:
            return None
        allowed = self.selector.eligible(hints)
        if not (allowed.prefillers or allowed.ranks):
            raise self.refusal(503, "the gateway allows no engine that is known here")
        return allowed

    def _may_be_any(self, allowed: Eligible | None) -> bool:
        if allowed is None:
            return True
        return all(
            rank.id in allowed.ranks or not rank.open
            for group in self._groups
            for rank in group.intake.instances.ranks
        )

    async def _asked(self, head: Head, body: bytes, allowed: Eligible | None) -> Asked:
        """Read a request. Raises SelectionRefusedError."""
        headers, api = head.headers, _APIS[head.path]
        tenant = self._gateway.owner(headers)
        if tenant is None:
            raise self.refusal(401, "Unauthorized")
        try:
            read = await _read(body)
            shape = _shape(api, read)
            now_ns = round(self._groups.context.clock() * 1e9)
            urgency = urgency_of(tenant, api, headers, read, now_ns)
            expected = expected_output_tokens(headers)
        except (BodyError, BadHintError) as error:
            raise self.refusal(400, str(error)) from None
        refused = refuse_model(tenant, shape.model)
        if refused is not None:
            raise self.refusal(*refused)
        given_id, _ = client_request_id(headers)
        return Asked(
            given_id or self._groups.context.unique(),
            1,
            shape.model,
            shape=shape,
            body=read,
            expected_tokens=expected,
            eligible=allowed,
            tenant=tenant.name,
            urgency=urgency,
            session=session_of(named_in_head(headers) or named_in_body(read), tenant.name),
        )


async def _or_cancel(selection: Selection, choice: Awaitable[_Engine]) -> _Engine:
    """Wait for a choice; end the request of a caller that stops waiting."""
    try:
        return await choice
    except BaseException:
        selection.cancel()
        raise


async def _read(data: bytes) -> RequestBody:
    """Read a body, a large one in slices. Raises BodyError."""
    if len(data) <= SMALL_BYTES:
        return RequestBody(data)
    reading = read_in_slices(data, hashed=False, pump=None)
    while True:
        try:
            next(reading)
        except StopIteration as end:
            body: RequestBody = end.value
            return body
        await asyncio.sleep(0)


def _shape(api: Api, body: RequestBody) -> Shape:
    """Return what a body asks for, which may be a Coordinator's: KV parameters are its own business."""
    if api is Api.GENERATE:
        shape = read_token_shape(body, max_sequences=_MOST_SEQUENCES, internal=True)
    else:
        shape = read_shape(api, body, max_sequences=_MOST_SEQUENCES, internal=True)
    # The gateway, which moves the bytes, has decided that two engines do it.
    return structs.replace(shape, direct="")


def _blocks(body: RequestBody) -> int:
    """Return how many KV blocks a rank is to pull, by the parameters of NIXL; 0 if they do not say."""
    try:
        given = body.values.get("kv_transfer_params")
    except BodyError:  # It is large.
        return 0
    ids = given.get("remote_block_ids") if isinstance(given, dict) else None
    if not isinstance(ids, list):
        return 0
    return max((len(one) for one in ids if isinstance(one, list)), default=len(ids))


def _tokens(headers: Headers, name: bytes) -> list[bytes]:
    """Return the parts of a header that is a list, without their parameters, in lower case."""
    value = first_value(headers, name) or b""
    parts = (part.partition(b";")[0].strip().lower() for part in value.split(b",", _MOST_HINTS))
    return [part for part in parts if part]


# The protocol.


class _Broken(Exception):  # noqa: N818 - no failure of this program.
    """A gateway that does not keep to the protocol."""


class _Call:
    """One request of a gateway, which is one stream of messages.

    Args:
        bodies: Counts the bytes of all bodies that are kept here.
    """

    def __init__(self, choices: Choices, limits: ServerLimits, bodies: BodyBudget) -> None:
        self._choices, self._limits = choices, limits
        self._body = IncomingBody(bodies, limits.body_limit_bytes)  # Until it goes on.
        self._has_body = False
        self._ended = False  # Whether the whole request has come.
        self._by_trailers = False  # Whether trailers said so.
        self._status = 0  # Of its answer; 0 while unknown.
        self._picked: Picked | None = None

    async def answers(
        self, messages: AsyncIterator[Any], closing: asyncio.Future[None]
    ) -> AsyncGenerator[Any, None]:
        """Yield what the gateway is to do; once `closing` is done, nothing more of a begun answer.

        A stream that ends well leaves the answer as it is, where one that breaks off cuts it.

        Raises:
            _Broken: It does not keep to the protocol.
        """
        try:
            head = await self._receive(messages)
            body = self._body.take()
            picked = self._picked = await self._choices.pick(head, body)
        except SelectionRefusedError as refusal:
            yield immediate(refusal)
            return
        except _Broken:
            raise
        except Exception as error:
            yield immediate(self._choices.crashed(error))
            return
        yield destination(picked)
        for message in self._kept(body):
            yield message
        self._body.drop()
        del body
        while (message := await _next(messages, closing)) is not None:
            answer = self._go_on(message)
            if answer is not None:
                yield answer

    def close(self) -> None:
        """Take note that the stream is over, and with it the answer as far as the gateway saw it."""
        self._body.drop()
        picked = self._picked
        if picked is None or picked.selection is None:
            return
        selection = picked.selection
        if self._status >= 400 or not self._ended:
            selection.failed(f"the gateway's answer has status {self._status}")
        elif picked.is_prefill:
            selection.prefill_answered()
        else:
            selection.ended()

    async def _receive(self, messages: AsyncIterator[Any]) -> Head:
        """Return the head of a request, once its body is here if that is read."""
        timeout_s = self._limits.body_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                first = await anext(messages, None)
                if first is None or first.WhichOneof("request") != "request_headers":
                    raise _Broken("the first message must have the headers of a request")
                head = self._head(first)
                self._ended = first.request_headers.end_of_stream
                if not self._ended and first.HasField("protocol_config"):
                    self._check_mode(first.protocol_config.request_body_mode)
                while not self._ended and self._choices.reads_body(head):
                    self._take(await anext(messages, None))
                return head
        except TimeoutError:
            reason = f"the body did not come within {timeout_s:g} s"
            raise self._choices.refusal(408, reason) from None

    def _head(self, message: Any) -> Head:
        fields = message.request_headers.headers.headers
        size, pseudo, headers = 0, {}, []
        for field in fields:
            name, value = field.key.lower().encode(), field.raw_value or field.value.encode()
            size += len(name) + len(value) + 4
            if name[:1] == b":":
                pseudo[name] = value
            else:
                headers.append((name, value))
        if size > self._limits.header_limit_bytes or len(headers) > self._limits.header_limit:
            raise self._choices.refusal(431, "the headers are too large, or too many")
        path = pseudo.get(b":path", b"").partition(b"?")[0]
        hints = _hints(message.metadata_context.filter_metadata, headers)
        if hints is not None and len(hints) > _MOST_HINTS:
            raise self._choices.refusal(400, f"{_SUBSET} has more than {_MOST_HINTS} endpoints")
        return Head(pseudo.get(b":method", b""), path, headers, hints)

    def _check_mode(self, mode: int) -> None:
        if mode != _FULL_DUPLEX:
            reason = "the gateway must send bodies to this picker in FULL_DUPLEX_STREAMED"
            raise self._choices.refusal(500, reason)

    def _take(self, message: Any) -> None:
        """Keep a piece of the body."""
        kind = None if message is None else message.WhichOneof("request")
        if kind == "request_trailers":
            self._ended = self._by_trailers = True
            return
        if kind != "request_body":
            raise _Broken("the request ended before its body did")
        self._has_body = True
        try:
            self._body.add(message.request_body.body)
        except MalformedError as error:
            raise self._choices.refusal(error.rejection.status, str(error)) from None
        self._ended = message.request_body.end_of_stream

    def _kept(self, body: bytes) -> Iterator[Any]:
        if self._has_body:
            starts = range(0, len(body) or 1, _PIECE_BYTES)
            for start in starts:
                last = self._ended and not self._by_trailers and start == starts[-1]
                yield streamed("request_body", body[start : start + _PIECE_BYTES], end=last)
        if self._by_trailers:
            yield pb.ProcessingResponse(request_trailers=pb.TrailersResponse())

    def _go_on(self, message: Any) -> Any:
        """Return the answer to a message behind the choice; None if it needs none."""
        kind = message.WhichOneof("request")
        if kind == "request_body":
            part = message.request_body
            if self._ended:
                if part.body:
                    raise _Broken("more of a body came behind its end")
                return None  # Some gateways say so twice.
            self._ended = part.end_of_stream
            return streamed(kind, part.body, end=part.end_of_stream)
        if kind == "request_trailers":
            self._ended = True
            return pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
        if kind == "response_headers":
            return self._answer_begins(message)
        if kind == "response_body":  # It is not read, and goes on.
            part = message.response_body
            return streamed(kind, part.body, end=part.end_of_stream)
        if kind == "response_trailers":
            return pb.ProcessingResponse(response_trailers=pb.TrailersResponse())
        raise _Broken("a second head came")

    def _answer_begins(self, message: Any) -> Any:
        picked = self._picked
        assert picked is not None, "it was answered"
        for field in message.response_headers.headers.headers:
            if field.key == ":status":
                value = field.raw_value or field.value.encode()
                self._status = int(value) if value.isdigit() and len(value) == 3 else 500
        good = self._status < 400
        if good and picked.selection is not None and not picked.is_prefill:
            picked.selection.began()
        headers = pb.HeadersResponse()
        if self._choices.tests:
            served = _served(message.metadata_context.filter_metadata) or picked.endpoints[0]
            headers = pb.HeadersResponse(response=_mutation({_TEST_SERVED: served}, ()))
        return pb.ProcessingResponse(response_headers=headers)


async def _next(messages: AsyncIterator[Any], closing: asyncio.Future[None]) -> Any:
    """Return the next message; None if there is none, or the process is closing."""
    following = asyncio.ensure_future(anext(messages, None))
    try:
        await asyncio.wait((following, closing), return_when=asyncio.FIRST_COMPLETED)
        return following.result() if following.done() else None
    finally:
        following.cancel()


def _hints(metadata: Mapping[str, struct_pb2.Struct], headers: Headers) -> frozenset[str] | None:
    """Return the only endpoints that a gateway allows, as it sends them in either way; None for all."""
    hints: list[str] = []
    # Check for the key first: to read a missing one would add it.
    if _HINTS in metadata and _SUBSET in metadata[_HINTS].fields:
        value = metadata[_HINTS].fields[_SUBSET]
        if value.WhichOneof("kind") == "list_value":
            hints = [one.string_value for one in value.list_value.values]
        else:
            hints = value.string_value.split(",")
    elif (given := first_value(headers, _SUBSET.encode())) is not None:
        hints = given.decode("latin-1").split(",")
    else:
        return None
    return frozenset(one.strip() for one in hints)


def _served(metadata: Mapping[str, struct_pb2.Struct]) -> str:
    """Return the endpoint that a gateway says it took; empty if it does not say."""
    if _METADATA not in metadata:
        return ""
    served: str = metadata[_METADATA].fields[_SERVED].string_value
    return served


def _mutation(values: Mapping[str, str], gone: tuple[str, ...]) -> Any:
    fields = [
        base_pb2.HeaderValueOption(
            header=base_pb2.HeaderValue(key=name, raw_value=value.encode()),
            append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        for name, value in values.items()
    ]
    return pb.CommonResponse(
        header_mutation=pb.HeaderMutation(set_headers=fields, remove_headers=gone)
    )


def destination(picked: Picked) -> Any:
    """Return the answer to the head of a request: where it goes, in both places of the protocol."""
    places = ",".join(picked.endpoints)
    values = {_DESTINATION: places, **dict(picked.headers)}
    common = _mutation(values, tuple(one for one in _INTERNAL if one not in values))
    common.clear_route_cache = True
    metadata = struct_pb2.Struct()
    metadata.update({_METADATA: {_DESTINATION: places}})
    headers = pb.HeadersResponse(response=common)
    return pb.ProcessingResponse(dynamic_metadata=metadata, request_headers=headers)


def streamed(kind: str, piece: bytes, *, end: bool) -> Any:
    """Return a piece of a body as it goes on; `kind` is that of the message that it came with."""
    part = pb.StreamedBodyResponse(body=piece, end_of_stream=end)
    common = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=part))
    return pb.ProcessingResponse(**{kind: pb.BodyResponse(response=common)})


def immediate(refusal: SelectionRefusedError) -> Any:
    """Return the gateway's own answer to a request that goes nowhere."""
    status = refusal.status if refusal.status in _STATUSES and refusal.status >= 400 else 503
    values = {name.decode(): value.decode("latin-1") for name, value in refusal.headers}
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=http_status_pb2.HttpStatus(code=status),
            headers=_mutation(values, ()).header_mutation,
            body=refusal.body,
            details="picker",
        )
    )


class Picker(rpc.ExternalProcessorServicer):  # type: ignore[misc]
    """The gRPC server of a picker."""

    def __init__(self, config: ProxyConfig, choices: Choices) -> None:
        self.choices = choices
        self.port = 0  # There after `start`.
        self.streams = 0  # Requests of gateways that are not over.
        self._config = config
        self.bodies = BodyBudget(None)  # Counts the bytes of all bodies that are kept.
        self._server: Any = None
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, bodies: BodyBudget) -> None:
        """Listen; bodies count in this budget, which other listeners may share. Raises ConfigError."""
        self.bodies = bodies
        gateway, listening = self._config.gateway, self._config.listening
        server = self._server = grpc.aio.server(
            maximum_concurrent_rpcs=_MOST_STREAMS,
            options=[("grpc.so_reuseport", 0), ("grpc.max_metadata_size", 1 << 16)],
        )
        rpc.add_ExternalProcessorServicer_to_server(self, server)
        server.add_generic_rpc_handlers((self._health(),))
        place = f"{bracketed(gateway.pick_host)}:{gateway.pick_port}"
        try:
            if listening.certificate is None:
                self.port = server.add_insecure_port(place)
            else:
                cert, key = listening.certificate
                pair = (key.read_bytes(), cert.read_bytes())
                self.port = server.add_secure_port(place, grpc.ssl_server_credentials([pair]))
        except RuntimeError:  # Its words are many, and do not say why.
            flags = f"--pick-host {gateway.pick_host} --pick-port {gateway.pick_port}"
            raise ConfigError(f"{flags}: cannot listen there") from None
        await server.start()

    async def close(self) -> None:
        """End all streams, so that begun answers go on."""
        if not self._closing.done():
            self._closing.set_result(None)
        if self._server is not None:
            await self._server.stop(_GRACE_S)

    async def Process(  # noqa: N802
        self, messages: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        """Answer one request's messages, as the protocol names it."""
        call = _Call(self.choices, self._config.limits, self.bodies)
        self.streams += 1
        try:
            async with aclosing(call.answers(aiter(messages), self._closing)) as answers:
                async for answer in answers:
                    yield answer
        except _Broken as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            self.streams -= 1
            call.close()

    # Health: `grpc.health.v1`, whose messages are a string and a number.

    def _health(self) -> Any:
        words = {
            "request_deserializer": wrappers_pb2.StringValue.FromString,
            "response_serializer": wrappers_pb2.Int32Value.SerializeToString,
        }
        handlers = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, **words),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, **words),
        }
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers)

    def _state(self, service: str) -> int:
        if service in ("", "liveness"):
            return _SERVING
        if service in ("readiness", _SERVICE):
            return _SERVING if self.choices.ready else _NOT_SERVING
        return _SERVICE_UNKNOWN

    async def _check(self, request: Any, context: Any) -> Any:
        state = self._state(request.value)
        if state == _SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return wrappers_pb2.Int32Value(value=state)

    async def _watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        del context
        last = -1
        while True:
            state = self._state(request.value)
            if state != last:
                last = state
                yield wrappers_pb2.Int32Value(value=state)
            await asyncio.sleep(_WATCH_S)
