"""Streams of token ids that another rank continues, and those that begin when the prefill ends."""

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.live.test_early_tokens import NULL, prefilled
from tests.live.test_proxy_connectors import ID, alone, another, same
from tests.live.test_token_requests import ASKED, EACH, GENERATE, SAMPLING, STREAM, ids_of
from tests.support.site import Site, served

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.continuation import continuable, continued_body
from balanceroute.proxy.live.openai.shape import Api, read_token_shape
from balanceroute.proxy.live.telemetry.record import Outcome

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Reply
    from balanceroute.proxy.wire.messages import HttpRequest

EXACT = {"resume": "exact"}
EARLY = {"first_token": "prefill"}
STREAMED = ASKED | STREAM
FAULTS = [
    {"reset_after_tokens": 5},
    {"end_after_tokens": 5},
    {"stall_after_tokens": 5},
    {"error_event_after_tokens": 5},
]
WAIT_S = 5.0


def another_prompt(number: int) -> dict[str, Any]:
    """Return a request with the answer of `STREAMED` that counts as another prompt."""
    return STREAMED | {"sampling_params": another(SAMPLING, number)}


def same_but_for_spans(answer: Any, right: Any, *, before: int) -> None:
    """Check that a stream is one engine's; its weight versions are known of its last part alone."""
    (spans,) = (c["weight_versions"] for c in _choices(answer) if c["weight_versions"])
    assert spans == [{"version": "default", "start": before, "end": 12}]
    told, wanted = ([_without(chunk) for chunk in one.chunks] for one in (answer, right))
    assert told == wanted
    assert answer.done


def _choices(answer: Any) -> list[dict[str, Any]]:
    return [choice for chunk in answer.chunks for choice in chunk["choices"]]


def _without(chunk: dict[str, Any]) -> dict[str, Any]:
    choices = [one | {"weight_versions": None} for one in chunk["choices"]]
    return chunk | {"choices": choices}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: next(iter(one)))
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream_options": EACH},
        {"return_token_ids": True},
        {"sampling_params": SAMPLING | {"logprobs": 2, "min_tokens": 3}},
    ],
    ids=["usage", "each", "prompt ids", "logprobs"],
)
@served(flags=EXACT | {"idle_stream_timeout_s": 2.0})
async def test_the_client_sees_one_unbroken_stream(
    site: Site, fault: dict[str, int], more: dict[str, Any]
) -> None:
    values = STREAMED | more
    right = await alone(site, GENERATE, values)
    site.fleet.faults.set("decode/0", **fault)
    answer = await site.send(GENERATE, values, headers=ID).end()
    same_but_for_spans(answer, right, before=5)
    (record,) = await site.ended()
    assert (record.outcome, record.prompt_tokens, record.output_tokens) == (Outcome.OK, 3, 12)
    assert (record.resumes, record.retries, record.recomputes) == (1, 0, 0)
    first, second = site.received("decode")
    assert (first.path, second.path) == (GENERATE, GENERATE)
    assert first.values["token_ids"] == [1, 2, 3]
    assert second.values["token_ids"] == [1, 2, 3, *ids_of(right)[:5]]
    assert second.values["sampling_params"]["max_tokens"] == 7
    assert "return_token_ids" not in second.values
    assert site.received("prefill")[-1].values["token_ids"] == second.values["token_ids"]


@pytest.mark.parametrize("odd", [{}, {"merged_outputs": 0.4}, {"partial_utf8": 0.4}], ids=str)
@served("**odd", flags=EXACT | {"quarantine_failures": 1_000})
async def test_a_stream_may_break_behind_each_of_its_ids(site: Site, odd: dict[str, float]) -> None:
    right = await alone(site, GENERATE, STREAMED)
    for tokens in range(1, 12):
        site.fleet.faults.set("decode/0", reset_after_tokens=tokens)
        begun = len(site.world.ended)
        answer = await site.send(GENERATE, another_prompt(tokens), headers=ID).end()
        assert answer.done, (tokens, answer.body)
        assert ids_of(answer) == ids_of(right)
        (record,) = (await site.ended(begun + 1))[begun:]
        assert record.output_tokens == 12


@served(flags=EXACT | {"retry_attempts": 4}, ranks=4)
async def test_it_goes_on_as_often_as_ranks_fail(site: Site) -> None:
    right = await alone(site, GENERATE, STREAMED)
    for rank in range(3):
        site.fleet.faults.set(f"decode/{rank}", error_event_after_tokens=3)
    answer = await site.send(GENERATE, STREAMED, headers=ID).end()
    assert ids_of(answer) == ids_of(right)
    assert answer.done
    (record,) = await site.ended()
    assert record.output_tokens == 12
    prompts = [leg.values["token_ids"] for leg in site.received("decode")]
    assert [len(one) for one in prompts] == [3 + 3 * n for n in range(len(prompts))]


