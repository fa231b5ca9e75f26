"""The file format: what is written is what is read, and nothing else is taken for it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.engine_patch.reader import STEP_DTYPE, TraceFormatError, read_steps
from balanceroute.engine_patch.writer import FIELDS, RECORD, header_line

U64, U32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
VALUES = st.tuples(*(U64 if code == "Q" else U32 for _, code in FIELDS))


def test_the_layout_of_version_1() -> None:
    # Files outlive the code that wrote them: a change here is a new version.
    assert RECORD.format == "<QQQQIIIIIII"
    assert RECORD.size == STEP_DTYPE.itemsize == 60
    assert [name for name, _ in FIELDS] == [
        "step",
        "start_ns",
        "end_ns",
        "kv_tokens",
        "running",
        "batch",
        "scheduled_tokens",
        "prefill_tokens",
        "wave",
        "wave_step",
        "flags",
    ]


@given(records=st.lists(VALUES, max_size=5), cut=st.integers(0, RECORD.size - 1))
def test_what_is_written_is_read_without_a_cut_record(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[int, ...]], cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "a.steps"
    whole = b"".join(RECORD.pack(*record) for record in records)
    path.write_bytes(header_line({"dp_rank": 1, "model": "é"}) + whole + bytes(cut))
    trace = read_steps(path)
    assert trace.header["dp_rank"] == 1
    assert trace.header["model"] == "é"
    assert [tuple(int(x) for x in step) for step in trace.steps.tolist()] == records


def test_a_header_is_one_line_of_ascii() -> None:
    line = header_line({"model": "a\nb\u2028é"})
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert line.isascii()


def header(**changed: Any) -> bytes:
    return json.dumps(json.loads(header_line({})) | changed).encode() + b"\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "no step trace"),
        (b"\x00\x01\x02" * 50_000, "no step trace"),
        (b"arrival_s,prompt_tokens\n1,2\n", "no step trace"),
        (b"[1]\n", "no step trace"),
        (header_line({})[:-1], "no step trace"),
        (header(format="other"), "no step trace"),
        (header(version=2), "version 2, not 1"),
        (header(version="1"), "version '1', not 1"),
        (header(record_bytes=64), "records of 64 bytes, not 60"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: bytes, reason: str) -> None:
    path = tmp_path / "x.steps"
    path.write_bytes(text)
    with pytest.raises(TraceFormatError) as caught:
        read_steps(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert reason in str(caught.value)
