"""The conversations of a trace: as it names them, or by the blocks of its prompts."""

import json
from pathlib import Path

import pytest

from balanceroute.traces import TraceRequest, read_mix, read_trace, with_sessions

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
