"""Each format is recognised by its first line and read exactly."""

import gzip
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.traces import (
    FORMATS,
    TraceError,
    TraceRequest,
    detect_format,
    read_mix,
    read_trace,
    with_sessions,
    write_native,
)
from balanceroute.traces.formats import timestamp_ns
from balanceroute.traces.lines import MAX_ARRIVAL_NS, MAX_LEVEL, MAX_TOKENS

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
BAILIAN = (
    '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521, "output_length": 132, '
    f'"type": "text", "turn": 1, "hash_ids": {list(range(33))}}}\n'
    '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 63.5, "input_length": 640, "output_length": 7, '
    f'"type": "text", "turn": 2, "hash_ids": {[*range(32), *range(50, 58)]}}}\n'
)


def without_sessions(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Return the requests as the rows have them."""
    return [replace(request, session="") for request in requests]


CASES: dict[str, tuple[str, str, list[tuple[int, int, int, tuple[int, ...]]]]] = {
    "bailian": ("bailian", BAILIAN, [(0, 521, 132, (0, 1)), (2_386_000_000, 640, 7, (0, 2))]),
    "azure 2023": ("azure", AZURE_2023, [(0, 4808, 10, ()), (52_000_500, 3180, 0, ())]),
    "azure 2024": ("azure", AZURE_2024, [(0, 2162, 5, ()), (990_070_000, 2399, 6, ())]),
    "mooncake": ("mooncake", MOONCAKE, [(0, 6955, 52, (46, 47)), (3_053_000_001, 6472, 26, ())]),
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
    assert without_sessions(read_trace(path)) == [TraceRequest(*row) for row in rows]
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
    assert without_sessions(read_trace(path)) == [TraceRequest(*row) for row in rows]


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
    ] == [(0, 2), (0, 4), (1, 5), (2, 1), (2, 3)]


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


def mooncake(*requests: tuple[float, int, list[int]]) -> str:
    return "".join(
        f'{{"timestamp": {at}, "input_length": {tokens}, "output_length": 5, "hash_ids": {ids}}}\n'
        for at, tokens, ids in requests
    )


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("last", [False, True], ids=["full blocks alone", "and the last"])
def test_smaller_blocks_are_read_as_blocks_of_512_tokens(
    tmp_path: Path, size: int, last: bool
) -> None:
    def ids(first: int, tokens: int) -> list[int]:
        return list(range(first, first + (-(-tokens // size) if last else tokens // size)))

    shared = ids(0, 1024)
    path = tmp_path / "trace.jsonl"
    path.write_text(
        mooncake(
            (0, 1024 + 700, shared + ids(1000, 700)),
            (3000, 1024 + 700, shared + ids(1000, 700)),
            (6000, 1024 + 901, shared + ids(2000, 901)),
            # The same ids behind others are another prefix.
            (9000, 901 + 512 - 901 % 512, ids(2000, 901 + 512 - 901 % 512)),
        )
    )
    read = [request.hash_ids for request in read_trace(path)]
    assert read[0] == read[1]
    assert read[2][:2] == read[0][:2]
    assert not set(read[2][2:]) & set(read[0])
    assert not set(read[3]) & set(read[2])


def test_blocks_of_512_and_prefixes_alone_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake((0, 1200, [3, 4, 9]), (3000, 5000, [3])))
    assert [request.hash_ids for request in read_trace(path)] == [(3, 4, 9), (3,)]


def test_blocks_of_no_one_size_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake((0, 512, list(range(32))), (3000, 512, list(range(16)))))
    with pytest.raises(TraceError, match=r"not of 8, 16, \.\. or 256 tokens: leave them out"):
        read_trace(path)


def test_a_bailian_trace_is_told_whoever_reads_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(BAILIAN)
    with pytest.raises(TraceError, match="seconds and blocks of 16 tokens: --format bailian"):
        read_trace(path, "mooncake")
    (tmp_path / "mix.toml").write_text('[[part]]\ntrace = "trace.jsonl"\n')
    assert read_mix(tmp_path / "mix.toml")[1].arrival_ns == 2_386_000_000
    assert "timestamps are read as seconds, and blocks as 16 tokens; --columns" in caplog.text


@pytest.mark.parametrize("fraction", [0.0, 0.25])
def test_seconds_in_a_mooncake_trace_are_asked_for(tmp_path: Path, fraction: float) -> None:
    path = tmp_path / "trace.jsonl"
    times = [number + fraction if fraction else number for number in range(24)]
    path.write_text(mooncake(*((at, 50, []) for at in times)))
    cure = "--columns arrival=timestamp,prompt=input_length,output=output_length"
    with pytest.raises(TraceError, match=f"would be 1,000 requests a second: .*{cure}"):
        read_trace(path)
    if fraction:
        with pytest.raises(TraceError, match=cure):
            read_trace(path, "mooncake")
    else:
        assert read_trace(path, "mooncake")[-1].arrival_ns == 23_000_000
    names = {"arrival": "timestamp", "prompt": "input_length", "output": "output_length"}
    assert read_trace(path, columns=names)[-1].arrival_ns == 23_000_000_000


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("zipped", [False, True])
def test_lines_end_as_on_any_system(tmp_path: Path, end: str, zipped: bool) -> None:
    path = tmp_path / "trace"
    content = AZURE_2023.replace("\n", end).encode()
    path.write_bytes(gzip.compress(content) if zipped else content)
    assert read_trace(path) == [TraceRequest(*row) for row in CASES["azure 2023"][2]]
    path.write_bytes(content + b"oops" + end.encode())
    with pytest.raises(TraceError, match=":4: "):
        read_trace(path)


# A malformed trace stops the reading, and the error names file, line and reason.


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
BURSTGPT_HEAD = "Timestamp,Request tokens,Response tokens\n5,472,18\n"
MOONCAKE_LINE = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n'
NATIVE_LINE = '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n'


def native(**fields: str) -> str:
    """One native line with some values replaced by the given JSON text."""
    entry = {"arrival_s": "1.5", "prompt_tokens": "1", "output_tokens": "1", **fields}
    return "{" + ", ".join(f'"{key}": {value}' for key, value in entry.items()) + "}\n"


ROWS = [
    # The file as a whole.
    ("", 0, "the file is empty"),
    ("\n\n", 0, "the file is empty"),
    (AZURE.splitlines()[0], 1, "the trace holds no request"),
    ("a,b,c\n1,2,3\n", 1, "unknown trace format: the file begins with 'a,b,c'"),
    ('{"a": 1}\n', 1, "unknown trace format"),
    ("[1, 2]\n", 1, "the file begins with '[1, 2]', and a trace has one"),
    ("0.5,7,3,text\n", 1, "unknown trace format: the file begins with '0.5,7,3,text'"),
    ("0.5,7,3\n1.5,8,4\n", 1, "no header, but '0.5,7,3': write the names of the columns above it"),
    (
        '{\n  "a": 1\n}\n',
        1,
        "JSON over several lines, and a trace has one JSON object a line: jq -c",
    ),
    ('[\n  {"a": 1}\n]\n', 1, "and a trace has one JSON object a line: jq -c"),
    (
        '{"custom_id": "1", "method": "POST", "url": "/v1", "body": {}}\n',
        1,
        "an OpenAI batch has no arrivals",
    ),
    # Blank lines count.
    (NATIVE_LINE + "\n \n" + "{}\n", 4, "missing key 'arrival_s'"),
    # Headers.
    ("TIMESTAMP,ContextTokens\n", 1, "missing column 'GeneratedTokens' in header"),
    ("ContextTokens,GeneratedTokens\n1,2\n", 1, "missing column 'TIMESTAMP'"),
    ("Timestamp,Model,Request tokens\n", 1, "missing column 'Response tokens'"),
    (AZURE.replace("\n", ",TIMESTAMP\n", 1), 1, "column 'TIMESTAMP' occurs more than once"),
    # Rows.
    (AZURE + "2023-11-16 18:17:04,1\n", 3, "missing column 'GeneratedTokens'"),
    (AZURE + "2023-11-16 18:17:04,1,2,3\n", 3, "4 cells in a table of 3 columns"),
    (AZURE + '2023-11-16 18:17:04,1,"2\n', 3, "not valid CSV"),
    (AZURE + AZURE, 3, "TIMESTAMP is not a date and time: 'TIMESTAMP'"),
    # Tokens in cells.
    (AZURE + "2023-11-16 18:17:04,,2\n", 3, "ContextTokens is not an integer: ''"),
    (AZURE + "2023-11-16 18:17:04,1.5,2\n", 3, "ContextTokens is not an integer: '1.5'"),
    (AZURE + "2023-11-16 18:17:04,1_0,2\n", 3, "ContextTokens is not an integer"),
    (AZURE + "2023-11-16 18:17:04, 1,2\n", 3, "ContextTokens is not an integer"),
    (AZURE + "2023-11-16 18:17:04,\u0661,2\n", 3, "ContextTokens is not an integer"),
    (AZURE + "2023-11-16 18:17:04,nan,2\n", 3, "ContextTokens is not an integer"),
    (AZURE + "2023-11-16 18:17:04,1,-2\n", 3, "GeneratedTokens is negative: -2"),
    (AZURE + "2023-11-16 18:17:04,1,2147483648\n", 3, "GeneratedTokens is over 2147483647"),
    (AZURE + f"2023-11-16 18:17:04,1,{'9' * 9000}\n", 3, "GeneratedTokens is not an integer"),
    # Times in cells.
    (AZURE + "16/11/2023 18:17,1,2\n", 3, "TIMESTAMP is not a date and time"),
    (AZURE + "2023-11-16,1,2\n", 3, "TIMESTAMP is not a date and time"),
    (AZURE + "2023-11-16 24:00:00,1,2\n", 3, "TIMESTAMP is not a date and time"),
    (AZURE + "2023-11-16 18:17:60,1,2\n", 3, "TIMESTAMP is not a date and time"),
    (AZURE + "2023-11-16 18:17:04.1234567891,1,2\n", 3, "TIMESTAMP is not a date and time"),
    (AZURE + "2023-11-16 18:17:04+25:00,1,2\n", 3, "TIMESTAMP is not a date and time"),
    (AZURE + "2023-02-29 18:17:04,1,2\n", 3, "TIMESTAMP names no date: '2023-02-29'"),
    (AZURE + "1969-12-31 23:59:59,1,2\n", 3, "TIMESTAMP is out of range"),
    (AZURE + "2263-01-01 00:00:00,1,2\n", 3, "TIMESTAMP is out of range"),
    (BURSTGPT_HEAD + "noon,1,2\n", 3, "Timestamp is not a finite number: 'noon'"),
    (BURSTGPT_HEAD + "nan,1,2\n", 3, "Timestamp is not a finite number: 'nan'"),
    (BURSTGPT_HEAD + "inf,1,2\n", 3, "Timestamp is not a finite number"),
    (BURSTGPT_HEAD + "-1,1,2\n", 3, "Timestamp is negative: '-1'"),
    (BURSTGPT_HEAD + "1e999999,1,2\n", 3, "Timestamp is out of range"),
    (BURSTGPT_HEAD + "6,1,x\n", 3, "Response tokens is not an integer: 'x'"),
    # JSON lines.
    ('{"arrival_s": 0,\n', 1, "not valid JSON"),
    (
        NATIVE_LINE + "{]\n",
        2,
        "not valid JSON: Expecting property name enclosed in double quotes at column 2",
    ),
    (
        NATIVE_LINE + NATIVE_LINE.strip() + NATIVE_LINE,
        2,
        "not valid JSON: Extra data",
    ),
    (NATIVE_LINE + "[1]\n", 2, "not a JSON object: '[1]'"),
    (NATIVE_LINE + "null\n", 2, "not a JSON object"),
    (
        NATIVE_LINE + '{"arrival_s": 1, "arrival_s": 2}\n',
        2,
        "the key 'arrival_s' is there twice",
    ),
    (NATIVE_LINE + '{"arrival_s": 1}\n', 2, "missing key 'prompt_tokens'"),
    ('{"prompt_tokens": 1, "output_tokens": 1}\n', 1, "missing key 'arrival_s'"),
    (MOONCAKE_LINE + NATIVE_LINE, 2, "missing key 'timestamp'"),
    (NATIVE_LINE + "[" * 100_000 + "\n", 2, "not decodable JSON: RecursionError"),
    # Values in JSON.
    (native(arrival_s="NaN"), 1, "NaN is not a finite number"),
    (native(arrival_s="-Infinity"), 1, "-Infinity is not a finite number"),
    (native(arrival_s="-0.5"), 1, "arrival_s is negative: '-0.5'"),
    (native(arrival_s="1e300"), 1, "arrival_s is out of range"),
    (native(arrival_s="1e" + "9" * 18), 1, "arrival_s is out of range"),
    (native(arrival_s="1e" + "9" * 30), 1, "not decodable JSON: InvalidOperation"),
    (native(arrival_s="9" * 9000), 1, "not decodable JSON: ValueError"),
    (native(arrival_s='"1"'), 1, "arrival_s is not a finite number: '1'"),
    (native(arrival_s="true"), 1, "arrival_s is not a finite number: True"),
    (native(arrival_s="null"), 1, "arrival_s is not a finite number: None"),
    (native(prompt_tokens="-1"), 1, "prompt_tokens is negative: -1"),
    (native(prompt_tokens="3.5"), 1, "prompt_tokens is not an integer: 3.5"),
    (native(prompt_tokens="1e999999"), 1, "prompt_tokens is not an integer"),
    (native(prompt_tokens="true"), 1, "prompt_tokens is not an integer: True"),
    (native(prompt_tokens='"7"'), 1, "prompt_tokens is not an integer: '7'"),
    (native(output_tokens="null"), 1, "output_tokens is not an integer: None"),
    (native(output_tokens="2147483648"), 1, "output_tokens is over 2147483647"),
    (native(hash_ids="null"), 1, "hash_ids is not a list: None"),
    (native(hash_ids='"12"'), 1, "hash_ids is not a list: '12'"),
    (native(hash_ids="[1, 2.0]"), 1, "hash_ids holds a non-integer: 2.0"),
    (native(hash_ids="[true]"), 1, "hash_ids holds a non-integer: True"),
    (
        MOONCAKE_LINE + MOONCAKE_LINE.replace("[0]", '["0"]'),
        2,
        "hash_ids holds a non-integer: '0'",
    ),
    (
        MOONCAKE_LINE + MOONCAKE_LINE.replace(": 0,", ": -1,"),
        2,
        "timestamp is negative: '-1'",
    ),
]


@pytest.mark.parametrize(
    ("text", "line", "reason"), ROWS, ids=[f"{number}: {row[2]}" for number, row in enumerate(ROWS)]
)
def test_a_malformed_line_is_named(tmp_path: Path, text: str, line: int, reason: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert caught.value.path == path
    assert caught.value.line == line
    assert reason in caught.value.reason
    assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert len(caught.value.reason) < 200


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(AZURE.encode() + b"2023-11-16 18:17:04,1,\xff\n")
    with pytest.raises(TraceError, match=r":3: not valid UTF-8: byte 0xff"):
        read_trace(path)


@pytest.mark.parametrize("read", [read_trace, detect_format])
def test_a_missing_file_and_a_folder_are_errors_of_the_file(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    with pytest.raises(TraceError, match=r"absent: No such file or directory"):
        read(tmp_path / "absent")
    with pytest.raises(TraceError, match=r": Is a directory"):
        read(tmp_path)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(gzip.compress(NATIVE_LINE.encode() * 1000)[:-20], id="cut short"),
        pytest.param(gzip.compress(NATIVE_LINE.encode())[:-8] + bytes(8), id="wrong checksum"),
        pytest.param(b"\x1f\x8b not gzip at all", id="only the magic"),
        pytest.param(gzip.compress(NATIVE_LINE.encode())[:10] + b"\xff" * 30, id="not deflate"),
    ],
)
def test_a_broken_gzip_file_is_an_error_of_the_trace(tmp_path: Path, broken: bytes) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(broken)
    with pytest.raises(TraceError):
        read_trace(path)


def test_an_unknown_format_is_refused_before_the_file_is_opened(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"unknown format 'csv': expected auto, azure, "):
        read_trace(tmp_path / "absent", "csv")


def test_a_format_that_does_not_fit_is_an_error_of_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(NATIVE_LINE)
    with pytest.raises(TraceError, match=r":1: missing column 'TIMESTAMP'"):
        read_trace(path, "azure")
    with pytest.raises(TraceError, match=r":1: missing key 'timestamp'"):
        read_trace(path, "mooncake")


@pytest.mark.parametrize(
    ("magic", "cure"),
    [
        (b"\x28\xb5\x2f\xfd", "zstd -d FILE"),
        (b"\xfd7zXZ\x00", "xz -d FILE"),
        (b"BZh9", "bunzip2 FILE"),
        (b"PK\x03\x04", "unzip FILE"),
    ],
)
def test_another_compression_is_told_with_its_cure(tmp_path: Path, magic: bytes, cure: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(magic + bytes(40))
    with pytest.raises(TraceError, match=cure):
        read_trace(path)


# What is written in the native format is read back to the nanosecond.


REQUESTS = st.builds(
    TraceRequest,
    arrival_ns=st.integers(0, MAX_ARRIVAL_NS),
    prompt_tokens=st.integers(0, MAX_TOKENS),
    output_tokens=st.integers(0, MAX_TOKENS),
    hash_ids=st.lists(st.integers(), max_size=5).map(tuple),
    max_tokens=st.none() | st.integers(0, MAX_TOKENS),
    tenant=st.text(max_size=3),
    level=st.integers(-MAX_LEVEL, MAX_LEVEL),
    deadline_ns=st.none() | st.integers(0, MAX_ARRIVAL_NS),
    session=st.text(max_size=3),
)


@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=20),
    name=st.sampled_from(["trace.jsonl", "trace.jsonl.gz"]),
)
def test_a_trace_survives_being_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, requests: list[TraceRequest], name: str
) -> None:
    path = tmp_path_factory.mktemp("native") / name
    write_native(path, requests)
    start_ns = min(request.arrival_ns for request in requests)
    assert detect_format(path) == "jsonl"
    assert read_trace(path) == [
        replace(request, arrival_ns=request.arrival_ns - start_ns)
        for request in sorted(requests, key=lambda request: request.arrival_ns)
    ]


@pytest.mark.parametrize(
    ("arrival_s", "expected_ns"),
    [
        ("9223372036.854775807", MAX_ARRIVAL_NS),
        ("0.0000000005", 0),  # Halves go to the even nanosecond.
        ("0.0000000015", 2),
        ("-0.0", 0),
        ("1e-999999999", 0),
        ("1" + "0" * 9 + "." + "0" * 8 + "1" + "0" * 500, 10**18 + 1),
    ],
)
def test_a_time_is_rounded_once(tmp_path: Path, arrival_s: str, expected_ns: int) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n'
        f'{{"arrival_s": {arrival_s}, "prompt_tokens": 1, "output_tokens": 1}}\n'
    )
    assert read_trace(path)[1].arrival_ns == expected_ns


def test_the_written_form_is_fixed(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_native(path, [TraceRequest(1_500_000_001, 3, 4), TraceRequest(2, 5, 6, (7, 8))])
    assert path.read_bytes() == (
        b'{"arrival_s": 1.500000001, "prompt_tokens": 3, "output_tokens": 4}\n'
        b'{"arrival_s": 0.000000002, "prompt_tokens": 5, "output_tokens": 6, "hash_ids": [7, 8]}\n'
    )


def test_equal_traces_give_equal_compressed_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl.gz", tmp_path / "second.jsonl.gz"
    write_native(first, [TraceRequest(0, 1, 2)])
    write_native(second, [TraceRequest(0, 1, 2)])
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x1f\x8b")


# A trace record cannot exist with an invalid field, and its error names the place.


VALID: dict[str, Any] = {"arrival_ns": 0, "prompt_tokens": 1, "output_tokens": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("arrival_ns", MAX_ARRIVAL_NS),
        ("prompt_tokens", 0),
        ("prompt_tokens", MAX_TOKENS),
        ("output_tokens", 0),
        ("output_tokens", MAX_TOKENS),
        ("hash_ids", (3, 3, 2**64)),
        ("level", -MAX_LEVEL),
        ("deadline_ns", MAX_ARRIVAL_NS),
        ("weight", 1e-3),
    ],
)
def test_fields_reach_their_bounds(field: str, value: object) -> None:
    assert getattr(TraceRequest(**{**VALID, field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("arrival_ns", -1, ValueError),
        ("arrival_ns", MAX_ARRIVAL_NS + 1, ValueError),
        ("arrival_ns", 0.0, TypeError),
        ("prompt_tokens", -1, ValueError),
        ("prompt_tokens", MAX_TOKENS + 1, ValueError),
        ("prompt_tokens", True, TypeError),
        ("output_tokens", -1, ValueError),
        ("output_tokens", "1", TypeError),
        ("hash_ids", [1], TypeError),
        ("hash_ids", (1, False), TypeError),
        ("tenant", None, TypeError),
        ("level", MAX_LEVEL + 1, ValueError),
        ("level", 0.5, TypeError),
        ("deadline_ns", -1, ValueError),
        ("weight", 1, TypeError),
        ("weight", 0.0, ValueError),
    ],
)
def test_an_invalid_record_cannot_exist(field: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=field):
        TraceRequest(**{**VALID, field: value})


def test_an_error_names_path_line_and_reason() -> None:
    error = TraceError(Path("a/b.csv"), 7, "no such column")
    assert (error.path, error.line, error.reason) == (Path("a/b.csv"), 7, "no such column")
    assert str(error) == "a/b.csv:7: no such column"


def test_an_error_survives_pickling() -> None:
    # A worker process hands its errors back that way.
    error = pickle.loads(pickle.dumps(TraceError(Path("b.csv"), 7, "why")))  # noqa: S301 - our own.
    assert str(error) == "b.csv:7: why"


# The conversations of a trace: as it names them, or by the blocks of its prompts.


A, B, C, D, E, F = range(6)


def request(prompt: int, answer: int, *blocks: int, session: str = "") -> TraceRequest:
    return TraceRequest(0, prompt, answer, blocks, session=session)


@pytest.mark.parametrize(
    ("requests", "sessions"),
    [
        # A turn, its next one, another conversation, and a turn behind that.
        (
            [
                request(1100, 100, A, B, C),
                request(1600, 10, A, B, D, E),
                request(1100, 10, F, E, D),
                request(2200, 10, A, B, D, 7, 8),
            ],
            "0020",
        ),
        # Too short for the answer before it.
        ([request(1100, 500, A, B, C), request(1599, 10, A, B, D, E)], "01"),
        # What two prompts end at they share: neither is the other's earlier turn.
        (
            [request(1100, 10, A, B, C), request(1200, 10, A, B, D), request(1900, 10, A, B, E, F)],
            "012",
        ),
        # The longest, and not what only begins like it.
        (
            [
                request(600, 1, A, B),
                request(1100, 1, A, C, D),
                request(1700, 1, A, C, E, F),
                request(1100, 1, A, F, D),
            ],
            "0000",
        ),
        # Nothing to go by.
        ([request(100, 10, A), request(900, 10), request(1900, 10)], "012"),
        # Given names stay, and are gone on with.
        (
            [
                request(1100, 10, A, B, C, session="mine"),
                request(1700, 10, A, B, D, E),
                request(2600, 10, A, B, D, 7, 8, F, session="other"),
            ],
            ["mine", "mine", "other"],
        ),
    ],
)
def test_turns_are_found_by_their_blocks(
    requests: list[TraceRequest], sessions: str | list[str]
) -> None:
    assert [one.session for one in with_sessions(requests)] == [*sessions]


def bailian(**members: object) -> str:
    usual = {"timestamp": 0.5, "input_length": 20, "output_length": 3, "hash_ids": [1, 2]}
    return json.dumps({**usual, **members}) + "\n"


def test_a_bailian_trace_has_the_chats_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "qwen.jsonl"
    path.write_text(
        bailian(chat_id=5, parent_chat_id=-1)
        + bailian(chat_id=6, parent_chat_id=-1)
        + bailian(chat_id=9, parent_chat_id=5)
        + bailian(chat_id=12, parent_chat_id=9)
        + bailian(chat_id=13, parent_chat_id=4)  # Before the file begins.
        + bailian(chat_id="x", parent_chat_id=5)
        + bailian(chat_id=14)
    )
    assert [one.session for one in read_trace(path)] == ["5", "6", "5", "5", "13", "", "14"]
    mix = tmp_path / "mix.toml"
    mix.write_text('[[part]]\ntrace = "qwen.jsonl"\nrequests = 1\n' * 2)
    assert [one.session for one in read_mix(mix)] == ["1/5", "2/5"]


def test_a_session_that_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="session must be texts"):
        TraceRequest(0, 1, 1, session=7)  # type: ignore[arg-type]
