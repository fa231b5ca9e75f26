"""Prefill and decode give what one engine gives, to the byte; and so does going on from the middle."""

import json
import re
from typing import Any

import pytest
from tests.lab.emulate.lab import CHAT, COMPLETIONS, Lab, emulated
from tests.support.site import Exchanged

from balanceroute.proxy.lab.emulate import Preemption

MESSAGES = [{"role": "user", "content": "t1 t2 hello t3"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 4},
                    "days": {"type": "integer"},
                    "unit": {"enum": ["K", "°C"]},
                    "deep": {"type": "object", "properties": {"a": {"type": "boolean"}}},
                    "many": {"type": "array", "items": {"type": "number"}},
                },
            },
        },
    }
]
CASES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {}),
    (CHAT, {"max_tokens": 9}),
    (CHAT, {"max_completion_tokens": 9, "max_tokens": 3}),
    (CHAT, {"temperature": 0, "max_tokens": 40, "ignore_eos": True}),
    (CHAT, {"temperature": 0.8, "seed": 5, "n": 3, "max_tokens": 12}),
    (CHAT, {"logprobs": True, "top_logprobs": 3, "max_tokens": 6}),
    (CHAT, {"logprobs": True, "max_tokens": 6}),
    (CHAT, {"tools": TOOLS, "tool_choice": "required"}),
    (CHAT, {"tools": TOOLS}),
    (
        CHAT,
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    ),
    (CHAT, {"stop": ["t1", "é"], "max_tokens": 200, "ignore_eos": True}),
    (CHAT, {"response_format": {"type": "json_object"}, "max_tokens": 5, "made_up": [1]}),
    (CHAT, {"return_token_ids": True, "max_tokens": 5}),
    (COMPLETIONS, {}),
    (COMPLETIONS, {"max_tokens": None}),
    (COMPLETIONS, {"max_tokens": 9, "logprobs": 2}),
    (COMPLETIONS, {"max_tokens": 9, "logprobs": 0}),
    (COMPLETIONS, {"max_tokens": 5, "echo": True}),
    (COMPLETIONS, {"prompt": [1, 2, 77777], "max_tokens": 5, "echo": True}),
    (COMPLETIONS, {"max_tokens": 60, "min_tokens": 50}),
    (COMPLETIONS, {"max_tokens": 60, "stop": "\n", "include_stop_str_in_output": True}),
]
VARIABLE = re.compile(rb'"id":"(?:chat)?cmpl-[^"]*"|"created":[0-9]+|"system_fingerprint":"[^"]*"')


def body(path: str, changes: dict[str, Any]) -> dict[str, Any]:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "t1 t2 hello t3"}
    return {"model": "tiny", **prompt, **changes}


