"""Traces on their way to a collector: OTLP over HTTP, as JSON (https://opentelemetry.io/docs/specs/otlp/).

A request's spans are made when it has ended, and wait here until a few seconds have passed or many wait.
So many may wait; the proxy drops and counts further ones, so a collector that is slow or gone
costs some memory and nothing else.
"""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from gzip import compress

import msgspec

from balanceroute import __version__
from balanceroute.proxy.live.openai.routes import find
from balanceroute.proxy.live.settings.tracing import ExportSettings
from balanceroute.proxy.live.telemetry.component_metrics import TraceMetrics
from balanceroute.proxy.live.telemetry.record import (
    Event,
    Log,
    Outcome,
    RequestRecord,
    Trace,
    stages_of,
)
from balanceroute.proxy.wire.http1.client import Endpoint, fetch
from balanceroute.proxy.wire.messages import Headers, Response, WireError

# The spans of a request that has ended, in OTLP's JSON encoding.
#
# One span of kind server per request, with a child for each stay in a stage: queue, prefill,
# pool, transfer, decode. What happened to it on the way becomes events of the request's span.
# Source of the encoding: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding and
# opentelemetry/proto/trace/v1/trace.proto. Names of attributes are those of OpenTelemetry's
# semantic conventions (HTTP, GenAI), or begin with `balanceroute.`.

_MAX_TEXT = 256
_NS_PER_S = 1_000_000_000
_INTERNAL, _SERVER, _CLIENT = 1, 2, 3
# Errors of a server; what a client did wrong, or did not wait for, is none.
_FAILED = frozenset({Outcome.EXPIRED, Outcome.UPSTREAM_ERROR, Outcome.INTERNAL_ERROR})
_DIGITS: Sequence[str] = "0123456789abcdef"
_encode = msgspec.json.Encoder().encode


def spans_of(record: RequestRecord) -> str:
    """Return the spans of a traced request whose outcome is set: JSON objects, with commas between."""
    trace, outcome = record.trace, record.outcome
    assert trace is not None
    assert outcome is not None
    epoch_ns = round(record.arrived_unix_s * _NS_PER_S) - record.arrived_ns
    # Text, not objects for an encoder: all that is here is made for every request.
    state = f',"traceState":{_quoted(trace.state)}' if trace.state else ""
    kind = _kind(record.endpoint, record.model, record.stream, outcome, record.status)
    return (
        f"{{{kind}{_client(record.peer.rpartition(':')[0], record.user_agent, record.tenant)}"
        f"{_engines(record.prefiller, record.rank)}"
        # It stands in JSON as it is: see `client_request_id`.
        f',{{"key":"balanceroute.request_id","value":{{"stringValue":"{record.request_id}"}}}}'
        f',{{"key":"gen_ai.usage.input_tokens","value":{{"intValue":"{record.prompt_tokens}"}}}}'
        f',{{"key":"gen_ai.usage.output_tokens","value":{{"intValue":"{record.output_tokens}"}}}}'
        f'{_more(record, outcome, trace)}],"traceId":"{trace.trace_id}","spanId":"{trace.span_id}"'
        f',"parentSpanId":"{trace.parent_id}","startTimeUnixNano":{epoch_ns + record.arrived_ns}'
        f',"endTimeUnixNano":{epoch_ns + record.ended_ns}{state}{_events(record, trace, epoch_ns)}'
        f"{'' if outcome is Outcome.OK else _status(record)}}}{_stage_spans(record, trace, epoch_ns, state)}"
    )


def resource_of(names: Mapping[str, str]) -> bytes:
    """Return what sends the spans, in the same encoding."""
    attributes = "".join(_said(name, value) for name, value in names.items())
    return f'{{"attributes":[{attributes[1:]}]}}'.encode()


def _events(record: RequestRecord, trace: Trace, epoch_ns: int) -> str:
    events = "".join([_event(one, epoch_ns) for one in trace.events]) if trace.events else ""
    if record.first_token_ns is not None:
        events += f',{{"name":"first token","timeUnixNano":{epoch_ns + record.first_token_ns}}}'
    return f',"events":[{events[1:]}]' if events else ""


def _event(event: Event, epoch_ns: int) -> str:
    detail = _said("balanceroute.reason", event.detail)[1:]
    attributes = f',"attributes":[{detail}]' if detail else ""
    return f',{{"name":"{event.name}","timeUnixNano":{epoch_ns + event.at_ns}{attributes}}}'


def _status(record: RequestRecord) -> str:
    if record.outcome in _FAILED or record.status >= 500:
        return _fault(record.reason)
    return ""


def _fault(text: str) -> str:
    return f',"status":{{"message":{_quoted(text)},"code":2}}'


