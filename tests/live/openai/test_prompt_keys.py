"""The keys of requests: alike where requests are alike, apart where their answers may differ."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.live.openai.body import BodyError, RequestBody
from balanceroute.proxy.live.openai.prompt_keys import (
    BLOCK_BYTES,
    CHARACTERS,
    TOKENS,
    prompt_blocks,
    prompt_keys,
)
from balanceroute.proxy.live.openai.shape import Api

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "because"}
AGAIN = {"role": "user", "content": "and why is that?"}
CHAT: dict[str, Any] = {"model": "m", "messages": [SYSTEM, USER], "max_tokens": 20}
TEXT: dict[str, Any] = {"model": "m", "prompt": "why?", "max_tokens": 20}


def keys(api: Api, values: dict[str, Any] | str) -> tuple[int, ...]:
    text = values if isinstance(values, str) else json.dumps(values)
    return prompt_keys(api, RequestBody(text.encode()))


def chat(*messages: object, **more: object) -> tuple[int, ...]:
    return keys(Api.CHAT, CHAT | {"messages": list(messages)} | more)


def text(prompt: object, **more: object) -> tuple[int, ...]:
    return keys(Api.COMPLETIONS, TEXT | {"prompt": prompt} | more)


def test_the_same_request_has_the_same_keys_and_they_are_64_bits() -> None:
    assert keys(Api.CHAT, CHAT) == keys(Api.CHAT, CHAT)
    # Fixed: they are written into logs and files, and compared years later.
    assert [f"{key:016x}" for key in keys(Api.CHAT, CHAT)] == [
        "b1accf0b26489987",
        "534790253ca2c4ea",
        "2701e6307bee450c",
    ]


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        # What cannot change the length changes no key.
        ({"stream": True}, 0),
        ({"stream_options": {"include_usage": True}}, 0),
        ({"user": "u-7"}, 0),
        ({"metadata": {"trace": "1"}}, 0),
        ({"session_id": "s-1"}, 0),
        ({"request_id": "r-7"}, 0),
        ({"priority": 3}, 0),
        ({"seed": 7}, 0),
        ({"n": 4}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 0),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, 0),
        ({"stop": None}, 0),
        # What may change the length changes the first key alone.
        ({"max_tokens": 21}, 1),
        ({"max_completion_tokens": 20}, 1),
        ({"min_tokens": 2}, 1),
        ({"stop": ["x"]}, 1),
        ({"ignore_eos": True}, 1),
        ({"temperature": 0.5}, 1),
        ({"logit_bias": {"1": 2}}, 1),
        ({"response_format": {"type": "json_object"}}, 1),
        ({"tool_choice": "none"}, 1),
        ({"unheard_of": 1}, 1),
        # What stands before the messages changes every key.
        ({"model": "other"}, 3),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 3),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 3),
        ({"reasoning_effort": "high"}, 3),
    ],
    ids=str,
)
def test_which_keys_a_member_changes(more: dict[str, object], changed: int) -> None:
    right = keys(Api.CHAT, CHAT)
    for values in (CHAT | more, {**more, **CHAT, **more}):
        found = keys(Api.CHAT, values)
        assert [one != two for one, two in zip(found, right, strict=True)] == [
            place < changed for place in range(3)
        ]
        assert not set(found[:changed]) & set(right)


def test_the_endpoint_and_the_order_of_members_are_told_apart_and_not() -> None:
    assert not set(keys(Api.CHAT, CHAT)) & set(keys(Api.MESSAGES, CHAT))
    backwards = dict(reversed(CHAT.items()))
    assert keys(Api.CHAT, backwards) == keys(Api.CHAT, CHAT)
    message = dict(reversed(USER.items()))
    assert chat(SYSTEM, message)[1:] == chat(SYSTEM, USER)[1:]


def test_a_conversation_shares_its_beginnings_as_it_grows() -> None:
    request, first_turn, system = chat(SYSTEM, USER)
    grown = chat(SYSTEM, USER, ANSWER, AGAIN)
    # The request, all but the last message, the first turn, the system prompt.
    assert len(set(grown)) == 4
    assert grown[0] != request
    assert grown[2:] == (first_turn, system)
    assert chat(SYSTEM, USER, ANSWER, USER)[1:] == grown[1:]
    assert chat(SYSTEM, AGAIN)[1:] != chat(SYSTEM, USER)[1:]
    assert chat(SYSTEM, AGAIN)[-1] == system


def test_without_a_system_prompt_the_first_turn_is_the_last_key() -> None:
    assert len(chat(USER)) == 2
    assert chat(USER)[-1] == chat(USER, ANSWER, AGAIN)[-1]
    assert len(chat(USER, ANSWER, AGAIN)) == 3
    assert len(chat()) == 1


def test_system_prompts_of_other_endpoints_count_too() -> None:
    anthropic: dict[str, Any] = {"model": "m", "system": "be brief", "messages": [USER]}
    _, turn, system = keys(Api.MESSAGES, anthropic)
    other = keys(Api.MESSAGES, anthropic | {"messages": [AGAIN]})
    assert other[1] != turn
    assert other[2] == system
    responses: dict[str, Any] = {"model": "m", "instructions": "be brief", "input": "why?"}
    assert (
        keys(Api.RESPONSES, responses)[-1] == keys(Api.RESPONSES, responses | {"input": "how?"})[-1]
    )
    assert (
        keys(Api.RESPONSES, responses)[0] != keys(Api.RESPONSES, responses | {"input": "how?"})[0]
    )


def test_parts_and_calls_in_messages_count() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "why?"}]}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    assert len({chat(USER)[1], chat(parts)[1], chat(image)[1]}) == 3
    named = USER | {"name": "bob"}
    assert chat(named)[1] != chat(USER)[1]


def test_messages_cannot_be_shifted_into_each_other() -> None:
    split = chat({"role": "user", "content": "a"}, {"role": "user", "content": "b"}, ANSWER)
    whole = chat({"role": "user", "content": "ab"}, ANSWER, ANSWER)
    joined = chat({"role": "user", "content": "a1 4 1 userb"}, ANSWER, ANSWER)
    assert len({split[1], whole[1], joined[1]}) == 3


def test_texts_share_the_beginnings_that_they_are_longer_than() -> None:
    long = "".join(f"{i} " for i in range(3000))
    assert len(text(long)) == 1 + len(CHARACTERS)
    for place, cut in enumerate(reversed(CHARACTERS), start=1):
        other = text(long[:cut] + "x" * 5000)
        assert other[place:] == text(long)[place:]
        assert not set(other[:place]) & set(text(long)[:place])
    assert len(text(long[: CHARACTERS[0]])) == 1
    assert len(text(long[: CHARACTERS[0] + 1])) == 2


def test_token_ids_share_the_beginnings_that_they_are_longer_than() -> None:
    ids = list(range(5000))
    assert len(text(ids)) == 1 + len(TOKENS)
    for place, cut in enumerate(reversed(TOKENS), start=1):
        other = text([*ids[:cut], *range(9000, 12_000)])
        assert other[place:] == text(ids)[place:]
        assert not set(other[:place]) & set(text(ids)[:place])


def test_a_list_of_one_prompt_is_that_prompt() -> None:
    long = "word " * 1000
    assert text([long])[1:] == text(long)[1:]
    assert text([list(range(100))])[1:] == text(list(range(100)))[1:]
    assert len(text([long, long])) == 1


@pytest.mark.parametrize(
    "prompt",
    [
        *([2**70] * 100, ["a", 1] * 50, [True, 1.5] * 50, [], {}, 7, None, [[1], [2]]),
        # Of bodies that are too large to be decoded.
        *(["a" * 100_000] * 2, [[1] * 40_000] * 2, [1.5] * 70_000, {"a": "b" * 200_000}),
        [{}] * 70_000,
    ],
    ids=lambda prompt: str(prompt)[:20],
)
def test_prompts_that_no_engine_takes_have_one_key(prompt: object) -> None:
    assert len(text(prompt)) == 1


@pytest.mark.parametrize(
    "messages",
    [
        *(7, {}, "why?" * 100, [], [[]], [7], [None, {"role": 7}]),
        *(["x" * 200_000], [SYSTEM] * 4_000, ["x" * 200_000, USER], "x" * 200_000),
    ],
    ids=lambda messages: str(messages)[:20],
)
def test_messages_that_no_engine_takes_do_no_harm(messages: object) -> None:
    assert keys(Api.CHAT, CHAT | {"messages": messages})


def test_half_a_surrogate_pair_does_no_harm() -> None:
    assert len(keys(Api.CHAT, '{"messages": [{"role": "user", "content": "\\ud800"}]}')) == 2
    assert len(keys(Api.COMPLETIONS, '{"prompt": "%s"}' % ("\\ud800" * 300))) == 2


def test_deep_messages_have_one_key() -> None:
    # As deep as a body may be, which is deeper than it can be written again.
    for levels in range(1, 1000, 9):
        body = '{"messages": [' + "[" * levels + "]" * levels + "]}"
        try:
            parsed = RequestBody(body.encode())
        except BodyError:
            break
        assert prompt_keys(Api.CHAT, parsed)
    assert levels > 900


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(
    api=st.sampled_from(Api),
    values=st.dictionaries(
        st.sampled_from(["model", "messages", "prompt", "input", "system", "tools", "x", "user"]),
        VALUES,
    ),
)
def test_any_body_has_one_to_five_distinct_keys(api: Api, values: dict[str, Any]) -> None:
    found = keys(api, values)
    assert 1 <= len(found) == len(set(found)) <= 5
    assert all(0 <= key < 1 << 64 for key in found)
    values.pop("user", None)
    assert keys(api, {"stream": True} | dict(reversed(values.items()))) == found


# Bodies that are too large to be decoded.


def test_large_prompts_share_their_beginnings_with_small_ones() -> None:
    # The last ones so that a character, or an escape, is cut wherever a beginning ends.
    units = ("word ", "数\n", "\U0001f999 ", *("a" * i + "数" * 9 + "\\" * 7 for i in range(4)))
    for unit in units:
        long = unit * (280_000 // len(unit))
        small = text(long[: CHARACTERS[-1] + 9])
        for prompt in (long, [long]):
            values = TEXT | {"prompt": prompt}
            for is_ascii in (True, False):
                found = keys(Api.COMPLETIONS, json.dumps(values, ensure_ascii=is_ascii))
                assert found[1:] == small[1:]
                assert len(found) == 4
    ids = list(range(100_000, 140_000))
    assert text(ids)[1:] == text([ids])[1:] == text(ids[:2000])[1:]
    assert len(text(ids)) == 4


def test_large_conversations_share_their_beginnings() -> None:
    long = USER | {"content": "数 word\n" * 40_000}
    first = chat(SYSTEM, USER, long, ANSWER, AGAIN)
    assert len(set(first)) == 4
    assert first[2:] == chat(SYSTEM, USER)[1:]
    assert chat(SYSTEM, USER, long, ANSWER, USER)[1:] == first[1:]
    assert chat(SYSTEM, USER, long, USER, AGAIN)[1] != first[1]
    # One long message, which may be the system prompt, the first turn or the last message.
    assert chat(SYSTEM, long)[2:] == chat(SYSTEM, USER)[2:]
    assert chat(long, ANSWER, USER)[1:] == chat(long, ANSWER, AGAIN)[1:]
    assert chat(long, ANSWER)[1:] != chat(long | {"name": "b"}, ANSWER)[1:]
    assert len(chat(SYSTEM, USER, long)) == 3


def test_time_is_linear_in_the_body() -> None:
    def seconds(size: int) -> float:
        body = RequestBody(json.dumps(TEXT | {"prompt": "word " * size}).encode())
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            prompt_keys(Api.COMPLETIONS, body)
            times.append(time.perf_counter() - begin)
        return min(times)

    # A MiB: some 1.3 ms on a slow core.
    assert seconds(200_000) < 0.05


# Blocks of prompts: alike as far as the text is, apart wherever a cache would be another.


LONG = " ".join(f"word{number}" for number in range(3_000))
FIRST = {"role": "user", "content": LONG}
MORE = [{"role": "assistant", "content": "because"}, {"role": "user", "content": "why? " * 600}]


def blocks(values: dict[str, Any], api: Api = Api.CHAT) -> tuple[int, ...]:
    return prompt_blocks(api, RequestBody(json.dumps(values).encode())).hashes


def long_chat(*messages: object, **more: object) -> tuple[int, ...]:
    return blocks({"model": "m", "messages": list(messages), **more})


def test_a_further_turn_repeats_the_blocks_of_the_turns_before() -> None:
    first, second = long_chat(FIRST), long_chat(FIRST, *MORE)
    assert len(first) == len(json.dumps([FIRST])) // BLOCK_BYTES
    assert len(second) > len(first)
    assert second[: len(first)] == first
    assert len(set(second)) == len(second)


def test_blocks_after_a_difference_differ_and_those_before_it_do_not() -> None:
    changed = {"role": "user", "content": LONG[:10_000] + "X" + LONG[10_001:]}
    first, other = long_chat(FIRST), long_chat(changed)
    same = [one == two for one, two in zip(first, other, strict=True)]
    assert same == [True] * (10_000 // BLOCK_BYTES) + [False] * (len(same) - 10_000 // BLOCK_BYTES)


@pytest.mark.parametrize(
    "more",
    [{"model": "n"}, {"tools": [1]}, {"cache_salt": "s"}, {"chat_template_kwargs": {"a": 1}}],
    ids=str,
)
def test_what_stands_before_the_prompt_makes_another_cache(more: dict[str, object]) -> None:
    assert not set(long_chat(FIRST)) & set(long_chat(FIRST, **more))


def test_what_only_the_answer_depends_on_does_not() -> None:
    assert long_chat(FIRST, temperature=0.5, max_tokens=3, seed=1, stream=True) == long_chat(FIRST)


def test_texts_token_ids_and_large_bodies_have_blocks() -> None:
    for prompt in (LONG, list(range(2_000)), LONG * 10):
        found = blocks({"model": "m", "prompt": prompt}, Api.COMPLETIONS)
        assert len(found) == min(512, len(json.dumps(prompt)) // BLOCK_BYTES)
    assert len(blocks({"model": "m", "prompt": LONG * 100}, Api.COMPLETIONS)) == 512


def test_a_block_is_its_share_of_the_bytes() -> None:
    body = RequestBody(json.dumps({"model": "m", "prompt": "a" * (4 * BLOCK_BYTES - 2)}).encode())
    found = prompt_blocks(Api.COMPLETIONS, body)
    assert (len(found.hashes), found.share, found.of_tokens) == (4, 0.25, False)


def test_short_and_absent_prompts_have_none() -> None:
    assert blocks({"model": "m"}) == ()
    assert long_chat({"role": "user", "content": "why?"}) == ()


def test_hashes_are_below_two_to_the_63() -> None:
    assert all(0 <= one < 1 << 63 for one in long_chat(FIRST))
