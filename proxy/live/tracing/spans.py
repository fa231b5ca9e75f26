"""The spans of a request that has ended, in OTLP's JSON encoding.

One span of kind server per request, with a child for each stay in a stage: queue, prefill, pool,
transfer, decode. What happened to it on the way is told as events of the request's span. Source of the
encoding: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding and
opentelemetry/proto/trace/v1/trace.proto. Names of attributes are those of OpenTelemetry's semantic
conventions (HTTP, GenAI), or begin with `balanceroute.`.
"""

from collections.abc import Mapping
from functools import lru_cache

import msgspec
from msgspec import Raw, Struct

from balanceroute.proxy.live.openai.routes import find
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.live.telemetry.stages import stages_of
from balanceroute.proxy.live.telemetry.trace import Trace

_MAX_TEXT = 256
_NS_PER_S = 1_000_000_000
_INTERNAL, _SERVER, _CLIENT = 1, 2, 3
# Errors of a server; what a client did wrong, or did not wait for, is none.
_FAILED = frozenset({Outcome.EXPIRED, Outcome.UPSTREAM_ERROR, Outcome.INTERNAL_ERROR})
_NONE = Raw(b"[]")
_DIGITS = "0123456789abcdef"
_TOKENS = (
    b',{"key":"gen_ai.usage.input_tokens","value":{"intValue":"%d"}}'
    b',{"key":"gen_ai.usage.output_tokens","value":{"intValue":"%d"}}'
)
_encode = msgspec.json.Encoder().encode


class _Event(Struct, omit_defaults=True, rename="camel"):
    name: str
    time_unix_nano: int
    attributes: Raw = _NONE


class _Status(Struct):
    message: str
    code: int = 2


class _Span(Struct, omit_defaults=True, rename="camel"):
    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    kind: int
    start_time_unix_nano: int
    end_time_unix_nano: int
    attributes: Raw = _NONE
    trace_state: str = ""
    events: list[_Event] = []
    status: _Status | None = None


def spans_of(record: RequestRecord) -> bytes:
    """Return the spans of a traced request whose outcome is set: JSON objects, with commas between."""
    trace = record.trace
    assert trace is not None
    epoch_ns = round(record.arrived_unix_s * _NS_PER_S) - record.arrived_ns
    spans = [_request_span(record, trace, epoch_ns), *_stage_spans(record, trace, epoch_ns)]
    return _encode(spans)[1:-1]


def resource_of(names: Mapping[str, str]) -> bytes:
    """Return what sends the spans, in the same encoding."""
    told = b"".join(_said(name, value) for name, value in names.items())
    return b'{"attributes":[' + told[1:] + b"]}"


def _request_span(record: RequestRecord, trace: Trace, epoch_ns: int) -> _Span:
    route = find(record.endpoint.encode("latin-1", errors="replace"))
    events = [_Event(one.name, epoch_ns + one.at_ns, _detail(one.detail)) for one in trace.events]
    if record.first_token_ns is not None:
        events.append(_Event("first token", epoch_ns + record.first_token_ns))
    status = None
    if record.outcome in _FAILED or record.status >= 500:
        status = _Status(_plain(record.reason))
    return _Span(
        trace.trace_id,
        trace.span_id,
        trace.parent_id,
        # Names are few: a path that is not served is not among them.
        "HTTP" if route is None else route.path,
        _SERVER,
        epoch_ns + record.arrived_ns,
        epoch_ns + record.ended_ns,
        _attributes(record),
        trace.state,
        events,
        status,
    )


def _stage_spans(record: RequestRecord, trace: Trace, epoch_ns: int) -> list[_Span]:
    steps = trace.steps or stages_of(record)
    trace_id, parent_id, state = trace.trace_id, trace.span_id, trace.state
    end_ns, spans = epoch_ns + record.ended_ns, []
    number, first, own = len(steps), parent_id[:-1], int(parent_id, 16)
    for step in reversed(steps):
        engine, fault, start_ns = step.engine, step.fault, epoch_ns + step.began_ns
        spans.append(
            _Span(
                trace_id,
                first + _DIGITS[number] if number < 16 else f"{own + number:016x}",
                parent_id,
                step.name,
                _CLIENT if engine else _INTERNAL,
                start_ns,
                end_ns,
                _worker(engine) if engine else _NONE,
                state,
                [],
                _Status(_plain(fault)) if fault else None,
            )
        )
        number, end_ns = number - 1, start_ns
    spans.reverse()
    return spans


