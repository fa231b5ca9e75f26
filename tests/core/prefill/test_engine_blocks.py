"""The index of what prefillers tell, against plain dictionaries; and what bad events do to it."""

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
    KeyTable,
    Knowledge,
    TextPrompts,
    chain,
    chain_one,
    named,
    token_hashes,
)
from balanceroute.proxy.core.prefill.prefix_memory import PrefixMemory

P0, P1 = PrefillerId(0), PrefillerId(1)
BLOCK = 4
# Few keys and many collisions: multiples of the table's size share a slot.
ALL_KEYS = [number * (1 << 60) % ((1 << 64) - 59) + number for number in range(1, 25)]
KEYS = st.sampled_from(ALL_KEYS)


def ids(*tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array(tokens, np.int64)


# Hashes.


@given(st.lists(st.integers(0, 300_000), max_size=60), st.integers(0, 15))
def test_a_prompt_in_pieces_has_the_hashes_of_the_whole(tokens: list[int], cut: int) -> None:
    whole = chain(ids(*tokens), BLOCK, 0).tolist()
    cut = min(cut, len(whole))
    before = whole[cut - 1] if cut else 0
    pieces = [
        *chain(ids(*tokens[: cut * BLOCK]), BLOCK, 0).tolist(),
        *chain(ids(*tokens[cut * BLOCK :]), BLOCK, before).tolist(),
    ]
    assert pieces == whole


@given(
    st.lists(st.integers(0, (1 << 40) - 1), min_size=BLOCK, max_size=BLOCK),
    st.integers(0, (1 << 64) - 1),
    st.integers(0, (1 << 64) - 1),
)
def test_one_block_has_the_hash_that_it_has_among_others(
    tokens: list[int], before: int, extra: int
) -> None:
    assert [chain_one(tokens, before, extra)] == chain(
        ids(*tokens), BLOCK, before, [extra]
    ).tolist()
    assert [chain_one(tokens, before)] == chain(ids(*tokens), BLOCK, before).tolist()


def test_hashes_differ_with_any_token_before() -> None:
    rng = random.Random(3)
    base = [rng.randrange(100) for _ in range(40)]
    seen = {token_hashes(ids(*base), BLOCK)}
    for place in range(40):
        other = [*base]
        other[place] += 1
        hashes = token_hashes(ids(*other), BLOCK)
        assert all(
            one != two
            for one, two in zip(hashes[place // BLOCK :], min(seen)[place // BLOCK :], strict=True)
        )
        seen.add(hashes)
    assert len(seen) == 41
    assert all(0 < one < 1 << 63 for hashes in seen for one in hashes)
    assert token_hashes(ids(0, 0, 0), BLOCK) == ()
    assert len(set(token_hashes(ids(*[0] * 40), BLOCK))) == 10


# The table.


@given(st.lists(st.tuples(st.booleans(), KEYS, st.integers(1, 1 << 63)), max_size=80))
def test_a_table_is_a_dictionary(steps: list[tuple[bool, int, int]]) -> None:
    table, plain = KeyTable(24), dict[int, int]()
    for adds, key, value in steps:
        if adds:
            if value % 2:
                table.put_one(key, value)
            else:
                table.put(np.array([key], np.uint64), np.array([value], np.uint64))
            plain[key] = value
        else:
            assert table.remove(key) == plain.pop(key, None)
        assert table.count == len(plain)
    for key in ALL_KEYS:
        assert table.get(key) == plain.get(key)


def test_a_table_takes_many_at_once_and_no_more_than_fit() -> None:
    table = KeyTable(100)
    keys = np.arange(0, 90, dtype=np.uint64)
    table.put(np.concatenate([keys, keys]), np.concatenate([keys, keys + np.uint64(7)]))
    assert table.count == 89
    assert table.get(0) is None
    assert table.get(89) == 89
    table.put(np.arange(1_000, 1_100, dtype=np.uint64), np.arange(100, dtype=np.uint64))
    assert table.count == 100
    table.put_one(5_000, 1)
    table.put_one(0, 1)
    assert (table.count, table.get(5_000), table.get(0)) == (100, None, None)
    for key in (*range(90), *range(1_000, 1_100)):
        table.remove(key)
    assert table.count == 0
    assert not table._keys.any()


# The index.


class Site:
    """An index, and the engines' hashes of blocks: any numbers will do."""

    def __init__(self, most: int = 1_000) -> None:
        self.index = EngineBlocks(BLOCK, most)
        self.names: dict[tuple[int, ...], int] = {}
        for prefiller in (P0, P1):
            self.index.begin(prefiller, Knowledge.ALL)

    def name(self, path: tuple[int, ...]) -> int:
        return self.names.setdefault(path, 0xABCDEF0123456789 + 977 * len(self.names))

    def store(self, prefiller: PrefillerId, tokens: list[int], first: int = 0) -> None:
        """Store the blocks of a prompt from the given one on."""
        paths = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        hashes = [self.name(path) for path in paths[first:]]
        before = self.name(paths[first - 1]) if first else None
        end = BLOCK * len(paths)
        self.index.stored(prefiller, hashes, before, tokens[first * BLOCK : end])

    def known(self, prefiller: PrefillerId, tokens: list[int]) -> int:
        return self.index.leading(prefiller, token_hashes(ids(*tokens), BLOCK))


def test_blocks_are_known_of_the_prefiller_that_told_them() -> None:
    site = Site()
    prompt = list(range(30))
    site.store(P0, prompt)
    assert site.known(P0, prompt) == 7
    assert site.known(P0, [*prompt[:13], 99, *prompt[14:]]) == 3
    assert site.known(P1, prompt) == 0
    # A further turn begins behind them.
    site.store(P0, [*prompt, *range(50, 60)], first=7)
    assert site.known(P0, [*prompt, *range(50, 60), 1]) == 10


def test_removed_blocks_are_gone_and_unknown_ones_are_fine() -> None:
    site = Site()
    prompt = list(range(40))
    site.store(P0, prompt)
    site.index.removed(P0, [site.name(tuple(prompt[:end])) for end in (40, 36, 32)])
    assert site.known(P0, prompt) == 7
    site.index.removed(P0, [1, 2, 1 << 63])
    assert site.index.blocks(P0) == 7


def test_what_follows_unheard_blocks_is_left_out() -> None:
    site = Site()
    site.store(P0, list(range(40)), first=5)
    assert site.index.blocks(P0) == 0


def test_cleared_blocks_are_counted_as_a_reset() -> None:
    site = Site()
    site.store(P0, list(range(40)))
    site.index.cleared(P0)
    assert (site.index.blocks(P0), site.index.resets(P0), site.index.resets(P1)) == (0, 1, 0)
    site.index.forget(P0)
    assert site.index.knowledge(P0) is Knowledge.NONE
    assert site.known(P0, list(range(40))) == 0


def test_no_more_blocks_are_kept_than_fit() -> None:
    site = Site(most=50)
    for start in range(0, 10_000, 100):
        site.store(P0, list(range(start, start + 100)))
    assert site.index.blocks(P0) == 50


@pytest.mark.parametrize(
    ("hashes", "tokens"),
    [([1, 2], [1] * 7), ([1], [1, 2, 3, -1]), ([1], [1, 2, 3, 1 << 70]), ([1], ["a", 2, 3, 4])],
)
def test_bad_token_ids_are_refused(hashes: list[int], tokens: list[int]) -> None:
    site = Site()
    with pytest.raises(ValueError, match="token id"):
        site.index.stored(P0, hashes, None, tokens)
    assert site.index.blocks(P0) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=5))))
