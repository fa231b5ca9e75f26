"""Requests that go on from token ids: which may, and what they ask for."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.continuation import (
    PrefillFirstToken,
    continuable,
    continued_body,
    resumed_members,
    says_again,
)
from balanceroute.proxy.live.openai.errors import CannotResumeError
from balanceroute.proxy.live.openai.legs import decode_body
from balanceroute.proxy.live.openai.shape import Api, read_shape
from balanceroute.proxy.live.openai.stream_reader import RepeatedText

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "a"}],
    "temperature": 0,
    "stream": True,
}
TEXT = {"prompt": "a", "temperature": 0, "stream": True}


def kept(api: Api, values: dict[str, Any], *, sampled: bool = False) -> dict[str, Any] | None:
    body = RequestBody(json.dumps(values).encode())
    return continuable(read_shape(api, body, max_sequences=8), body.values, sampled=sampled)


def continued(api: Api, values: dict[str, Any], tokens: int) -> Any:
    members = kept(api, values)
    assert members is not None
    return json.loads(continued_body(members, api, b"1,2,3", tokens))


def test_a_chat_goes_on_as_a_completion_of_its_ids() -> None:
    values = CHAT | {"max_tokens": 50, "min_tokens": 4, "seed": 3, "chat_template_kwargs": {"a": 1}}
    values |= {"session_id": "s", "prompt_cache_key": "s", "metadata": {"user_id": "u"}}
    assert continued(Api.CHAT, values, 10) == {
        "model": "tiny",
        "temperature": 0,
        "stream": True,
        "max_tokens": 40,
        "min_tokens": 0,
        "seed": 3,
        "prompt": [1, 2, 3],
    }


def test_a_chats_log_probabilities_are_a_completions() -> None:
    for top, wanted in ((None, 0), (0, 0), (3, 3)):
        body = continued(Api.CHAT, CHAT | {"logprobs": True, "top_logprobs": top}, 10)
        assert body["logprobs"] == wanted
        assert "top_logprobs" not in body
    assert continued(Api.COMPLETIONS, TEXT | {"logprobs": 0}, 10)["logprobs"] == 0


def test_a_chat_without_a_limit_has_the_contexts() -> None:
    assert continued(Api.CHAT, CHAT, 10)["max_tokens"] is None


def test_the_newer_name_of_the_limit_goes_before_the_older() -> None:
    body = continued(Api.CHAT, CHAT | {"max_completion_tokens": 30, "max_tokens": 90}, 10)
    assert body["max_tokens"] == 20
    assert "max_completion_tokens" not in body


def test_a_completion_without_a_limit_has_the_engines() -> None:
    assert continued(Api.COMPLETIONS, TEXT, 10)["max_tokens"] == 6


@pytest.mark.parametrize("temperature", [None, 0.5, "0", True, float("1e-4")])
def test_sampled_answers_go_on_only_where_they_may_differ(temperature: object) -> None:
    values = CHAT | {"temperature": temperature}
    assert kept(Api.CHAT, values) is None
    assert kept(Api.CHAT, values, sampled=True) is not None


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False},
        {"n": 2},
        {"stop": ["a"], "temperature": 1},
        {"echo": True},
        {"logprobs": True, "top_logprobs": -1},
        {"prompt_logprobs": 0},
        {"tools": [{}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_schema"}},
        {"structured_outputs": {}},
        {"presence_penalty": 0.1},
        {"return_token_ids": True},
        {"vllm_xargs": {"a": 1}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    ],
    ids=str,
)
def test_what_would_begin_anew_is_not_continued(more: dict[str, Any]) -> None:
    assert kept(Api.CHAT, CHAT | more, sampled=True) is None


def test_members_that_say_nothing_are_no_obstacle() -> None:
    more: dict[str, Any] = {
        "stop": None,
        "tools": [],
        "tool_choice": "auto",
        "logprobs": False,
        "user": "u",
    }
    more |= {"response_format": {"type": "text"}, "frequency_penalty": 0}
    assert kept(Api.CHAT, CHAT | more) is not None


# Going on with an answer: which members change, and which answers cannot be continued.


USER = {"role": "user", "content": "Tell a story."}


def completion(text: str = " upon", tokens: int = 3, **values: object) -> dict[str, object]:
    return resumed_members(Api.COMPLETIONS, {"prompt": "Once"} | values, text, tokens)


def chat(text: str = "Once", tokens: int = 3, **values: object) -> dict[str, object]:
    return resumed_members(Api.CHAT, {"messages": [USER]} | values, text, tokens)


BEGUN = {"role": "assistant", "content": "On", "name": "bard"}
GOES_ON = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize(
    ("form", "sent", "expected"),
    [
        (completion, {"max_tokens": 10}, {"prompt": "Once upon", "max_tokens": 7}),
        (
            completion,
            {"prompt": ["Once"], "max_tokens": 10},
            {"prompt": "Once upon", "max_tokens": 7},
        ),
        # vLLM stops a completion without a limit after 16 tokens.
        (completion, {"tokens": 10}, {"prompt": "Once upon", "max_tokens": 6}),
        (completion, {"max_tokens": None}, {"prompt": "Once upon"}),
        # The echo is not put into the prompt twice.
        (
            completion,
            {"text": "Once upon", "echo": True, "max_tokens": 9},
            {"prompt": "Once upon", "echo": False, "max_tokens": 6},
        ),
        (chat, {}, {"messages": [USER, {"role": "assistant", "content": "Once"}]} | GOES_ON),
        (
            chat,
            {"text": "ce upon", "messages": [USER, BEGUN], "continue_final_message": True},
            {"messages": [USER, BEGUN | {"content": "Once upon"}]} | GOES_ON,
        ),
        # An answer without any text begins again.
        (chat, {"text": "", "tokens": 1, "max_tokens": 9}, {"max_tokens": 8}),
        (
            chat,
            {"text": "", "max_tokens": 10, "max_completion_tokens": 9, "min_tokens": 4},
            {"max_tokens": 7, "max_completion_tokens": 6, "min_tokens": 1},
        ),
        # A limit stays one that an engine takes, and an absent one absent.
        (
            chat,
            {"text": "", "tokens": 30, "max_tokens": 10, "min_tokens": 4},
            {"max_tokens": 1, "min_tokens": 0},
        ),
        (chat, {"text": "", "max_tokens": None}, {}),
    ],
)
def test_which_members_change(
    form: Callable[..., dict[str, object]], sent: dict[str, Any], expected: dict[str, object]
) -> None:
    assert form(**sent) == expected


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


def test_an_echo_that_is_not_the_prompt_cannot_be_continued() -> None:
    with pytest.raises(CannotResumeError):
        completion("<s>Once upon", echo=True)


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
    for words in (["once", "upon a"], [" upon a", 7, ""], ["n!"], ["upon!"]):
        with pytest.raises(CannotResumeError, match=f"one of {name} may have begun"):
            completion(" upon", 3, **{name: words})
    for others in ([], ["upon", "a", "pon"], [7]):
        assert completion(" upon", 3, **{name: others})["prompt"] == "Once upon"


@pytest.mark.parametrize("api", [Api.RESPONSES, Api.MESSAGES])
def test_the_other_apis_are_not_resumed(api: Api) -> None:
    with pytest.raises(CannotResumeError):
        resumed_members(api, {"input": "a", "messages": [USER]}, "b", 1)


# Whether a rank says the first token that a prefiller said.


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
    ("text", "choices", "same"),
    [
        ("ab", [{"text": "ab"}], True),
        ("ab", [{"text": "abc", "finish_reason": "stop"}], True),
        ("ab", [{"text": "a"}], None),
        ("ab", [{"text": "a"}, {"text": "b"}], True),
        ("ab", [{"text": "a"}, {"text": "c"}], False),
        ("ab", [{"text": "a", "finish_reason": "stop"}], False),
        ("ab", [{"text": ""}], None),
        ("ab", [{"text": "", "finish_reason": "stop"}], False),
        (
            "ab",
            [{"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": "ab"}}],
            True,
        ),
        ("ab", [{"delta": {"content": "x"}}], False),
        ("ab", [{"delta": {"reasoning": "ab"}}], False),
        ("", [{"token_ids": [7]}], True),
        ("", [{"token_ids": [7, 8]}], True),
        ("", [{"token_ids": []}, {"token_ids": [7]}], True),
        ("", [{"token_ids": [8, 7]}], False),
        ("", [{"token_ids": [], "finish_reason": "stop"}], False),
    ],
    ids=str,
)
def test_whether_a_first_token_is_said_again(
    text: str, choices: list[dict[str, Any]], same: bool | None
) -> None:
    assert judge(text, *choices) is same


@pytest.mark.parametrize("event", [b": ping\n\n", b"data: [DONE]\n\n", b'data: {"usage":{}}\n\n'])
def test_an_event_without_choices_leaves_it_open(event: bytes) -> None:
    said = PrefillFirstToken("ab", 7, b"1,7", b"", b"")
    assert says_again(said, RepeatedText("ab"), event) is None
