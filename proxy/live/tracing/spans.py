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

from balanceroute.proxy.live.openai.routes import find
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.live.telemetry.stages import stages_of
from balanceroute.proxy.live.telemetry.trace import Event, Trace

_MAX_TEXT = 256
_NS_PER_S = 1_000_000_000
_INTERNAL, _SERVER, _CLIENT = 1, 2, 3
# Errors of a server; what a client did wrong, or did not wait for, is none.
_FAILED = frozenset({Outcome.EXPIRED, Outcome.UPSTREAM_ERROR, Outcome.INTERNAL_ERROR})
_DIGITS = "0123456789abcdef"
_encode = msgspec.json.Encoder().encode


def spans_of(record: RequestRecord) -> bytes:
    """Return the spans of a traced request whose outcome is set: JSON objects, with commas between."""
    trace = record.trace
    assert trace is not None
    epoch_ns = round(record.arrived_unix_s * _NS_PER_S) - record.arrived_ns
    # Text, not objects for an encoder: all that is here is made for every request.
    state = f',"traceState":{_quoted(trace.state)}' if trace.state else ""
    return (
        f'{{"traceId":"{trace.trace_id}","spanId":"{trace.span_id}"'
        f',"parentSpanId":"{trace.parent_id}","name":{_name(record.endpoint)},"kind":{_SERVER}'
        f',"startTimeUnixNano":{epoch_ns + record.arrived_ns}'
        f',"endTimeUnixNano":{epoch_ns + record.ended_ns}'
        f',"attributes":[{_attributes(record)}]{state}{_events(record, trace, epoch_ns)}'
        f"{_status(record)}}}{_stage_spans(record, trace, epoch_ns, state)}"
    ).encode()


def resource_of(names: Mapping[str, str]) -> bytes:
    """Return what sends the spans, in the same encoding."""
    told = "".join(_said(name, value) for name, value in names.items())
    return f'{{"attributes":[{told[1:]}]}}'.encode()


def _events(record: RequestRecord, trace: Trace, epoch_ns: int) -> str:
    first_ns = record.first_token_ns
    last = ""
    if first_ns is not None:
        last = f',{{"name":"first token","timeUnixNano":{epoch_ns + first_ns}}}'
    told = last
    if trace.events:
        told = "".join([_event(one, epoch_ns) for one in trace.events]) + last
    return f',"events":[{told[1:]}]' if told else ""


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
    """Return the spans of the stages, each with a comma before it."""
    steps = trace.steps or stages_of(record)
    parent_id = trace.span_id
    common = f',{{"traceId":"{trace.trace_id}","parentSpanId":"{parent_id}","spanId":"'
    first, number, spans = parent_id[:-1], len(steps), [""] * len(steps)
    end = str(epoch_ns + record.ended_ns)
    for step in reversed(steps):
        span_id = first + _DIGITS[number] if number < 16 else f"{int(parent_id, 16) + number:016x}"
        start = str(epoch_ns + step.began_ns)
        fault = _fault(step.fault) if step.fault else ""
        number -= 1
        spans[number] = (
            f'{common}{span_id}","name":"{step.name}"{_worker(step.engine)}'
            f',"startTimeUnixNano":{start},"endTimeUnixNano":{end}{state}{fault}}}'
        )
        end = start
    return "".join(spans)


def _attributes(record: RequestRecord) -> str:
    """Return what is told of a request; what is empty or 0 is left out."""
    outcome, trace = record.outcome, record.trace
    assert outcome is not None
    told = (
        f"{_asked(record.endpoint, record.model, record.stream, record.tenant)}"
        f"{_client(record.peer.rpartition(':')[0], record.user_agent)}"
        f"{_engines(record.prefiller, record.rank)}{_ended(outcome, record.status)}"
        # It is plain: see `client_request_id`.
        f',{{"key":"balanceroute.request_id","value":{{"stringValue":"{record.request_id}"}}}}'
        f',{{"key":"gen_ai.usage.input_tokens","value":{{"intValue":"{record.prompt_tokens}"}}}}'
        f',{{"key":"gen_ai.usage.output_tokens","value":{{"intValue":"{record.output_tokens}"}}}}'
    )
    if record.max_tokens:
        told += _count("gen_ai.request.max_tokens", record.max_tokens)
    if record.cached_tokens:
        told += _count("balanceroute.cached_tokens", record.cached_tokens)
    if record.choices > 1:
        told += _count("gen_ai.request.choice.count", record.choices)
    if outcome is not Outcome.OK:
        told += _said("balanceroute.reason", record.reason)
        told += _said("balanceroute.refused_for", record.refused_for)
    if trace is not None and trace.events:
        told += _count("balanceroute.retries", record.retries)
        told += _count("balanceroute.recomputes", record.recomputes)
        told += _count("balanceroute.resumes", record.resumes)
        told += _count("balanceroute.lease_lapses", record.lease_lapses)
    return told[1:]


# What many requests have in common is encoded once.


@lru_cache(maxsize=256)
def _name(endpoint: str) -> str:
    # Names are few: a path that is not served is not among them.
    route = find(endpoint.encode("latin-1", errors="replace"))
    return _quoted("HTTP" if route is None else route.path)


@lru_cache(maxsize=1024)
def _asked(endpoint: str, model: str, stream: bool, tenant: str) -> str:
    return "".join(
        (
            f',{{"key":"balanceroute.stream","value":{{"boolValue":{"true" if stream else "false"}}}}}',
            _said("url.path", endpoint),
            _said("gen_ai.request.model", model),
            _said("balanceroute.tenant", tenant),
        )
    )


@lru_cache(maxsize=1024)
def _client(address: str, user_agent: str) -> str:
    return _said("client.address", address) + _said("user_agent.original", user_agent)


@lru_cache(maxsize=4096)
def _engines(prefiller: str, rank: str) -> str:
    return _said("balanceroute.prefiller", prefiller) + _said("balanceroute.rank", rank)


@lru_cache(maxsize=256)
def _ended(outcome: Outcome, status: int) -> str:
    return "".join(
        (
            _count("http.response.status_code", status),
            _said("balanceroute.outcome", outcome.value),
            _said("error.type", "" if outcome is Outcome.OK else outcome.value),
        )
    )


@lru_cache(maxsize=4096)
def _worker(engine: str) -> str:
    """Return the kind of a stage's span, and who worked on the request."""
    if not engine:
        return f',"kind":{_INTERNAL}'
    return f',"kind":{_CLIENT},"attributes":[{_said("balanceroute.engine", engine)[1:]}]'


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
