"""What is known of one client request when it ends: the source of its log line and its metrics."""

from enum import Enum
from typing import TYPE_CHECKING, Protocol

from balanceroute.proxy.live.telemetry.trace import Trace

if TYPE_CHECKING:
    from balanceroute.predictors.hinted import Hint

from msgspec import Struct


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


class Leg(Enum):
    """An exchange of a request with an engine, as metrics and failures name it."""

    # Enum's own hash is Python code, and every request counts by leg.
    __hash__ = object.__hash__

    PREFILL = "prefill"
    DECODE = "decode"
    DIRECT = "direct"  # A prefiller does the whole request.


class RequestRecord(Struct, omit_defaults=True):
    """One request's life, filled in as it happens. Times are the loop's, in nanoseconds.

    Attributes:
        request_id: The client's X-Request-Id, or ours.
        client_request_id: The client's, cut, where ours is used in its place; empty if it is not.
        endpoint: The path, for example /v1/chat/completions; empty if none could be read.
        model: The `model` of the body, cut to 128 characters.
        arrived_unix_s: Wall-clock time of arrival, for the log alone.
        prompt_tokens: As the engine counted them; 0 while unknown.
        cached_tokens: Those of them that the prefiller had cached; None if it did not say.
        output_tokens: Tokens that reached the client.
        choices: n, sequences of the answer.
        retries: Legs sent again, of both kinds.
        lease_lapses: Prefills repeated because the KV lease ran out.
        cheaper_lapses: Of these, those whose lease was left to end: a repeated prefill costs less
            rank time than an overflow.
        recomputes: Times a rank gave the request back to be prefilled again.
        resumes: Times another rank went on with its stream after a failure.
        early_first_token: Whether its client got the first token when the prefill ended.
        first_token_differences: Times a rank said something else than that token.
        seed: What the proxy drew for both legs to have the same first token; None if it drew none.
        pool_wait_ns: Time spent prefilled and unbound, all bindings together.
        itl_max_ns: Longest gap between two pieces of the stream.
        reason: Why it did not end well; empty if it did.
        max_tokens: The limit of each sequence; None if there is none.
        prompt_estimate: Prompt tokens as the scheduler took them to be when the request came; 0 if
            it was refused before.
        keys: See `prompt_keys`; empty if no predictor uses them.
        peer: The client's address and port.
        api_key_id: Names the API key that the client gave (`request_head.api_key_id`); empty if none
            was asked for.
        user_agent: The client's own word, cut to 128 characters.
        tenant: Whose request it is; empty without tenants.
        refused_for: See `Refusal.cause`; empty unless admission refused it.
        expected_ttft_ns: The time to first token that was expected when it came; None if none was.
        local_prefill: Whether it was left to its rank to compute the prompt.
        hint: What told predictors how long its answer may be, in tokens; None if nothing did.
        hint_source: "client", or "limit" (its `max_tokens`); empty without a hint.
        group: Which of several groups had it last; empty if there is one, or none had it.
        alias: The alias of models that it named; empty if it named none.
        task: What it was taken to ask for, among the tasks of that alias.
        fall_backs: The groups that had it before, each with why it went on: a status, or "timeout".
        superseded: Whether it is an attempt in whose place another group was asked. Then it is neither
            counted nor logged.
        trace_id: Names the trace that it belongs to, by the client's `traceparent` or by ours; empty if
            there is none.
        trace: What its spans are made of; None unless it is traced.
    """

    request_id: str
    endpoint: str
    arrived_ns: int
    arrived_unix_s: float
    model: str = ""
    stream: bool = False
    outcome: Outcome | None = None
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    choices: int = 1
    prefiller: str = ""
    rank: str = ""
    prefill_started_ns: int | None = None
    prefilled_ns: int | None = None
    admitted_ns: int | None = None
    first_token_ns: int | None = None
    second_token_ns: int | None = None
    ended_ns: int = 0
    pool_wait_ns: int = 0
    itl_max_ns: int = 0
    retries: int = 0
    recomputes: int = 0
    resumes: int = 0
    early_first_token: bool = False
    first_token_differences: int = 0
    seed: int | None = None
    lease_lapses: int = 0
    cheaper_lapses: int = 0
    reason: str = ""
    max_tokens: int | None = None
    prompt_estimate: int = 0
    keys: tuple[int, ...] = ()
    peer: str = ""
    api_key_id: str = ""
    user_agent: str = ""
    tenant: str = ""
    refused_for: str = ""
    expected_ttft_ns: int | None = None
    local_prefill: bool = False
    hint: int | None = None
    hint_source: str = ""
    group: str = ""
    alias: str = ""
    task: str = ""
    fall_backs: tuple[tuple[str, str], ...] = ()
    superseded: bool = False
    trace_id: str = ""
    trace: Trace | None = None
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
        """Note the prefiller that is asked now."""
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

    def hinted(self, hint: "Hint | None") -> None:
        """Note what predictors were told last."""
        self.hint = None if hint is None else hint.tokens
        self.hint_source = "" if hint is None else hint.source

    def end(self, outcome: Outcome, reason: str, now_s: float) -> None:
        """Note how the request ended now."""
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
