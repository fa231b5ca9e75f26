"""Several traces as one."""

from pathlib import Path

import pytest

from balanceroute.traces import TraceError, TraceRequest, read_mix, write_native

SECOND = 1_000_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_native(tmp_path / "a.jsonl", [TraceRequest(s * SECOND, 10 + s, 1) for s in range(4)])
    write_native(tmp_path / "b.jsonl", [TraceRequest(0, 5, 2, tenant="own", level=4)])
    return tmp_path


def mix(folder: Path, text: str) -> list[TraceRequest]:
    path = folder / "mix.toml"
    path.write_text(text)
    return read_mix(path)


def test_parts_are_merged_by_arrival_with_what_the_file_says_of_them(folder: Path) -> None:
    text = """
        [[part]]
        trace = "a.jsonl"
        tenant = "chat"
        weight = 2
        class = -1
        deadline_s = 1.5
        rate = 2.0
        skip = 1
        requests = 2
        [[part]]
        trace = "b.jsonl"
        start_s = 0.25
    """
    chat = {"tenant": "chat", "weight": 2.0, "level": -1, "deadline_ns": 3 * SECOND // 2}
    assert mix(folder, text) == [
        TraceRequest(0, 11, 1, **chat),  # type: ignore[arg-type]
        TraceRequest(SECOND // 4, 5, 2, tenant="own", level=4),
        TraceRequest(SECOND // 2, 12, 1, **chat),  # type: ignore[arg-type]
    ]


def test_a_tenant_may_come_late_and_leave_early(folder: Path) -> None:
    text = '[[part]]\ntrace = "a.jsonl"\nstart_s = 10\nend_s = 12.0'
    assert [one.arrival_ns for one in mix(folder, text)] == [10 * SECOND, 11 * SECOND]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "a mix has one or more tables"),
        ("part = 3", "a mix has one or more tables"),
        ("x = 1\n[[part]]\ntrace = 'a.jsonl'", "a mix has one or more tables"),
        ("[[part", "not valid TOML"),
        ("[[part]]\nrate = 2.0", "part 1: trace is missing"),
        ("[[part]]\ntrace = 'a.jsonl'\n[[part]]\ntrace = 7", "part 2: trace must be a text, not 7"),
        ("[[part]]\ntrace = 'a.jsonl'\nlevel = 1", "part 1: level is unknown; known: class, dead"),
        ("[[part]]\ntrace = 'a.jsonl'\nformat = 'x'", "part 1: format must be one of auto, azure"),
        ("[[part]]\ntrace = 'a.jsonl'\nrate = 0", "part 1: rate must be a number from 1e-06"),
        ("[[part]]\ntrace = 'a.jsonl'\nrate = nan", "part 1: rate must be a number from 1e-06"),
        ("[[part]]\ntrace = 'a.jsonl'\nweight = true", "part 1: weight must be a number"),
        ("[[part]]\ntrace = 'a.jsonl'\nclass = 1.0", "part 1: class must be an integer from"),
        ("[[part]]\ntrace = 'a.jsonl'\ndeadline_s = 0", "part 1: deadline_s must be a number"),
        ("[[part]]\ntrace = 'a.jsonl'\nend_s = 0", "the parts hold no request"),
        ("[[part]]\ntrace = 'a.jsonl'\nskip = 4", "the parts hold no request"),
    ],
)
def test_a_mix_that_makes_no_sense_is_refused(folder: Path, text: str, reason: str) -> None:
    with pytest.raises(TraceError, match=r"mix\.toml") as fault:
        mix(folder, text)
    assert reason in str(fault.value)


def test_a_trace_that_cannot_be_read_is_named(folder: Path) -> None:
    with pytest.raises(TraceError, match=r"absent\.jsonl"):
        mix(folder, "[[part]]\ntrace = 'absent.jsonl'")
    with pytest.raises(TraceError, match="No such file"):
        read_mix(folder / "absent.toml")