def _stage_spans(record: RequestRecord, trace: Trace, epoch_ns: int, state: str) -> str:
    steps = trace.steps or stages_of(record)
    parent_id = trace.span_id
    if len(steps) < len(_DIGITS):
        first, ids = parent_id[:-1], _DIGITS[1:]
    else:
        ids = [f"{int(parent_id, 16) + number:016x}" for number in range(1, len(steps) + 1)]
        first = ""
    if state:
        state = state.replace("%", "%%")
    form = (
        f',{{"traceId":"{trace.trace_id}","parentSpanId":"{parent_id}","spanId":"{first}%s%s'
        f',"startTimeUnixNano":%d,"endTimeUnixNano":%d{state}}}'
    )
    said = [
        _stage(step.name, step.engine) + (_fault(step.fault) if step.fault else "")
        for step in steps
    ]
    begins = [epoch_ns + step.began_ns for step in steps]
    ends = [*begins[1:], epoch_ns + record.ended_ns]
    # No loop of our own: this is most of what a trace costs.
    return "".join(map(form.__mod__, zip(ids, said, begins, ends, strict=False)))


def _more(record: RequestRecord, outcome: Outcome, trace: Trace) -> str:
    """Return the attributes that few requests have, without those that are empty or 0."""
    more = ""
    if record.max_tokens:
        more = _count("gen_ai.request.max_tokens", record.max_tokens)
    if record.cached_tokens:
        more += _count("balanceroute.cached_tokens", record.cached_tokens)
    if record.choices > 1:
        more += _count("gen_ai.request.choice.count", record.choices)
    if outcome is not Outcome.OK:
        more += _said("balanceroute.reason", record.reason)
        more += _said("balanceroute.refused_for", record.refused_for)
    if trace.events:
        more += _count("balanceroute.retries", record.retries)
        more += _count("balanceroute.recomputes", record.recomputes)
        more += _count("balanceroute.resumes", record.resumes)
        more += _count("balanceroute.lease_lapses", record.lease_lapses)
    return more


# What many requests have in common is encoded once.


@lru_cache(maxsize=1024)
def _kind(endpoint: str, model: str, stream: bool, outcome: Outcome, status: int) -> str:
    """Return what a request has in common with similar ones: members of its span, up to its own attributes."""
    # Names are few: a path that is not served is not among them.
    route = find(endpoint.encode("latin-1", errors="replace"))
    return "".join(
        (
            f'"name":{_quoted("HTTP" if route is None else route.path)},"kind":{_SERVER},"attributes":[',
            f'{{"key":"balanceroute.stream","value":{{"boolValue":{"true" if stream else "false"}}}}}',
            _said("url.path", endpoint),
            _said("gen_ai.request.model", model),
            _count("http.response.status_code", status),
            _said("balanceroute.outcome", outcome.value),
            _said("error.type", "" if outcome is Outcome.OK else outcome.value),
        )
    )


@lru_cache(maxsize=1024)
def _client(address: str, user_agent: str, tenant: str) -> str:
    return "".join(
        (
            _said("client.address", address),
            _said("user_agent.original", user_agent),
            _said("balanceroute.tenant", tenant),
        )
    )


@lru_cache(maxsize=4096)
def _engines(prefiller: str, rank: str) -> str:
    return _said("balanceroute.prefiller", prefiller) + _said("balanceroute.rank", rank)


@lru_cache(maxsize=4096)
def _stage(name: str, engine: str) -> str:
    """Return what a stage's span says behind its id, but for its times."""
    if not engine:
        return f'","name":"{name}","kind":{_INTERNAL}'
    worker = _said("balanceroute.engine", engine)[1:]
    return f'","name":"{name}","kind":{_CLIENT},"attributes":[{worker}]'


def _said(name: str, text: str) -> str:
    """Return an attribute with a comma before it; nothing if it is empty."""
    return f',{{"key":"{name}","value":{{"stringValue":{_quoted(text)}}}}}' if text else ""


def _count(name: str, count: int) -> str:
    """Return an attribute with a comma before it; nothing if it is 0."""
    return f',{{"key":"{name}","value":{{"intValue":"{count}"}}}}' if count else ""


def _quoted(text: str) -> str:
    """Return a text as JSON, cut if it is long."""
    text = text[:_MAX_TEXT]
    if not text.isascii():  # There may be half a surrogate pair, in the name of a model.
        text = text.encode(errors="replace").decode()
    return _encode(text).decode()


MOST_WAITING = 4096
"""Requests whose spans wait; one takes 2 to 4 kB."""

BATCH = 256
"""Requests whose spans are sent at once, at most."""

DELAY_S = 2.0
"""How long spans wait for further ones."""

_log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_ANSWER_BYTES = 65_536
_BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0)
_MOST_BACKOFF_S = 60.0
# What the specification says may be sent again.
_RETRYABLE = frozenset({429, 502, 503, 504})
_COMPLAINT_S = 60.0

InThread = Callable[[Callable[[], None]], Awaitable[None]]


