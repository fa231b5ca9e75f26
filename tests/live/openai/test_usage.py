"""Usage objects, as of one engine that did the whole request."""

import json
import re
from typing import Any

import pytest
from tests.live.stream_client import DONE, LAST, Client, chat, event, in_pieces
from tests.support.site import transcript

from balanceroute.proxy.live.openai.token_counts import PromptUsage, UsageRewrite, with_prompt_usage


def usage_of(stream: bytes) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in re.findall(rb"data: (\{.*)", stream)]
    return [message["usage"] for message in found if message.get("usage")]


def with_details(body: bytes, cached: int) -> bytes:
    """Return a real stream as of an engine that tells cached tokens."""
    return body.replace(
        b',"completion_tokens"', b',"prompt_tokens_details":{"cached_tokens":%d},"completion_tokens"' % cached
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["solo_chat_stream_usage", "solo_chat_stream_usage_continuous", "solo_cmpl_stream_usage"],
)
@pytest.mark.parametrize("size", [1, 400, 10_000])
def test_cached_tokens_are_those_of_the_prefill(name: str, size: int) -> None:
    body = with_details(transcript(f"{name}.resp"), 51)
    client = Client(cached_tokens=16).answer(*in_pieces(body, size)).end()
    assert client.received == with_details(transcript(f"{name}.resp"), 16)
    assert client.usage_tokens == 8
    assert client.tokens == 8


def test_without_a_correction_every_byte_of_the_usage_stays() -> None:
    body = with_details(transcript("solo_chat_stream_usage_continuous.resp"), 51)
    assert Client().answer(body).end().received == body


@pytest.mark.parametrize("cached", [None, 16])
def test_usage_of_a_resumed_answer_is_that_of_the_whole(cached: int | None) -> None:
    body = with_details(transcript("solo_chat_stream_usage_continuous.resp"), 51)
    client = Client(resumed_tokens=5, cached_tokens=cached).answer(*in_pieces(body, 333)).end()
    before, after = usage_of(body), usage_of(client.received)
    del before[0]  # The opening's, which is not repeated.
    assert len(after) == len(before) == 9
    for was, now in zip(before, after, strict=True):
        assert now == was | {
            "prompt_tokens": was["prompt_tokens"] - 5,
            "completion_tokens": was["completion_tokens"] + 5,
            "prompt_tokens_details": {"cached_tokens": 51 if cached is None else cached},
        }
        assert now["total_tokens"] == now["prompt_tokens"] + now["completion_tokens"]
    # What this rank emitted, for the sum over all ranks.
    assert client.usage_tokens == 8


def test_the_correction_leaves_the_text_alone() -> None:
    text = '"usage":{"prompt_tokens":1,"cached_tokens":2}'
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
    token = chat(text)
    last = event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}],
                 usage=usage)  # fmt: skip
    client = Client(cached_tokens=3).answer(token, token, last).end()
    assert client.received == token + token + last.replace(b":7}", b":3}")


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        "many",
        {},
        {"completion_tokens": None},
        {"completion_tokens": True},
        {"completion_tokens": -1},
        {"completion_tokens": 1.5},
        {"completion_tokens": 10**12},
    ],
)
def test_a_count_that_cannot_be_true_is_not_read(usage: object) -> None:
    client = Client(cached_tokens=1, resumed_tokens=1)
    client.answer(chat(), LAST, event(choices=[], usage=usage), DONE).end()
    assert client.usage_tokens is None
    assert client.turns[-1] == "ended"


def test_a_count_of_thousands_of_digits_is_harmless() -> None:
    last = b'data: {"choices":[],"usage":{"completion_tokens":' + b"9" * 5_000 + b"}}\n\n"
    client = Client(resumed_tokens=1).answer(chat(), LAST, last).end()
    assert client.received == chat() + LAST + last
    assert client.usage_tokens is None


def test_a_prefill_that_ends_behind_the_first_token_corrects_the_rest() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
    token, last = chat(usage=usage), event(choices=[], usage=usage)
    seen = event(choices=[{"index": 0, "text": "a", "finish_reason": None}], usage=usage)
    client = Client().answer(token, seen)
    client.usage.correct_prompt(PromptUsage(3))
    for one in (seen, LAST, last):
        client.leg.on_data(one)
    right = [one.replace(b":7}", b":3}") for one in (seen, LAST, last)]
    assert client.received == b"".join([token, seen, *right])


