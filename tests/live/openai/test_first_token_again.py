"""Whether a rank says the first token that a prefiller said."""

import json
from typing import Any

import pytest

from balanceroute.proxy.live.openai.continuation import PrefillFirstToken, says_again
from balanceroute.proxy.live.openai.stream_reader import RepeatedText


def judge(text: str, *choices: dict[str, Any]) -> bool | None:
    """Return what is known behind the last event, of one choice each."""
    said, left = PrefillFirstToken(text, 7, b"1,7", b"", b""), RepeatedText(text)
    verdict = None
    for choice in choices:
        assert verdict is None
        event = json.dumps({"choices": [choice]}).encode()
        verdict = says_again(said, left, b"data: " + event + b"\n\n")
    return verdict


@pytest.mark.parametrize(
    ("choices", "same"),
    [
        ([{"text": "ab"}], True),
        ([{"text": "abc", "finish_reason": "stop"}], True),
        ([{"text": "a"}], None),
        ([{"text": "a"}, {"text": "b"}], True),
        ([{"text": "a"}, {"text": "c"}], False),
        ([{"text": "a", "finish_reason": "stop"}], False),
        ([{"text": ""}], None),
        ([{"text": "", "finish_reason": "stop"}], False),
        ([{"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": "ab"}}], True),
        ([{"delta": {"content": "x"}}], False),
        ([{"delta": {"reasoning": "ab"}}], False),
    ],
    ids=str,
)
def test_text(choices: list[dict[str, Any]], same: bool | None) -> None:
    assert judge("ab", *choices) is same


@pytest.mark.parametrize(
    ("choices", "same"),
    [
        ([{"token_ids": [7]}], True),
        ([{"token_ids": [7, 8]}], True),
        ([{"token_ids": []}, {"token_ids": [7]}], True),
        ([{"token_ids": [8, 7]}], False),
        ([{"token_ids": [], "finish_reason": "stop"}], False),
    ],
    ids=str,
)
def test_ids(choices: list[dict[str, Any]], same: bool | None) -> None:
    assert judge("", *choices) is same


@pytest.mark.parametrize("event", [b": ping\n\n", b"data: [DONE]\n\n", b'data: {"usage":{}}\n\n'])
def test_an_event_without_choices_leaves_it_open(event: bytes) -> None:
    said = PrefillFirstToken("ab", 7, b"1,7", b"", b"")
    assert says_again(said, RepeatedText("ab"), event) is None
