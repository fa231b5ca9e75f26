"""What the ranks are known to have of a prompt: against a plain model of their caches, and its bounds."""

import random
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.events import (
    Action,
    Admit,
    DecodeLost,
    DecodeStarted,
    PrefillDone,
    PrefillerId,
    RankClosed,
    RankId,
    RankOpened,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    RequestId,
    StartPrefill,
    StepCompleted,
    Tick,
    Ticket,
)
from balanceroute.proxy.core.local_prefill import LocalPrefill
from balanceroute.proxy.core.policies import POLICIES, PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.prefill.engine_blocks import (
    EngineBlocks,
    Knowledge,
    named,
    token_hashes,
)
from balanceroute.proxy.core.rank_memory import RankMemory
from balanceroute.proxy.core.scheduler import Intake, Scheduler, SchedulerConfig, placed
from balanceroute.proxy.core.waiting import PoolEntry

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import Event

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
    engine_blocks = EngineBlocks(16)
    memory = RankMemory(engine_blocks=engine_blocks)
    assert memory.kept(Ticket(9)) == {}
    hashes = token_hashes(np.arange(1_000), 16)
    ticket = Ticket(1_000, blocks=hashes, block_tokens=16, token_blocks=True)
    for rank in (RANK0, RANK1, RANK2):
        memory.add(ticket, rank)
    engine_blocks.begin(RANK0, Knowledge.ALL)
    engine_blocks.begin(RANK1, Knowledge.SOME)
    engine_blocks.stored(RANK0, list(range(1, 41)), None, list(range(640)))
    assert memory.kept(ticket) == {RANK0: 640, RANK1: 768, RANK2: 768}
    engine_blocks.removed(RANK0, list(range(11, 41)))
    assert memory.kept(ticket)[RANK0] == 160
    engine_blocks.cleared(RANK0)
    assert memory.kept(ticket) == {RANK1: 768, RANK2: 768}
    # Of a text whose tokens nobody told nothing else is known.
    memory.add(ticket_of([1, 1]), RANK0)
    assert memory.kept(ticket_of([1, 1])) == {RANK0: 200}


def test_of_a_text_ranks_tell_as_far_as_its_tokens_are_known() -> None:
    engine_blocks = EngineBlocks(16)
    memory = RankMemory(engine_blocks=engine_blocks)
    text = tuple(range(1, 11))
    ticket = Ticket(1_000, blocks=text, block_tokens=100)
    for rank in (RANK0, RANK1):
        memory.add(ticket, rank)
        engine_blocks.begin(rank, Knowledge.ALL)
    engine_blocks.texts.sent(text[:8])
    engine_blocks.stored(
        RANK0, list(range(1, 51)), None, list(range(800)), name=named(text[:8], 8.0)
    )
    # All that was told is on the first rank, where more may be, and nothing of it on the other one.
    assert memory.kept(ticket) == {RANK0: 999}
    engine_blocks.removed(RANK0, [50])
    assert memory.kept(ticket) == {RANK0: 49 * 16}


def test_ranks_tell_of_texts_whose_tokens_a_prefiller_told() -> None:
    prefillers = EngineBlocks(16)
    engine_blocks = EngineBlocks(16, texts=prefillers.texts)
    memory = RankMemory(engine_blocks=engine_blocks)
    texts = tuple(range(11, 19))
    ticket = Ticket(1_000, blocks=texts, block_tokens=120)
    memory.add(ticket, RANK0)
    memory.add(ticket, RANK1)
    tokens = list(range(1_000))
    prefillers.begin(0, Knowledge.ALL)
    prefillers.stored(0, list(range(1, 63)), None, tokens[:992], name=named(texts, 8.3))
    for rank, blocks in ((RANK0, 62), (RANK1, 20)):
        engine_blocks.begin(rank, Knowledge.ALL)
        engine_blocks.stored(rank, list(range(501, 501 + blocks)), None, tokens[: 16 * blocks])
    # Behind what is known of the text the estimate holds where all of that is there.
    assert memory.kept(ticket) == {RANK0: 960, RANK1: 320}
    engine_blocks.removed(RANK0, list(range(505, 563)))
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


