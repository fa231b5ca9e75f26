"""The record of one client request: the source of its log line and its metrics."""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import NamedTuple, Protocol

from msgspec import Struct, field

from balanceroute.predictors.survival import Hint

# A request's place in a trace, and what happened to it that the times of its record do not show.


class Step(Struct, array_like=True):
    """A stay in one stage."""

    # "queue", "prefill", "pool", "transfer", "decode", "backoff", or "engine" of a request that one
    # engine answers alone.
    name: str
    began_ns: int  # The loop's time.
    engine: str = ""  # The engine that works on the request; empty for none.
    fault: str = ""  # What ended the stay, if that was a failure.


class Event(Struct, frozen=True, array_like=True):
    """Something that happened at one moment, in nanoseconds of the loop's time."""

    name: str
    at_ns: int
    detail: str = ""


class Trace(Struct):
    """The trace that a request belongs to."""

    trace_id: str  # 32 hexadecimal digits.
    # 16 of them, those of the request's own span: the parent of the engines' spans. The last one is
    # 0, and the ids that follow are those of its children.
    span_id: str
    parent_id: str = ""  # Those of the client's span; empty if it gave none.
    state: str = ""  # The client's `tracestate`.
    # In order; each ends where the next one begins, and the last with the request. Empty as long as
    # the times of the record show them; see `stages_of`.
    steps: list[Step] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)  # In order.


class Outcome(Enum):
    """How a request ended; every request ends in exactly one of these."""

    # Enum's own hash is Python code, and every request counts by outcome.
    __hash__ = object.__hash__

    OK = "ok"
    CLIENT_ERROR = "client_error"  # An answer of 4xx, the engine's or ours, or 501 or 505.
    REJECTED = "rejected"  # Refused before any work: a limit is reached, or the proxy drains.
    EXPIRED = "expired"  # Waited longer than it may.
    UPSTREAM_ERROR = "upstream_error"  # The engines failed and no retry was left.
    INTERNAL_ERROR = "internal_error"  # The proxy failed.
    CANCELLED = "cancelled"  # The client left.


OK = Outcome.OK


class Leg(Enum):
    """An exchange of a request with an engine, as metrics and failures name it."""

    # Enum's own hash is Python code, and every request counts by leg.
    __hash__ = object.__hash__

    PREFILL = "prefill"
    DECODE = "decode"
    DIRECT = "direct"  # A prefiller does the whole request.


PREFILL_LEG, DECODE_LEG, DIRECT_LEG = Leg.PREFILL, Leg.DECODE, Leg.DIRECT


