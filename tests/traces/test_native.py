"""What is written in the native format is read back to the nanosecond."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.traces import TraceRequest, detect_format, read_trace, write_native
from balanceroute.traces.lines import MAX_ARRIVAL_NS, MAX_LEVEL, MAX_TOKENS

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