# A conversation's next turn goes to the rank that has its beginning, where balance allows that.


TOKEN_NS = 1_000
STEP_NS = 10_000
HOME0, HOME1 = RankId(0), RankId(1)


def turn(length: int, conversation: int = 0) -> Ticket:
    """Return the ticket of a prompt of so many blocks, and a token."""
    blocks = tuple(1_000 * (conversation + 1) + place for place in range(length))
    return Ticket(BLOCK * length + 1, blocks=blocks, block_tokens=BLOCK)


class Site:
    """Two ranks of two slots that compute up to 300 tokens of a prompt; steps and prefills are known."""

    def __init__(self, policy: str = "br-0") -> None:
        config = SchedulerConfig(ranks=2, batch_limit=2)
        inputs = PolicyInputs(2, 2, PolicySettings(), random.Random(0), NoPrediction())
        self.local = LocalPrefill(300)
        self.scheduler = Scheduler(
            config, make_policy(policy, inputs), intake=Intake(local_prefill=self.local)
        )
        self.now_ns = self.sent = 0
        for tokens in [500, 1_000] * 20:
            request, _ = self.arrive(Ticket(tokens))
            self.feed(PrefillDone(request, tokens), after_ns=TOKEN_NS * tokens)
            self.feed(RequestCancelled(request))
        for _ in range(3):
            self.feed(StepCompleted(STEP_NS))

    def feed(self, *events: "Event", after_ns: int = 0) -> list[Action]:
        self.now_ns += after_ns
        actions: list[Action] = []
        for event in events:
            actions = self.scheduler.handle(event, now_ns=self.now_ns)
            self.scheduler.check()
        return actions

    def arrive(self, ticket: Ticket) -> tuple[RequestId, list[Action]]:
        request = RequestId(self.sent)
        self.sent += 1
        ticket = placed(self.scheduler, ticket, self.now_ns)
        return request, self.feed(RequestArrived(request, ticket), Tick())

    def decode(self, ticket: Ticket) -> tuple[RequestId, RankId]:
        """Have a request prefilled by a prefiller and decoded; return its rank."""
        request, _ = self.arrive(replace(ticket, blocks=()))
        self.local._prompts[request] = self.scheduler.requests[request].ticket = ticket
        done = PrefillDone(request, ticket.prompt_tokens)
        self.feed(done, after_ns=TOKEN_NS * ticket.prompt_tokens)
        (action,) = self.feed(Tick())
        assert isinstance(action, Admit)
        self.feed(DecodeStarted(request))
        return request, action.rank

    def place(self, ticket: Ticket) -> Ticket:
        return placed(self.scheduler, ticket, self.now_ns)


def test_the_next_turn_returns_to_its_rank() -> None:
    site = Site()
    request, home = site.decode(turn(8))
    site.feed(RequestFinished(request))
    ticket = site.place(turn(10))
    assert (ticket.prefill, ticket.home, ticket.home_tokens) == (False, home, 800)
    # More than a rank may compute, and another conversation.
    assert site.place(turn(12)).prefill
    assert site.place(turn(10, conversation=1)).prefill


def test_every_policy_sends_it_there() -> None:
    for name in POLICIES:
        site = Site(name)
        for conversation in range(4):
            request, home = site.decode(turn(8, conversation))
            site.feed(RequestFinished(request))
            again, actions = site.arrive(turn(9, conversation))
            assert actions == [Admit(again, home)], name
            site.feed(RequestFinished(again))


