"""Each format is recognised by its first line and read exactly."""

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

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
)
from balanceroute.traces.formats import timestamp_ns

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
