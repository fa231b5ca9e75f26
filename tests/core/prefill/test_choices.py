"""Which candidate each rule takes."""

import random
from collections import Counter

import pytest

from balanceroute.proxy.core.events import PrefillerId, RequestId, Ticket
from balanceroute.proxy.core.prefill import (
    PREFILL_CHOICES,
    USING_BLOCKS,
    FewestTokens,
    PrefillChoice,
    Prefillers,
    PrefillInputs,
    PrefillRequest,
)

P = [PrefillerId(number) for number in range(4)]
LONG = tuple(range(100, 120))


def made(name: str) -> PrefillChoice:
    return PREFILL_CHOICES[name](PrefillInputs(random.Random(0), index_blocks=1_000))


def fleet(*prefills: int) -> Prefillers:
    """Return prefillers with so many prefills of one token each."""
    prefillers = Prefillers(len(prefills), choice=FewestTokens())
    for prefiller, running in zip(P, prefills, strict=False):
        for _ in range(running):
            prefillers.begin_prefill(prefiller, 1)
    return prefillers


class Asked:
    """Asks one choice about request after request."""

    def __init__(self, name: str) -> None:
        self.choice = made(name)
        self.requests = 0

    def __call__(
        self,
        prefillers: Prefillers,
        blocks: tuple[int, ...] = (),
        among: list[PrefillerId] = P,
        session: int = 0,
    ) -> int:
        self.requests += 1
        tokens = max(1, 16 * len(blocks))
        ticket = Ticket(tokens, blocks=blocks, block_tokens=16.0, session=session)
        request = PrefillRequest(RequestId(self.requests), ticket, tokens, 0)
        return self.choice.choose(request, among, prefillers)


@pytest.mark.parametrize("name", PREFILL_CHOICES)
def test_every_choice_takes_a_candidate_and_the_same_one_each_time(name: str) -> None:
    def run() -> list[int]:
        ask = Asked(name)
        return [ask(fleet(3, 0, 2, 2), LONG[: number % 7], P[1:]) for number in range(40)]

    assert set(run()) <= set(P[1:])
    assert run() == run()


def test_least_conn_counts_prefills_and_direct_sequences() -> None:
    prefillers = fleet(2, 1, 1, 2)
    prefillers.begin_direct(P[1], 1, 3)
    assert Asked("least-conn")(prefillers) == 2
    ask = Asked("least-conn")
    assert [ask(fleet(1, 1, 1, 0), among=P[:3]) for _ in range(4)] == [0, 1, 2, 0]


def test_round_robin_skips_those_without_room() -> None:
    ask = Asked("round-robin")
    assert [ask(fleet(0, 0, 0, 0), among=[P[0], P[1], P[3]]) for _ in range(4)] == [0, 1, 3, 0]
    assert ask(fleet(0, 0, 0, 0), among=[P[2], P[3]]) == 2


def test_random_is_even() -> None:
    ask = Asked("random")
    counts = Counter(ask(fleet(9, 0, 0, 0)) for _ in range(4_000))
    assert all(900 < counts[prefiller] < 1_100 for prefiller in P)


def test_power_of_two_never_takes_the_busiest() -> None:
    ask = Asked("power-of-two")
    counts = Counter(ask(fleet(3, 2, 1, 0)) for _ in range(1_200))
    assert counts[P[0]] == 0
    # Of the six pairs three hold the idle one.
    assert 550 < counts[P[3]] < 650
    assert Asked("power-of-two")(fleet(5, 0, 0, 0), among=P[:1]) == 0


def test_a_conversation_sticks_whatever_the_load() -> None:
    ask = Asked("sticky")
    homes = {start: ask(fleet(0, 0, 0, 0), (7, start)) for start in range(400)}
    assert homes == {start: ask(fleet(9, 9, 0, 0), (7, start, 5)) for start in range(400)}
    assert all(70 < count < 130 for count in Counter(homes.values()).values())
    assert len({ask(fleet(0, 0, 0, 0), (7, start), session=5) for start in range(99)}) == 1
    # Without its prefiller only its own conversations move.
    moved = {start: ask(fleet(0, 0, 0, 0), (7, start), P[:3]) for start in range(400)}
    assert {start for start in homes if moved[start] != homes[start]} == {
        start for start, home in homes.items() if home == P[3]
    }


def test_cache_aware_takes_the_longest_prefix_unless_loads_differ_a_lot() -> None:
    ask = Asked("cache-aware")
    assert ask(fleet(1, 1, 0, 1), LONG[:10]) == 2
    assert ask(fleet(0, 0, 64, 0), LONG) == 2
    assert ask(fleet(0, 1, 65, 1), LONG) == 0
    # A short match counts for nothing.
    assert ask(fleet(1, 1, 1, 0), (*LONG[:3], *range(7))) == 3


def test_lmetric_multiplies_uncached_tokens_and_requests() -> None:
    ask = Asked("lmetric")
    assert ask(fleet(1, 0, 1, 1), LONG[:10]) == 1
    # 10 uncached blocks x 2 requests against 20 x 1, then 10 x 3.
    assert ask(fleet(0, 0, 0, 0), LONG) == 1
    ask = Asked("lmetric")
    ask(fleet(1, 0, 1, 1), LONG[:11])
    assert ask(fleet(0, 1, 0, 0), LONG) == 1
    assert ask(fleet(0, 2, 0, 0), (*LONG[:11], *range(9))) == 0


def test_only_the_choices_that_use_blocks_do() -> None:
    for name in PREFILL_CHOICES:
        with_blocks, without = Asked(name), Asked(name)
        prompts = [tuple(range(number % 5, 20)) for number in range(30)]
        chosen = [with_blocks(fleet(0, 0, 0, 0), blocks) for blocks in prompts]
        blind = [without(fleet(0, 0, 0, 0)) for _ in prompts]
        assert (chosen != blind) == (name in USING_BLOCKS), name