def test_the_index_follows_a_cache_that_drops_ends_first(
    steps: list[tuple[int, list[int]]],
) -> None:
    site, held = Site(), dict[tuple[int, ...], None]()
    for action, path in steps:
        tokens = [token for step in path for token in [step] * BLOCK]
        paths = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        if action:
            first = next((n for n, one in enumerate(paths) if one not in held), None)
            if first is not None:
                site.store(P0, tokens, first)
            for one in reversed(paths):
                held.pop(one, None)
                held[one] = None
        for _ in range(max(len(held) - 12, 1 - action)):
            if not held:
                break
            oldest = next(iter(held))
            del held[oldest]
            site.index.removed(P0, [site.name(oldest)])
        known = 0
        while known < len(paths) and paths[known] in held:
            known += 1
        assert site.known(P0, tokens) == known
    assert site.index.blocks(P0) == len(held)


# What the choice makes of it.


class Asked:
    """A memory before two prefillers, and requests for prompts of token ids."""

    def __init__(self) -> None:
        self.site = Site()
        self.memory = PrefixMemory(4_000, self.site.index)
        self.sent = 0

    def expect(self, tokens: list[int], *, text: bool = False) -> list[int]:
        request = self.request(tokens, text=text)
        found = self.memory.expect(request, [P0, P1])
        return [found[prefiller].cached_tokens for prefiller in (P0, P1)]

    def request(self, tokens: list[int], *, text: bool = False) -> PrefillRequest:
        blocks = token_hashes(ids(*tokens), BLOCK)
        ticket = Ticket(len(tokens), blocks=blocks, block_tokens=BLOCK, token_blocks=not text)
        self.sent += 1
        return PrefillRequest(RequestId(self.sent), ticket, len(tokens), 0)

    def send(self, tokens: list[int], prefiller: PrefillerId, *, text: bool = False) -> RequestId:
        request = self.request(tokens, text=text)
        expected = self.memory.expect(request, [prefiller])[prefiller]
        self.memory.add(request, prefiller)
        self.memory.watch(request, prefiller, expected)
        return request.request


