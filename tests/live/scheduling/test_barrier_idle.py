"""The time lost at the barrier, over the latest minutes."""

import numpy as np
import pytest

from balanceroute.proxy.live.scheduling.progress import BUCKET_S, BUCKETS, BarrierIdle


def loads(*tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array(tokens, np.int64)


def test_nothing_is_idle_before_the_first_step() -> None:
    barrier = BarrierIdle()
    assert barrier.share(10.0) == 0.0
    assert barrier.shares(10.0) == [None] * BUCKETS


def test_steps_count_in_the_bucket_of_their_time() -> None:
    barrier = BarrierIdle()
    barrier.add(2, loads(100, 50), 0.0)
    barrier.add(1, loads(100, 100), BUCKET_S - 0.1)
    barrier.add(1, loads(100, 0), BUCKET_S)
    assert (barrier.idle_tokens, barrier.capacity_tokens) == (200, 800)
    assert barrier.shares(BUCKET_S)[-2:] == [pytest.approx(100 / 600), pytest.approx(0.5)]
    assert barrier.share(BUCKET_S) == pytest.approx(200 / 800)


def test_what_is_older_than_the_window_counts_only_in_the_sums() -> None:
    barrier = BarrierIdle()
    barrier.add(1, loads(100, 0), 1.0)
    end_s = 1.0 + BUCKETS * BUCKET_S
    assert barrier.share(end_s - BUCKET_S) == 0.5
    assert barrier.share(end_s) == 0.0
    assert barrier.shares(end_s) == [None] * BUCKETS
    assert barrier.idle_tokens == 100


def test_memory_is_bounded() -> None:
    barrier = BarrierIdle()
    for number in range(10 * BUCKETS):
        barrier.add(1, loads(10, 10), BUCKET_S * number)
    assert barrier.shares(BUCKET_S * (10 * BUCKETS - 1)) == [0.0] * BUCKETS
