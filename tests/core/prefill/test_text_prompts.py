"""The tokens of texts, from the events of engines that are told by name whose blocks they are."""

import random
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.prefill.budgets import PrefillRequest
from balanceroute.proxy.core.prefill.engine_blocks import (
    EngineBlocks,
    Knowledge,
    TextPrompts,
    named,
    token_hashes,
)
from balanceroute.proxy.core.prefill.prefix_memory import PrefixMemory

P0, P1 = PrefillerId(0), PrefillerId(1)
# Tokens of a block; letters of a token, and of a block of text.
BLOCK, TOKEN, TEXT = 4, 3, 60


def mark(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def texts_of(text: str) -> tuple[int, ...]:
    ends = range(TEXT, len(text) + 1, TEXT)
    return tuple(mark(text[:end]) >> 1 for end in ends)


def tokens_of(text: str) -> list[int]:
    return [mark(text[at : at + TOKEN]) & 0xFFFFFF for at in range(0, len(text), TOKEN)]


def hashes_of(text: str) -> list[int]:
    return list(token_hashes(np.array(tokens_of(text), np.int64), BLOCK))


def letters(rng: random.Random, count: int) -> str:
    return "".join(rng.choices("abcdefgh", k=count))


class Engine:
    """A prefix cache that drops the blocks used least recently, ends first, and tells what it does."""

    def __init__(self, index: EngineBlocks, prefiller: PrefillerId, *, most: int = 1_000) -> None:
        self.index, self.prefiller, self.most = index, prefiller, most
        self.held: dict[tuple[int, ...], None] = {}
        index.begin(prefiller, Knowledge.ALL)

    def compute(self, text: str, name: str | None = None, chunk: int = 5) -> int:
        """Compute a prompt in chunks of so many blocks; return how many it had."""
        tokens = tokens_of(text)
        paths = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        found = self.leading(text)
        name = named(texts_of(text), len(text) / TEXT) if name is None else name
        for path in reversed(paths):
            self.held.pop(path, None)
            self.held[path] = None
        for first in range(found, len(paths), chunk):
            new = paths[first : first + chunk]
            self.index.stored(
                self.prefiller,
                [hash(path) & (1 << 64) - 1 for path in new],
                hash(paths[first - 1]) & (1 << 64) - 1 if first else None,
                tokens[first * BLOCK : (first + len(new)) * BLOCK],
                name=name,
            )
        while len(self.held) > self.most:
            oldest = next(iter(self.held))
            del self.held[oldest]
            self.index.removed(self.prefiller, [hash(oldest) & (1 << 64) - 1])
        return found

    def leading(self, text: str) -> int:
        tokens, known = tokens_of(text), 0
        while tuple(tokens[: (known + 1) * BLOCK]) in self.held:
            known += 1
            if (known + 1) * BLOCK > len(tokens):
                break
        return known


def test_the_next_turn_of_a_conversation_is_known_in_tokens() -> None:
    rng, index = random.Random(1), EngineBlocks(BLOCK)
    engine, text = Engine(index, P0), ""
    for turn in range(6):
        before, text = text, text + letters(rng, rng.randrange(200, 400))
        told = list(index.texts.tokens(texts_of(text)))
        assert told == hashes_of(text)[: len(told)]
        if turn:
            # All but what follows the last full block of the text of the last turn.
            assert len(told) * BLOCK * TOKEN > len(before) - TEXT - 2 * BLOCK * TOKEN
        assert index.leading(P0, told) == len(told)
        index.texts.sent(texts_of(text))
        engine.compute(text)


def test_a_beginning_that_several_conversations_share_is_known_from_one() -> None:
    rng, index = random.Random(2), EngineBlocks(BLOCK)
    engine, system = Engine(index, P0), letters(rng, 10 * TEXT)
    first, second = system + letters(rng, 500), system + letters(rng, 300)
    index.texts.sent(texts_of(first))
    engine.compute(first)
    told = list(index.texts.tokens(texts_of(second)))
    assert told == hashes_of(second)[: len(told)]
    assert 10 * TEXT - 2 * BLOCK * TOKEN < len(told) * BLOCK * TOKEN <= 10 * TEXT
    # Nobody has sent it: a proxy that came later, say, knows the end of a prompt alone.
    late = EngineBlocks(BLOCK)
    Engine(late, P0).compute(first)
    assert not late.texts.tokens(texts_of(second))
    assert len(late.texts.tokens(texts_of(first + letters(rng, TEXT)))) > 50


def test_blocks_that_were_there_before_are_found_by_the_blocks_before_them() -> None:
    rng, index = random.Random(3), EngineBlocks(BLOCK)
    engine, text = Engine(index, P0), letters(rng, 600)
    engine.compute(text, name="")  # Of another proxy.
    assert not index.texts.tokens(texts_of(text))
    longer = text + letters(rng, 100)
    assert engine.compute(longer) == 50
    told = list(index.texts.tokens(texts_of(longer)))
    assert told == hashes_of(longer)[: len(told)]
    assert len(told) >= 50
    # Not where one of them was dropped meanwhile.
    index.removed(P0, [hash(tuple(tokens_of(text)[: 30 * BLOCK])) & (1 << 64) - 1])
    other = text + letters(rng, 160)
    engine.compute(other)
    assert not index.texts.tokens((texts_of(other)[-1],))


@given(st.integers(0, 1 << 30))
def test_what_is_told_is_the_truth_of_every_engine(seed: int) -> None:
    rng, index = random.Random(seed), EngineBlocks(BLOCK)
    engines = [Engine(index, prefiller, most=rng.choice([60, 200])) for prefiller in (P0, P1)]
    system = letters(rng, rng.randrange(200))
    conversations = [system] * 4
    for _ in range(25):
        place = rng.randrange(len(conversations))
        text = conversations[place] = conversations[place] + letters(rng, rng.randrange(1, 200))
        if rng.random() < 0.1:
            conversations[place] = system
        if len(text) < TEXT:
            continue
        told = list(index.texts.tokens(texts_of(text)))
        assert told == hashes_of(text)[: len(told)]
        for engine in engines:
            known = index.leading(engine.prefiller, told)
            assert known == min(len(told), engine.leading(text))
        if rng.random() < 0.8:
            index.texts.sent(texts_of(text))
        chunk = rng.randrange(1, 30)
        rng.choice(engines).compute(text, None if rng.random() < 0.8 else "", chunk)


@pytest.mark.parametrize(
    "name",
    ["", "mine", "br-", "br-1-0-40", "br-1-2-40", "br-x-1-40", "br-1-1-40-1", "br-1-fffff-1"],
)
def test_other_names_say_nothing(name: str) -> None:
    texts = TextPrompts()
    texts.told(name, 0, [1, 2, 3], lambda: array("Q"))
    assert not texts.tokens((1,))
    texts.told("br-1-1-40", 0, [1, 2, 3], lambda: array("Q"))
    assert list(texts.tokens((1,))) == [1, 2, 3]


def test_a_name_that_lies_of_its_length_changes_no_more_than_the_expectation() -> None:
    texts = TextPrompts()
    texts.sent((5, 6, 7))
    texts.told("br-7-200-8000", 0, range(1, 90), lambda: array("Q"))
    for known in ((5,), (5, 6), (5, 6, 7)):
        assert list(texts.tokens(known)) == list(range(1, 90))[: len(texts.tokens(known))]


def test_no_more_is_remembered_than_fits() -> None:
    texts = TextPrompts(most=5_000)
    blocks: tuple[int, ...] = ()
    for number in range(1, 400):
        blocks = tuple(number << 20 | block for block in range(1, 6))
        texts.sent(blocks)
        name = named(blocks, 5.5)
        texts.told(name, 0, [number << 20 | one for one in range(1, 101)], lambda: array("Q"))
    held = sum(prompt.weight for prompt in texts._prompts.values())
    assert held == texts._weight <= 5_000
    assert len(texts._beginnings) == 5 * len(texts._prompts)
    assert len(texts.tokens(blocks)) == 90
    # One larger than all of it is not kept either.
    texts.told("br-1-1-40", 0, range(1, 6_000), lambda: array("Q"))
    assert not texts._prompts
    assert not texts._beginnings
    assert texts._weight == 0


def test_texts_on_their_way_are_remembered_within_bounds() -> None:
    texts = TextPrompts()
    for number in range(600):
        texts.sent(tuple(range(number * 512 + 1, number * 512 + 513)))
    assert sum(map(len, texts._sent.values())) == texts._sent_blocks <= 1 << 17
    texts.sent((1, 2))
    texts.sent((9, 2))
    assert texts._sent[2] == (9, 2)
    assert sum(map(len, texts._sent.values())) == texts._sent_blocks


# What the choice makes of it.


class Asked:
    """A memory before two prefillers, and requests for texts."""

    def __init__(self) -> None:
        self.index = EngineBlocks(BLOCK)
        self.engines = [Engine(self.index, prefiller, most=120) for prefiller in (P0, P1)]
        self.memory = PrefixMemory(4_000, self.index)
        self.sent = 0

    def request(self, text: str) -> PrefillRequest:
        tokens, texts = len(tokens_of(text)), texts_of(text)
        ticket = Ticket(tokens, blocks=texts, block_tokens=TEXT / len(text) * tokens)
        self.sent += 1
        return PrefillRequest(RequestId(self.sent), ticket, tokens, 0)

    def expect(self, text: str) -> Sequence[int]:
        found = self.memory.expect(self.request(text), [P0, P1])
        return [found[prefiller].cached_tokens for prefiller in (P0, P1)]

    def send(self, text: str, prefiller: PrefillerId) -> None:
        request = self.request(text)
        expected = self.memory.expect(request, [prefiller])[prefiller]
        self.memory.add(request, prefiller)
        self.memory.watch(request, prefiller, expected)
        assert self.expect(text)[prefiller] >= request.tokens - TEXT, "on its way"
        self.engines[prefiller].compute(text)
        self.memory.ended(request.request, None)


def test_a_text_is_expected_where_its_tokens_are() -> None:
    rng, asked = random.Random(4), Asked()
    text = letters(rng, 700)
    asked.send(text, P0)
    there = asked.expect(text)[0]
    assert 190 < there <= 233
    # Another proxy has it computed at the other one.
    asked.engines[1].compute(text, name="")
    told = BLOCK * len(asked.index.texts.tokens(texts_of(text)))
    assert there - 2 * BLOCK < told <= there
    assert asked.expect(text) == [there, told]
    # And other prompts have it dropped at the first one.
    for _ in range(3):
        asked.engines[0].compute(letters(rng, 700), name="")
    assert asked.expect(text) == [0, told]


def test_what_follows_the_known_part_of_a_text_may_be_there_as_it_was_sent() -> None:
    rng, asked = random.Random(5), Asked()
    text = letters(rng, 700)
    asked.send(text, P0)
    longer = text + letters(rng, 700)
    request = asked.request(longer)
    asked.memory.add(request, P0)
    assert asked.expect(longer)[0] > 400
    asked.index.begin(P0, Knowledge.NONE)
    assert asked.expect(longer)[0] > 400
