"""Reading a probe's answer."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.site import transcript

from balanceroute.proxy.live.openai.legs import (
    BadPrefillAnswerError,
    PrefillAnswer,
    read_prefill_answer,
)
from balanceroute.proxy.live.openai.shape import Api

# What a real one may hold instead of what it should.
JUNK: list[object] = [None, True, 0, -1, 1.5, "", "stop", [], [{}], {}, 10**40]


def answer(**members: Any) -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "prompt_tokens_details": None},
        "kv_transfer_params": {"remote_port": 5600},
    } | members


def read(**members: Any) -> PrefillAnswer:
    return read_prefill_answer(json.dumps(answer(**members)).encode())


def test_a_real_nixl_answer_is_read() -> None:
    body = transcript("nixl_chat_stream_usage_prefill.resp")
    read = read_prefill_answer(body)
    assert (read.prompt_tokens, read.cached_tokens, read.complete) == (187, None, False)
    assert read.kv_transfer_params == json.loads(body)["kv_transfer_params"]
    assert isinstance(read.kv_transfer_params, dict)
    assert read.kv_transfer_params["remote_block_ids"] == [[26, 27, 28, 29, 30, 31]]
    assert read.message == json.loads(body)


def test_the_parameters_are_kept_as_they_were_written() -> None:
    params = '{"remote_block_ids":[' + ",".join(map(str, range(2_000))) + '], "tp_size" :1E0}'
    body = json.dumps(answer(kv_transfer_params=0)).replace('params": 0', 'params":' + params)
    read = read_prefill_answer(body.encode())
    assert read.params_text == params.encode()
    assert read.kv_transfer_params == json.loads(params)


def test_of_members_that_stand_twice_the_last_ones_count() -> None:
    twice = ', "kv_transfer_params": {"remote_port": 1}, "usage": {"prompt_tokens": 9}}'
    read = read_prefill_answer((json.dumps(answer())[:-1] + twice).encode())
    assert read.params_text == b'{"remote_port": 1}'
    assert read.kv_transfer_params == {"remote_port": 1}
    assert read.prompt_tokens == 9


@pytest.mark.parametrize("value", ["NaN", '"\\ud800"'])
def test_an_answer_is_read_even_if_it_is_no_strict_json(value: str) -> None:
    for place in ("logprobs", "kv_transfer_params"):
        read = read_prefill_answer((json.dumps(answer())[:-1] + f', "{place}": {value}}}').encode())
        assert read.prompt_tokens == 7
        assert read.params_text == b""


@pytest.mark.parametrize(
    "name",
    ["mooncake_chat_nonstream_prefill.resp", "mooncake_cmpl_stream_logprobs_prefill.resp"],
)
def test_a_real_mooncake_answer_has_no_parameters(name: str) -> None:
    read = read_prefill_answer(transcript(name))
    assert read.kv_transfer_params is None
    assert read.prompt_tokens > 100
    assert not read.complete


@pytest.mark.parametrize(
    ("reason", "complete"),
    [("length", False), (None, False), ("stop", True), ("tool_calls", True), ("abort", True)],
)
def test_only_a_stop_condition_completes_the_answer(reason: str | None, complete: bool) -> None:
    assert read(choices=[{"finish_reason": reason}]).complete is complete


@pytest.mark.parametrize(
    ("details", "cached"),
    [
        ({"cached_tokens": 0}, 0),
        ({"cached_tokens": 7}, 7),
        ({"cached_tokens": None}, None),
        ({"cached_tokens": 8}, None),
        ({"cached_tokens": -1}, None),
        ({"cached_tokens": True}, None),
        ({}, None),
        (None, None),
        ([], None),
    ],
)
def test_cached_tokens_are_read_if_they_can_be_true(details: object, cached: int | None) -> None:
    usage = {"prompt_tokens": 7, "prompt_tokens_details": details}
    assert read(usage=usage).cached_tokens == cached


def nested(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"\x1f\x8b\x08",
        b"<html>",
        b"[" * 100_000,
        b"null",
        b"[1]",
        b"{}",
        json.dumps(answer(usage=None)).encode(),
        json.dumps(answer(usage={})).encode(),
        json.dumps(answer(usage={"prompt_tokens": 0})).encode(),
        json.dumps(answer(usage={"prompt_tokens": True})).encode(),
        json.dumps(answer(usage={"prompt_tokens": 7.0})).encode(),
        json.dumps(answer(usage={"prompt_tokens": 10**12})).encode(),
        json.dumps(answer(choices=None)).encode(),
        json.dumps(answer(choices=[])).encode(),
        json.dumps(answer(choices=["a"])).encode(),
        json.dumps(answer(kv_transfer_params=nested(200))).encode(),
        json.dumps(answer(choices=[{"finish_reason": "stop", "x": nested(200)}])).encode(),
        json.dumps(answer()).encode()[:-9],
        # Nobody reads it as long as nobody asks for the message.
        json.dumps(answer(model="X")).encode().replace(b"X", b"\xff"),
        json.dumps(answer(X=1)).encode().replace(b"X", b"\xff"),
    ],
    ids=range(22),
)
def test_what_is_no_answer_to_a_probe_is_told(body: bytes) -> None:
    with pytest.raises(BadPrefillAnswerError):
        read_prefill_answer(body)


@given(
    st.dictionaries(
        st.sampled_from(["choices", "usage", "kv_transfer_params"]), st.sampled_from(JUNK)
    )
)
def test_nothing_that_an_engine_says_raises_anything_else(members: dict[str, Any]) -> None:
    try:
        read(**members)
    except BadPrefillAnswerError:
        assert {"choices", "usage"} & members.keys()


def of_message(**members: object) -> bytes:
    usage = {"input_tokens": 2, "output_tokens": 1, "cache_read_input_tokens": 4}
    usage["cache_creation_input_tokens"] = 1
    message = {"content": [], "stop_reason": "max_tokens", "usage": usage}
    return json.dumps(message | {"kv_transfer_params": {"a": 1}} | members).encode()


def of_response(**members: object) -> bytes:
    details = {"cached_tokens": 4, "cache_write_tokens": 1}
    usage = {"input_tokens": 7, "input_tokens_details": details, "output_tokens": 1}
    response = {"output": [], "status": "incomplete", "usage": usage}
    return json.dumps(response | {"kv_transfer_params": {"a": 1}} | members).encode()


AGENTS = {Api.MESSAGES: of_message, Api.RESPONSES: of_response}


@pytest.mark.parametrize("api", AGENTS)
def test_an_answer_of_agents_tells_the_same(api: Api) -> None:
    read = read_prefill_answer(AGENTS[api](), api=api)
    assert (read.prompt_tokens, read.cached_tokens, read.complete) == (7, 4, False)
    assert read.usage is not None
    assert read.usage.written_tokens == 1
    assert (read.kv_transfer_params, read.params_text) == ({"a": 1}, b'{"a": 1}')


@pytest.mark.parametrize(
    ("api", "members", "complete", "aborted"),
    [
        (Api.MESSAGES, {"stop_reason": "end_turn"}, True, False),
        (Api.MESSAGES, {"stop_reason": "stop_sequence"}, True, False),
        (Api.MESSAGES, {"stop_reason": None}, True, True),
        (Api.RESPONSES, {"status": "completed"}, True, False),
        (Api.RESPONSES, {"status": "cancelled"}, True, True),
    ],
)
def test_how_an_answer_of_agents_ended_is_told(
    api: Api, members: dict[str, object], complete: bool, aborted: bool
) -> None:
    read = read_prefill_answer(AGENTS[api](**members), api=api)
    assert (read.complete, read.aborted) == (complete, aborted)


def test_a_message_that_counts_no_cache_counts_the_whole_prompt() -> None:
    read = read_prefill_answer(of_message(usage={"input_tokens": 7}), api=Api.MESSAGES)
    assert (read.prompt_tokens, read.cached_tokens) == (7, None)


@pytest.mark.parametrize("api", AGENTS)
@pytest.mark.parametrize(
    "members",
    [
        {"usage": None},
        {"usage": {}},
        {"usage": {"input_tokens": 0}},
        {"usage": {"input_tokens": True}},
        {"usage": {"input_tokens": -1}},
        {"content": None, "output": None},
        {"content": "a", "output": {}},
        {"kv_transfer_params": nested(200)},
    ],
    ids=lambda one: str(one)[:40],
)
def test_what_is_no_answer_of_agents_is_told(api: Api, members: dict[str, object]) -> None:
    with pytest.raises(BadPrefillAnswerError):
        read_prefill_answer(AGENTS[api](**members), api=api)
