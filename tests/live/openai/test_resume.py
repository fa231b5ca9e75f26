"""Going on with an answer: which members change, and which answers cannot be continued."""

import json
from typing import Any

import pytest

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.continuation import CannotResumeError, resumed_members
from balanceroute.proxy.live.openai.legs import decode_body
from balanceroute.proxy.live.openai.shape import Api

USER = {"role": "user", "content": "Tell a story."}


def completion(text: str = " upon", tokens: int = 3, **values: object) -> dict[str, object]:
    return resumed_members(Api.COMPLETIONS, {"prompt": "Once"} | values, text, tokens)


def chat(text: str = "Once", tokens: int = 3, **values: object) -> dict[str, object]:
    return resumed_members(Api.CHAT, {"messages": [USER]} | values, text, tokens)


@pytest.mark.parametrize("prompt", ["Once", ["Once"]])
def test_a_completion_goes_on_behind_its_prompt(prompt: object) -> None:
    assert completion(prompt=prompt, max_tokens=10) == {"prompt": "Once upon", "max_tokens": 7}


def test_a_chat_goes_on_with_the_assistants_message() -> None:
    assert chat() == {
        "messages": [USER, {"role": "assistant", "content": "Once"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    }


def test_a_message_that_the_client_began_goes_on() -> None:
    begun = {"role": "assistant", "content": "On", "name": "bard"}
    members = chat("ce upon", messages=[USER, begun], continue_final_message=True)
    assert members["messages"] == [USER, begun | {"content": "Once upon"}]
    assert members["continue_final_message"] is True
    assert members["add_generation_prompt"] is False


def test_the_limits_shrink_by_what_was_emitted() -> None:
    limits: dict[str, Any] = {"max_tokens": 10, "max_completion_tokens": 9, "min_tokens": 4}
    assert {name: chat(tokens=3, **limits)[name] for name in limits} == {
        "max_tokens": 7,
        "max_completion_tokens": 6,
        "min_tokens": 1,
    }


def test_a_limit_stays_one_that_an_engine_takes() -> None:
    members = chat(tokens=30, max_tokens=10, min_tokens=4)
    assert (members["max_tokens"], members["min_tokens"]) == (1, 0)


def test_an_absent_limit_stays_absent_where_the_engine_has_none() -> None:
    assert "max_tokens" not in chat(max_tokens=None)
    assert "max_tokens" not in chat()
    assert "max_tokens" not in completion(max_tokens=None)


def test_a_completion_without_a_limit_keeps_to_the_engines_own() -> None:
    # vLLM stops such a completion after 16 tokens.
    assert completion(tokens=10)["max_tokens"] == 6


def test_a_second_resume_starts_from_what_the_client_sent() -> None:
    values = {"prompt": "Once", "max_tokens": 10}
    sent = RequestBody(json.dumps(values).encode())
    first = resumed_members(Api.COMPLETIONS, sent.values, " upon", 3)
    second = resumed_members(Api.COMPLETIONS, sent.values, " upon a time", 5)
    assert json.loads(bytes(decode_body(sent, first, None))) == {
        "prompt": "Once upon",
        "max_tokens": 7,
    }
    assert json.loads(bytes(decode_body(sent, second, None))) == {
        "prompt": "Once upon a time",
        "max_tokens": 5,
    }
    assert sent.values == values


def test_a_second_resume_of_a_chat_has_one_assistants_message() -> None:
    values = {"messages": [USER]}
    resumed_members(Api.CHAT, values, "Once", 1)
    messages = resumed_members(Api.CHAT, values, "Once upon", 2)["messages"]
    assert messages == [USER, {"role": "assistant", "content": "Once upon"}]
    assert values == {"messages": [USER]}


def test_an_echo_is_not_put_into_the_prompt_twice() -> None:
    members = completion("Once upon", echo=True, max_tokens=9)
    assert members == {"prompt": "Once upon", "echo": False, "max_tokens": 6}


def test_an_echo_that_is_not_the_prompt_cannot_be_continued() -> None:
    with pytest.raises(CannotResumeError):
        completion("<s>Once upon", echo=True)


def test_an_answer_without_any_text_begins_again() -> None:
    assert chat("", tokens=1, max_tokens=9) == {"max_tokens": 8}


def test_text_of_any_kind_gets_into_the_body() -> None:
    text = '"\\\n\ud83e\udd99 \ud800'
    sent = RequestBody(b'{"prompt": ""}')
    made = bytes(decode_body(sent, resumed_members(Api.COMPLETIONS, sent.values, text, 1), None))
    assert json.loads(made)["prompt"] == json.loads(json.dumps(text))


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": [1, 2]},
        {"prompt": [[1, 2]]},
        {"prompt": ["a", "b"]},
        {"prompt": None},
        {"max_tokens": "ten"},
        {"max_tokens": 10.5},
        {"min_tokens": []},
        {"response_format": {"type": "json_object"}},
        {"response_format": "odd"},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_json": {}},
        # vLLM cuts the prompt, of which the answer so far would be a part: from the right, it would
        # say that part again.
        {"truncate_prompt_tokens": 4},
        {"thinking_token_budget": 0},
        {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}},
        {"watermarking": True},
        {"vllm_xargs": {"ngram_size": 3}},
        {"suffix": "b"},
        {"a member of tomorrow": 1},
    ],
    ids=json.dumps,
)
def test_a_completion_that_text_cannot_carry_is_not_resumed(values: dict[str, Any]) -> None:
    with pytest.raises(CannotResumeError):
        completion(**values)


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "values",
    [
        {"messages": None},
        {"messages": "hello"},
        {"messages": [{"role": "user", "content": nested(200)}]},
        {"messages": [], "continue_final_message": True},
        {"messages": ["a"], "continue_final_message": True},
        {"messages": [{"role": "assistant", "content": [{}]}], "continue_final_message": True},
        {"add_generation_prompt": False},
        {"echo": True},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"include_reasoning": False},
        {"truncate_prompt_tokens": 4, "truncation_side": "right"},
    ],
)
def test_a_chat_that_text_cannot_carry_is_not_resumed(values: dict[str, Any]) -> None:
    with pytest.raises(CannotResumeError):
        chat(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None},
        {"tool_choice": "auto", "tools": [{}]},
        {"tool_choice": "none"},
        {"truncate_prompt_tokens": None, "a member of tomorrow": None},
        {"include_reasoning": True, "watermarking": False, "use_beam_search": False},
        {"stream_interval": 4, "session_id": "a", "reasoning_effort": "low"},
    ],
    ids=json.dumps,
)
def test_a_chat_that_is_free_text_so_far_is_resumed(values: dict[str, Any]) -> None:
    assert "messages" in chat(**values)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_words_that_may_have_begun_at_the_end_forbid_to_go_on(name: str) -> None:
    for words in (["once", "upon a"], [" upon a", 7, ""], ["n!"]):
        with pytest.raises(CannotResumeError, match=f"one of {name} may have begun"):
            completion(" upon", 3, **{name: words})
    for others in ([], ["upon", "a", "pon"], [7]):
        assert completion(" upon", 3, **{name: others})["prompt"] == "Once upon"


@pytest.mark.parametrize("api", [Api.RESPONSES, Api.MESSAGES])
def test_the_other_apis_are_not_resumed(api: Api) -> None:
    with pytest.raises(CannotResumeError):
        resumed_members(api, {"input": "a", "messages": [USER]}, "b", 1)
