"""A barrier whose idle share is known."""

from typing import TYPE_CHECKING

import numpy as np
import pytest

from balanceroute.engine_patch.reader import read_steps
from balanceroute.proxy.lab.validate.traces import Timeline, timeline_of
from balanceroute.proxy.lab.validate.validation import Fit, align, idle

if TYPE_CHECKING:
    from tests.lab.validate.conftest import WriteSteps

FIT = Fit(base_ms=10.0, us_per_token=1.0, r2=1.0, steps=100, pauses=0)


def barrier(
    write_steps: "WriteSteps", *loads: list[int], prefill: list[int] | None = None
) -> list[Timeline]:
    """Return ranks whose steps take 10 ms and 1 µs per token of the heaviest."""
    step_ms = [10.0 + max(step) / 1e3 for step in zip(*loads, strict=True)]
    return [
        timeline_of(
            read_steps(write_steps(f"{rank}", row, step_ms, in_barrier=True, prefill=prefill or []))
        )
        for rank, row in enumerate(loads)
    ]


def test_the_idle_fraction_of_two_ranks(write_steps: "WriteSteps") -> None:
    aligned = align(barrier(write_steps, [10_000, 20_000], [30_000, 20_000]))
    assert aligned.loads.tolist() == [[10_000, 30_000], [20_000, 20_000]]
    assert aligned.step_ns.tolist() == [40e6, 30e6]
    found = idle(aligned, FIT)
    assert found is not None
    assert (found.ranks, found.steps) == (2, 2)
    # 20,000 tokens missing of 2 x (30,000 + 20,000); 20 ms lost of 2 x 70 ms.
    assert found.tokens == pytest.approx(0.2)
    assert found.time == pytest.approx(20 / 140)
    assert found.dummy == 0
    assert found.spread_ms_p50 == 0


def test_a_rank_without_requests_idles_in_dummy_batches(write_steps: "WriteSteps") -> None:
    found = idle(align(barrier(write_steps, [10_000, 10_000], [10_000, 0])), None)
    assert found is not None
    assert found.tokens == pytest.approx(0.25)
    assert found.dummy == pytest.approx(0.25)
    assert found.time is None


def test_steps_with_prefill_and_steps_of_nobody_do_not_count(write_steps: "WriteSteps") -> None:
    ranks = barrier(write_steps, [5, 10, 0], [5, 0, 0], prefill=[0, 100, 0])
    found = idle(align(ranks), FIT)
    assert found is not None
    assert (found.steps, found.tokens) == (1, 0)
    assert idle(align(barrier(write_steps, [0], [0])), FIT) is None


def test_only_steps_that_all_ranks_recorded_are_aligned(write_steps: "WriteSteps") -> None:
    first, second = barrier(write_steps, [1, 2, 3, 4], [5, 6, 7, 8])
    aligned = align([first.cut(np.array([True, True, True, False])), second.cut(second.place > 0)])
    assert aligned.loads.tolist() == [[2, 6], [3, 7]]


def test_ranks_without_a_step_in_common_align_to_nothing(write_steps: "WriteSteps") -> None:
    first, second = barrier(write_steps, [1, 2], [5, 6])
    aligned = align([first.cut(first.place == 0), second.cut(second.place == 1)])
    assert aligned.loads.shape == (0, 2)


def test_the_spread_of_the_ends(write_steps: "WriteSteps") -> None:
    paths = [
        write_steps("0", [9, 9, 9], [10.0] * 3, in_barrier=True),
        write_steps("1", [9, 9, 9], [10.0] * 3, gaps_ms={0: 4.0}, in_barrier=True),
    ]
    found = idle(align([timeline_of(read_steps(path)) for path in paths]), None)
    assert found is not None
    assert found.spread_ms_p50 == pytest.approx(4.0)
