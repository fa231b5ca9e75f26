"""The request log: its lines are safe, complete, and a trace that can be read."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from balanceroute.proxy.live.telemetry import request_log
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord, Tracer, read_parent
from balanceroute.proxy.live.telemetry.request_log import MAX_TEXT, RequestLog, line_of
from balanceroute.traces import detect_format, read_trace

MS = 1_000_000
RECORD = RequestRecord(
    request_id="r1",
    endpoint="/v1/chat/completions",
    arrived_ns=1000 * MS,
    arrived_unix_s=1_795_230_203.1234567,
    model="m",
    stream=True,
    outcome=Outcome.OK,
    status=200,
    prompt_tokens=100,
    cached_tokens=60,
    output_tokens=11,
    prefiller="http://p:8000",
    rank="http://d:8000@3",
    prefill_started_ns=1010 * MS,
    prefilled_ns=1050 * MS,
    admitted_ns=1055 * MS,
    first_token_ns=1_100_000_499,
    second_token_ns=1400 * MS,
    ended_ns=1600 * MS,
    pool_wait_ns=5 * MS,
    itl_max_ns=80 * MS,
    retries=1,
    max_tokens=50,
    prompt_estimate=90,
    keys=(255, (1 << 64) - 1),
    peer="10.0.0.1:5000",
    api_key_id="0a1b2c3d",
    user_agent="curl/8",
    tenant="acme",
    refused_for="queue",
    expected_ttft_ns=90 * MS,
    early_first_token=True,
    first_token_differences=1,
    seed=12,
    hint=70,
    hint_source="client",
    trace_id="0af7651916cd43dd8448eb211c80319c",
)


def fields_of(record: RequestRecord) -> dict[str, object]:
    decoded = json.loads(line_of(record))
    assert isinstance(decoded, dict)
    return decoded


def test_a_line_has_every_field_that_the_docstring_promises_in_that_order() -> None:
    assert request_log.__doc__ is not None
    block = request_log.__doc__.split("come last:\n\n")[1].split("\n\n")[0]
    promised = [line.split()[0] for line in block.splitlines()]
    assert list(fields_of(RECORD)) == promised


def test_a_request_is_written_with_its_durations_in_seconds() -> None:
    assert fields_of(RECORD) == {
        "arrival_s": 1_795_230_203.123457,
        "prompt_tokens": 100,
        "output_tokens": 11,
        "request_id": "r1",
        "endpoint": "/v1/chat/completions",
        "model": "m",
        "stream": True,
        "choices": 1,
        "outcome": "ok",
        "reason": "",
        "status": 200,
        "cached_tokens": 60,
        "prefiller": "http://p:8000",
        "rank": "http://d:8000@3",
        "queue_s": 0.01,
        "prefill_s": 0.04,
        "pool_s": 0.005,
        "ttft_s": 0.1,
        "itl_max_s": 0.08,
        "duration_s": 0.6,
        "retries": 1,
        "recomputes": 0,
        "resumes": 0,
        "lease_lapses": 0,
        "cheaper_lapses": 0,
        "max_tokens": 50,
        "prompt_estimate": 90,
        "keys": ["00000000000000ff", "ffffffffffffffff"],
        "transfer_s": 0.045,
        "peer": "10.0.0.1:5000",
        "api_key_id": "0a1b2c3d",
        "user_agent": "curl/8",
        "time": "2026-11-21T03:03:23.723457+00:00",
        "level": "info",
        "message": "request ended",
        "tenant": "acme",
        "refused_for": "queue",
        "expected_ttft_s": 0.09,
        "local_prefill": False,
        "time_to_second_token_s": 0.4,
        "early_first_token": True,
        "first_token_differences": 1,
        "seed": 12,
        "hint": 70,
        "hint_source": "client",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "event": "request_ended",
    }


def test_what_never_happened_is_null() -> None:
    record = RequestRecord("r", "/v1/completions", 0, 0.0, outcome=Outcome.CANCELLED)
    line = fields_of(record)
    nothing = ("cached_tokens", "queue_s", "prefill_s", "ttft_s", "max_tokens", "seed", "hint")
    for name in (*nothing, "pool_s", "itl_max_s", "transfer_s", "time_to_second_token_s"):
        assert line[name] is None
    assert line["keys"] == []
    assert line["hint_source"] == ""


@pytest.mark.parametrize("outcome", Outcome)
def test_the_level_says_whose_fault_it_was(outcome: Outcome) -> None:
    quiet = {Outcome.OK, Outcome.CLIENT_ERROR, Outcome.CANCELLED}
    level = fields_of(replace(RECORD, outcome=outcome))["level"]
    assert level == ("info" if outcome in quiet else "warning")


def test_a_first_token_of_an_earlier_binding_tells_no_transfer() -> None:
    assert fields_of(replace(RECORD, admitted_ns=1200 * MS))["transfer_s"] is None
    assert fields_of(replace(RECORD, prefilled_ns=None))["transfer_s"] is None


def test_every_field_of_a_record_is_in_the_line() -> None:
    # A field that a record gains must not be forgotten here.
    written = {"arrived_unix_s", "outcome", "superseded"}
    exported = {"trace"}
    more = replace(RECORD, group="large", alias="auto", client_request_id="a b")
    plain = set(fields_of(more))
    timed = {"arrived_ns", "ended_ns", "prefill_started_ns", "prefilled_ns", "first_token_ns"}
    timed |= {"second_token_ns"}
    timed |= {"pool_wait_ns", "itl_max_ns", "admitted_ns", "expected_ttft_ns"}
    assert {field.name for field in fields(RequestRecord)} <= written | exported | plain | timed


def test_the_log_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with path.open("wb") as file:
        log = RequestLog(file.write)
        log.request_ended(replace(RECORD, arrived_unix_s=1_795_230_204.5))
        # It arrived first and ended last; its prompt was never counted.
        log.request_ended(
            replace(RECORD, outcome=Outcome.REJECTED, prompt_tokens=0, output_tokens=0)
        )
    assert detect_format(path) == "jsonl"
    first, second = read_trace(path)
    assert (first.arrival_ns, first.prompt_tokens, first.output_tokens) == (0, 0, 0)
    assert (second.arrival_ns, second.prompt_tokens, second.output_tokens) == (
        1_376_543_000,
        100,
        11,
    )


@pytest.mark.parametrize(
    "hostile",
    [
        'x","outcome":"ok',
        "a\r\nb",
        "\x1b[31mred\x1b[0m",
        "\x00\x07\x08\x7f",
        "\x85\x9b31m\u2028\u202e",
        "lone \ud800 surrogate",
    ],
)
def test_hostile_text_stays_inside_its_field(hostile: str) -> None:
    line = line_of(replace(RECORD, request_id=hostile, model=hostile, reason=hostile))
    assert line.endswith(b"\n")
    assert all(0x20 <= byte < 0x7F for byte in line[:-1])
    decoded = json.loads(line)
    assert decoded["request_id"] == decoded["model"] == decoded["reason"] == hostile
    assert decoded["status"] == 200


@given(st.text())
def test_any_text_makes_one_line_of_plain_ascii(text: str) -> None:
    line = line_of(replace(RECORD, model=text))
    assert all(0x20 <= byte < 0x7F for byte in line[:-1])
    assert json.loads(line)["model"] == text[:MAX_TEXT]


def test_long_text_is_cut() -> None:
    long = "m" * 9999
    line = fields_of(replace(RECORD, request_id=long, endpoint=long, model=long, reason=long))
    for name in ("request_id", "endpoint", "model", "reason"):
        assert line[name] == "m" * MAX_TEXT


# Whose span a request belongs under, and which requests are traced.


TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01".encode()
TRACE = b"traceparent"


def record() -> RequestRecord:
    return RequestRecord("r", "/v1/completions", 5, 0.0)


def tracer(share: float = 1.0) -> Tracer:
    return Tracer(share, random.Random(3).getrandbits)


@pytest.mark.parametrize(
    "value",
    [
        PARENT,
        b" " + PARENT + b" ",
        # A later version may have more behind what we know.
        b"01" + PARENT[2:],
        b"01" + PARENT[2:] + b"-more",
    ],
)
def test_the_parent_is_read(value: bytes) -> None:
    assert read_parent([(b"host", b"a"), (TRACE, value)]) == (TRACE_ID, SPAN_ID, True)


def test_of_the_flags_the_lowest_bit_says_whether_the_parent_is_traced() -> None:
    for flags, sampled in ((b"00", False), (b"02", False), (b"03", True), (b"ff", True)):
        parent = read_parent([(TRACE, PARENT[:-2] + flags)])
        assert parent is not None
        assert parent.sampled == sampled


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(TRACE, b"")],
        [(TRACE, b"00-1-2-01")],
        [(TRACE, PARENT), (TRACE, PARENT)],
        [(TRACE, b"ff" + PARENT[2:])],
        [(TRACE, PARENT + b"-more")],
        [(TRACE, PARENT.upper())],
        [(TRACE, PARENT.replace(TRACE_ID.encode(), b"0" * 32))],
        [(TRACE, PARENT.replace(SPAN_ID.encode(), b"0" * 16))],
    ],
)
def test_what_is_no_parent_is_none(headers: list[tuple[bytes, bytes]]) -> None:
    assert read_parent(headers) is None


def test_engines_get_the_request_s_own_span_as_their_parent() -> None:
    mine, state = record(), [(b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    headers = tracer().begin([(b"host", b"a"), (TRACE, PARENT), *state], mine)
    assert mine.trace_id == TRACE_ID
    trace = mine.trace
    assert trace is not None
    assert (trace.trace_id, trace.parent_id, trace.state) == (TRACE_ID, SPAN_ID, "a=1,b=2")
    assert trace.span_id != SPAN_ID
    context = (TRACE, f"00-{TRACE_ID}-{trace.span_id}-01".encode())
    assert headers == [(b"host", b"a"), *state, context]


def test_without_a_valid_parent_a_trace_begins() -> None:
    mine = record()
    headers = tracer().begin([(TRACE, b"00-1-2-01"), (b"tracestate", b"a=1")], mine)
    assert mine.trace is not None
    assert (mine.trace.trace_id, mine.trace.parent_id) == (mine.trace_id, "")
    assert len(mine.trace_id) == 32
    # The state belongs to a parent that is not there.
    assert [name for name, _ in headers] == [TRACE]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_the_requests_without_a_parent_is_traced(share: float) -> None:
    sampler, traced = tracer(share), 0
    for _ in range(2_000):
        mine = record()
        headers = sampler.begin([], mine)
        flag = b"00" if mine.trace is None else b"01"
        assert headers[0][1].endswith(b"-" + flag), "engines trace the same requests"
        traced += mine.trace is not None
    assert abs(traced / 2_000 - share) < 0.03


def test_a_parent_decides_for_itself() -> None:
    for share in (0.0, 1.0):
        kept, left = record(), record()
        tracer(share).begin([(TRACE, PARENT)], kept)
        headers = tracer(share).begin([(TRACE, PARENT[:-2] + b"00")], left)
        assert kept.trace is not None
        assert left.trace is None
        assert left.trace_id == TRACE_ID
        assert headers[0][1].endswith(b"-00")