def constant(answer: Exchanged) -> bytes:
    """Return what must not differ between two engines."""
    assert answer.status == 200, answer.body
    return VARIABLE.sub(b"", answer.body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "changes"), CASES, ids=lambda value: json.dumps(value)[:40] if value != CHAT else ""
)
@emulated()
async def test_prefill_and_decode_answer_as_one_engine_does(
    lab: Lab, path: str, changes: dict[str, Any], stream: bool
) -> None:
    values = body(path, changes | {"stream": stream})
    if stream:
        values["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    alone = await lab.post("decode/0", path, values)
    apart = await lab.post("decode/1", path, await lab.prefilled(path, values))
    assert constant(apart) == constant(alone)
    assert lab.leases() == {"pulled": 1}
    assert lab.fleet.idle


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@emulated()
async def test_a_stream_says_what_the_whole_answer_says(lab: Lab, path: str) -> None:
    for changes in (
        {"max_tokens": 30, "ignore_eos": True},
        {"max_tokens": None},
        {"max_tokens": 300, "stop": ["7 ", "99", "t16383"], "ignore_eos": True},
        {"n": 2, "temperature": 1, "max_tokens": 8},
    ):
        values = body(path, changes)
        whole = await lab.post("decode/0", path, values)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await lab.post("decode/0", path, values | options)
        for index in range(values.get("n", 1)):
            assert stream.text_of(index) == whole.text_of(index)
            assert stream.reasons(index) == whole.reasons(index)
        usage = {key: value for key, value in whole.json["usage"].items() if value is not None}
        assert stream.chunks[-1]["usage"] == usage
        assert stream.done


@pytest.mark.parametrize("draw", [{"temperature": 0}, {"seed": 3}], ids=str)
@emulated()
async def test_the_prefill_says_the_first_token_of_the_answer(
    lab: Lab, draw: dict[str, Any]
) -> None:
    values = body(CHAT, {"max_tokens": 5, "logprobs": True, "ignore_eos": True} | draw)
    first = (await lab.prefill(CHAT, values)).json["choices"][0]
    whole = (await lab.post("decode/0", CHAT, values)).json["choices"][0]
    assert whole["message"]["content"].startswith(first["message"]["content"])
    assert whole["logprobs"]["content"][0] == first["logprobs"]["content"][0]
    assert first["finish_reason"] == "length"


@emulated()
async def test_without_a_seed_no_two_engines_draw_alike(lab: Lab) -> None:
    values = body(CHAT, {"max_tokens": 5, "ignore_eos": True})
    first = (await lab.prefill(CHAT, values)).text
    assert not (await lab.post("decode/0", CHAT, values)).text.startswith(first)


@emulated(partial_utf8=1.0)
async def test_an_answer_that_ends_within_a_character_lacks_it(lab: Lab) -> None:
    values = body(CHAT, {"max_tokens": 1, "ignore_eos": True, "return_token_ids": True})
    (choice,) = (await lab.prefill(CHAT, values)).json["choices"]
    assert (choice["message"]["content"], len(choice["token_ids"])) == ("", 1)


@emulated()
async def test_choices_and_seeds_differ(lab: Lab) -> None:
    def sampled(seed: int) -> dict[str, Any]:
        return body(CHAT, {"n": 2, "seed": seed, "max_tokens": 6, "ignore_eos": True})

    answers = [await lab.post("decode/0", CHAT, sampled(seed)) for seed in (1, 2, 1)]
    texts = [[answer.text_of(0), answer.text_of(1)] for answer in answers]
    assert texts[0] == texts[2]
    assert len({*texts[0], *texts[1]}) == 4


@emulated()
async def test_a_prompt_alone_decides_whether_a_tool_is_called(lab: Lab) -> None:
    called = 0
    for number in range(12):
        messages = [{"role": "user", "content": f"t{number}"}]
        answer = await lab.post(
            "decode/0", CHAT, body(CHAT, {"messages": messages, "tools": TOOLS})
        )
        choice = answer.json["choices"][0]
        calls = choice["message"].get("tool_calls", [])
        assert (choice["finish_reason"] == "tool_calls") == bool(calls)
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            assert set(arguments) == {"city", "days", "unit", "deep", "many"}
            assert len(arguments["city"]) <= 4
            assert arguments["unit"] in ("K", "°C")
        called += len(calls)
    assert 0 < called < 12


@emulated()
async def test_a_streamed_tool_call_has_the_arguments_of_the_whole_one(lab: Lab) -> None:
    values = body(CHAT, {"tools": TOOLS, "tool_choice": "required"})
    whole = (await lab.post("decode/0", CHAT, values)).json["choices"][0]
    stream = await lab.post("decode/0", CHAT, values | {"stream": True})
    calls = [
        call
        for chunk in stream.chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    (wanted,) = whole["message"]["tool_calls"]
    assert (calls[0]["id"], calls[0]["function"]["name"]) == (wanted["id"], "get_weather")
    arguments = "".join(call["function"].get("arguments", "") for call in calls)
    assert arguments == wanted["function"]["arguments"]
    assert len(calls) > 4
    assert stream.reasons() == ("tool_calls", None)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "get_weather"}}, "stop"),
    ],
    ids=["required", "named"],
)
@emulated()
async def test_a_call_that_the_request_named_ends_with_stop(
    lab: Lab, choice: object, reason: str
) -> None:
    values = body(CHAT, {"tools": TOOLS, "tool_choice": choice})
    for stream in (False, True):
        answer = await lab.post("decode/0", CHAT, values | {"stream": stream})
        assert answer.reasons() == (reason, None)


@emulated()
async def test_an_answer_ends_at_the_first_stop_string_and_not_behind_it(lab: Lab) -> None:
    values = body(CHAT, {"max_tokens": 50, "ignore_eos": True})
    whole = (await lab.post("decode/0", CHAT, values)).text
    stop = whole[60:64]
    cut = await lab.post("decode/0", CHAT, values | {"stop": ["never said", stop]})
    assert cut.text == whole[: whole.index(stop)]
    assert cut.reasons() == ("stop", stop)
    kept = await lab.post(
        "decode/0", CHAT, values | {"stop": stop, "include_stop_str_in_output": True}
    )
    assert kept.text == whole[: whole.index(stop) + len(stop)]


@emulated()
async def test_an_answer_ends_at_a_stop_token(lab: Lab) -> None:
    values = body(COMPLETIONS, {"max_tokens": 20, "ignore_eos": True, "return_token_ids": True})
    whole = (await lab.post("decode/0", COMPLETIONS, values)).json["choices"][0]
    token = whole["token_ids"][6]
    cut = await lab.post("decode/0", COMPLETIONS, values | {"stop_token_ids": [token]})
    assert cut.reasons() == ("stop", token)
    assert cut.json["choices"][0]["token_ids"] == whole["token_ids"][:7]
    assert cut.json["usage"]["completion_tokens"] == 7
    assert whole["text"].startswith(cut.text)
    later = await lab.post(
        "decode/0", COMPLETIONS, values | {"stop_token_ids": [token], "min_tokens": 8}
    )
    assert later.text == whole["text"]


