"""The bodies of the legs: next to nothing differs from the client's, and nothing internal is its."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.site import transcript

from balanceroute.proxy.live.connectors import make_connector
from balanceroute.proxy.live.openai.body import RequestBody, dump
from balanceroute.proxy.live.openai.legs import decode_body, least_tokens, prefill_body
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