@pytest.mark.parametrize("usage", [UsageRewrite(), UsageRewrite(None, 0)])
def test_nothing_known_changes_nothing(usage: UsageRewrite) -> None:
    told = event(usage={"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}})
    assert not usage.changes
    assert usage.apply(told) is told


def test_no_count_gets_below_zero() -> None:
    told = event(usage={"prompt_tokens": 2, "completion_tokens": 1})
    assert UsageRewrite(None, 5).apply(told) == event(
        usage={"prompt_tokens": 0, "completion_tokens": 6}
    )


DETAILED = (
    b'{"choices":[{"message":{"content":"\\"usage\\":{\\"cached_tokens\\":1}"}}],'
    b'"usage":{"prompt_tokens":9,"total_tokens":12,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens": 8}}}'
)


def test_cached_tokens_of_a_whole_answer_are_those_of_the_prefill() -> None:
    corrected = with_prompt_usage(DETAILED, PromptUsage(5))
    assert corrected == DETAILED.replace(b'"cached_tokens": 8', b'"cached_tokens": 5')
    assert json.loads(corrected)["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


def test_an_answer_without_cached_tokens_stays_as_it_is() -> None:
    for name in ("nixl_cmpl_nonstream_decode.resp", "solo_err_unknown_model.resp"):
        assert with_prompt_usage(transcript(name), PromptUsage(5)) == transcript(name)


def test_what_was_written_to_the_cache_is_what_the_prefill_wrote() -> None:
    usage = b'{"prompt_tokens_details":{"cached_tokens":8,"created_cache_tokens":1}}'
    assert PromptUsage(3, 5).apply(usage) == usage.replace(b"8", b"3").replace(b":1}", b":5}")
    assert PromptUsage(3).apply(usage) == usage.replace(b"8", b"3")


@pytest.mark.parametrize(
    ("told", "right"),
    [
        # input_tokens: all that was neither read nor written.
        ({"input_tokens": 1, "cache_read_input_tokens": 9}, {"input_tokens": 7}),
        (
            {"input_tokens": 0, "cache_read_input_tokens": 9, "cache_creation_input_tokens": 1},
            {"input_tokens": 2, "cache_creation_input_tokens": 5},
        ),
        ({"input_tokens": 10}, None),  # Nothing is told of the cache.
    ],
)
def test_a_message_counts_apart_what_was_cached(
    told: dict[str, int], right: dict[str, int] | None
) -> None:
    event = {"type": "message_delta", "delta": {"usage": 1}, "usage": told | {"output_tokens": 4}}
    made = json.loads(PromptUsage(3, 5).apply_within(json.dumps(event).encode()))
    wanted = told if right is None else {"cache_read_input_tokens": 3, **right}
    assert made == event | {"usage": wanted | {"output_tokens": 4}}


def test_the_usage_of_a_response_is_found_behind_what_its_client_called_so() -> None:
    details = {"cached_tokens": 9, "cache_write_tokens": 1, "cached_tokens_per_turn": [9]}
    theirs = {"usage": {"cached_tokens": 77, "cache_read_input_tokens": 77}}
    response = {"metadata": {"usage": "cached_tokens"}, "tools": [{"parameters": theirs}]}
    usage = {"input_tokens": 10, "input_tokens_details": details, "output_tokens": 4}
    for held in (
        response | {"usage": usage, "user": "u"},
        {"response": response | {"usage": usage}},
    ):
        made = PromptUsage(3, 5).apply_within(json.dumps(held).encode())
        right = {"cached_tokens": 3, "cache_write_tokens": 5, "cached_tokens_per_turn": [3]}
        inner = json.loads(made)
        inner = inner.get("response", inner)
        assert inner["usage"] == usage | {"input_tokens_details": right}
        assert inner["tools"] == response["tools"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'no json "usage"',
        b'{"usage":null}',
        b'{"response":5,"usage":{"cached_tokens":9}}',
        b'{"usage":[{"cached_tokens":9}]}',
        b'{"a":""usage":{"cached_tokens":9}"}',
    ],
)
def test_what_nobody_can_read_stays_as_it_is(data: bytes) -> None:
    assert PromptUsage(3, 5).apply_within(data) == data
