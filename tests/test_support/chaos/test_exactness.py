"""Through the proxy, an answer is what one engine answers: byte for byte, whatever was asked."""

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.extended import USUAL_POLICIES, usually
from tests.support.chaos.exactness import compare
from tests.support.chaos.requests import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    TOKENS,
    ClientRequest,
    RequestMix,
    draw_request,
)

from balanceroute.proxy.live.request.client_answer import ClientAnswer
from balanceroute.proxy.live.request.leg_settings import FirstTokenFrom, Resume
from balanceroute.proxy.wire.messages import Headers
from balanceroute.topologies import CONNECTORS

MIX = RequestMix("emulated")
# The first of 200, and in `make test-all` the others too.
counts = pytest.mark.parametrize("count", usually({100}, [100, 200]))


@counts
@pytest.mark.parametrize(("seed", "connector"), list(enumerate(CONNECTORS)))
def test_answers_of_every_shape_are_those_of_one_engine(
    seed: int, connector: str, count: int
) -> None:
    found = compare(seed, requests=count, connector=connector)
    assert not found.differences
    assert found.statuses[200] > 0.87 * count
    # The others share a stream among choices.
    assert found.identical > 0.87 * count


@counts
@pytest.mark.parametrize("seed", usually(range(2), range(4)))
def test_ids_that_are_asked_for_change_nothing_in_an_answer(seed: int, count: int) -> None:
    assert not compare(seed, requests=count, resume=Resume.VALID).differences


@pytest.mark.parametrize(
    ("seed", "connector"),
    [(seed, name) for seed, name in enumerate(CONNECTORS) if CONNECTORS[name].says_first],
)
@pytest.mark.parametrize(
    "resume", usually({"valid"}, [Resume.OFF, Resume.VALID], ids=["off", "valid"])
)
@pytest.mark.parametrize("count", usually({200}, [200, 400]))
def test_a_first_token_from_the_prefiller_changes_nothing_in_an_answer(
    seed: int, connector: str, resume: Resume, count: int
) -> None:
    early = FirstTokenFrom.PREFILL
    # Many enough for the probation of prefillers that do not tell what they leave to the ranks.
    count = 400 if connector == "mooncake-ascend" else count
    found = compare(seed, requests=count, connector=connector, resume=resume, first_token=early)
    assert not found.differences
    # With the prefill behind the decode leg there is none before it.
    assert found.early > 10 or connector == "mooncake-layerwise"


@pytest.mark.parametrize("policy", usually(USUAL_POLICIES, ["jsq", "br-0", "br-0-bypass"]))
def test_the_policy_changes_nothing_in_an_answer(policy: str) -> None:
    assert not compare(4, requests=60, policy=policy).differences


def test_one_wrong_letter_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    send = ClientAnswer.send

    def misspell(self: ClientAnswer, status: int, headers: Headers, body: bytes) -> None:
        send(self, status, headers, body.replace(b'"text":" t', b'"text":" T'))

    monkeypatch.setattr(ClientAnswer, "send", misspell)
    assert compare(0, requests=60).differences


def test_the_same_generator_draws_the_same_requests() -> None:
    def drawn() -> list[ClientRequest]:
        rng = random.Random(7)
        return [draw_request(rng, number, MIX) for number in range(50)]

    assert drawn() == drawn()


