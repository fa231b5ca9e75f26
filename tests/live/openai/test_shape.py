"""What routing reads out of a request: which path it takes, how many slots it needs, what is refused."""

import json
from typing import Any

import pytest
from msgspec import structs
from tests.support.site import Site, served

from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.shape import (
    DATA_TOKENS,
    INTERNAL_FIELDS,
    Api,
    Shape,
    TokenEstimate,
    read_shape,
)

MESSAGES = [{"role": "user", "content": "hello"}]


def shape_of(api: Api, **members: object) -> Shape:
    return read_shape(api, RequestBody(json.dumps(members).encode()), max_sequences=8)


def chat(**members: object) -> Shape:
    return shape_of(Api.CHAT, **({"model": "m", "messages": MESSAGES} | members))


def completion(**members: object) -> Shape:
    return shape_of(Api.COMPLETIONS, **({"model": "m", "prompt": "hello"} | members))


def refused_param(**members: object) -> str | None:
    with pytest.raises(BodyError) as caught:
        completion(**members)
    return caught.value.param


def test_an_ordinary_request_takes_the_pd_path() -> None:
    assert chat(stream=True, max_tokens=5) == Shape(
        api=Api.CHAT,
        model="m",
        stream=True,
        sequences=1,
        direct="",
        prompt_tokens=None,
        prompt_characters=len("userhello"),
        prompt_data=0,
        max_tokens=5,
    )


@pytest.mark.parametrize(
    "members",
    [
        {"n": 1},
        {"logprobs": True, "top_logprobs": 2},
        {"max_completion_tokens": 9},
        {"max_tokens": None, "min_tokens": None, "n": None, "stream": None},
        {"min_tokens": 0},
        {"max_tokens": 10**30},
        {"max_tokens": "5", "min_tokens": 5.0, "n": 1.0, "truncate_prompt_tokens": "7"},
        {"best_of": 200, "priority": -(2**63)},
        {"truncate_prompt_tokens": 100},
        {"tools": [{}], "tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"echo": False, "use_beam_search": False, "prompt_logprobs": None},
        {"seed": 123456789012345678901234567890},
        {"vllm_xargs": {"mine": 1}},
        {"unheard_of": {"kv_transfer_params": 1}},
        {"min_tokens": 17},
        {"stream_options": None},
        {"stream_options": {}},
        {"stream": True, "stream_options": {}},
        {"stream": True, "stream_options": {"include_usage": "yes", "other": 1}},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": None}},
    ],
    ids=json.dumps,
)
def test_what_one_kv_cache_can_carry_takes_the_pd_path(members: dict[str, object]) -> None:
    assert not chat(**members).direct


@pytest.mark.parametrize(
    "members",
    [
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt_embeds": "AAAA"},
        {"n": 2},
        {"use_beam_search": True},
        {"prompt_logprobs": 0},
        {"echo": True},
        {"echo": True, "logprobs": 1},
        # Engines refuse these, but a prefill leg would not find it out.
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": "five"},
        {"max_tokens": []},
        {"max_completion_tokens": 0},
        {"max_completion_tokens": 5, "max_tokens": 0},
        {"min_tokens": -1},
        {"min_tokens": "a"},
        {"min_tokens": 6, "max_tokens": 5},
        {"min_tokens": 17},  # A completion that names no limit has 16.
        {"stream_options": {"include_usage": True}},
        {"stream": False, "stream_options": {"include_usage": False}},
        {"stream": True, "stream_options": "include_usage"},
        {"stream": True, "stream_options": []},
        {"stream": True, "stream_options": {"include_usage": "often"}},
        {"stream": True, "stream_options": {"continuous_usage_stats": 2}},
        # Cut to what max_tokens leaves, which is not the same on both legs.
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": "-1"},
    ],
    ids=json.dumps,
)
def test_what_needs_one_engine_goes_direct(members: dict[str, object]) -> None:
    assert completion(**members).direct


LIMIT = {Api.RESPONSES: "max_output_tokens", Api.MESSAGES: "max_tokens"}


def agents(api: Api, **members: object) -> Shape:
    prompt = {"input": "hello"} if api is Api.RESPONSES else {"messages": MESSAGES}
    return shape_of(api, **({"model": "m", **prompt, LIMIT[api]: 7} | members))


@pytest.mark.parametrize("api", LIMIT)
@pytest.mark.parametrize(
    "members",
    [
        {},
        {"stream": True},
        # What the other APIs read there, and vLLM's do not.
        {"n": 3, "min_tokens": 9, "echo": True, "use_beam_search": True, "prompt_logprobs": 1},
        {"n": "many", "stream_options": {"include_obfuscation": False}},
        {"truncate_prompt_tokens": -1, "max_completion_tokens": "none"},
        {"tools": [{"type": "function", "name": "mcp"}, {"type": "custom", "name": "container"}]},
        {"tools": [{"type": "web_search"}, {"name": "a", "description": "\u2019 \u003c"}]},
        {
            "store": True,
            "background": False,
            "previous_response_id": None,
            "truncation": "disabled",
        },
        {"tool_choice": {"type": "any"}, "thinking": {"type": "enabled", "budget_tokens": 6}},
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "name": "a"}},
    ],
    ids=json.dumps,
)
def test_agents_requests_take_the_pd_path(api: Api, members: dict[str, object]) -> None:
    shape = agents(api, **members)
    assert (shape.direct, shape.sequences, shape.max_tokens) == ("", 1, 7)