class RequestRecord(Struct, omit_defaults=True):
    """One request's life, filled in as it happens. Times are the loop's, in nanoseconds."""

    request_id: str  # The client's X-Request-Id, or ours.
    endpoint: str  # The path, for example /v1/chat/completions; empty if none could be read.
    arrived_ns: int
    arrived_unix_s: float  # Wall-clock time of arrival, for the log alone.
    model: str = ""  # The `model` of the body, cut to 128 characters.
    stream: bool = False
    outcome: Outcome | None = None
    status: int = 0
    prompt_tokens: int = 0  # As the engine counted them; 0 while unknown.
    # Those of them that the prefiller had cached; None if it did not say.
    cached_tokens: int | None = None
    output_tokens: int = 0  # Tokens that reached the client.
    choices: int = 1  # n, sequences of the answer.
    prefiller: str = ""
    rank: str = ""
    prefill_started_ns: int | None = None
    prefilled_ns: int | None = None
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    second_token_ns: int | None = None
    ended_ns: int = 0
    pool_wait_ns: int = 0  # Time spent prefilled and unbound, all bindings together.
    itl_max_ns: int = 0  # Longest gap between two pieces of the stream.
    retries: int = 0  # Legs sent again, of both kinds.
    recomputes: int = 0  # Times a rank gave the request back to be prefilled again.
    resumes: int = 0  # Times another rank went on with its stream after a failure.
    # Whether its client got the first token when the prefill ended.
    early_first_token: bool = False
    first_token_differences: int = 0  # Times a rank said something else than that token.
    # What the proxy drew for both legs to have the same first token; None if it drew none.
    seed: int | None = None
    lease_lapses: int = 0  # Prefills repeated because the KV lease ran out.
    # Of these, those whose lease was left to end: a repeated prefill costs less rank time than an
    # overflow.
    cheaper_lapses: int = 0
    reason: str = ""  # Why it did not end well; empty if it did.
    max_tokens: int | None = None  # The limit of each sequence; None if there is none.
    # Prompt tokens as the scheduler took them to be when the request came; 0 if it was refused
    # before.
    prompt_estimate: int = 0
    keys: tuple[int, ...] = ()  # See `prompt_keys`; empty if no predictor uses them.
    peer: str = ""  # The client's address and port.
    # Names the API key that the client gave (`request_head.api_key_id`); empty if none was asked
    # for.
    api_key_id: str = ""
    user_agent: str = ""  # The client's own word, cut to 128 characters.
    tenant: str = ""  # Whose request it is; empty without tenants.
    refused_for: str = ""  # See `Refusal.cause`; empty unless admission refused it.
    # The time to first token that was expected when it came; None if none was.
    expected_ttft_ns: int | None = None
    local_prefill: bool = False  # Whether it was left to its rank to compute the prompt.
    # The length of its answer that predictors were given as a hint, in tokens; None without one.
    hint: int | None = None
    hint_source: str = ""  # "client", or "limit" (its `max_tokens`); empty without a hint.
    group: str = ""  # Which of several groups had it last; empty if there is one, or none had it.
    alias: str = ""  # The alias of models that it named; empty if it named none.
    task: str = ""  # What it was taken to ask for, among the tasks of that alias.
    # The groups that had it before, each with why it went on: a status, or "timeout".
    fall_backs: tuple[tuple[str, str], ...] = ()
    # Whether it is an attempt in whose place another group was asked. Then it is neither counted
    # nor logged.
    superseded: bool = False
    # Names the trace that it belongs to, by the client's `traceparent` or by ours; empty if there
    # is none.
    trace_id: str = ""
    trace: Trace | None = None  # What its spans are made of; None unless it is traced.
    # The client's, cut, where ours is used in its place; empty if it is not.
    client_request_id: str = ""

    @property
    def begun_ns(self) -> int | None:
        """When an engine was first given it; None if none was."""
        return self.admitted_ns if self.prefill_started_ns is None else self.prefill_started_ns

    @property
    def transfer_ns(self) -> int | None:
        """Time from the binding to the first token: the transfer of the KV cache and the first step.

        None if there was no such transfer, or if the first token came on an earlier binding.
        """
        begin_ns, end_ns = self.admitted_ns, self.first_token_ns
        if self.prefilled_ns is None or begin_ns is None or end_ns is None or end_ns < begin_ns:
            return None
        return end_ns - begin_ns

    def prefill_began(self, prefiller: str, now_s: float) -> None:
        self.prefiller = prefiller
        if self.prefill_started_ns is None:
            self.prefill_started_ns = int(now_s * 1e9 + 0.5)

    def bound(self, rank: str, now_s: float, *, pooled_s: float) -> None:
        """Note the rank that is asked now, and since when the request waited for one."""
        self.rank = rank
        self.admitted_ns = int(now_s * 1e9 + 0.5)
        self.pool_wait_ns += int((now_s - pooled_s) * 1e9 + 0.5)

    def second_token_came(self, at_ns: int) -> None:
        """Note the second token of a stream, and its gap to a first one that another engine said."""
        self.second_token_ns = at_ns
        if self.early_first_token and self.first_token_ns is not None:
            self.itl_max_ns = max(self.itl_max_ns, at_ns - self.first_token_ns)

    def hinted(self, hint: Hint | None) -> None:
        """Note the hint that predictors were given last."""
        self.hint = None if hint is None else hint.tokens
        self.hint_source = "" if hint is None else hint.source

    def end(self, outcome: Outcome, reason: str, now_s: float) -> None:
        self.outcome, self.reason = outcome, reason
        self.ended_ns = int(now_s * 1e9 + 0.5)

    def lease_lapsed(self, *, cheaper: bool) -> None:
        """Count a prefill that is repeated because of its lease."""
        self.lease_lapses += 1
        self.cheaper_lapses += cheaper


class Log(Protocol):
    """Writes down requests that ended."""

    def request_ended(self, record: RequestRecord) -> None:
        """Write one request's line."""


def stages_of(record: RequestRecord) -> list[Step]:
    """Return the stages that a request was in so far, if none of them was repeated."""
    arrived_ns, began_ns = record.arrived_ns, record.prefill_started_ns
    prefilled_ns, admitted_ns, first_ns = (
        record.prefilled_ns,
        record.admitted_ns,
        record.first_token_ns,
    )
    engine = record.rank
    if began_ns is None:
        if admitted_ns is None:
            return [Step("queue", arrived_ns)]
        steps = [Step("pool", arrived_ns)]
        if prefilled_ns is not None:  # The rank called for the prefill.
            steps.append(Step("prefill", admitted_ns, record.prefiller))
            admitted_ns = prefilled_ns
    else:
        steps = [Step("queue", arrived_ns), Step("prefill", began_ns, record.prefiller)]
        if prefilled_ns is not None:
            steps.append(Step("pool", prefilled_ns))
        elif admitted_ns is None:
            engine = record.prefiller  # Which does the whole request.
    if record.early_first_token:
        first_ns = record.second_token_ns
    if admitted_ns is None:
        if first_ns is not None and record.stream:
            steps.append(Step("decode", first_ns, engine))
    elif first_ns is not None and first_ns < admitted_ns:
        # It came on an earlier binding.
        steps.append(Step("decode", admitted_ns, engine))
    else:
        steps.append(Step("transfer" if record.stream else "decode", admitted_ns, engine))
        if first_ns is not None and record.stream:
            steps.append(Step("decode", first_ns, engine))
    return steps


