"""What befalls who continues an answer from ids with a KV cache that is another prompt's: vLLM says nothing.

Each test is a client that walks into it. Figures are those seen with vLLM 0.32 and its NIXL connector.
"""

from typing import Any

import pytest
from tests.lab.emulate.lab import COMPLETIONS, Lab, emulated

BLOCK = 8
CACHES = {"block_tokens": BLOCK, "prefix_cache_tokens": 1_000}
ANSWER = 12


def body(ids: list[int], tokens: int = ANSWER) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": ids,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def prompt(tokens: int) -> list[int]:
    return list(range(100, 100 + tokens))


def ids_of(message: Any) -> list[int]:
    found: list[int] = message["choices"][0]["token_ids"]
    return found


async def said(lab: Lab, ids: list[int], engine: str = "decode/1") -> list[int]:
    """Return what one engine says, alone."""
    answer = await lab.post(engine, COMPLETIONS, body(ids))
    assert answer.status == 200, answer.body
    return ids_of(answer.json)


async def naive(lab: Lab, ids: list[int], more: list[int], **values: Any) -> Any:
    """Continue behind `ids` and `more` with the KV cache of `ids` alone."""
    leg = await lab.prefilled(COMPLETIONS, body(ids) | values)
    leg |= body(ids + more, ANSWER - len(more))
    return await lab.post("decode/0", COMPLETIONS, leg)


async def cache(lab: Lab, ids: list[int]) -> None:
    """Have the decode rank's prefix cache know `ids`."""
    await lab.post("decode/0", COMPLETIONS, body([*ids, 9], 1))


@pytest.mark.parametrize("tokens", [5, BLOCK - 1, BLOCK + 1, 2 * BLOCK - 1])
@pytest.mark.parametrize("cached", [0, 1])
@emulated(**CACHES)
async def test_one_id_more_is_right_within_a_block(lab: Lab, tokens: int, cached: int) -> None:
    right = await said(lab, prompt(tokens))
    await cache(lab, prompt(min(tokens, cached * BLOCK)))
    answer = await naive(lab, prompt(tokens), right[:1])
    assert ids_of(answer.json) == right[1:]
    assert not lab.fleet.misreads
    assert not lab.fleet.overruns


@emulated(**CACHES)
async def test_one_id_more_behind_full_blocks_kills_the_engine(lab: Lab) -> None:
    right = await said(lab, prompt(2 * BLOCK))
    answer = await naive(lab, prompt(2 * BLOCK), right[:1])
    assert answer.status == 500
    assert len(lab.fleet.overruns) == 1
    assert not lab.fleet.engine("decode/0").alive


@emulated(**CACHES)
async def test_one_id_more_is_right_behind_full_blocks_that_are_all_cached(lab: Lab) -> None:
    right = await said(lab, prompt(2 * BLOCK))
    await cache(lab, prompt(2 * BLOCK))
    answer = await naive(lab, prompt(2 * BLOCK), right[:1])
    assert ids_of(answer.json) == right[1:]
    assert lab.fleet.misreads == []


@pytest.mark.parametrize("cached", [1, 2])
@emulated(**CACHES)
async def test_one_id_more_behind_full_blocks_cached_in_part_poisons_the_cache(
    lab: Lab, cached: int
) -> None:
    ids = prompt(3 * BLOCK)
    right = await said(lab, ids)
    await cache(lab, ids[: cached * BLOCK])
    answer = await naive(lab, ids, right[:1])
    assert (answer.status, ids_of(answer.json) == right[1:]) == (200, False)
    # Nobody transfers anything now.
    later = [*ids, 9]
    assert await said(lab, later, "decode/0") != await said(lab, later)
    assert [one.again for one in lab.fleet.misreads] == [False, True]
    # What is computed anew is right.
    others = [7, *ids]
    assert await said(lab, others, "decode/0") == await said(lab, others)


@emulated(**CACHES | {"prefix_cache_tokens": 6 * BLOCK})
async def test_a_poisoned_block_is_gone_with_the_others(lab: Lab) -> None:
    ids = prompt(3 * BLOCK)
    right = await said(lab, ids)
    await cache(lab, ids[:BLOCK])
    await naive(lab, ids, right[:1])
    await cache(lab, list(range(500, 500 + 6 * BLOCK)))
    assert await said(lab, ids, "decode/0") == right


@pytest.mark.parametrize("more", [2, 3, 7])
@emulated(**CACHES)
async def test_old_parameters_with_more_ids_are_taken_and_wrong(lab: Lab, more: int) -> None:
    ids = prompt(BLOCK + 1)
    right = await said(lab, ids)
    answer = await naive(lab, ids, right[:more])
    assert (answer.status, ids_of(answer.json) == right[more:]) == (200, False)
    assert len(lab.fleet.misreads) == 1


@emulated(**CACHES)
async def test_fewer_ids_get_the_last_blocks(lab: Lab) -> None:
    leg = await lab.prefilled(COMPLETIONS, body(prompt(3 * BLOCK + 1)))
    fewer = prompt(2 * BLOCK + 1)
    answer = await lab.post("decode/0", COMPLETIONS, leg | body(fewer))
    assert (answer.status, ids_of(answer.json) == await said(lab, fewer)) == (200, False)


@pytest.mark.parametrize("tokens", [BLOCK - 1, BLOCK, 2 * BLOCK])
@emulated(**CACHES)
async def test_one_id_more_is_right_where_the_prefiller_has_computed_with_it(
    lab: Lab, tokens: int
) -> None:
    right = await said(lab, prompt(tokens))
    kv = {"do_remote_decode": True, "do_remote_prefill": False}
    two = await lab.post(
        "prefill/0", COMPLETIONS, body(prompt(tokens), 2) | {"kv_transfer_params": kv}
    )
    leg = body(prompt(tokens) + right[:1], ANSWER - 1)
    leg["kv_transfer_params"] = two.json["kv_transfer_params"]
    answer = await lab.post("decode/0", COMPLETIONS, leg)
    assert ids_of(answer.json) == right[1:]
    assert lab.fleet.misreads == []


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
@emulated(partial_utf8=0.3)
async def test_a_prompt_that_ends_within_a_character_is_said_again(
    lab: Lab, streamed: bool
) -> None:
    first = body([4, 5, 6], 30)
    answer = (await lab.post("decode/0", COMPLETIONS, first)).json["choices"][0]
    ids, text = answer["token_ids"], answer["text"]
    halves = 0
    for cut in range(1, 30):
        rest = first | {"prompt": [4, 5, 6, *ids[:cut]], "max_tokens": 30 - cut}
        further = await lab.post("decode/0", COMPLETIONS, rest | {"stream": streamed})
        if text.endswith(further.text()):
            continue
        halves += 1
        assert further.text().startswith("t4 t5 t6 ")
        assert further.text().endswith(text[-5:])
    assert 0 < halves < 29