PROMPT = list(range(200, 241))


def test_what_a_prefiller_tells_counts_more_than_what_it_was_sent() -> None:
    asked = Asked()
    request = asked.send(PROMPT, P0)
    # On its way.
    assert asked.expect(PROMPT) == [40, 0]
    asked.memory.ended(request, None)
    # It was not stored after all.
    assert asked.expect(PROMPT) == [0, 0]
    asked.site.store(P0, PROMPT)
    assert asked.expect(PROMPT) == [40, 0]
    # The last token is always computed.
    assert asked.expect(PROMPT[:40]) == [39, 0]


def test_of_a_prefiller_that_was_heard_late_the_larger_counts() -> None:
    asked = Asked()
    asked.site.index.begin(P0, Knowledge.SOME)
    asked.memory.ended(asked.send(PROMPT, P0), None)
    assert asked.expect(PROMPT) == [40, 0]
    asked.site.store(P0, [*PROMPT[:20], *range(30)])
    assert asked.expect([*PROMPT[:20], *range(30)]) == [48, 0]


def test_prompts_as_text_use_what_was_sent_until_the_cache_is_cleared() -> None:
    asked = Asked()
    asked.memory.ended(asked.send(PROMPT, P0, text=True), None)
    assert asked.expect(PROMPT, text=True) == [40, 0]
    asked.site.index.cleared(P0)
    assert asked.expect(PROMPT, text=True) == [0, 0]


def test_prompts_on_their_way_are_forgotten_when_they_are_there() -> None:
    asked = Asked()
    requests = [asked.send(list(range(start, start + 41)), P0) for start in range(0, 4_000, 50)]
    for request in requests:
        asked.memory.ended(request, None)
    heard = asked.memory._reported
    assert heard is not None
    assert not heard._tables
    assert not heard._pending[P0]._tables
    assert not heard._under_way[P0]


# The tokens of texts, from the events of engines that are told by name whose blocks they are.


TEXT0, TEXT1 = PrefillerId(0), PrefillerId(1)
# Tokens of a block; letters of a token, and of a block of text.
TEXT_BLOCK, TOKEN, TEXT = 4, 3, 60