Values = Mapping[str, Any]
SHAPES: dict[str, Callable[[str, Values], object]] = {
    "chat": lambda path, _: path == CHAT,
    "completion": lambda path, _: path == COMPLETIONS,
    "messages, streamed": lambda path, values: path == MESSAGES and values.get("stream"),
    "messages, whole": lambda path, values: path == MESSAGES and not values.get("stream"),
    "messages, a system prompt": lambda _, values: isinstance(values.get("system"), list),
    "messages, a tool's result": lambda path, values: (
        path == MESSAGES and "tool_result" in json.dumps(values)
    ),
    "messages, stop": lambda _, values: values.get("stop_sequences"),
    "messages, aside": lambda _, values: values.get("context_management"),
    "responses, streamed": lambda path, values: path == RESPONSES and values.get("stream"),
    "responses, whole": lambda path, values: path == RESPONSES and not values.get("stream"),
    "responses, a text": lambda _, values: isinstance(values.get("input"), str),
    "responses, instructions": lambda _, values: values.get("instructions"),
    "responses, tools": lambda path, values: (
        path == RESPONSES and values.get("tool_choice") == "required"
    ),
    "responses, a tool's result": lambda path, values: (
        path == RESPONSES and "function_call_output" in json.dumps(values)
    ),
    "responses, continued": lambda path, values: (
        path == RESPONSES and '"incomplete"' in json.dumps(values)
    ),
    "responses, logprobs": lambda _, values: (
        "message.output_text.logprobs" in (values.get("include") or ())
    ),
    "responses, aside": lambda _, values: values.get("prompt_cache_key"),
    "stream": lambda _, values: values.get("stream"),
    "no stream": lambda _, values: not values.get("stream"),
    "n": lambda _, values: values.get("n", 1) == 2,
    "logprobs": lambda _, values: values.get("logprobs"),
    "top_logprobs": lambda _, values: values.get("top_logprobs"),
    "tools, auto": lambda _, values: values.get("tool_choice") == "auto",
    "tools, required": lambda _, values: values.get("tool_choice") == "required",
    "tools, named": lambda _, values: isinstance(values.get("tool_choice"), dict),
    "echo": lambda _, values: values.get("echo"),
    "stop": lambda _, values: values.get("stop"),
    "list of prompts": lambda _, values: (
        isinstance(values.get("prompt"), list)
        and len(values["prompt"]) > 1
        and isinstance(values["prompt"][0], str)
    ),
    "token ids": lambda _, values: (
        isinstance(values.get("prompt"), list) and isinstance(values["prompt"][0], int)
    ),
    "lists of token ids": lambda _, values: (
        isinstance(values.get("prompt"), list) and isinstance(values["prompt"][0], list)
    ),
    "tokens": lambda path, values: path == TOKENS and values["token_ids"],
    "big": lambda _, values: len(json.dumps(values)) > 100_000,
    "no limit": lambda _, values: "max_tokens" not in values,
    "max_completion_tokens": lambda _, values: values.get("max_completion_tokens"),
    "include_usage": lambda _, values: (
        (values.get("stream_options") or {}).get("include_usage") is True
    ),
    "continuous_usage_stats": lambda _, values: (values.get("stream_options") or {}).get(
        "continuous_usage_stats"
    ),
    "response_format": lambda _, values: values.get("response_format"),
    "seed": lambda _, values: values.get("seed"),
    "greedy": lambda _, values: values.get("temperature") == 0,
    "continued message": lambda _, values: values.get("continue_final_message"),
    "return_token_ids": lambda _, values: values.get("return_token_ids"),
    "kv_transfer_params": lambda _, values: values.get("kv_transfer_params"),
}


@pytest.fixture(scope="module")
def drawn() -> list[ClientRequest]:
    rng = random.Random(0)
    return [draw_request(rng, number, MIX) for number in range(2000)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_drawn(drawn: list[ClientRequest], shape: str) -> None:
    has = SHAPES[shape]
    assert sum(bool(has(request.path, request.values)) for request in drawn) >= 3


def test_prompts_are_one_of_a_kind(drawn: list[ClientRequest]) -> None:
    prompts = [
        json.dumps(
            request.values.get("prompt")
            or request.values.get("messages")
            or request.values.get("input")
            or request.values.get("token_ids")
        )
        for request in drawn
        if request.values.get("prompt") != "" and request.values.get("messages") != []
    ]
    assert len(set(prompts)) == len(prompts)
