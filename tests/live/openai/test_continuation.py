"""Requests that go on from token ids: which may, and what they ask for."""

import json
from typing import Any

import pytest

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.continuation import continuable, continued_body
from balanceroute.proxy.live.openai.shape import Api, read_shape

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
