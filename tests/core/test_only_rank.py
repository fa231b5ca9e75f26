"""Where nothing is to choose: the stages would come to the same, and nothing is predicted."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import Survival
from balanceroute.proxy.core.config import UNLIMITED
from balanceroute.proxy.core.events import RankId, RequestId, Ticket
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.policies.two_stage import fill_only_rank
from balanceroute.proxy.core.prediction import OutputPredictor
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.ranks import Assignment, Fleet
from balanceroute.proxy.core.waiting import Pool, PoolEntry

NOW_NS = 50
BATCH = 8


class Unasked:
    """A predictor that nobody may ask."""

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        raise AssertionError


def fleet(taken: Sequence[int], kv_limit: int = UNLIMITED) -> Fleet:
    bound = np.array(taken)
    loads = 10 * bound
    return Fleet(
        np.ones(len(taken), np.bool_), loads, bound, BATCH - bound, np.maximum(kv_limit - loads, 0)
    )


def pool_of(*entries: tuple[int, int], deadline_ns: int | None = None, lost_on: int = -1) -> Pool:
    pool = Pool(Fcfs())
    avoided = () if lost_on < 0 else (RankId(lost_on),)
    for number, (tokens, slots) in enumerate(entries):
        ticket = Ticket(tokens, slots)
        times = (deadline_ns, None, None)
        pool.add(PoolEntry(RequestId(number), ticket, tokens, 0, *times, lost_on=avoided))
    return pool


def dispatched(
    view: Fleet, pool: Pool, predictor: OutputPredictor, hold_s: float = 0.0
) -> list[Assignment]:
    settings, rng = PolicySettings(hold_s=hold_s), random.Random(1)
    inputs = PolicyInputs(len(view.loads), BATCH, settings, rng, predictor)
    return make_policy("br-h", inputs).dispatch(view, pool, NOW_NS)


@given(
    taken=st.integers(0, BATCH - 1),
    full=st.integers(0, 2),
    entries=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 3)), min_size=1, max_size=9),
    kv_limit=st.integers(10, 400) | st.just(UNLIMITED),
)
def test_the_stages_come_to_the_same(
    taken: int, full: int, entries: list[tuple[int, int]], kv_limit: int
) -> None:
    view = fleet([taken, *[BATCH] * full], kv_limit)
    pool = pool_of(*entries)
    forced = fill_only_rank(view, pool, NOW_NS)
    assume(forced is not None)
    other = fleet([taken, *[BATCH] * full], kv_limit)
    # With this, entries take more room than is known beforehand, so the stages decide.
    other.room_after = lambda rank, entry: int(other.free_kv_tokens[rank]) - entry.kv_tokens
    assert forced == dispatched(other, pool_of(*entries), Survival([3, 7, 20]))
    assert len(pool) == 0


def test_nothing_is_predicted() -> None:
    view, pool = fleet([BATCH, 2]), pool_of((5, 1), (9, 1), (9, 2))
    assert dispatched(view, pool, Unasked()) == [(2, 1), (1, 1), (0, 1)]


OPEN = {
    "two ranks have slots": (fleet([1, 1]), pool_of((5, 1))),
    "too few slots": (fleet([7]), pool_of((5, 1), (5, 1))),
    "too little memory": (fleet([1], kv_limit=14), pool_of((5, 1))),
    "an entry is late": (fleet([1]), pool_of((5, 1), deadline_ns=NOW_NS)),
    "an entry avoids the rank": (fleet([1]), pool_of((5, 1), lost_on=0)),
}


@pytest.mark.parametrize("why", OPEN)
def test_the_stages_decide_what_is_open(why: str) -> None:
    view, pool = OPEN[why]
    waiting = len(pool)
    assert fill_only_rank(view, pool, NOW_NS) is None
    assert len(pool) == waiting


def test_the_stages_decide_while_a_request_may_be_held() -> None:
    pool = pool_of((5, 1))
    with pytest.raises(AssertionError):
        dispatched(fleet([7, BATCH]), pool, Unasked(), hold_s=1.0)
    assert dispatched(fleet([7, BATCH]), pool, Unasked()) == [(0, 0)]


def test_a_rank_alone_holds_nothing() -> None:
    assert dispatched(fleet([7]), pool_of((5, 1)), Unasked(), hold_s=1.0) == [(0, 0)]
