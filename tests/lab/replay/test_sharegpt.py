"""ShareGPT files: the first question and the length of its answer."""

import json
from pathlib import Path

import pytest

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.replay.requests import (
    PlannedRequest,
    SharedExchange,
    read_exchanges,
    with_exchanges,
)

HUMAN = {"from": "human", "value": "What is a router?"}
GPT = {"from": "gpt", "value": "A box."}


def written(folder: Path, content: object) -> Path:
    path = folder / "sharegpt.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_first_exchange_of_each_conversation_is_read(tmp_path: Path) -> None:
    more = [HUMAN, GPT, {"from": "human", "value": "Why?"}]
    only_asked = [HUMAN]
    backwards = [GPT, HUMAN]
    unanswered = [HUMAN, {"from": "gpt", "value": ""}]
    conversations = [more, only_asked, backwards, unanswered, [], [HUMAN, GPT]]
    path = written(tmp_path, [{"id": "a", "conversations": turns} for turns in conversations])
    assert read_exchanges(path) == 2 * [SharedExchange("What is a router?", 5, 2)]


def test_a_length_is_a_token_for_every_four_bytes_rounded_up(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "éé"}, {"from": "gpt", "value": "ééx"}]
    (exchange,) = read_exchanges(written(tmp_path, [{"conversations": turns}]))
    assert exchange == SharedExchange("éé", 1, 2)


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "a\ud800b"}, {"from": "gpt", "value": "\ud800"}]
    (exchange,) = read_exchanges(written(tmp_path, [{"conversations": turns}]))
    assert exchange == SharedExchange("a?b", 1, 1)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not valid JSON"),
        (10_000 * "[", "not valid JSON"),
        ({}, "not a JSON list of conversations"),
        ([], "no conversation begins with a question"),
        ([{"conversations": [HUMAN]}], "no conversation begins with a question"),
        ([7], "entry 0 has no list of conversations"),
        ([{"conversations": []}, {"turns": []}], "entry 1 has no list of conversations"),
        ([{"conversations": ["hello"]}], "entry 0 has no list of conversations"),
        ([{"conversations": [HUMAN, {"from": "gpt"}]}], "entry 0 has a turn without a text"),
    ],
)
def test_another_file_is_refused_with_the_reason(
    content: object, reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError, match=reason) as error:
        read_exchanges(path)
    assert str(path) in str(error.value)


def test_requests_take_the_exchanges_in_turn_and_keep_their_arrival() -> None:
    exchanges = [SharedExchange("one", 1, 10), SharedExchange("two", 2, 20)]
    requests = [PlannedRequest(number, 7 * number, 500, 50, (1,)) for number in (1, 2, 4)]
    assert with_exchanges(requests, exchanges) == [
        PlannedRequest(1, 7, 2, 20, (), "two"),
        PlannedRequest(2, 14, 1, 10, (), "one"),
        PlannedRequest(4, 28, 1, 10, (), "one"),
    ]


def test_limits_cut_the_text_and_the_answer() -> None:
    exchange = SharedExchange("abcdefgéé", 3, 99)
    (request,) = with_exchanges(
        [PlannedRequest(0, 0, 5, 5)], [exchange], max_prompt_tokens=2, max_output_tokens=9
    )
    # The eighth byte is half of a character.
    assert (request.text, request.prompt_tokens, request.output_tokens) == ("abcdefg", 2, 9)