class SpanExporter:
    """A log in front of another, which sends spans to one collector. `run` it, and `close` it at the end."""

    def __init__(
        self,
        log: Log,
        settings: ExportSettings,
        endpoint: Endpoint,
        metrics: TraceMetrics,
        *,
        in_thread: InThread,
        rng: random.Random,
    ) -> None:
        self._log = log
        self._settings = settings
        self._endpoint = endpoint
        self._metrics = metrics
        self._in_thread = in_thread
        self._rng = rng
        self._target = settings.path.encode()
        self._headers: Headers = [
            (b"content-type", b"application/json"),
            (b"user-agent", f"balanceroute/{__version__}".encode()),
            *((name.lower().encode(), secret.value) for name, secret in settings.headers),
        ]
        if settings.gzip:
            self._headers.append((b"content-encoding", b"gzip"))
        scope = msgspec.json.encode({"name": "balanceroute", "version": __version__})
        resource = resource_of(dict(settings.resource))
        self._before = (
            b'{"resourceSpans":[{"resource":' + resource + b',"scopeSpans":[{"scope":' + scope
        ) + b',"spans":['
        self._waiting: deque[str] = deque()
        self._batch: list[str] = []
        self._some, self._many = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._complained_s = -_COMPLAINT_S

    def take(self, record: RequestRecord) -> None:
        """Take the spans of a traced request that has ended; never waits."""
        if len(self._waiting) >= MOST_WAITING:
            self._drop(1, "queue_full", "they come faster than they are taken")
            return
        self._waiting.append(spans_of(record))
        self._some.set()
        if len(self._waiting) >= BATCH:
            self._many.set()

    def request_ended(self, record: RequestRecord) -> None:
        """Pass a record on, and have its spans exported if it is traced."""
        self._log.request_ended(record)
        if record.trace is not None:
            self.take(record)

    async def run(self) -> None:
        while True:
            await self._some.wait()
            try:
                async with asyncio.timeout(DELAY_S):
                    await self._many.wait()
            except TimeoutError:
                pass
            while self._fill():
                await self._export()
                if len(self._waiting) < BATCH:
                    break

    async def close(self) -> None:
        """Export waiting spans, if the collector takes them at once, and close the connection."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                while self._fill() and await self._attempt() is None:
                    pass
        except TimeoutError:
            pass
        left = len(self._batch) + len(self._waiting)
        self._batch, self._waiting = [], deque()
        self._drop(left, "closed", "the proxy ends")
        self._endpoint.close()

    def _fill(self) -> bool:
        """Fill the batch, unless an unsent one is left; return whether there is one."""
        if not self._batch:
            count = min(BATCH, len(self._waiting))
            self._batch = [self._waiting.popleft() for _ in range(count)]
        if not self._waiting:
            self._some.clear()
        if len(self._waiting) < BATCH:
            self._many.clear()
        return bool(self._batch)

    async def _export(self) -> None:
        """Send the batch, again if that may help."""
        for backoff_s in _BACKOFF_S:
            asked_s = await self._attempt()
            if asked_s is None:
                return
            spread_s = backoff_s * self._rng.uniform(0.5, 1.0)
            await asyncio.sleep(min(max(asked_s, spread_s), _MOST_BACKOFF_S))
        self._lose("unreachable", "the collector does not take them")

    async def _attempt(self) -> float | None:
        """Send it once; return how long to wait at least before another attempt, None for no other."""
        body = b"".join((self._before, ",".join(self._batch).encode(), b"]}]}]}"))
        if self._settings.gzip:
            packed: list[bytes] = []
            await self._in_thread(lambda: packed.append(compress(body, 1)))
            body = packed[0]
        try:
            response = await fetch(
                self._endpoint,
                b"POST",
                self._target,
                self._headers,
                body,
                timeout_s=self._settings.timeout_s,
                max_bytes=_ANSWER_BYTES,
                cut=True,
            )
        except WireError as error:
            self._complain(str(error))
            return 0.0
        if response.status in _RETRYABLE:
            self._complain(f"status {response.status}")
            return _retry_after_s(response)
        if response.status >= 300:
            self._lose("refused", f"status {response.status}")
            return None
        count, self._batch = len(self._batch), []
        self._metrics.exported(count)
        self._take_answer(response)
        return None

    def _take_answer(self, response: Response) -> None:
        """Log what the collector says that it did not take: spans, not whole traces."""
        try:
            partial_success = msgspec.json.decode(response.body)["partialSuccess"]
            rejected = int(partial_success.get("rejectedSpans", 0))
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            return  # There is none.
        if rejected:
            reason = str(partial_success.get("errorMessage", ""))[:200]
            self._complain(f"it rejected {rejected} spans: {reason}")

    def _lose(self, what: str, reason: str) -> None:
        count, self._batch = len(self._batch), []
        self._drop(count, what, reason)

    def _drop(self, count: int, what: str, reason: str) -> None:
        if count:
            self._metrics.dropped(count, what)
            self._complain(reason)

    def _complain(self, reason: str) -> None:
        """Log, at most once a minute, that the collector does not take spans."""
        now_s = self._loop.time()
        if now_s >= self._complained_s + _COMPLAINT_S:
            self._complained_s = now_s
            fields = {"collector": self._endpoint.name, "reason": reason}
            _log.warning("traces are not exported", extra={"fields": fields})


def _retry_after_s(response: Response) -> float:
    value = response.header(b"retry-after") or b""
    return float(value) if value.isdigit() else 0.0
