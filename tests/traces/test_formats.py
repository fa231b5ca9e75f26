"""Each format is recognised by its first line and read exactly."""

import gzip
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.traces import FORMATS, TraceError, TraceRequest, detect_format, read_trace
from balanceroute.traces.azure import timestamp_ns

AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319605,3180,0
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
"""
MOONCAKE = """\
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535.000001, "input_length": 6472, "output_length": 26}
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
"""
BURSTGPT_SESSIONS = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log
19440161.5,,2,ChatGPT,36,29,65,API log
"""
NATIVE = """\
{"arrival_s":0.1,"prompt_tokens":3,"output_tokens":4,"hash_ids":[7],"user":"a"}
{"arrival_s":0.30000000000000004,"prompt_tokens":5,"output_tokens":6}
"""
CASES = {
    "azure 2023": ("azure", AZURE_2023, [(0, 4808, 10, ()), (52_000_500, 3180, 0, ())]),
    "azure 2024": ("azure", AZURE_2024, [(0, 2162, 5, ()), (990_070_000, 2399, 6, ())]),
    "mooncake": (
        "mooncake",
        MOONCAKE,
        [(0, 6955, 52, (46, 47)), (3_053_000_001, 6472, 26, ())],
    ),
    "burstgpt": ("burstgpt", BURSTGPT, [(0, 472, 18, ()), (40_000_000_000, 1087, 0, ())]),
    "burstgpt with sessions": (
        "burstgpt",
        BURSTGPT_SESSIONS,
        [(0, 906, 446, ()), (51_500_000_000, 36, 29, ())],
    ),
    "native": ("jsonl", NATIVE, [(0, 3, 4, (7,)), (200_000_000, 5, 6, ())]),
}
Row = tuple[int, int, int, tuple[int, ...]]
EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - compared with other times without a zone.
LATEST = datetime(2262, 1, 1)  # noqa: DTZ001 - as above.


@pytest.mark.parametrize(("name", "text", "rows"), CASES.values(), ids=CASES)
def test_a_format_is_recognised_and_read_exactly(
    tmp_path: Path, name: str, text: str, rows: list[Row]
) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    assert detect_format(path) == name
    assert read_trace(path) == [TraceRequest(*row) for row in rows]
    assert read_trace(str(path), name) == read_trace(path)


@pytest.mark.parametrize(("name", "text", "rows"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "encoded",
    [
        pytest.param(lambda text: b"\xef\xbb\xbf" + text.encode(), id="byte order mark"),
        pytest.param(lambda text: text.replace("\n", "\r\n").encode(), id="CRLF"),
        pytest.param(lambda text: text.rstrip("\n").encode(), id="no newline at the end"),
        pytest.param(lambda text: text.replace("\n", "\n  \r\n\n").encode(), id="blank lines"),
        pytest.param(lambda text: ("\n" + text).encode(), id="a blank line first"),
        pytest.param(lambda text: gzip.compress(text.encode()), id="gzip"),
    ],
)
def test_the_encoding_of_a_file_does_not_matter(
    tmp_path: Path, name: str, text: str, rows: list[Row], encoded: Callable[[str], bytes]
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(encoded(text))
    assert detect_format(path) == name
    assert read_trace(path) == [TraceRequest(*row) for row in rows]


def test_every_format_is_covered() -> None:
    assert {name for name, _, _ in CASES.values()} == set(FORMATS)


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        '"note",GeneratedTokens,ContextTokens,TIMESTAMP\n"a, b",2,1,2024-05-10 00:00:00Z\n'
    )
    assert read_trace(path) == [TraceRequest(0, 1, 2)]


def test_requests_come_by_arrival_and_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(
            f'{{"arrival_s": {arrival}, "prompt_tokens": {prompt}, "output_tokens": 1}}\n'
            for arrival, prompt in [(9, 1), (7, 2), (9, 3), (7, 4), (8, 5)]
        )
    )
    assert [
        (request.arrival_ns // 10**9, request.prompt_tokens) for request in read_trace(path)
    ] == [
        (0, 2),
        (0, 4),
        (1, 5),
        (2, 1),
        (2, 3),
    ]


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("1970-01-01 00:00:00", 0),
        ("1970-01-01 00:00:00.000000001", 1),
        ("1970-01-01T00:00:01.5Z", 1_500_000_000),
        ("1970-01-01 05:30:00+05:30", 0),
        ("1969-12-31 17:00:00.25-0700", 250_000_000),
        ("2024-02-29 23:59:59.9999999", 1_709_251_199_999_999_900),
    ],
)
def test_a_timestamp_is_exact(text: str, expected_ns: int) -> None:
    assert timestamp_ns(text) == expected_ns


@given(st.datetimes(min_value=EPOCH, max_value=LATEST))
def test_a_timestamp_agrees_with_datetime(moment: datetime) -> None:
    expected_us = (moment - EPOCH) // timedelta(microseconds=1)
    assert timestamp_ns(moment.isoformat(sep=" ")) == expected_us * 1000


def test_the_proxys_log_is_a_trace_with_its_process_lines_passed_over(tmp_path: Path) -> None:
    """Finding usability-H2: it begins with a line of the process log, which no format had."""
    process = {"time": "2026-01-01T00:00:00+00:00", "level": "info", "logger": "l", "message": "m"}
    request = {"prompt_tokens": 900, "output_tokens": 12, "outcome": "ok", "max_tokens": None}
    new = request | {"time": "2026", "level": "info", "message": "request ended"}
    lines = [
        process,
        request | {"arrival_s": 1_700_000_001.5},
        process,
        new | {"arrival_s": 1_700_000_001.25, "max_tokens": 256},
        process,
    ]
    path = tmp_path / "req.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert detect_format(path) == "jsonl"
    assert read_trace(path) == [
        TraceRequest(0, 900, 12, max_tokens=256),
        TraceRequest(250_000_000, 900, 12),
    ]
    path.write_text(json.dumps(process) + "\n")
    with pytest.raises(TraceError, match="the trace holds no request"):
        read_trace(path)
