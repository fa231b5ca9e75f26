"""The request log: one JSON object a line for every request that has ended or was refused.

Fields, in this order; names and meanings are stable, and new ones come last:

    arrival_s       Wall-clock time of arrival, seconds since 1970.
    prompt_tokens   As the engine counted them; 0 if it never did.
    output_tokens   Tokens that reached the client.
    request_id      The client's X-Request-Id, or ours.
    endpoint        The path; empty if the head of the request could not be read.
    model           The model asked for.
    stream          Whether the client asked for a stream.
    choices         n, sequences of the answer.
    outcome         ok, client_error, rejected, expired, upstream_error, internal_error or cancelled.
    reason          Why it did not end well, with the engine's own words; empty if it did.
    status          HTTP status sent; 0 if none was.
    cached_tokens   Prompt tokens that the prefiller had cached, or null.
    prefiller       The prefiller's name; empty if the request saw none.
    rank            The decode rank's name; empty if the request saw none.
    queue_s         Arrival to the first prefill, or null.
    prefill_s       Prefill request to its answer, or null.
    pool_s          Time prefilled and unbound, or null if it was bound to no rank.
    ttft_s          Arrival to the first token, or null.
    itl_max_s       Longest gap between two pieces of the stream, or null.
    duration_s      Arrival to the end.
    retries         Legs sent again.
    recomputes      Times a rank gave the request back.
    resumes         Times another rank went on with its stream after a failure.
    lease_lapses    Prefills repeated because the KV lease ran out.
    cheaper_lapses  Of these, leases left to end because to force the request in would have cost more.
    max_tokens      The limit of each sequence, or null.
    prompt_estimate Prompt tokens as they were estimated on arrival; 0 if the request was refused.
    keys            16 hexadecimal digits each (`prompt_keys`); empty if no predictor uses them.
    transfer_s      Binding to a rank to the first token (KV transfer and first step), or null.
    peer            The client's address and port.
    api_key_id      First 8 hexadecimal digits of the SHA-256 of the client's API key; empty without.
    user_agent      The client's own word, cut to 128 characters.
    time            When it ended, UTC, ISO 8601: as in the lines of the process log.
    level           info; warning if the outcome is rejected, expired, upstream_error or internal_error.
    message         request ended.
    tenant          Whose request it was; empty without tenants, and for a key of none.
    refused_for     The limit that refused it, see docs/tenants.md; empty if none did.
    expected_ttft_s The time to first token that `--admission early` expected, or null.
    local_prefill   Whether a rank was to compute the prompt instead of a prefiller.
    time_to_second_token_s   Arrival to the second token of a stream, or null.
    early_first_token        Whether the first token came from the prefiller.
    first_token_differences  Times a rank said something else than that token.
    seed                     Drawn for both legs to have the same first token, or null.
    hint            The hint to predictors of the answer's length, in tokens, or null.
    hint_source     client (X-Expected-Output-Tokens), limit (max_tokens), or empty.
    trace_id        32 hexadecimal digits: of the client's traceparent, or ours; empty without.
    event           request_ended.

Times are seconds, rounded to microseconds. The first three names are those of the native trace
format (`balanceroute.traces`), so that a log can be replayed as it is;
`balanceroute.predictors.past` reads it for training.

A proxy with several groups writes `group` too: the one that had the request last, if one had it. Of a
request that named an alias of models it writes `alias`, `task`, and `fall_backs`, the groups that had it
before, each with why it went on; `model` is then the alias. Where the client's X-Request-Id could not be kept,
`request_id` is ours and `client_request_id` what the client gave.

Only these fields are written: no other headers, no bodies, nothing secret, of a prompt no more than
64-bit hashes. A line is plain ASCII without control characters, whatever a client put into an id or a
model's name.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache

from msgspec import UNSET, Struct, UnsetType, structs

from balanceroute.proxy.live.telemetry.process_log import json_line
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord

MAX_TEXT = 256
"""Characters of a text that are written; the rest is cut off."""

_NS_PER_S = 1_000_000_000
# `value` of a member is two calls.
_OUTCOMES = {outcome: outcome.value for outcome in Outcome}
_WARNINGS = frozenset(
    {Outcome.REJECTED, Outcome.EXPIRED, Outcome.UPSTREAM_ERROR, Outcome.INTERNAL_ERROR}
)


class RequestLog:
    """Writes one line for every request that has ended, to what does not block."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write

    def request_ended(self, record: RequestRecord) -> None:
        self._write(line_of(record))


def line_of(record: RequestRecord) -> bytes:
    assert record.outcome is not None
    return json_line(_line(record, record.ended_ns))