@emulated(max_model_len=200, mean_output_tokens=20.0)
async def test_an_answer_without_a_limit_ends_by_itself_or_with_the_context(lab: Lab) -> None:
    ended = await lab.post("decode/0", CHAT, body(CHAT, {}))
    assert ended.reasons() == ("stop", None)
    full = await lab.post("decode/0", CHAT, body(CHAT, {"ignore_eos": True}))
    assert full.reasons() == ("length", None)
    assert full.json["usage"]["total_tokens"] == 200


@emulated(mean_output_tokens=4.0)
async def test_an_answer_has_at_least_min_tokens(lab: Lab) -> None:
    for number in range(10):
        values = {"prompt": f"t{number}", "max_tokens": 60}
        free = await lab.post("decode/0", COMPLETIONS, values)
        bound = await lab.post("decode/0", COMPLETIONS, values | {"min_tokens": 30})
        assert bound.json["usage"]["completion_tokens"] >= 30
        assert bound.text.startswith(free.text)


@emulated()
async def test_an_echo_comes_before_the_first_token(lab: Lab) -> None:
    values = {"prompt": "t7 t8 t9", "max_tokens": 3, "ignore_eos": True, "logprobs": 1}
    plain = await lab.post("decode/0", COMPLETIONS, values)
    whole = await lab.post("decode/0", COMPLETIONS, values | {"echo": True})
    assert whole.text == "t7 t8 t9" + plain.text
    logprobs = whole.json["choices"][0]["logprobs"]
    said = plain.json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["t7", "t8", "t9", *said["tokens"]]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][3:] == said["token_logprobs"]
    stream = await lab.post(
        "decode/0", COMPLETIONS, values | {"echo": True, "stream": True, "logprobs": None}
    )
    assert stream.texts()[0] == "t7 t8 t9" + said["tokens"][0]
    assert stream.text == whole.text


@emulated()
async def test_a_completion_without_a_limit_has_sixteen_tokens_as_in_vllm(lab: Lab) -> None:
    answer = await lab.post("decode/0", COMPLETIONS, body(COMPLETIONS, {"ignore_eos": True}))
    assert answer.json["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@emulated(preemption=Preemption.STOP)
async def test_an_answer_that_is_handed_back_goes_on_elsewhere_from_its_text(
    lab: Lab, path: str
) -> None:
    values = body(path, {"max_tokens": 40, "stream": True, "ignore_eos": True})
    whole = (await lab.post("decode/1", path, values)).text
    lab.fleet.faults.set("decode/0", recomputed_after_tokens=13)
    begun = await lab.post("decode/0", path, await lab.prefilled(path, values))
    assert begun.reasons() == ("stop", "recomputed")
    assert begun.done
    said = begun.text
    rest = values | {"max_tokens": 40 - 13}
    if path == CHAT:
        rest["messages"] = [*MESSAGES, {"role": "assistant", "content": said}]
        rest |= {"add_generation_prompt": False, "continue_final_message": True}
    else:
        rest["prompt"] += said
    ended = await lab.post("decode/1", path, await lab.prefilled(path, rest))
    assert said + ended.text == whole
    assert ended.reasons() == ("length", None)


@emulated()
async def test_an_answer_goes_on_from_token_ids(lab: Lab) -> None:
    values = body(CHAT, {"max_tokens": 30, "ignore_eos": True, "return_token_ids": True})
    whole = (await lab.post("decode/0", CHAT, values)).json["choices"][0]
    tokenized = await lab.post("prefill/0", "/tokenize", body(CHAT, {}))
    prompt = tokenized.json["tokens"] + whole["token_ids"][:11]
    rest = await lab.post(
        "decode/0", COMPLETIONS, {"prompt": prompt, "max_tokens": 19, "ignore_eos": True}
    )
    assert whole["message"]["content"].endswith(rest.text)
    assert len(rest.text) > 19


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "mooncake-ascend"])
@emulated("connector")
async def test_every_connector_carries_an_answer(lab: Lab, connector: str) -> None:
    values = body(CHAT, {"max_tokens": 7})
    alone = await lab.post("decode/0", CHAT, values)
    params: dict[str, object] = {"do_remote_decode": True, "do_remote_prefill": False}
    if connector == "mooncake":
        params["transfer_id"] = "xfer-1"
    returned = (await lab.prefill(CHAT, values, params=params)).json["kv_transfer_params"]
    if connector == "mooncake":
        assert returned is None
        (url,) = lab.fleet.bootstrap_urls
        known = (await lab.get_url(f"{url}/query")).json
        returned = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": url,
            "remote_engine_id": known["0"]["engine_id"],
            "transfer_id": "xfer-1",
        }
    apart = await lab.post("decode/1", CHAT, values | {"kv_transfer_params": returned})
    assert constant(apart) == constant(alone)
    assert lab.leases() == {"pulled": 1}
    assert lab.fleet.idle
