"""/inference/v1/generate, token ids in and out, through both legs."""

import json
from typing import Any

import pytest
from tests.live.test_proxy_connectors import ID, PULL_KEYS, alone, another, same, usage
from tests.support.site import Exchanged, Site, answering, served

from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.completion_stream import ids_in
from balanceroute.proxy.live.openai.shape import read_token_shape
from balanceroute.proxy.live.telemetry.record import Outcome

GENERATE = "/inference/v1/generate"
SAMPLING: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0}
ASKED: dict[str, Any] = {"model": "tiny", "token_ids": [1, 2, 3], "sampling_params": SAMPLING}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
EACH = {"include_usage": True, "continuous_usage_stats": True}


def ids_of(answer: Exchanged) -> list[int]:
    messages = answer.chunks if answer.events else [answer.json]
    return [one for m in messages for choice in m["choices"] for one in choice["token_ids"]]


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
@served("connector")
async def test_the_answer_is_that_of_one_engine(site: Site, connector: str) -> None:
    for more in (
        {},
        {"output_mode": "text"},
        {"return_token_ids": True},
        {"sampling_params": SAMPLING | {"logprobs": 2}},
        {"sampling_params": SAMPLING | {"logprobs": 2}, "output_mode": "text"},
        {"sampling_params": SAMPLING | {"temperature": 1.0, "seed": 7}},
        {"sampling_params": {"seed": 7}},  # No limit but the context's, and an end.
    ):
        for form in ({}, STREAM, {"stream": True}, {"stream": True, "stream_options": EACH}):
            values = ASKED | more | form
            right = await alone(site, GENERATE, values)
            answer = await site.post(GENERATE, values, ID)
            same(answer, right)
            assert ids_of(answer)
            record = (await site.ended(len(site.world.ended)))[-1]
            assert record.outcome is Outcome.OK
            assert (record.prompt_tokens, record.output_tokens) == (3, len(ids_of(answer)))
            assert record.rank
            assert record.first_token_ns is not None or not form
            if "stream_options" in form:
                assert usage(answer) == (3, len(ids_of(answer)))


@served()
async def test_each_leg_gets_what_is_its(site: Site) -> None:
    foreign = {
        "kv_transfer_params": {"do_remote_prefill": True},
        "request_id": "x",
        "priority": 3,
    }
    sampling = SAMPLING | {"logprobs": 1, "stop": ["no such word"]}
    values = ASKED | STREAM | foreign | {"sampling_params": sampling}
    assert (await site.post(GENERATE, values, ID)).done
    (prefill,) = site.received("prefill", GENERATE)
    (decode,) = site.received("decode", GENERATE)
    one = {"max_tokens": 1, "min_tokens": 1, "n": 1}
    assert prefill.values["sampling_params"] == sampling | one
    assert (prefill.values["stream"], prefill.values["token_ids"]) == (False, [1, 2, 3])
    assert "stream_options" not in prefill.values
    assert prefill.values["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.values.pop("kv_transfer_params").keys() >= PULL_KEYS
    for leg in (prefill, decode):
        assert not {"request_id", "priority"} & leg.values.keys()
    without = {k: v for k, v in values.items() if k not in foreign}
    assert {k: v for k, v in decode.values.items() if k != "kv_transfer_params"} == without


@pytest.mark.parametrize("form", [{}, STREAM], ids=["whole", "streamed"])
@pytest.mark.parametrize("mode", ["tokens", "text"])
@served(prompt_tokens_details=True)
async def test_an_answer_that_its_first_token_ends_needs_no_rank(
    site: Site, form: dict[str, Any], mode: str
) -> None:
    for engine in ("prefill/0", "prefill/1", "decode/0"):
        site.fleet.faults.set(engine, eos_first=1.0)
    values = ASKED | form | {"output_mode": mode, "sampling_params": {}}
    right = await alone(site, GENERATE, values)
    same(await site.post(GENERATE, values, ID), right)
    assert not site.received("decode", GENERATE)


@pytest.mark.parametrize(
    ("more", "direct"),
    [
        ({}, ""),
        ({"sampling_params": {"max_tokens": None}}, ""),
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, "2"]}, "token_ids"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"content_parts": [{}]}, "content_parts"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"sampling_params": {"n": "two"}}, "sampling_params.n"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"prompt_logprobs": 0}}, "sampling_params.prompt_logprobs"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"min_tokens": -1}}, "sampling_params.min_tokens"),
        ({"sampling_params": {"max_tokens": 2, "min_tokens": 3}}, "sampling_params.min_tokens"),
    ],
    ids=str,
)
def test_what_one_engine_has_to_do(more: dict[str, Any], direct: str) -> None:
    body = RequestBody(json.dumps(ASKED | more).encode())
    assert read_token_shape(body, max_sequences=8).direct == direct


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"model": 1}, "model"),
        ({"stream": "perhaps"}, "stream"),
        ({"priority": "high"}, "priority"),
        ({"sampling_params": {"n": 9}}, "n"),
        (
            {"sampling_params": {"extra_args": {"kv_transfer_params": {}}}},
            "sampling_params.extra_args",
        ),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs"),
    ],
    ids=str,
)
def test_what_is_refused(more: dict[str, Any], param: str) -> None:
    body = RequestBody(json.dumps(ASKED | more).encode())
    with pytest.raises(BodyError) as raised:
        read_token_shape(body, max_sequences=8)
    assert raised.value.param == param


