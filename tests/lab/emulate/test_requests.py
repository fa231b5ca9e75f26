"""Requests that an engine refuses, and limits that it works out."""

from typing import Any

import pytest

from balanceroute.proxy.lab.emulate.request import (
    ApiError,
    GenerationRequest,
    read_generation,
    read_json,
)
from balanceroute.proxy.lab.emulate.settings import EmulationSettings

SETTINGS = EmulationSettings(model="tiny", max_model_len=100)
USER = {"role": "user", "content": "a b"}  # Six tokens with the template.
TOOL = {"type": "function", "function": {"name": "f"}}


def chat(**changes: Any) -> GenerationRequest:
    return read_generation({"messages": [USER], **changes}, SETTINGS, chat=True)


def completion(**changes: Any) -> GenerationRequest:
    return read_generation({"prompt": "a b", **changes}, SETTINGS, chat=False)


@pytest.mark.parametrize(
    ("changes", "status", "param", "words"),
    [
        ({"model": "big"}, 404, "model", "The model `big` does not exist."),
        ({"messages": "hello"}, 400, "body.messages", "'type': 'list_type'"),
        ({"messages": ["hello"]}, 400, "body.messages.0", "'type': 'dict_type'"),
        ({"max_tokens": "many"}, 400, "body.max_tokens", "'input': 'many'"),
        ({"max_tokens": True}, 400, "body.max_tokens", "'type': 'int_type'"),
        ({"stream": 1}, 400, "body.stream", "'type': 'bool_type'"),
        ({"temperature": "hot"}, 400, "body.temperature", "'type': 'float_type'"),
        ({"stream_options": []}, 400, "body.stream_options", "<list of 0 items>"),
        ({"kv_transfer_params": [1]}, 400, "body.kv_transfer_params", "<list of 1 items>"),
        ({"stop": [1]}, 400, "body.stop", "'type': 'string_type'"),
        ({"stop": ["a", ""]}, 400, None, "stop cannot contain an empty string."),
        ({"stop_token_ids": ["a"]}, 400, "body.stop_token_ids", "'type': 'int_type'"),
        ({"max_completion_tokens": 0}, 400, "max_completion_tokens", "must be at least 1, got 0"),
        ({"max_tokens": 101}, 400, "max_tokens", "cannot be greater than max_model_len=100"),
        ({"max_tokens": 95}, 400, "input_tokens", "for a total of at least 101 tokens"),
        (
            {"min_tokens": 3, "max_tokens": 2},
            400,
            None,
            "less than or equal to max_tokens=2, got 3",
        ),
        ({"min_tokens": -1}, 400, None, "min_tokens must be greater than or equal to 0, got -1"),
        ({"n": 0}, 400, None, "n must be at least 1, got 0."),
        ({"n": 2, "temperature": 0}, 400, None, "n must be 1 when using greedy sampling, got 2."),
        ({"temperature": -1}, 400, "temperature", "temperature must be non-negative, got -1."),
        ({"temperature": 10**400}, 400, "body.temperature", "'type': 'float_type'"),
        ({"logprobs": True, "top_logprobs": 2**62}, 400, None, "greater than max allowed: 20"),
        ({"prompt_logprobs": 10**9}, 400, None, "greater than max allowed: 20"),
        ({"stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs", "not available"),
        ({"continue_final_message": True}, 400, None, "Cannot set both"),
        ({"tools": "hammer"}, 400, "body.tools", "'type': 'list_type'"),
        ({"tools": [{"type": "function"}]}, 400, "body.tools.0.function.name", "Field required"),
        ({"tool_choice": "auto"}, 400, None, "`tools` must be set"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, 400, None, "Invalid value for `tool_choice`"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, 400, None, "not match any"),
    ],
    ids=str,
)
def test_a_chat_that_cannot_be_served_is_refused(
    changes: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**changes)
    assert (caught.value.status, caught.value.param) == (status, param)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": None}, "'loc': 'body.prompt', 'msg': 'Field required'"),
        ({"prompt": {}}, "'input': '<dict of 0 items>'"),
        ({"prompt": []}, "'input': '<list of 0 items>'"),
        ({"prompt": ["a", 5]}, "'input': '5'"),
        ({"prompt": [-1, 2]}, "'input': '-1'"),
        ({"prompt": ""}, "The decoder prompt cannot be empty"),
        ({"prompt": "a " * 101}, "your prompt contains at least 101 input tokens"),
        ({"prompt": "a " * 100, "max_tokens": None}, "at least 100 input tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_completion_that_cannot_be_served_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**changes)
    assert caught.value.status == 400
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "'type': 'missing', 'loc': 'body'"),
        (b"[1]", "'type': 'model_attributes_type'"),
        (b"{", "'loc': 'body.1'"),
        (b'{"a": "\xff"}', "There was an error parsing the body"),
        (b'{"a":' + b"[" * 100_000, "There was an error parsing the body"),
        (b'{"a":' + b"9" * 5_000 + b"}", "There was an error parsing the body"),
    ],
    ids=["empty", "a list", "cut", "no UTF-8", "deep", "digits"],
)
def test_a_body_that_is_no_object_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_json(body)
    assert caught.value.status == 400
    assert words in str(caught.value)


def test_limits_reach_to_the_end_of_the_context() -> None:
    assert chat().max_tokens == (94,)
    assert chat(max_tokens=94).max_tokens == (94,)
    assert chat(max_tokens=9, max_completion_tokens=7).max_tokens == (7,)
    assert completion().max_tokens == (16,)
    assert completion(max_tokens=None).max_tokens == (98,)
    assert completion(prompt=["a", "b c"], max_tokens=None).max_tokens == (99, 98)


def test_what_a_request_does_not_say_has_vllms_defaults() -> None:
    request = completion(model=None, n=None, stream=None, seed=None, unknown={"deep": [1]})
    assert (request.n, request.stream, request.min_tokens) == (1, False, 0)
    assert (request.logprobs, request.kv, request.stop) == (0, None, ())
    assert chat(tools=[TOOL]).tool_choice == "auto"
    assert chat(tools=[TOOL], tool_choice={"function": {"name": "f"}}).tool_name == "f"


def test_only_what_changes_the_distribution_changes_the_sampling_key() -> None:
    base = completion().sampling
    assert completion(max_tokens=9, stream=True, logprobs=3, stop="x").sampling == base
    assert completion(temperature=1).sampling == base
    for changes in ({"seed": 1}, {"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5}):
        assert completion(**changes).sampling != base
    greedy = completion(temperature=0).sampling
    assert completion(temperature=0, seed=9, top_p=0.5).sampling == greedy != base
