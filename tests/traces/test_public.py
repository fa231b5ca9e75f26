"""The public traces are installed with the package and read as what their page says."""

import gzip
import io
import sys
from importlib.resources import as_file, files
from itertools import takewhile
from pathlib import Path

import pytest

from balanceroute.traces import TraceError, detect_format, read_trace, shipped_traces, with_sessions


@pytest.mark.parametrize(
    ("name", "format_name", "num_requests", "last_arrival_ns", "prompt_tokens", "output_tokens"),
    [
        (
            "mooncake_conversation.jsonl.gz",
            "mooncake",
            12031,
            3_536_999_000_000,
            144793823,
            4122048,
        ),
        ("mooncake_synthetic.jsonl.gz", "mooncake", 3993, 1_022_025_000_000, 61194628, 595432),
        ("azure_2023_conv.csv.gz", "azure", 19366, 3_501_721_937_000, 22361870, 4088665),
        ("azure_2023_code.csv.gz", "azure", 8819, 3_435_948_056_000, 18059974, 245896),
        ("servegen_reasoning.jsonl.gz", "jsonl", 23721, 86_393_495_702_485, 2928055, 54432190),
    ],
)
def test_a_public_trace_is_read_whole(
    name: str,
    format_name: str,
    num_requests: int,
    last_arrival_ns: int,
    prompt_tokens: int,
    output_tokens: int,
) -> None:
    with as_file(files("balanceroute.traces") / "public" / name) as path:
        assert detect_format(path) == format_name
        requests = read_trace(path)
    assert len(requests) == num_requests
    assert requests[0].arrival_ns == 0
    assert requests[-1].arrival_ns == last_arrival_ns
    assert sum(request.prompt_tokens for request in requests) == prompt_tokens
    assert sum(request.output_tokens for request in requests) == output_tokens


@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic"])
def test_the_mooncake_traces_keep_their_prefix_blocks(name: str) -> None:
    requests = read_trace(name)
    # A block is 512 tokens, the last one perhaps partly filled.
    assert all(len(request.hash_ids) == -(-request.prompt_tokens // 512) for request in requests)


@pytest.mark.parametrize(
    ("name", "cached", "later"),
    [("mooncake_conversation", 0.37, 0.24), ("mooncake_synthetic", 0.65, 0.016)],
)
def test_the_mooncake_traces_have_the_turns_that_their_page_says(
    name: str, cached: float, later: float
) -> None:
    requests, seen, found, first = with_sessions(read_trace(name)), set[int](), 0, set[str]()
    turns = 0
    for request in requests:
        known = list(takewhile(seen.__contains__, request.hash_ids))
        found += min(request.prompt_tokens, 512 * len(known))
        seen.update(request.hash_ids)
        turns += request.session in first
        first.add(request.session)
    assert found / sum(one.prompt_tokens for one in requests) == pytest.approx(cached, abs=0.006)
    assert turns / len(requests) == pytest.approx(later, abs=0.005)


# Traces by name and from standard input.


ROWS = b'{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 4}\n' * 2


def test_a_shipped_trace_is_read_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = shipped_traces()
    assert {"azure_2023_conv", "mooncake_conversation"} <= shipped.keys()
    assert read_trace("azure_2023_code") == read_trace(shipped["azure_2023_code"])


def test_every_public_file_has_a_name() -> None:
    folder = next(iter(shipped_traces().values())).parent
    assert sorted(shipped_traces().values()) == sorted(folder.glob("*.gz"))


def test_a_file_goes_before_a_shipped_trace_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("azure_2023_code").write_bytes(ROWS)
    assert len(read_trace("azure_2023_code")) == 2


def test_a_name_of_no_trace_is_told_with_those_there_are() -> None:
    with pytest.raises(
        TraceError, match=r"azure: no such file, and no shipped trace; known: azure"
    ):
        read_trace("azure")
    with pytest.raises(TraceError, match=r"azure\.csv: No such file or directory"):
        read_trace("azure.csv")


@pytest.mark.parametrize("content", [ROWS, gzip.compress(ROWS)], ids=["plain", "gzip"])
def test_a_dash_is_standard_input(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    given = io.TextIOWrapper(io.BufferedReader(io.BytesIO(content)))
    monkeypatch.setattr(sys, "stdin", given)
    assert len(read_trace("-")) == 2
    assert not given.closed
