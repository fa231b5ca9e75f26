"""Traces by name and from standard input."""

import gzip
import io
import sys
from pathlib import Path

import pytest

from balanceroute.traces import TraceError, read_trace, shipped_traces

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
