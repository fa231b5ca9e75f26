"""Prompts: exactly as long as recorded, the same every time, with the prefixes of the trace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.lab.emulate.tokens import tokenise
from balanceroute.proxy.lab.replay.requests import BLOCK_WORDS, PlannedRequest, PromptBuilder


def planned(
    tokens: int, *, number: int = 0, hash_ids: tuple[int, ...] = (), text: str | None = None
) -> PlannedRequest:
    return PlannedRequest(number, 0, tokens, 1, hash_ids, text)


def words(prompt: str) -> list[str]:
    return prompt.split(" ")


@given(
    tokens=st.integers(1, 3 * BLOCK_WORDS),
    ids=st.lists(st.integers(-5, 5), max_size=4),
    number=st.integers(0, 10**9),
)
def test_a_prompt_has_exactly_the_words_asked(tokens: int, ids: list[int], number: int) -> None:
    prompt = PromptBuilder(0).build(planned(tokens, number=number, hash_ids=tuple(ids)))
    assert len(words(prompt)) == tokens
    assert all(word[0] == "t" and word[1:].isdigit() for word in words(prompt))
    assert len(tokenise(prompt)) == tokens


def test_a_prompt_of_100_000_tokens_is_exact_too() -> None:
    assert len(words(PromptBuilder(0).build(planned(100_000)))) == 100_000


def test_the_words_are_the_same_on_every_machine_and_in_every_version() -> None:
    builder = PromptBuilder(7)
    assert builder.build(planned(4, number=3)) == "t10062 t3335 t3417 t3586"
    assert builder.build(planned(4, hash_ids=(46,))) == "t1552 t3179 t12919 t752"


def test_order_and_memory_do_not_change_a_prompt() -> None:
    requests = [planned(1500, number=i, hash_ids=(i % 3, 7, i)) for i in range(9)]
    fresh = [PromptBuilder(1).build(request) for request in requests]
    forgetful = PromptBuilder(1, cached_blocks=1)
    assert [forgetful.build(request) for request in reversed(requests)] == fresh[::-1]


def test_the_blocks_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(key: str) -> str:
        made.append(key)
        return " ".join(BLOCK_WORDS * ["t1"])

    monkeypatch.setattr("balanceroute.proxy.lab.replay.requests._words", counted)
    builder = PromptBuilder(0, cached_blocks=2)
    for block in (1, 2, 1, 3, 1, 2):
        builder.build(planned(512, hash_ids=(block,)))
    assert made == ["0/block/1", "0/block/2", "0/block/3", "0/block/2"]


def test_equal_ids_give_equal_blocks_and_other_ids_others() -> None:
    builder = PromptBuilder(0)
    first = words(builder.build(planned(1300, number=1, hash_ids=(5, 6, 7))))
    second = words(builder.build(planned(1400, number=2, hash_ids=(5, 6, 8))))
    assert first[:1024] == second[:1024]
    assert first[1024:1300] != second[1024:1300]


def test_a_short_last_block_is_the_beginning_of_the_whole_block() -> None:
    builder = PromptBuilder(0)
    short = words(builder.build(planned(600, hash_ids=(5, 6))))
    whole = words(builder.build(planned(1024, hash_ids=(5, 6))))
    assert whole[:600] == short


def test_without_ids_every_request_has_words_of_its_own() -> None:
    builder = PromptBuilder(0)
    first, second = (words(builder.build(planned(600, number=number))) for number in (1, 2))
    assert first[:10] != second[:10]
    assert first[:88] != first[512:]


def test_a_prompt_longer_than_its_ids_goes_on_with_words_of_its_own() -> None:
    builder = PromptBuilder(0)
    first, second = (
        words(builder.build(planned(1000, number=number, hash_ids=(5,)))) for number in (1, 2)
    )
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


@pytest.mark.parametrize("hash_ids", [(), (5,)])
def test_another_seed_gives_other_words(hash_ids: tuple[int, ...]) -> None:
    request = planned(9, hash_ids=hash_ids)
    assert PromptBuilder(0).build(request) != PromptBuilder(1).build(request)


def test_a_given_text_is_the_prompt() -> None:
    assert PromptBuilder(0).build(planned(9, text="What is love?")) == "What is love?"