def fields_of(record: RequestRecord, now_ns: int) -> dict[str, object]:
    """Return the fields as they are now; of a request that lives, `outcome` is null."""
    fields = structs.asdict(_line(record, now_ns))
    return {name: value for name, value in fields.items() if value is not UNSET}


class _Line(Struct):
    # Not a dictionary: its names would be hashed and looked through for each line.
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    request_id: str
    endpoint: str
    model: str
    stream: bool
    choices: int
    outcome: str | None
    reason: str
    status: int
    cached_tokens: int | None
    prefiller: str
    rank: str
    queue_s: float | None
    prefill_s: float | None
    pool_s: float | None
    ttft_s: float | None
    itl_max_s: float | None
    duration_s: float
    retries: int
    recomputes: int
    resumes: int
    lease_lapses: int
    cheaper_lapses: int
    max_tokens: int | None
    prompt_estimate: int
    keys: list[str]
    transfer_s: float | None
    peer: str
    api_key_id: str
    user_agent: str
    time: str
    level: str
    message: str
    tenant: str
    refused_for: str
    expected_ttft_s: float | None
    local_prefill: bool
    time_to_second_token_s: float | None
    early_first_token: bool
    first_token_differences: int
    seed: int | None
    hint: int | None
    hint_source: str
    trace_id: str
    event: str
    # Most proxies have no groups.
    group: str | UnsetType = UNSET
    alias: str | UnsetType = UNSET
    task: str | UnsetType = UNSET
    fall_backs: list[str] | UnsetType = UNSET
    client_request_id: str | UnsetType = UNSET


def _line(record: RequestRecord, now_ns: int) -> _Line:
    arrived_ns = record.arrived_ns
    started_ns, transfer_ns = record.prefill_started_ns, record.transfer_ns
    now_s = record.arrived_unix_s + (now_ns - arrived_ns) / _NS_PER_S
    # By place: that is faster than by name.
    line = _Line(
        int(record.arrived_unix_s * 1e6 + 0.5) / 1e6,
        record.prompt_tokens,
        record.output_tokens,
        record.request_id[:MAX_TEXT],
        record.endpoint[:MAX_TEXT],
        record.model[:MAX_TEXT],
        record.stream,
        record.choices,
        None if record.outcome is None else _OUTCOMES[record.outcome],
        record.reason[:MAX_TEXT],
        record.status,
        record.cached_tokens,
        record.prefiller,
        record.rank,
        _between(arrived_ns, started_ns),
        _between(started_ns, record.prefilled_ns),
        None if record.admitted_ns is None else _seconds(record.pool_wait_ns),
        _between(arrived_ns, record.first_token_ns),
        _seconds(record.itl_max_ns) if record.itl_max_ns else None,
        _seconds(now_ns - arrived_ns),
        record.retries,
        record.recomputes,
        record.resumes,
        record.lease_lapses,
        record.cheaper_lapses,
        record.max_tokens,
        record.prompt_estimate,
        [f"{key:016x}" for key in record.keys] if record.keys else [],
        None if transfer_ns is None else _seconds(transfer_ns),
        record.peer,
        record.api_key_id,
        record.user_agent,
        _utc(now_s),
        "warning" if record.outcome in _WARNINGS else "info",
        "request ended",
        record.tenant,
        record.refused_for,
        None if record.expected_ttft_ns is None else _seconds(record.expected_ttft_ns),
        record.local_prefill,
        _between(arrived_ns, record.second_token_ns),
        record.early_first_token,
        record.first_token_differences,
        record.seed,
        record.hint,
        record.hint_source,
        record.trace_id,
        "request_ended",
    )
    if record.group or record.alias or record.client_request_id:
        _say_more(line, record)
    return line


def _say_more(line: _Line, record: RequestRecord) -> None:
    if record.group:
        line.group = record.group
    if record.alias:
        line.alias, line.task = record.alias, record.task
        line.fall_backs = [f"{group}: {why}" for group, why in record.fall_backs]
    if record.client_request_id:
        line.client_request_id = record.client_request_id[:MAX_TEXT]


def _utc(unix_s: float) -> str:
    """Return a time as ISO 8601 with microseconds."""
    second = int(unix_s)
    carry, microseconds = divmod(round((unix_s - second) * 1e6), 1_000_000)
    return f"{_second(second + carry)}.{microseconds:06d}+00:00"


@lru_cache(maxsize=4)  # Many requests end within one second.
def _second(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat()[:19]


def _between(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns + 500) // 1_000 / 1e6


def _seconds(duration_ns: int) -> float:
    # As `round` to six digits, which takes three times as long.
    return (duration_ns + 500) // 1_000 / 1e6
