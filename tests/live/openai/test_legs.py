"""The bodies of the legs: next to nothing differs from the client's, and nothing internal is its."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.site import transcript

from balanceroute.proxy.live.connectors import make_connector
from balanceroute.proxy.live.openai.body import BodyError, RequestBody, dump
from balanceroute.proxy.live.openai.legs import (
    BadPrefillAnswerError,
    PrefillAnswer,
    decode_body,
    least_tokens,
    prefill_body,
    read_prefill_answer,
    refuse_if_too_long,
    refuse_what_was_counted,
)
from balanceroute.proxy.live.openai.shape import INTERNAL_FIELDS, Api

PARAMS = {"do_remote_decode": True, "remote_host": None}
EVIL = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80}
PAIRS = [
    "nixl_chat_stream_usage",
    "nixl_cmpl_nonstream",
    "nixl_cmpl_stream_usage",
    "mooncake_chat_nonstream",
    "mooncake_chat_stream_n2",
    "mooncake_cmpl_stream_logprobs",
]


def body(**members: object) -> RequestBody:
    return RequestBody(json.dumps(members).encode())


def client_body(decode_request: bytes) -> bytes:
    """Return what a client sent, from what a decode engine got: without the last member."""
    text, _, _ = decode_request.partition(b', "kv_transfer_params"')
    return text + b"}"


@pytest.mark.parametrize("name", PAIRS)
def test_the_prefill_leg_is_the_one_that_worked_with_a_real_engine(name: str) -> None:
    decode = transcript(f"{name}_decode.req")
    worked = json.loads(transcript(f"{name}_prefill.req"))
    connector = make_connector(name.partition("_")[0])
    params = connector.prefill_params(worked["kv_transfer_params"].get("transfer_id", ""))
    made = json.loads(bytes(prefill_body(RequestBody(client_body(decode)), {}, params)))
    # Ours makes sure of one token and one sequence.
    assert made == {"n": 1, "min_tokens": 1} | worked


@pytest.mark.parametrize("name", PAIRS)
def test_the_decode_leg_is_the_clients_bytes_and_the_parameters(name: str) -> None:
    decode = transcript(f"{name}_decode.req")
    params = json.loads(decode)["kv_transfer_params"]
    assert decode_body(RequestBody(client_body(decode)), {}, dump(params)) == decode


@given(st.dictionaries(st.text(max_size=4), st.recursive(st.integers(), st.lists), max_size=4))
def test_the_decode_leg_differs_by_the_parameters_only(members: dict[str, Any]) -> None:
    sent = json.dumps(members).encode()
    made = bytes(decode_body(RequestBody(sent), {}, dump(PARAMS)))
    tail = b'"kv_transfer_params": ' + json.dumps(PARAMS).encode() + b"}"
    kept = {key: value for key, value in members.items() if key not in INTERNAL_FIELDS}
    assert made == (json.dumps(kept).encode()[:-1] + b", " if kept else b"{") + tail


def test_numbers_and_escapes_reach_both_legs_as_they_were_written() -> None:
    texts = [
        '"seed": 123456789012345678901234567890',
        '"temperature":1E-7',
        '"pr\\u006fmpt" : "\\ud800 \\u00e9 \\/"',
        '"top_p": 0.10',
    ]
    sent = RequestBody(("{" + ",".join(texts) + "}").encode())
    for made in (
        bytes(prefill_body(sent, {}, dump(PARAMS))),
        bytes(decode_body(sent, {}, dump(PARAMS))),
    ):
        assert all(text.encode() in made for text in texts)


@pytest.mark.parametrize("field", sorted(INTERNAL_FIELDS))
def test_an_internal_field_never_reaches_a_leg(field: str) -> None:
    escaped = f'"\\u{ord(field[0]):04x}{field[1:]}"'
    for key in (f'"{field}"', escaped):
        sent = RequestBody(f'{{"prompt": "a", {key}: {json.dumps(EVIL)}}}'.encode())
        for made in (
            bytes(prefill_body(sent, {}, dump(PARAMS))),
            bytes(decode_body(sent, {}, dump(PARAMS))),
            bytes(decode_body(sent, {}, None)),
        ):
            assert b"169.254" not in made
            ours = PARAMS if b"do_remote_decode" in made else None
            assert json.loads(made).get(field) == (ours if field == "kv_transfer_params" else None)


def test_without_parameters_the_decode_leg_has_none() -> None:
    sent = body(prompt="a", kv_transfer_params=EVIL, max_tokens=3)
    assert decode_body(sent, {}, None) == b'{"prompt": "a", "max_tokens": 3}'


def test_the_prefill_leg_asks_for_one_token_of_one_sequence_at_once() -> None:
    sent = body(
        prompt="a",
        n=4,
        best_of=5,
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=900,
        min_tokens=100,
        stop=["x"],
    )
    assert json.loads(bytes(prefill_body(sent, {}, dump(PARAMS)))) == {
        "prompt": "a",
        "n": 1,
        "stream": False,
        "max_tokens": 1,
        "min_tokens": 1,
        "stop": ["x"],
        "kv_transfer_params": PARAMS,
    }


@pytest.mark.parametrize("limit", [50, None])
def test_the_newer_limit_is_overridden_where_it_stands_and_only_there(limit: int | None) -> None:
    given_limit = json.loads(
        bytes(prefill_body(body(max_completion_tokens=limit), {}, dump(PARAMS)))
    )
    assert given_limit["max_completion_tokens"] == given_limit["max_tokens"] == 1
    assert "max_completion_tokens" not in json.loads(bytes(prefill_body(body(), {}, dump(PARAMS))))


def test_both_legs_of_a_resumed_answer_have_the_same_prompt() -> None:
    sent = body(prompt="once", max_tokens=10, temperature=0)
    members = {"prompt": "once upon", "max_tokens": 8}
    prefill = json.loads(bytes(prefill_body(sent, members, dump(PARAMS))))
    decode = json.loads(bytes(decode_body(sent, members, dump(PARAMS))))
    assert prefill["prompt"] == decode["prompt"] == "once upon"
    assert (prefill["max_tokens"], decode["max_tokens"]) == (1, 8)


SCHEMA = {"type": "json_schema", "json_schema": {"schema": {}}}


@pytest.mark.parametrize(
    ("members", "least"),
    [
        ({}, 1),
        ({"min_tokens": 3}, 1),
        ({"response_format": None, "tool_choice": None, "structured_outputs": None}, 1),
        ({"response_format": {"type": "text"}, "tool_choice": "auto"}, 1),
        ({"tool_choice": "none", "tools": []}, 1),
        ({"response_format": SCHEMA}, 0),
        ({"response_format": {"type": "json_object"}}, 0),
        ({"response_format": {"type": "structural_tag"}}, 0),
        ({"structured_outputs": {"regex": ""}}, 0),
        ({"structured_outputs": {"choice": [""]}, "min_tokens": 0}, 0),
        ({"guided_regex": ""}, 0),
        ({"tool_choice": "required"}, 0),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 0),
        # Its own limit holds at the rank, too.
        ({"response_format": SCHEMA, "min_tokens": 2}, 1),
        ({"response_format": SCHEMA | {"pad": "x" * 200_000}}, 0),
    ],
)
def test_a_prefill_leg_needs_no_token_where_a_grammar_may_allow_none(
    members: dict[str, object], least: int
) -> None:
    assert least_tokens(Api.CHAT, body(messages=[], **members)) == least


@pytest.mark.parametrize(
    ("sampling", "least"),
    [({}, 1), ({"structured_outputs": {}}, 0), ({"structured_outputs": {}, "min_tokens": 1}, 1)],
)
def test_so_does_one_of_token_ids(sampling: dict[str, object], least: int) -> None:
    asked = body(token_ids=[1], sampling_params=sampling)
    assert least_tokens(Api.GENERATE, asked) == least
    made = prefill_body(asked, {}, b"{}", api=Api.GENERATE, min_tokens=least)
    assert json.loads(bytes(made))["sampling_params"]["min_tokens"] == least


@pytest.mark.parametrize(
    ("api", "limit", "more"),
    [
        (Api.MESSAGES, "max_tokens", {}),
        (Api.RESPONSES, "max_output_tokens", {"ignore_eos": True, "store": False}),
    ],
)
def test_the_prefill_leg_of_agents_has_the_members_of_their_apis(
    api: Api, limit: str, more: dict[str, object]
) -> None:
    kept = {"model": "m", "system": "s", "tools": [{"name": "f"}], "n": 2, "min_tokens": 4}
    asked = {"stream": True, "store": True, "ignore_eos": False, "stream_options": {"a": 1}}
    sent = body(**kept, **asked, **{limit: 99})
    assert least_tokens(api, sent) == (api is Api.RESPONSES)
    made = json.loads(bytes(prefill_body(sent, {}, dump(PARAMS), api=api, min_tokens=0)))
    wanted = {**kept, "stream": False, limit: 1, **more, "kv_transfer_params": PARAMS}
    assert made == wanted
    decode = json.loads(bytes(decode_body(sent, {}, dump(PARAMS))))
    assert decode == {**kept, **asked, limit: 99, "kv_transfer_params": PARAMS}


def test_a_prefill_leg_goes_on_past_what_would_end_its_answer() -> None:
    ends: dict[str, object] = {"stop": ["a"], "stop_token_ids": [1], "ignore_eos": False}
    sent = body(prompt="a", max_tokens=5, seed=3, **ends)
    made = prefill_body(sent, {}, dump(PARAMS), min_tokens=0, past_end=True)
    limits = {"max_tokens": 1, "min_tokens": 0, "n": 1, "ignore_eos": True}
    rest = {"prompt": "a", "seed": 3, "stream": False, "kv_transfer_params": PARAMS}
    assert json.loads(bytes(made)) == limits | rest
    sent = body(token_ids=[1], sampling_params=ends | {"seed": 3})
    made = prefill_body(sent, {}, dump(PARAMS), api=Api.GENERATE, min_tokens=0, past_end=True)
    assert json.loads(bytes(made))["sampling_params"] == limits | {"seed": 3}
    assert "ignore_eos" not in json.loads(bytes(made))


# Reading a probe's answer.


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


@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
def test_a_limit_beyond_the_context_is_refused_in_the_same_words_once_a_prompt_is_counted(
    api: Api,
) -> None:
    """Where the context was not known before, a prompt of -97951 tokens was said to be too long."""
    asked = body(prompt="a", messages=[{"role": "user", "content": "a"}], max_tokens=100_000)
    told = []
    with pytest.raises(BodyError) as refused:
        refuse_if_too_long(api, asked, 2048)
    told.append((str(refused.value), refused.value.param))
    with pytest.raises(BodyError) as refused:
        refuse_what_was_counted(api, asked, 1, 2048)
    told.append((str(refused.value), refused.value.param))
    assert told[0] == told[1]
    assert told[0][0].startswith("max_tokens=100000 cannot be greater than max_model_len=2048.")
    with pytest.raises(BodyError, match="contains at least 49 input tokens"):
        refuse_what_was_counted(api, body(prompt="a", messages=[], max_tokens=2_000), 60, 2048)