@served(flags=EXACT | {"retry_attempts": 4}, ranks=4)
async def test_it_goes_on_once_where_ranks_die(site: Site) -> None:
    right = await alone(site, GENERATE, STREAMED)
    site.fleet.faults.set("decode", reset_after_tokens=3)
    answer = await site.send(GENERATE, STREAMED, headers=ID).end()
    assert not answer.done
    assert answer.error is not None
    assert b"two engines died" in answer.events[-1]
    told = [i for chunk in answer.chunks[:-1] for i in chunk["choices"][0]["token_ids"]]
    assert told == ids_of(right)[:6]
    (record,) = await site.ended()
    assert (record.outcome, record.resumes) == (Outcome.UPSTREAM_ERROR, 1)
    assert record.output_tokens == 6
    prompts = [leg.values["token_ids"] for leg in site.received("decode")]
    assert [len(one) for one in prompts] == [3, 6]


@served(flags=EXACT, connector="mooncake-ascend")
async def test_a_stream_that_is_handed_back_goes_on(site: Site) -> None:
    right = await alone(site, GENERATE, STREAMED)
    site.fleet.faults.set("decode/0", recomputed_after_tokens=4)
    answer = await site.send(GENERATE, STREAMED, headers=ID).end()
    assert ids_of(answer) == ids_of(right)
    assert answer.done
    (record,) = await site.ended()
    assert record.recomputes
    assert record.output_tokens == 12


@served(flags=EXACT, at_rest=False)
async def test_experts_that_no_engine_knows_all_of_end_it_with_an_error(site: Site) -> None:
    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        body = json.loads(request.body)
        if engine.startswith("prefill"):
            prefilled(reply, {"index": 0, "finish_reason": "length", "token_ids": [7]})
            return
        again = len(body["token_ids"]) > 3
        reply.start(200, [(b"content-type", b"text/event-stream")])
        ended = {"finish_reason": "length", "routed_experts": "AAAA"} if again else {}
        choice: dict[str, Any] = {"index": 0, "finish_reason": None, "token_ids": [7]} | ended
        data = json.dumps({"choices": [choice]}, separators=(",", ":"))
        reply.write(b"data: " + data.encode() + b"\n\n")
        if not again:
            reply.abort()

    site.handlers[GENERATE.encode()] = answer
    exchange = await site.post(GENERATE, STREAMED)
    assert not exchange.done
    assert b"routed_experts of an answer" in exchange.events[-1]


@pytest.mark.parametrize(
    ("more", "goes_on"),
    [
        ({}, True),
        ({"output_mode": "tokens", "request_id": "r", "cache_salt": "s"}, True),
        ({"token_offsets": [[0, 1]], "reasoning_ended": True, "features": None}, True),
        ({"output_mode": "text"}, False),
        ({"lora": "x"}, False),
        ({"sampling_params": SAMPLING | {"stop_token_ids": [4], "logit_bias": {"4": 1}}}, True),
        ({"sampling_params": SAMPLING | {"stop": [], "presence_penalty": 0.0}}, True),
        ({"sampling_params": SAMPLING | {"stop": ["a"]}}, False),
        ({"sampling_params": SAMPLING | {"presence_penalty": 0.1}}, False),
        ({"sampling_params": SAMPLING | {"structured_outputs": {"regex": "a"}}}, False),
        ({"sampling_params": SAMPLING | {"thinking_token_budget": 0}}, False),
        ({"sampling_params": SAMPLING | {"extra_args": {"a": 1}}}, False),
        ({"sampling_params": SAMPLING | {"another": 1}}, False),
        ({"sampling_params": {"max_tokens": 3}}, False),  # Drawn at temperature 1.
        ({"stream": False}, False),
    ],
    ids=str,
)
def test_what_goes_on(more: dict[str, Any], goes_on: bool) -> None:
    body = RequestBody(json.dumps(STREAMED | more).encode())
    shape = read_token_shape(body, max_sequences=8)
    assert (continuable(shape, body.values, sampled=False) is not None) is goes_on


