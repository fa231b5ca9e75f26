"""A conversation's next turn goes to the rank that has its beginning, where balance allows that."""

import random
from typing import TYPE_CHECKING

import pytest
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
from balanceroute.proxy.core.rank_memory import RankMemory
from balanceroute.proxy.core.scheduler import Intake, Scheduler, SchedulerConfig, placed

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import Event

BLOCK = 100
TOKEN_NS = 1_000
STEP_NS = 10_000
RANK0, RANK1 = RankId(0), RankId(1)


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
        memory.missed(turn(8), RANK1)
        memory.add(turn(8), RANK1)
        found = [bool(memory.expect(turn(9))) for _ in range(skipped + 1)]
        assert found == [False] * skipped + [True]
    memory.had()
    memory.missed(turn(8), RANK0)
    assert memory.expect(turn(9))


def named(tokens: int, session: int, conversation: int = 0) -> Ticket:
    """Return the ticket of a turn whose client writes the turns before it in another way."""
    return Ticket(tokens, blocks=(conversation,), block_tokens=tokens, session=session)


def test_a_session_is_known_by_its_name_where_its_text_is_not() -> None:
    memory = RankMemory()
    memory.add(named(500, 7, 1), RANK1)
    assert memory.expect(named(700, 7, 2)) == {RANK1: 500}
    assert memory.expect(named(300, 7, 2)) == {RANK1: 299}
    assert memory.expect(named(700, 8, 2)) == memory.expect(named(700, 0, 2)) == {}
    # Its text may tell of more, and the latest turn counts.
    assert memory.expect(named(700, 7, 1)) == {RANK1: 699}
    memory.add(named(600, 7, 3), RANK0)
    assert memory.expect(named(700, 7, 4)) == {RANK0: 600}
    memory.forget(RANK0)
    assert memory.expect(named(700, 7, 4)) == {}


def test_a_session_whose_rank_lacked_it_is_not_relied_on_again() -> None:
    memory = RankMemory()
    for session in (7, 8):
        memory.add(named(500, session, session), RANK1)
    memory.missed(named(700, 7), RANK1)
    memory.add(named(700, 7, 3), RANK1)
    assert memory.expect(named(900, 7, 4)) == {}
    assert memory.expect(named(900, 8, 4)) == {RANK1: 500}


@pytest.mark.parametrize("tokens", [800, 801])
def test_the_last_token_is_always_computed(tokens: int) -> None:
    memory = RankMemory()
    memory.add(turn(8), RANK1)
    ticket = replace(turn(8), prompt_tokens=tokens)
    assert memory.expect(ticket) == {RANK1: min(800, tokens - 1)}
    assert memory.expect(Ticket(800)) == {}
    memory.forget(RANK1)
    assert memory.expect(ticket) == {}


def test_a_prefiller_that_is_idle_keeps_what_would_delay_many() -> None:
    site = Site("fifo")
    _, actions = site.arrive(turn(2))
    assert isinstance(actions[0], Admit | StartPrefill)
    busy = [site.decode(turn(1, number))[0] for number in range(1, 4)]
    assert site.scheduler.prefillers.is_open[PrefillerId(0)]
    assert site.place(turn(3, 9)).prefill
    site.feed(*(RequestCancelled(request) for request in busy))
