"""Blocks of prompts: alike as far as the text is, apart wherever a cache would be another."""

import json
from typing import Any

import pytest

from balanceroute.proxy.live.openai.body import RequestBody
from balanceroute.proxy.live.openai.prompt_keys import BLOCK_BYTES, prompt_blocks
from balanceroute.proxy.live.openai.shape import Api

LONG = " ".join(f"word{number}" for number in range(3_000))
FIRST = {"role": "user", "content": LONG}
MORE = [{"role": "assistant", "content": "because"}, {"role": "user", "content": "why? " * 600}]


def blocks(values: dict[str, Any], api: Api = Api.CHAT) -> tuple[int, ...]:
    return prompt_blocks(api, RequestBody(json.dumps(values).encode())).hashes


def chat(*messages: object, **more: object) -> tuple[int, ...]:
    return blocks({"model": "m", "messages": list(messages), **more})


def test_a_further_turn_repeats_the_blocks_of_the_turns_before() -> None:
    first, second = chat(FIRST), chat(FIRST, *MORE)
    assert len(first) == len(json.dumps([FIRST])) // BLOCK_BYTES
    assert len(second) > len(first)
    assert second[: len(first)] == first
    assert len(set(second)) == len(second)


def test_blocks_after_a_difference_differ_and_those_before_it_do_not() -> None:
    changed = {"role": "user", "content": LONG[:10_000] + "X" + LONG[10_001:]}
    first, other = chat(FIRST), chat(changed)
    same = [one == two for one, two in zip(first, other, strict=True)]
    assert same == [True] * (10_000 // BLOCK_BYTES) + [False] * (len(same) - 10_000 // BLOCK_BYTES)


@pytest.mark.parametrize(
    "more",
    [{"model": "n"}, {"tools": [1]}, {"cache_salt": "s"}, {"chat_template_kwargs": {"a": 1}}],
    ids=str,
)
def test_what_stands_before_the_prompt_makes_another_cache(more: dict[str, object]) -> None:
    assert not set(chat(FIRST)) & set(chat(FIRST, **more))


def test_what_only_the_answer_depends_on_does_not() -> None:
    assert chat(FIRST, temperature=0.5, max_tokens=3, seed=1, stream=True) == chat(FIRST)


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
    assert chat({"role": "user", "content": "why?"}) == ()


def test_hashes_are_below_two_to_the_63() -> None:
    assert all(0 <= one < 1 << 63 for one in chat(FIRST))