@pytest.mark.parametrize(
    ("api", "members", "direct"),
    [
        (Api.MESSAGES, {"tool_choice": {"type": "tool", "name": "a"}}, "tool_choice"),
        (Api.MESSAGES, {"max_tokens": None}, "max_tokens"),
        (Api.MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 7}}, "thinking"),
        (Api.MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (Api.MESSAGES, {"max_tokens": "many"}, "max_tokens"),
        (Api.RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (Api.RESPONSES, {"max_output_tokens": 1.5}, "max_output_tokens"),
        # vLLM cuts for null as for "auto".
        (Api.RESPONSES, {"truncation": "auto"}, "truncation"),
        (Api.RESPONSES, {"truncation": None}, "truncation"),
        (Api.RESPONSES, {"tools": [{"type": "web_search_preview"}]}, "tools"),
        (Api.RESPONSES, {"tools": [{"type": "code_interpreter"}]}, "tools"),
        (Api.RESPONSES, {"tools": [{"type": "container"}]}, "tools"),
        (Api.RESPONSES, {"tools": [{"server_label": "s", "type": "mcp"}]}, "tools"),
    ],
    ids=str,
)
def test_agents_requests_that_differ_in_the_legs_go_direct(
    api: Api, members: dict[str, object], direct: str
) -> None:
    assert agents(api, **members).direct == direct


def test_agents_requests_without_what_they_need_go_direct() -> None:
    for missing in ("model", "messages", "max_tokens"):
        given: dict[str, object] = {"model": "m", "messages": MESSAGES, "max_tokens": 7}
        del given[missing]
        assert shape_of(Api.MESSAGES, **given).direct == missing
    assert shape_of(Api.RESPONSES, model="m").direct == "input"
    assert not shape_of(Api.RESPONSES, input="a").direct
    assert shape_of(Api.RESPONSES, input="a").max_tokens is None


def test_a_tool_of_the_engines_is_known_however_it_is_written() -> None:
    spelled = b'{"input": "a", "tools": [{"type" :\t"\\u006Dcp"}]}'
    shape = read_shape(Api.RESPONSES, RequestBody(spelled), max_sequences=8)
    assert shape.direct == "tools"


@pytest.mark.parametrize("api", LIMIT)
def test_what_agents_send_ahead_counts(api: Api) -> None:
    hello = len("hello" if api is Api.RESPONSES else "userhello")
    assert agents(api).prompt_characters == hello
    ahead = {"system": "abc", "instructions": "de", "tools": [{}]}
    assert agents(api, **ahead).prompt_characters == hello + 5 + 4 + 4