# The requests that ended last, kept for administrators that ask for one by its id.

KEPT = 1000


class RecentRequests:
    """A log that keeps the latest records, in front of another."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._kept: deque[RequestRecord] = deque(maxlen=KEPT)

    def request_ended(self, record: RequestRecord) -> None:
        self._kept.append(record)
        self._log.request_ended(record)

    def find(self, request_id: str) -> list[RequestRecord]:
        """Return those with an id, which clients may give twice; the latest last."""
        return [one for one in self._kept if request_id in (one.request_id, one.client_request_id)]


# W3C trace context (https://www.w3.org/TR/trace-context/): whose span a request belongs under.

Headers = list[tuple[bytes, bytes]]

# A later version may have more behind the flags.
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NAMES = frozenset({b"traceparent", b"tracestate"})
_SAMPLED = 1
_MAX_STATE = 512
# The ratio of a sampler counts in these bits of the trace id, as in OpenTelemetry's SDKs.
_RATIO_BITS = 64
# An id of a trace, and the first 15 digits of one of a span.
_DRAWN_DIGITS = 32 + 15
# Requests whose ids are drawn at once: each draw asks the system.
_DRAWN_AT_ONCE = 64


class Parent(NamedTuple):
    """The span that a client names as the request's parent."""

    trace_id: str
    span_id: str
    sampled: bool


def read_parent(headers: Iterable[tuple[bytes, bytes]]) -> Parent | None:
    """Return the parent that the `traceparent` header names; None if there is none, or no valid one."""
    given = None
    for name, value in headers:
        if name == b"traceparent":
            if given is not None:
                return None
            given = value
    if given is None:
        return None
    match = _PARENT.fullmatch(given.strip())
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5] is not None):
        return None
    if not (match[2].strip(b"0") and match[3].strip(b"0")):
        return None
    sampled = bool(int(match[4], 16) & _SAMPLED)
    return Parent(match[2].decode(), match[3].decode(), sampled)


class Tracer:
    """Decides which requests are traced.

    Args:
        share: Of the requests without a parent, which are traced; a parent's own flag decides.
    """

    def __init__(self, share: float, random_bits: Callable[[int], int]) -> None:
        self._all = share == 1.0
        self._bound = round(share * (1 << _RATIO_BITS))
        self._random_bits = random_bits
        self._drawn = self._draw()

    def begin(self, headers: Headers, record: RequestRecord) -> Headers:
        """Begin the request's trace; return its headers with the context that engines are to get.

        They get one of a request that is not traced too: it says so, and they do not begin their own.
        """
        parent_id, sampled = "", False
        states: Headers = []
        drawn = next(self._drawn)
        trace_id, span_id = drawn[15:], f"{drawn[:15]}0"
        given = dict(headers)
        if b"traceparent" in given or b"tracestate" in given:
            parent = read_parent(headers)
            states = [one for one in headers if one[0] == b"tracestate"]
            headers = [one for one in headers if one[0] not in _NAMES]
            if parent is None:
                states = []  # It belongs to a parent.
            else:
                trace_id, parent_id, sampled = parent
        if not parent_id:
            sampled = self._all or int(trace_id[16:], 16) < self._bound
        record.trace_id = trace_id
        if sampled:
            state = b",".join([value for _, value in states])[:_MAX_STATE].decode("latin-1")
            record.trace = Trace(trace_id, span_id, parent_id, state)
        flag = "01" if sampled else "00"
        return [*headers, *states, (b"traceparent", f"00-{trace_id}-{span_id}-{flag}".encode())]

    def _draw(self) -> Iterator[str]:
        """Return random digits, those of a request each time."""
        digits = _DRAWN_DIGITS * _DRAWN_AT_ONCE
        while True:
            drawn = f"{self._random_bits(4 * digits):0{digits}x}"
            for begin in range(0, digits, _DRAWN_DIGITS):
                yield drawn[begin : begin + _DRAWN_DIGITS]
