"""The proxy's log read back for training."""

import gzip
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from balanceroute.predictors import PastRequest, RequestFeatures
from balanceroute.predictors.past import features_of, past_requests, read_log
from balanceroute.predictors.state import MAX_OUTPUT_TOKENS
from balanceroute.proxy.live.telemetry.process_log import JsonFormatter
from balanceroute.proxy.live.telemetry.record import Outcome, RequestRecord
from balanceroute.proxy.live.telemetry.request_log import line_of
from balanceroute.traces import TraceError, TraceRequest

RECORD = RequestRecord(
    request_id="r1",
    endpoint="/v1/chat/completions",
    arrived_ns=1_000_000_000,
    arrived_unix_s=1_795_230_203.25,
    outcome=Outcome.OK,
    status=200,
    prompt_tokens=100,
    output_tokens=11,
    ended_ns=3_500_000_000,
    max_tokens=50,
    prompt_estimate=90,
    prefiller="p0",
    keys=(0xFFFFFFFFFFFFFFFF, 7),
)
REQUEST = PastRequest(
    1_795_230_203.25, 1_795_230_205.75, RequestFeatures(100, 50, (0xFFFFFFFFFFFFFFFF, 7)), 11
)


def entry(**changes: object) -> dict[str, Any]:
    fields = json.loads(line_of(RECORD)) | changes
    return {name: value for name, value in fields.items() if value is not ...}


def write(folder: Path, *lines: bytes | dict[str, Any]) -> Path:
    path = folder / "requests.jsonl"
    encoded = [one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines]
    path.write_bytes(b"".join(encoded))
    return path


def test_what_the_proxy_writes_is_read_back(tmp_path: Path) -> None:
    assert read_log(write(tmp_path, line_of(RECORD))) == [REQUEST]


def test_a_compressed_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(line_of(RECORD)))
    assert read_log(path) == [REQUEST]


def test_requests_come_by_arrival_though_logged_by_end(tmp_path: Path) -> None:
    early = structs.replace(RECORD, arrived_unix_s=1_795_230_201.0, output_tokens=9)
    outputs = [
        one.output_tokens for one in read_log(write(tmp_path, *map(line_of, (RECORD, early))))
    ]
    assert outputs == [9, 11]


@pytest.mark.parametrize(
    ("output_tokens", "choices", "expected"), [(11, 1, 11), (33, 3, 11), (34, 3, 11), (1, 4, 1)]
)
def test_outputs_are_those_of_a_sequence(
    tmp_path: Path, output_tokens: int, choices: int, expected: int
) -> None:
    path = write(tmp_path, entry(output_tokens=output_tokens, choices=choices))
    assert read_log(path)[0].output_tokens == expected


@pytest.mark.parametrize(
    "changes",
    [
        *({"outcome": outcome.value} for outcome in Outcome if outcome is not Outcome.OK),
        {"output_tokens": 0},
        {"output_tokens": MAX_OUTPUT_TOKENS + 1},
        {"prompt_tokens": 0, "prompt_estimate": 0},
        {"prompt_tokens": 0, "prompt_estimate": ...},
    ],
)
def test_nothing_is_learned_from_what_tells_nothing(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    path = write(tmp_path, entry(**changes), line_of(RECORD))
    assert read_log(path) == [REQUEST]
    with pytest.raises(TraceError, match=r": the log holds no request that ended by itself"):
        read_log(write(tmp_path, entry(**changes)))


def test_an_uncounted_prompt_is_as_long_as_it_was_estimated(tmp_path: Path) -> None:
    (request,) = read_log(write(tmp_path, entry(prompt_tokens=0)))
    assert request.features.prompt_tokens == 90


def test_logs_of_before_there_were_keys_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path, entry(keys=..., max_tokens=..., prompt_estimate=..., hint=..., hint_source=...)
    )
    assert read_log(path) == [replace(REQUEST, features=RequestFeatures(100))]


@pytest.mark.parametrize(
    ("hint", "source", "expected"), [(70, "client", 70), (50, "limit", None), (None, "", None)]
)
def test_what_the_client_expected_is_read_back(
    tmp_path: Path, hint: int | None, source: str, expected: int | None
) -> None:
    record = structs.replace(RECORD, hint=hint, hint_source=source)
    (request,) = read_log(write(tmp_path, line_of(record)))
    assert request.features.expected_tokens == expected


