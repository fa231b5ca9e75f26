"""A trace record cannot exist with an invalid field, and its error names the place."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from balanceroute.traces import TraceError, TraceRequest
from balanceroute.traces.lines import MAX_ARRIVAL_NS, MAX_LEVEL, MAX_TOKENS

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
