"""The spans of a request that has ended, in OTLP's JSON encoding.

One span of kind server per request, with a child for each stay in a stage: queue, prefill, pool,
transfer, decode. What happened to it on the way is told as events of the request's span. Source of the
encoding: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding and
opentelemetry/proto/trace/v1/trace.proto. Names of attributes are those of OpenTelemetry's semantic
conventions (HTTP, GenAI), or begin with `balanceroute.`.
"""

from collections.abc import Mapping, Sequence
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
    told = "".join(_said(name, value) for name, value in names.items())
    return f'{{"attributes":[{told[1:]}]}}'.encode()


def _events(record: RequestRecord, trace: Trace, epoch_ns: int) -> str:
    told = "".join([_event(one, epoch_ns) for one in trace.events]) if trace.events else ""
    if record.first_token_ns is not None:
        told += f',{{"name":"first token","timeUnixNano":{epoch_ns + record.first_token_ns}}}'
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
    """Return the attributes that few requests have; what is empty or 0 is left out."""
    told = ""
    if record.max_tokens:
        told = _count("gen_ai.request.max_tokens", record.max_tokens)
    if record.cached_tokens:
        told += _count("balanceroute.cached_tokens", record.cached_tokens)
    if record.choices > 1:
        told += _count("gen_ai.request.choice.count", record.choices)
    if outcome is not Outcome.OK:
        told += _said("balanceroute.reason", record.reason)
        told += _said("balanceroute.refused_for", record.refused_for)
    if trace.events:
        told += _count("balanceroute.retries", record.retries)
        told += _count("balanceroute.recomputes", record.recomputes)
        told += _count("balanceroute.resumes", record.resumes)
        told += _count("balanceroute.lease_lapses", record.lease_lapses)
    return told


# What many requests have in common is encoded once.


@lru_cache(maxsize=1024)
def _kind(endpoint: str, model: str, stream: bool, outcome: Outcome, status: int) -> str:
    """Return what a request has in common with others: members of its span, up to its own attributes."""
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