def test_the_limit_of_a_chat_is_the_newer_member() -> None:
    assert chat(max_tokens=9, max_completion_tokens=4).max_tokens == 4
    assert chat(max_tokens=9, max_completion_tokens=None).max_tokens == 9
    assert chat().max_tokens is None
    assert chat(max_tokens="9").max_tokens == 9
    assert chat(max_tokens="nine").max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "sequences", "tokens", "characters"),
    [
        ("text", 1, None, 4),
        (["text"], 1, None, 4),
        ([5, 6, 7], 1, 3, 1),
        ([[5, 6, 7]], 1, 3, 1),
        ([[5], [6, 7, 8], [9, 10]], 3, 2, 1),
        ([[], []], 2, 1, 1),
        (["a", "b", "c"], 3, None, 1),
        (["a" * 100, "b" * 200], 2, None, 150),
        (["a", [1]], 2, None, 1),
        ([True, False], 2, None, 1),
        ([], 1, None, 1),
        (None, 1, None, 1),
        ({"a": 1}, 1, None, 1),
    ],
)
def test_prompts_are_counted(
    prompt: object, sequences: int, tokens: int | None, characters: int
) -> None:
    """What each of several texts is charged is their mean, not their sum."""
    shape = completion(prompt=prompt)
    assert (shape.sequences, shape.prompt_tokens) == (sequences, tokens)
    assert shape.prompt_characters == characters
    assert shape.prompt_data == 0


def test_an_image_is_no_text() -> None:
    """Base64 says nothing about the number of tokens."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10_000}}
    sound = {"type": "input_audio", "input_audio": {"data": "A" * 10_000, "format": "wav"}}
    text = {"type": "text", "text": "what is it?"}
    shape = chat(messages=[{"role": "user", "content": [text, image, sound]}])
    assert shape.prompt_characters < 100
    assert shape.prompt_data == 2


def test_a_chat_has_one_prompt_whatever_a_prompt_member_says() -> None:
    assert chat(prompt=["a", "b"]).sequences == 1


def test_an_absent_prompt_is_for_the_engine_to_refuse() -> None:
    shape = shape_of(Api.COMPLETIONS)
    assert (shape.model, shape.prompt_characters) == ("", 1)


EXTRA = [{"mine": 1, field: {"remote_host": "evil"}} for field in sorted(INTERNAL_FIELDS)]
EXTRA += [{field: None} for field in sorted(INTERNAL_FIELDS)]
REFUSED: dict[str, list[Any]] = {
    "n": [0, -1, 9, 10**6, 10**400, 1.5, 1e300, "two", False, [], {}],
    "priority": [2**63, -(2**63) - 1, 10**400, 1.5, "high", None, [], {}],
    "stream": [2, -1, 0.5, "", " true", "maybe", [], {}],
    "model": [0, True, [], {}],
    "vllm_xargs": EXTRA,  # Internal fields cannot hide there.
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_refuses_or_must_not_see_is_refused(name: str) -> None:
    for value in REFUSED[name]:
        assert refused_param(**{name: value}) == name, value


@pytest.mark.parametrize(
    ("members", "answers", "stream"),
    [
        *(({"n": value}, 2, False) for value in ("2", 2.0, " +2.0 ")),
        *(({"stream": value}, 1, True) for value in ("True", 1.0)),
        *(({"stream": value}, 1, False) for value in ("false", 0, "off")),
        ({"n": True}, 1, False),
        ({"prompt": ["a", "b"], "n": 3}, 6, False),
        ({"best_of": 5}, 1, False),
    ],
    ids=str,
)
def test_answers_and_stream_are_read_as_vllm_reads_them(
    members: dict[str, object], answers: int, stream: bool
) -> None:
    """Pydantic's lax mode takes these, and so does vLLM."""
    shape = completion(**members)
    assert (shape.sequences, shape.stream) == (answers, stream)


@pytest.mark.parametrize("limit", [2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**30, 10**400])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_that_is_calculated_with_is_bounded(name: str, limit: int) -> None:
    """Beyond 64 bits it ended every decision of the scheduler."""
    assert completion(**{name: limit}).max_tokens == 2**31 - 1
    assert chat(**{name: str(limit)}).max_tokens == 2**31 - 1


@pytest.mark.parametrize("api", LIMIT)
def test_the_limit_of_agents_is_bounded_too(api: Api) -> None:
    assert agents(api, **{LIMIT[api]: 10**30}).max_tokens == 2**31 - 1


def test_anthropics_messages_have_no_priority_to_refuse() -> None:
    assert shape_of(Api.MESSAGES, model="m", messages=MESSAGES, priority="high").model == "m"


def test_more_answers_than_allowed_are_refused_however_they_come_about() -> None:
    assert refused_param(prompt=["a", "b", "c"], n=3) == "n"
    assert refused_param(prompt=["a"] * 9) == "n"
    assert completion(prompt=["a"] * 8).sequences == 8