def test_a_full_rank_gets_no_turn_back() -> None:
    site = Site("fifo")
    _, home = site.decode(turn(8))
    site.decode(turn(8, 1))
    site.decode(turn(8, 2))
    assert site.scheduler.ledger.bound.tolist() in ([2, 1], [1, 2])
    free = site.scheduler.free_slots()
    assert (site.place(turn(10)).home == home) is bool(free[home])
    site.decode(turn(8, 3))
    assert site.place(turn(10)).prefill


def test_a_rank_that_would_be_far_above_the_others_gets_no_turn_back() -> None:
    site = Site("fifo")
    request, home = site.decode(turn(8))
    site.feed(RequestFinished(request), StepCompleted(STEP_NS))
    _, heavy = site.decode(turn(60, 1))
    for _ in range(5):
        site.feed(StepCompleted(STEP_NS))
    assert heavy == home
    assert site.place(turn(10)).home == home
    # Steps read KV caches more slowly than prefillers compute.
    for _ in range(200):
        site.feed(StepCompleted(1_000 * STEP_NS))
    assert site.place(turn(10)).prefill


def test_a_home_that_closes_frees_who_waits_for_it() -> None:
    site = Site()
    request, home = site.decode(turn(8))
    site.feed(RequestFinished(request))
    ticket = site.place(turn(9))
    again = RequestId(site.sent)
    site.feed(RequestArrived(again, ticket), RankClosed(home))
    other = RankId(1 - home)
    assert site.feed(Tick()) == [Admit(again, other)]
    site.feed(RequestCancelled(again), RankOpened(home))
    # It may have lost what it had.
    assert site.place(turn(9)).home != home


def test_a_home_that_closed_before_the_pool_is_none() -> None:
    site = Site()
    request, home = site.decode(turn(8))
    site.feed(RequestFinished(request))
    ticket = site.place(turn(9))
    site.feed(RankClosed(home))
    again = RequestId(site.sent)
    site.feed(RequestArrived(again, ticket))
    assert site.feed(Tick()) == [Admit(again, RankId(1 - home))]


def test_a_home_that_lost_it_frees_it() -> None:
    site = Site()
    request, home = site.decode(turn(8))
    site.feed(RequestFinished(request))
    again, actions = site.arrive(turn(9))
    assert actions == [Admit(again, home)]
    site.feed(DecodeLost(again))
    assert site.feed(Tick()) == [Admit(again, RankId(1 - home))]


def test_a_late_first_token_shows_that_the_rank_has_it_no_more() -> None:
    site = Site()
    request, home = site.decode(turn(8))
    site.feed(RequestFinished(request))
    again, actions = site.arrive(turn(9))
    assert actions == [Admit(again, home)]
    site.feed(DecodeStarted(again), after_ns=901 * TOKEN_NS + STEP_NS)
    site.feed(RequestFinished(again))
    assert site.place(turn(10)).prefill


def test_a_turn_in_time_keeps_its_home() -> None:
    site = Site()
    request, home = site.decode(turn(8))
    site.feed(RequestFinished(request))
    for length in range(9, 14):
        again, actions = site.arrive(turn(length))
        assert actions == [Admit(again, home)]
        site.feed(DecodeStarted(again), after_ns=101 * TOKEN_NS + STEP_NS)
        site.feed(RequestFinished(again))


def test_a_turn_is_not_late_because_another_rank_computes() -> None:
    site = Site("fifo")
    site.local._limit_tokens = 800
    turns = [site.decode(turn(8, conversation)) for conversation in range(2)]
    homes = [home for _, home in turns]
    assert homes[0] != homes[1]
    site.feed(*(RequestFinished(request) for request, _ in turns))
    first, actions = site.arrive(turn(9))
    assert actions == [Admit(first, homes[0])]
    second, actions = site.arrive(turn(15, 1))
    assert actions == [Admit(second, homes[1])]
    site.feed(StepCompleted(STEP_NS), after_ns=STEP_NS)
    # Alone it would have taken 101 tokens' time.
    started = [DecodeStarted(request) for request in (first, second)]
    site.feed(*started, after_ns=701 * TOKEN_NS + STEP_NS)
    site.feed(*(RequestFinished(request) for request in (first, second)))
    assert site.place(turn(10)).home == homes[0]


