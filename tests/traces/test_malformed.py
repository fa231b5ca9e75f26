"""A malformed trace stops the reading, and the error names file, line and reason."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from balanceroute.traces import TraceError, detect_format, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
BURSTGPT = "Timestamp,Request tokens,Response tokens\n5,472,18\n"
MOONCAKE = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n'
NATIVE = '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n'


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
    (NATIVE + "\n \n" + "{}\n", 4, "missing key 'arrival_s'"),
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
    (BURSTGPT + "noon,1,2\n", 3, "Timestamp is not a finite number: 'noon'"),
    (BURSTGPT + "nan,1,2\n", 3, "Timestamp is not a finite number: 'nan'"),
    (BURSTGPT + "inf,1,2\n", 3, "Timestamp is not a finite number"),
    (BURSTGPT + "-1,1,2\n", 3, "Timestamp is negative: '-1'"),
    (BURSTGPT + "1e999999,1,2\n", 3, "Timestamp is out of range"),
    (BURSTGPT + "6,1,x\n", 3, "Response tokens is not an integer: 'x'"),
    # JSON lines.
    ('{"arrival_s": 0,\n', 1, "not valid JSON"),
    (
        NATIVE + "{]\n",
        2,
        "not valid JSON: Expecting property name enclosed in double quotes at column 2",
    ),
    (NATIVE + NATIVE.strip() + NATIVE, 2, "not valid JSON: Extra data"),
    (NATIVE + "[1]\n", 2, "not a JSON object: '[1]'"),
    (NATIVE + "null\n", 2, "not a JSON object"),
    (NATIVE + '{"arrival_s": 1, "arrival_s": 2}\n', 2, "the key 'arrival_s' is there twice"),
    (NATIVE + '{"arrival_s": 1}\n', 2, "missing key 'prompt_tokens'"),
    ('{"prompt_tokens": 1, "output_tokens": 1}\n', 1, "missing key 'arrival_s'"),
    (MOONCAKE + NATIVE, 2, "missing key 'timestamp'"),
    (NATIVE + "[" * 100_000 + "\n", 2, "not decodable JSON: RecursionError"),
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
    (MOONCAKE + MOONCAKE.replace("[0]", '["0"]'), 2, "hash_ids holds a non-integer: '0'"),
    (MOONCAKE + MOONCAKE.replace(": 0,", ": -1,"), 2, "timestamp is negative: '-1'"),
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
        pytest.param(gzip.compress(NATIVE.encode() * 1000)[:-20], id="cut short"),
        pytest.param(gzip.compress(NATIVE.encode())[:-8] + bytes(8), id="wrong checksum"),
        pytest.param(b"\x1f\x8b not gzip at all", id="only the magic"),
        pytest.param(gzip.compress(NATIVE.encode())[:10] + b"\xff" * 30, id="not deflate"),
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
    path.write_text(NATIVE)
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