def test_the_process_log_and_blank_lines_in_between_are_passed_over(tmp_path: Path) -> None:
    record = logging.LogRecord("balanceroute", logging.INFO, "", 0, "draining", None, None)
    record.fields = {"count": 3}
    line = JsonFormatter().format(record).encode() + b"\n"
    assert read_log(write(tmp_path, line, b"\n", line_of(RECORD), line)) == [REQUEST]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"listening on http://127.0.0.1:8000\n", "not valid JSON"),
        (b"[1]\n", "not a JSON object"),
        (line_of(RECORD)[:-20], "not valid JSON"),
        (b"\xff\n", "not valid UTF-8: byte 0xff"),
        ({"time": "x", "level": "info"}, "missing key 'outcome'"),
        (entry(outcome=...), "missing key 'outcome'"),
        (entry(outcome=1), "outcome is not a text: 1"),
        (entry(choices=0), "choices is 0"),
        (entry(choices=...), "missing key 'choices'"),
        (entry(output_tokens=1.5), "output_tokens is not an integer: 1.5"),
        (entry(output_tokens=-1), "output_tokens is negative"),
        (entry(prompt_tokens="7"), "prompt_tokens is not an integer: '7'"),
        (entry(arrival_s=None), "arrival_s is not a finite number"),
        (entry(arrival_s=...), "missing key 'arrival_s'"),
        (entry(duration_s=-1), "duration_s is negative"),
        (entry(max_tokens=True), "max_tokens is not an integer"),
        (entry(prompt_estimate=None), "prompt_estimate is not an integer"),
        (entry(keys=None), "keys is not a list"),
        (entry(keys=["7"]), "keys holds '7', not 16 hexadecimal digits"),
        (entry(keys=[7]), "keys holds 7, not 16 hexadecimal digits"),
        (entry(hint=0.5, hint_source="client"), "hint is not an integer: 0.5"),
    ],
)
def test_a_malformed_line_is_named(
    tmp_path: Path, line: bytes | dict[str, Any], reason: str
) -> None:
    path = write(tmp_path, line_of(RECORD), line)
    with pytest.raises(TraceError) as caught:
        read_log(path)
    assert (caught.value.path, caught.value.line) == (path, 2)
    assert reason in caught.value.reason


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none: No such file"):
        read_log(tmp_path / "none")
    path = tmp_path / "cut.gz"
    path.write_bytes(gzip.compress(line_of(RECORD) * 1000)[:-20])
    with pytest.raises(TraceError, match=r"cut\.gz:\d+: "):
        read_log(path)
    with pytest.raises(TraceError, match=": the log holds no request"):
        read_log(write(tmp_path))


def test_a_prompt_that_only_the_answer_counted_is_the_estimate_that_the_predictor_was_told(
    tmp_path: Path,
) -> None:
    (direct,) = read_log(write(tmp_path, entry(prefiller="")))
    assert direct.features.prompt_tokens == 90


# Requests of a trace as predictors see them: keys that recur, and nothing of the future.


def request(*ids: int, output_tokens: int = 5) -> TraceRequest:
    return TraceRequest(2_000_000_000, 100, output_tokens, ids)


def test_requests_with_the_same_blocks_have_all_keys_in_common() -> None:
    assert features_of(request(1, 2, 3)).keys == features_of(request(1, 2, 3)).keys


def test_requests_that_begin_alike_have_only_the_later_keys_in_common() -> None:
    one, other = features_of(request(1, 2, 3, 4)).keys, features_of(request(1, 2, 3, 5)).keys
    assert one[0] != other[0]
    assert one[-1] == other[-1]
    assert set(one).isdisjoint(features_of(request(7, 2, 3, 4)).keys)


def test_keys_are_the_same_in_every_process() -> None:
    assert features_of(request(1)).keys == (18_232_024_504_446_223_411,)


def test_a_request_without_blocks_has_no_keys() -> None:
    assert features_of(request()).keys == ()


def test_features_know_nothing_of_the_output() -> None:
    known = request(1, 2)
    assert features_of(known) == features_of(replace(known, output_tokens=900))


def test_past_requests_ended_after_their_last_token_and_failed_ones_are_left_out() -> None:
    (past,) = past_requests([request(1), request(1, output_tokens=0)], token_s=0.1)
    assert (past.arrival_s, past.finished_s, past.output_tokens) == (2.0, 2.5, 5)


def test_the_clients_limit_is_known() -> None:
    assert features_of(request(1)).max_tokens is None
    assert features_of(replace(request(1), max_tokens=512)).max_tokens == 512