def test_two_turns_do_not_claim_one_slot() -> None:
    site = Site("fifo")
    site.decode(turn(8))
    request, home = site.decode(turn(8, 1))
    site.decode(turn(1, 2))
    tickets = []
    for _ in range(3):
        ticket = site.place(turn(9, 1))
        number = RequestId(site.sent)
        site.sent += 1
        site.feed(RequestArrived(number, ticket))
        tickets.append(ticket)
    free = int(site.scheduler.free_slots()[home])
    assert [ticket.home == home for ticket in tickets].count(True) <= free
    site.feed(RequestCancelled(request))


def test_ranks_without_caches_are_relied_on_ever_less() -> None:
    memory = RankMemory()
    for skipped in (0, 0, 0, 4, 16, 64):
        memory.missed(turn(8), HOME1)
        memory.add(turn(8), HOME1)
        found = [bool(memory.expect(turn(9))) for _ in range(skipped + 1)]
        assert found == [False] * skipped + [True]
    memory.had()
    memory.missed(turn(8), HOME0)
    assert memory.expect(turn(9))


def asked_by_name(tokens: int, session: int, conversation: int = 0) -> Ticket:
    """Return the ticket of a turn whose client writes the turns before it in another way."""
    return Ticket(tokens, blocks=(conversation,), block_tokens=tokens, session=session)


def test_a_session_is_known_by_its_name_where_its_text_is_not() -> None:
    memory = RankMemory()
    memory.add(asked_by_name(500, 7, 1), HOME1)
    assert memory.expect(asked_by_name(700, 7, 2)) == {HOME1: 500}
    assert memory.expect(asked_by_name(300, 7, 2)) == {HOME1: 299}
    assert memory.expect(asked_by_name(700, 8, 2)) == memory.expect(asked_by_name(700, 0, 2)) == {}
    # Its text may tell of more, and the latest turn counts.
    assert memory.expect(asked_by_name(700, 7, 1)) == {HOME1: 699}
    memory.add(asked_by_name(600, 7, 3), HOME0)
    assert memory.expect(asked_by_name(700, 7, 4)) == {HOME0: 600}
    memory.forget(HOME0)
    assert memory.expect(asked_by_name(700, 7, 4)) == {}


def test_a_session_whose_rank_lacked_it_is_not_relied_on_again() -> None:
    memory = RankMemory()
    for session in (7, 8):
        memory.add(asked_by_name(500, session, session), HOME1)
    memory.missed(asked_by_name(700, 7), HOME1)
    memory.add(asked_by_name(700, 7, 3), HOME1)
    assert memory.expect(asked_by_name(900, 7, 4)) == {}
    assert memory.expect(asked_by_name(900, 8, 4)) == {HOME1: 500}


@pytest.mark.parametrize("tokens", [800, 801])
def test_the_last_token_is_always_computed(tokens: int) -> None:
    memory = RankMemory()
    memory.add(turn(8), HOME1)
    ticket = replace(turn(8), prompt_tokens=tokens)
    assert memory.expect(ticket) == {HOME1: min(800, tokens - 1)}
    assert memory.expect(Ticket(800)) == {}
    memory.forget(HOME1)
    assert memory.expect(ticket) == {}


def test_a_prefiller_that_is_idle_keeps_what_would_delay_many() -> None:
    site = Site("fifo")
    _, actions = site.arrive(turn(2))
    assert isinstance(actions[0], Admit | StartPrefill)
    busy = [site.decode(turn(1, number))[0] for number in range(1, 4)]
    assert site.scheduler.prefillers.is_open[PrefillerId(0)]
    assert site.place(turn(3, 9)).prefill
    site.feed(*(RequestCancelled(request) for request in busy))