@pytest.mark.parametrize("value", [None, [], "kv_transfer_params", 1])
def test_extra_arguments_of_another_type_are_for_the_engine_to_refuse(value: object) -> None:
    assert not completion(vllm_xargs=value).direct


# The tokens of a prompt before it was counted: texts, several of them, images, and what is no text.


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TEXT = Shape(Api.CHAT, "m", False, 1, "", None, 1_600, 0, None)


def test_text_is_taken_by_its_length_and_by_what_was_counted() -> None:
    estimate = TokenEstimate()
    assert estimate.tokens(TEXT) == 400
    for _ in range(200):
        estimate.learn(TEXT, 800)
    assert estimate.tokens(TEXT) == pytest.approx(800, rel=0.01)
    assert estimate.tokens(structs.replace(TEXT, prompt_characters=1)) == 1
    assert estimate.tokens(structs.replace(TEXT, prompt_tokens=7)) == 7


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"prompt_data": 1}, 1_500),
        ({"prompt_characters": 1_000_000}, 5),
        ({"prompt_characters": 2}, 100_000),
        ({"prompt_tokens": 5}, 5),
    ],
)
def test_what_was_not_counted_as_text_teaches_nothing(
    changes: dict[str, int], counted: int
) -> None:
    """Neither an image nor a prompt that is mostly tools spoils the estimate of text."""
    estimate = TokenEstimate()
    for _ in range(100):
        estimate.learn(structs.replace(TEXT, **changes), counted)
    assert estimate.tokens(TEXT) == 400


def test_an_image_counts_as_a_constant() -> None:
    assert TokenEstimate().tokens(structs.replace(TEXT, prompt_data=2)) == 400 + 2 * DATA_TOKENS


@pytest.mark.parametrize("characters", [64 << 20, 10**12])
def test_all_sequences_together_stay_countable(characters: int) -> None:
    """The estimate of each sequence times their number does not overflow 32 bits."""
    shape = structs.replace(TEXT, prompt_characters=characters, sequences=128)
    assert TokenEstimate().tokens(shape) * 128 < 2**31
    exact = structs.replace(shape, prompt_tokens=characters)
    assert TokenEstimate().tokens(exact) * 128 < 2**31


@served()
async def test_several_texts_are_charged_what_they_have(site: Site) -> None:
    """Sixteen prompts of a thousand tokens were charged sixteen times their sum."""
    prompts = [" ".join(f"t{i}" for i in range(start, start + 1_000)) for start in range(16)]
    values = {"model": "tiny", "prompt": prompts, "max_tokens": 4, "stream": True}
    exchange = site.send(COMPLETIONS, values)
    await exchange.until_events(1)
    (rank,) = [load for load in site.world.scheduler.ledger.loads.tolist() if load]
    assert 10_000 < rank < 30_000
    await exchange.end()


@served()
async def test_an_image_does_not_move_what_texts_are_charged(site: Site) -> None:
    """After one image of a megabyte a text of 400 tokens counted as one."""
    text = " ".join(f"t{i}" for i in range(400))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}
    for content in (text, [image, {"type": "text", "text": "t1"}], text):
        talk = [{"role": "user", "content": content}]
        values = {"model": "tiny", "messages": talk, "max_tokens": 2}
        assert (await site.post(CHAT, values)).status == 200
    before, picture, after = (record.prompt_estimate for record in site.world.ended)
    assert picture < 2 * DATA_TOKENS
    assert after == pytest.approx(before, rel=0.2)


# The priority of a request.


@pytest.mark.parametrize("connector", ["nixl", "mooncake-layerwise"])
@pytest.mark.parametrize("passed", [False, True])
@served("connector", flags=lambda passed: {"pass_priority": passed})
async def test_a_priority_reaches_both_legs_if_it_is_to(
    site: Site, connector: str, passed: bool
) -> None:
    """`priority` was dropped without a word."""
    values = {"model": "tiny", "prompt": "t1", "max_tokens": 3, "priority": -5}
    assert (await site.post(COMPLETIONS, values)).status == 200
    assert {seen.engine.partition("/")[0] for seen in site.seen} == {"prefill", "decode"}
    assert {seen.values.get("priority") for seen in site.seen} == {-5 if passed else None}
    refused = await site.post(COMPLETIONS, values | {"priority": 2**63})
    assert refused.status == 400