@served()
async def test_several_answers_are_one_engines(site: Site) -> None:
    values = ASKED | {"sampling_params": SAMPLING | {"n": 2, "temperature": 1.0, "seed": 3}}
    right = await alone(site, GENERATE, values)
    same(await site.post(GENERATE, values, ID), right)
    (seen,) = site.seen
    assert seen.values == values


@served(flags={"quarantine_failures": 1_000})
async def test_what_breaks_before_the_first_token_is_repeated_and_later_it_is_told(
    site: Site,
) -> None:
    values = ASKED | STREAM
    right = await alone(site, GENERATE, values)
    site.fleet.faults.set("decode/0", reset_before_headers=1.0)
    for number in range(3):
        other = values | {"sampling_params": another(SAMPLING, number)}
        same(await site.post(GENERATE, other, ID), right)
    for rank in ("decode/0", "decode/1"):
        site.fleet.faults.set(rank, reset_before_headers=0.0, reset_after_tokens=4)
    broken = await site.post(GENERATE, values, ID)
    assert not broken.done
    assert broken.error is not None
    assert b'"error"' in broken.events[-1]
    told = [i for chunk in broken.chunks[:-1] for i in chunk["choices"][0]["token_ids"]]
    assert told == ids_of(right)[:4]
    assert site.world.ended[-1].outcome is Outcome.UPSTREAM_ERROR


@served(connector="mooncake-ascend", flags={"quarantine_failures": 1_000})
async def test_a_request_that_is_handed_back_begins_again_or_ends_truthfully(site: Site) -> None:
    """No text says what a rank has done, so a stream of ids that has begun cannot go on."""
    right = await alone(site, GENERATE, ASKED)
    for rank in ("decode/0", "decode/1"):
        site.fleet.faults.set(rank, recomputed_after_tokens=4)
    broken = await site.post(GENERATE, ASKED | STREAM, ID)
    assert not broken.done
    assert b'"error"' in broken.events[-1]
    assert site.world.ended[-1].status == 200
    site.fleet.faults.clear()
    site.fleet.faults.set("decode/0", recomputed_after_tokens=4)
    for _ in range(3):
        same(await site.post(GENERATE, ASKED, ID), right)


@served(merged_outputs=0.5)
async def test_tokens_are_counted_however_they_are_cut_into_events(site: Site) -> None:
    answer = await site.post(GENERATE, ASKED | {"stream": True}, ID)
    assert len(answer.chunks) < len(ids_of(answer)) == 12
    assert site.world.ended[-1].output_tokens == 12


@served()
async def test_an_engine_without_the_route_says_so(site: Site) -> None:
    site.handlers[GENERATE.encode()] = answering(403, b'{"error":{"message":"off"}}')
    answer = await site.post(GENERATE, ASKED, ID)
    assert (answer.status, answer.json) == (403, {"error": {"message": "off"}})


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (b'data: {"prompt_token_ids":[1,2],"choices":[{"token_ids":[3]}]}', 1),
        (b'data: {"choices":[{"token_ids":[3,4,5]}]}', 3),
        (b'data: {"choices":[{"token_ids":[]}]}', 0),
        (b'data: {"choices":[{"token_ids":null}]}', 1),
    ],
)
def test_ids_are_counted_in_the_bytes_of_an_event(event: bytes, count: int) -> None:
    assert ids_in(event) == count