def _attributes(record: RequestRecord) -> Raw:
    """Return what is told of a request; what is empty or 0 is left out."""
    outcome = record.outcome
    assert outcome is not None
    told = [
        _asked(record.endpoint, record.model, record.stream, record.tenant),
        _client(record.peer.rpartition(":")[0], record.user_agent),
        _engines(record.prefiller, record.rank),
        _ended(outcome, record.status),
        _said("balanceroute.request_id", record.request_id),
        _TOKENS % (record.prompt_tokens, record.output_tokens),
    ]
    if record.max_tokens:
        told.append(_count("gen_ai.request.max_tokens", record.max_tokens))
    if record.cached_tokens:
        told.append(_count("balanceroute.cached_tokens", record.cached_tokens))
    if record.choices > 1:
        told.append(_count("gen_ai.request.choice.count", record.choices))
    if outcome is not Outcome.OK:
        told.append(_said("balanceroute.reason", record.reason))
        told.append(_said("balanceroute.refused_for", record.refused_for))
    if record.trace is not None and record.trace.events:
        told.append(_count("balanceroute.retries", record.retries))
        told.append(_count("balanceroute.recomputes", record.recomputes))
        told.append(_count("balanceroute.resumes", record.resumes))
        told.append(_count("balanceroute.lease_lapses", record.lease_lapses))
    return Raw(b"[%b]" % b"".join(told)[1:])


# What many requests have in common is encoded once.


@lru_cache(maxsize=1024)
def _asked(endpoint: str, model: str, stream: bool, tenant: str) -> bytes:
    streamed = b',{"key":"balanceroute.stream","value":{"boolValue":%b}}'
    return b"".join(
        (
            streamed % (b"true" if stream else b"false"),
            _said("url.path", endpoint),
            _said("gen_ai.request.model", model),
            _said("balanceroute.tenant", tenant),
        )
    )


@lru_cache(maxsize=1024)
def _client(address: str, user_agent: str) -> bytes:
    return _said("client.address", address) + _said("user_agent.original", user_agent)


@lru_cache(maxsize=4096)
def _engines(prefiller: str, rank: str) -> bytes:
    return _said("balanceroute.prefiller", prefiller) + _said("balanceroute.rank", rank)


@lru_cache(maxsize=256)
def _ended(outcome: Outcome, status: int) -> bytes:
    return b"".join(
        (
            _count("http.response.status_code", status),
            _said("balanceroute.outcome", outcome.value),
            _said("error.type", "" if outcome is Outcome.OK else outcome.value),
        )
    )


@lru_cache(maxsize=4096)
def _worker(engine: str) -> Raw:
    return Raw(b"[%b]" % _said("balanceroute.engine", engine)[1:])


def _detail(text: str) -> Raw:
    return Raw(b"[%b]" % _said("balanceroute.reason", text)[1:])


def _said(name: str, text: str) -> bytes:
    """Return an attribute with a comma before it; nothing if it is empty."""
    if not text:
        return b""
    return b',{"key":"%b","value":{"stringValue":%b}}' % (name.encode(), _encode(_plain(text)))


def _count(name: str, count: int) -> bytes:
    """Return an attribute with a comma before it; nothing if it is 0."""
    return b',{"key":"%b","value":{"intValue":"%d"}}' % (name.encode(), count) if count else b""


def _plain(text: str) -> str:
    """Return a text as UTF-8 can have it, cut if it is long."""
    text = text[:_MAX_TEXT]
    # Half a surrogate pair, in the name of a model.
    return text if text.isascii() else text.encode(errors="replace").decode()