def test_the_request_that_goes_on_asks_for_the_rest() -> None:
    sampling = {"max_tokens": 50, "min_tokens": 4, "seed": 3, "top_p": 0.5, "logprobs": 0}
    body = RequestBody(json.dumps(STREAMED | {"sampling_params": sampling}).encode())
    kept = continuable(read_token_shape(body, max_sequences=8), body.values, sampled=True)
    assert kept is not None
    assert json.loads(continued_body(kept, Api.GENERATE, b"1,2,3,9", 1)) == {
        **STREAM,
        "model": "tiny",
        "sampling_params": sampling | {"max_tokens": 49, "min_tokens": 3},
        "token_ids": [1, 2, 3, 9],
    }


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"return_token_ids": True},
        {"sampling_params": SAMPLING | {"temperature": 1.0, "seed": 5}},
        {"sampling_params": SAMPLING | {"min_tokens": 4, "stop_token_ids": [1]}},
    ],
    ids=["greedy", "prompt ids", "seeded", "least"],
)
@served(flags=EARLY)
async def test_the_first_id_comes_before_there_is_a_rank(site: Site, more: dict[str, Any]) -> None:
    values = STREAMED | more
    right = await alone(site, GENERATE, values)
    site.fleet.faults.set("decode", delay_s=WAIT_S)
    begin_s = site.loop.time()
    exchange = site.send(GENERATE, values, headers=ID)
    await exchange.until_events(1)
    assert site.loop.time() - begin_s < WAIT_S / 10
    same(await exchange.end(), right)
    (record,) = await site.ended()
    assert record.early_first_token
    assert (record.outcome, record.output_tokens) == (Outcome.OK, 12)


@served(flags=EARLY)
async def test_both_legs_of_a_sampled_stream_have_one_seed(site: Site) -> None:
    values = STREAMED | {"sampling_params": SAMPLING | {"temperature": 0.9, "logit_bias": {}}}
    answer = await site.post(GENERATE, values, ID)
    assert answer.done
    (record,) = await site.ended()
    assert record.early_first_token
    legs = [site.received(role)[0].values["sampling_params"] for role in ("prefill", "decode")]
    assert {leg["seed"] for leg in legs} == {record.seed}
    assert (legs[0]["max_tokens"], legs[1]["max_tokens"]) == (1, 12)
    drawn = values["sampling_params"] | {"seed": record.seed}
    assert ids_of(await alone(site, GENERATE, values | {"sampling_params": drawn})) == ids_of(
        answer
    )


@pytest.mark.parametrize(
    "more",
    [
        {"output_mode": "text"},
        {"sampling_params": SAMPLING | {"logprobs": 1}},
        {"sampling_params": SAMPLING | {"max_tokens": 1}},
        {"sampling_params": SAMPLING | {"stop": ["x"]}},
        {"stream_options": EACH},
    ],
    ids=str,
)
@served(flags=EARLY)
async def test_whose_first_id_waits_for_a_rank(site: Site, more: dict[str, Any]) -> None:
    values = STREAMED | more
    right = await alone(site, GENERATE, values)
    same(await site.post(GENERATE, values, ID), right)
    (record,) = await site.ended()
    assert not record.early_first_token


@pytest.mark.parametrize(
    ("first", "rest", "prompts"),
    [
        ([7, 8], [9], [[1, 2, 3]]),  # With the next one in one event.
        ([6, 5], [9], [[1, 2, 3], [1, 2, 3, 7]]),  # Another.
        ([], [9], [[1, 2, 3], [1, 2, 3, 7]]),
    ],
    ids=["the same", "another", "none"],
)
@served(flags=EARLY, at_rest=False)
async def test_a_rank_that_says_another_first_id_is_left(
    site: Site, first: list[int], rest: list[int], prompts: list[list[int]]
) -> None:
    asked: list[list[int]] = []

    def answer(engine: str, request: "HttpRequest", reply: "Reply") -> None:
        body = json.loads(request.body)
        if engine.startswith("prefill"):
            prefilled(reply, NULL | {"token_ids": [7]})
            return
        asked.append(body["token_ids"])
        reply.start(200, [(b"content-type", b"text/event-stream")])
        goes_on = len(body["token_ids"]) > 3
        for ids, reason in ((([8] if goes_on else first), None), (rest, "length")):
            choice = {"index": 0, "token_ids": ids, "finish_reason": reason}
            data = json.dumps({"choices": [choice]}, separators=(",", ":"))
            reply.write(b"data: " + data.encode() + b"\n\n")
        reply.write(b"data: [DONE]\n\n")
        reply.end()

    site.handlers[GENERATE.encode()] = answer
    exchange = await site.post(GENERATE, STREAMED)
    assert exchange.done
    assert ids_of(exchange) == [7, 8, 9]
    assert asked == prompts
    (record,) = await site.ended()
    assert record.first_token_differences == len(prompts) - 1