def mark(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def texts_of(text: str) -> tuple[int, ...]:
    ends = range(TEXT, len(text) + 1, TEXT)
    return tuple(mark(text[:end]) >> 1 for end in ends)


def tokens_of(text: str) -> list[int]:
    return [mark(text[at : at + TOKEN]) & 0xFFFFFF for at in range(0, len(text), TOKEN)]


def hashes_of(text: str) -> list[int]:
    return list(token_hashes(np.array(tokens_of(text), np.int64), TEXT_BLOCK))


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
        paths = [tuple(tokens[:end]) for end in range(TEXT_BLOCK, len(tokens) + 1, TEXT_BLOCK)]
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
                tokens[first * TEXT_BLOCK : (first + len(new)) * TEXT_BLOCK],
                name=name,
            )
        while len(self.held) > self.most:
            oldest = next(iter(self.held))
            del self.held[oldest]
            self.index.removed(self.prefiller, [hash(oldest) & (1 << 64) - 1])
        return found

    def leading(self, text: str) -> int:
        tokens, known = tokens_of(text), 0
        while tuple(tokens[: (known + 1) * TEXT_BLOCK]) in self.held:
            known += 1
            if (known + 1) * TEXT_BLOCK > len(tokens):
                break
        return known


def test_the_next_turn_of_a_conversation_is_known_in_tokens() -> None:
    rng, index = random.Random(1), EngineBlocks(TEXT_BLOCK)
    engine, text = Engine(index, TEXT0), ""
    for turn in range(6):
        before, text = text, text + letters(rng, rng.randrange(200, 400))
        told = list(index.texts.tokens(texts_of(text)))
        assert told == hashes_of(text)[: len(told)]
        if turn:
            # All but what follows the last full block of the text of the last turn.
            assert len(told) * TEXT_BLOCK * TOKEN > len(before) - TEXT - 2 * TEXT_BLOCK * TOKEN
        assert index.leading(TEXT0, told) == len(told)
        index.texts.sent(texts_of(text))
        engine.compute(text)


def test_a_beginning_that_several_conversations_share_is_known_from_one() -> None:
    rng, index = random.Random(2), EngineBlocks(TEXT_BLOCK)
    engine, system = Engine(index, TEXT0), letters(rng, 10 * TEXT)
    first, second = system + letters(rng, 500), system + letters(rng, 300)
    index.texts.sent(texts_of(first))
    engine.compute(first)
    told = list(index.texts.tokens(texts_of(second)))
    assert told == hashes_of(second)[: len(told)]
    assert 10 * TEXT - 2 * TEXT_BLOCK * TOKEN < len(told) * TEXT_BLOCK * TOKEN <= 10 * TEXT
    # Nobody has sent it: a proxy that came later, say, knows the end of a prompt alone.
    late = EngineBlocks(TEXT_BLOCK)
    Engine(late, TEXT0).compute(first)
    assert not late.texts.tokens(texts_of(second))
    assert len(late.texts.tokens(texts_of(first + letters(rng, TEXT)))) > 50


def test_blocks_that_were_there_before_are_found_by_the_blocks_before_them() -> None:
    rng, index = random.Random(3), EngineBlocks(TEXT_BLOCK)
    engine, text = Engine(index, TEXT0), letters(rng, 600)
    engine.compute(text, name="")  # Of another proxy.
    assert not index.texts.tokens(texts_of(text))
    longer = text + letters(rng, 100)
    assert engine.compute(longer) == 50
    told = list(index.texts.tokens(texts_of(longer)))
    assert told == hashes_of(longer)[: len(told)]
    assert len(told) >= 50
    # Not where one of them was dropped meanwhile.
    index.removed(TEXT0, [hash(tuple(tokens_of(text)[: 30 * TEXT_BLOCK])) & (1 << 64) - 1])
    other = text + letters(rng, 160)
    engine.compute(other)
    assert not index.texts.tokens((texts_of(other)[-1],))


@given(st.integers(0, 1 << 30))
def test_what_is_told_is_the_truth_of_every_engine(seed: int) -> None:
    rng, index = random.Random(seed), EngineBlocks(TEXT_BLOCK)
    engines = [Engine(index, prefiller, most=rng.choice([60, 200])) for prefiller in (TEXT0, TEXT1)]
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
    texts.add_blocks(name, 0, [1, 2, 3], lambda: array("Q"))
    assert not texts.tokens((1,))
    texts.add_blocks("br-1-1-40", 0, [1, 2, 3], lambda: array("Q"))
    assert list(texts.tokens((1,))) == [1, 2, 3]


