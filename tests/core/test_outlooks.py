"""Ranks whose outlooks are made together choose what they would choose one by one."""

import random

import numpy as np
import pytest

from balanceroute.proxy.core.config import UNLIMITED
from balanceroute.proxy.core.events import RequestId, Ticket
from balanceroute.proxy.core.policies import stage_2
from balanceroute.proxy.core.policies.two_stage import TwoStage, TwoStageSettings
from balanceroute.proxy.core.projection import Weights
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.ranks import Fleet
from balanceroute.proxy.core.waiting import Pool, PoolEntry

RANKS = 40
WAITING = 120


def chosen(seed: int) -> list[tuple[int, int]]:
    """Return the admissions of six rounds of a saturated fleet, of which stage 2 makes all."""
    rng = random.Random(seed)
    weights = Weights(np.ones(1), alpha=1.0, beta=float(RANKS))
    rule = TwoStage(
        TwoStageSettings(weights, theta=3 * RANKS, window=16, patience=5_000.0),
        None,
        stage_2.choose_subsets,
    )
    pool, arrived = Pool(Fcfs()), 0
    found: list[tuple[int, int]] = []
    reserved: set[int] = set()
    for _ in range(6):
        while len(pool) < WAITING:
            # The first three are larger than any rank's room, and late.
            tokens = 9_000 if arrived < 3 else rng.choice((100, 300, 900, 2_700))
            tokens += rng.randint(0, 50)
            entry = PoolEntry(RequestId(arrived), Ticket(tokens), tokens, 0, None, None, None)
            entry.overtaken = 180 if arrived < 3 else 0
            pool.add(entry)
            arrived += 1
        free = np.array([rng.choice((0, 1, 1, 1, 2, 3)) for _ in range(RANKS)])
        loads = np.array([rng.randint(6_000, 10_000) for _ in range(RANKS)])
        limit = np.where(np.arange(RANKS) % 7 == 0, 2_000, UNLIMITED)
        fleet = Fleet(np.ones(RANKS, np.bool_), loads, np.full(RANKS, 9), free, limit)
        found += [(int(request), int(rank)) for request, rank in rule.dispatch(fleet, pool, 0)]
        reserved |= set(rule.reserved)
    assert reserved, "no rank makes room for a large request"
    return found


@pytest.mark.parametrize("seed", range(8))
def test_outlooks_that_are_made_together_change_no_choice(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = chosen(seed)
    # An outlook for each rank alone, of entries that are looked at anew after each admission.
    monkeypatch.setattr(stage_2, "_TOGETHER", 1)
    monkeypatch.setattr(stage_2, "_MOST_SPARE", 1)
    assert chosen(seed) == together
