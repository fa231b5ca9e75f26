"""What the ranks are known to have of a prompt: against a plain model of their caches, and its bounds."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanceroute.proxy.core.events import RankId, RequestId, Ticket
from balanceroute.proxy.core.prefill.engine_blocks import (
    EngineBlocks,
    Knowledge,
    named,
    token_hashes,
)
from balanceroute.proxy.core.rank_memory import RankMemory
from balanceroute.proxy.core.waiting import PoolEntry

BLOCK = 100
RANK0, RANK1, RANK2 = RankId(0), RankId(1), RankId(2)
# A prompt: which way it takes at each of its blocks, so that prompts share beginnings.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=7)


def ticket_of(way: list[int], session: int = 0) -> Ticket:
    """Return the ticket of a prompt of so many blocks, and a token."""
    blocks = tuple(int("1" + "".join(map(str, way[: n + 1])), 3) for n in range(len(way)))
    return Ticket(BLOCK * len(way) + 1, blocks=blocks, block_tokens=BLOCK, session=session)


@given(
    sent=st.lists(st.tuples(PROMPTS, st.integers(0, 3)), max_size=40),
    asked=PROMPTS,
    room=st.integers(0, 12),
)
def test_it_is_what_caches_of_the_ranks_size_hold(
    sent: list[tuple[list[int], int]], asked: list[int], room: int
) -> None:
    memory = RankMemory(lambda: BLOCK * room)
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(4)]
    for way, rank in sent:
        ticket = ticket_of(way)
        memory.add(ticket, RankId(rank))
        cache = caches[rank]
        for block in reversed(ticket.blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > room:
            cache.popitem(last=False)
    expected = {}
    ticket = ticket_of(asked)
    for rank, cache in enumerate(caches):
        known = 0
        while known < len(ticket.blocks) and ticket.blocks[known] in cache:
            known += 1
        if known:
            expected[RankId(rank)] = BLOCK * known
    assert memory.kept(ticket) == expected


def test_a_rank_that_closed_has_nothing_and_the_others_keep_theirs() -> None:
    memory = RankMemory()
    for rank in (RANK0, RANK1):
        memory.add(ticket_of([1, 1, 0], session=5), rank)
    memory.add(ticket_of([1, 1, 0, 0]), RANK1)
    memory.forget(RANK1)
    assert memory.kept(ticket_of([1, 1, 0, 0], session=5)) == {RANK0: 300}
    memory.forget(RANK0)
    memory.forget(RANK2)
    assert memory.kept(ticket_of([1, 1, 0, 0], session=5)) == {}
    assert not memory._ranks_of


def test_what_it_remembers_has_a_bound_where_no_engine_tells_its_size() -> None:
    memory = RankMemory()
    for number in range(100):
        blocks = tuple(range(1_000 * number, 1_000 * number + 500))
        memory.add(Ticket(50_000, blocks=blocks, block_tokens=BLOCK, session=number + 1), RANK1)
    assert len(memory._ranks_of) == len(memory._held[RANK1].blocks) == 1 << 13
    assert memory.kept(Ticket(50_000, blocks=(99_000, 99_001), block_tokens=BLOCK)) == {RANK1: 200}
    assert memory.kept(Ticket(50_000, blocks=(0, 1), block_tokens=BLOCK)) == {}


def test_small_blocks_of_token_ids_are_known_by_every_so_many() -> None:
    memory, tokens = RankMemory(), np.arange(1_000)
    hashes = token_hashes(tokens, 16)
    ticket = Ticket(1_000, blocks=hashes, block_tokens=16, token_blocks=True)
    memory.add(ticket, RANK1)
    assert memory.kept(ticket) == {RANK1: 768}
    assert len(memory._ranks_of) == 3


def test_what_ranks_tell_themselves_is_believed() -> None:
    told = EngineBlocks(16)
    memory = RankMemory(told=told)
    assert memory.kept(Ticket(9)) == {}
    hashes = token_hashes(np.arange(1_000), 16)
    ticket = Ticket(1_000, blocks=hashes, block_tokens=16, token_blocks=True)
    for rank in (RANK0, RANK1, RANK2):
        memory.add(ticket, rank)
    told.begin(RANK0, Knowledge.ALL)
    told.begin(RANK1, Knowledge.SOME)
    told.stored(RANK0, list(range(1, 41)), None, list(range(640)))
    assert memory.kept(ticket) == {RANK0: 640, RANK1: 768, RANK2: 768}
    told.removed(RANK0, list(range(11, 41)))
    assert memory.kept(ticket)[RANK0] == 160
    told.cleared(RANK0)
    assert memory.kept(ticket) == {RANK1: 768, RANK2: 768}
    # Of a text whose tokens nobody told nothing else is known.
    memory.add(ticket_of([1, 1]), RANK0)
    assert memory.kept(ticket_of([1, 1])) == {RANK0: 200}


def test_of_a_text_ranks_tell_as_far_as_its_tokens_are_known() -> None:
    told = EngineBlocks(16)
    memory = RankMemory(told=told)
    text = tuple(range(1, 11))
    ticket = Ticket(1_000, blocks=text, block_tokens=100)
    for rank in (RANK0, RANK1):
        memory.add(ticket, rank)
        told.begin(rank, Knowledge.ALL)
    told.texts.sent(text[:8])
    told.stored(RANK0, list(range(1, 51)), None, list(range(800)), name=named(text[:8], 8.0))
    # All that was told is on the first rank, where more may be, and nothing of it on the other one.
    assert memory.kept(ticket) == {RANK0: 999}
    told.removed(RANK0, [50])
    assert memory.kept(ticket) == {RANK0: 49 * 16}


def test_ranks_tell_of_texts_whose_tokens_a_prefiller_told() -> None:
    prefillers = EngineBlocks(16)
    told = EngineBlocks(16, texts=prefillers.texts)
    memory = RankMemory(told=told)
    texts = tuple(range(11, 19))
    ticket = Ticket(1_000, blocks=texts, block_tokens=120)
    memory.add(ticket, RANK0)
    memory.add(ticket, RANK1)
    tokens = list(range(1_000))
    prefillers.begin(0, Knowledge.ALL)
    prefillers.stored(0, list(range(1, 63)), None, tokens[:992], name=named(texts, 8.3))
    for rank, blocks in ((RANK0, 62), (RANK1, 20)):
        told.begin(rank, Knowledge.ALL)
        told.stored(rank, list(range(501, 501 + blocks)), None, tokens[: 16 * blocks])
    # Behind what is known of the text the estimate holds where all of that is there.
    assert memory.kept(ticket) == {RANK0: 960, RANK1: 320}
    told.removed(RANK0, list(range(505, 563)))
    assert memory.kept(ticket) == {RANK0: 64, RANK1: 320}


def test_a_sessions_answer_is_kept_until_its_rank_was_given_as_much_as_it_holds() -> None:
    memory = RankMemory(lambda: 1_000)
    first, later = Ticket(300, session=7), Ticket(900, session=7)
    memory.add(first, RANK1)
    memory.ended(first, RANK0, 999)
    assert memory.kept(later) == {RANK1: 300}
    memory.ended(first, RANK1, 450)
    assert memory.kept(later) == {RANK1: 450}
    memory.add(Ticket(550), RANK1)
    assert memory.kept(later) == {RANK1: 450}
    memory.add(Ticket(1), RANK1)
    assert memory.kept(later) == {}


def waiting(ticket: Ticket) -> PoolEntry:
    return PoolEntry(RequestId(1), ticket, ticket.prompt_tokens, 0, None, None, None)


def test_a_waiting_request_is_looked_up_once_in_some_admissions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = RankMemory()
    looked: list[Ticket] = []
    row = memory.row

    def counted(ticket: Ticket, ranks: int) -> list[int]:
        looked.append(ticket)
        return row(ticket, ranks)

    monkeypatch.setattr(memory, "row", counted)
    entry, known = waiting(ticket_of([1, 0, 1])), None
    for number in range(65):
        memory.add(ticket_of([1, 0, 1] if number == 40 else [0]), RANK1)
        known = memory.keeping(ranks=4, open_ranks=3).of(entry)
    assert len(looked) == 3
    assert known is not None
    assert (known.tokens, known.mean) == ([0, 300, 0, 0], 100.0)
    unknown = waiting(Ticket(200, blocks=(999,), block_tokens=BLOCK))
    assert memory.keeping(ranks=1, open_ranks=0).of(unknown)[:2] == ([0], 0.0)