def test_a_name_that_lies_of_its_length_changes_no_more_than_the_expectation() -> None:
    texts = TextPrompts()
    texts.sent((5, 6, 7))
    texts.add_blocks("br-7-200-8000", 0, range(1, 90), lambda: array("Q"))
    for known in ((5,), (5, 6), (5, 6, 7)):
        assert list(texts.tokens(known)) == list(range(1, 90))[: len(texts.tokens(known))]


def test_no_more_is_remembered_than_fits() -> None:
    texts = TextPrompts(most=5_000)
    blocks: tuple[int, ...] = ()
    for number in range(1, 400):
        blocks = tuple(number << 20 | block for block in range(1, 6))
        texts.sent(blocks)
        name = named(blocks, 5.5)
        texts.add_blocks(name, 0, [number << 20 | one for one in range(1, 101)], lambda: array("Q"))
    held = sum(prompt.weight for prompt in texts._prompts.values())
    assert held == texts._weight <= 5_000
    assert len(texts._beginnings) == 5 * len(texts._prompts)
    assert len(texts.tokens(blocks)) == 90
    # One larger than all of it is not kept either.
    texts.add_blocks("br-1-1-40", 0, range(1, 6_000), lambda: array("Q"))
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


class AskedText:
    """A memory before two prefillers, and requests for texts."""

    def __init__(self) -> None:
        self.index = EngineBlocks(TEXT_BLOCK)
        self.engines = [Engine(self.index, prefiller, most=120) for prefiller in (TEXT0, TEXT1)]
        self.memory = PrefixMemory(4_000, self.index)
        self.sent = 0

    def request(self, text: str) -> PrefillRequest:
        tokens, texts = len(tokens_of(text)), texts_of(text)
        ticket = Ticket(tokens, blocks=texts, block_tokens=TEXT / len(text) * tokens)
        self.sent += 1
        return PrefillRequest(RequestId(self.sent), ticket, tokens, 0)

    def expect(self, text: str) -> Sequence[int]:
        found = self.memory.expect(self.request(text), [TEXT0, TEXT1])
        return [found[prefiller].cached_tokens for prefiller in (TEXT0, TEXT1)]

    def send(self, text: str, prefiller: PrefillerId) -> None:
        request = self.request(text)
        expected = self.memory.expect(request, [prefiller])[prefiller]
        self.memory.add(request, prefiller)
        self.memory.watch(request, prefiller, expected)
        assert self.expect(text)[prefiller] >= request.tokens - TEXT, "on its way"
        self.engines[prefiller].compute(text)
        self.memory.ended(request.request, None)


def test_a_text_is_expected_where_its_tokens_are() -> None:
    rng, asked = random.Random(4), AskedText()
    text = letters(rng, 700)
    asked.send(text, TEXT0)
    there = asked.expect(text)[0]
    assert 190 < there <= 233
    # Another proxy has it computed at the other one.
    asked.engines[1].compute(text, name="")
    told = TEXT_BLOCK * len(asked.index.texts.tokens(texts_of(text)))
    assert there - 2 * TEXT_BLOCK < told <= there
    assert asked.expect(text) == [there, told]
    # And other prompts have it dropped at the first one.
    for _ in range(3):
        asked.engines[0].compute(letters(rng, 700), name="")
    assert asked.expect(text) == [0, told]


def test_what_follows_the_known_part_of_a_text_may_be_there_as_it_was_sent() -> None:
    rng, asked = random.Random(5), AskedText()
    text = letters(rng, 700)
    asked.send(text, TEXT0)
    longer = text + letters(rng, 700)
    request = asked.request(longer)
    asked.memory.add(request, TEXT0)
    assert asked.expect(longer)[0] > 400
    asked.index.begin(TEXT0, Knowledge.NONE)
    assert asked.expect(longer)[0] > 400
