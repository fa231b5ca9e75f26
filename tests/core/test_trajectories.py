"""What a slot is expected to hold over a whole output."""

import random

import numpy as np
import pytest

from balanceroute.proxy.core.curves import POINTS, Slots

ONE = np.ones(1, np.int64)


def fitted(outputs: list[int], prompt: int = 0) -> Slots:
    slots = Slots()
    for output in outputs * 64:
        slots.leave(prompt, output)
    slots.fit()
    return slots


def test_the_ratio_is_unknown_until_enough_requests_have_left() -> None:
    slots = Slots()
    for _ in range(63):
        slots.leave(10, 50)
    assert slots.output_ratio == 0.0
    slots.leave(10, 50)
    assert slots.output_ratio == 5.0


def test_the_ratio_is_of_the_latest_requests() -> None:
    slots = Slots()
    for _ in range(512):
        slots.leave(10, 50)
    for _ in range(512):
        slots.leave(100, 50)
    assert slots.output_ratio == 0.5


def test_the_grid_reaches_as_far_as_the_long_outputs_last() -> None:
    # Half of the time slots hold requests of 1,000 tokens, whatever the number of short ones.
    even, mixed = fitted([1000]), fitted([1000] + 10 * [100])
    assert 2_500 <= even.width * (POINTS - 1) <= 3_500
    assert mixed.width > 0.5 * even.width


def test_the_grid_stays_while_it_reaches_far_enough() -> None:
    slots = fitted([1000])
    width = slots.width
    for _ in range(512):
        slots.leave(0, 900)
    assert slots.fit() == 1.0
    for _ in range(512):
        slots.leave(0, 3000)
    assert slots.fit() == slots.width / width > 2.0


def test_a_request_that_stays_grows_by_its_sequences() -> None:
    slots = fitted([1000])
    loads = slots.loads(np.array([70]), np.array([2]), np.ones((1, POINTS)))
    assert loads[0].tolist() == [70 + 2 * slots.width * point for point in range(POINTS)]


def test_refills_solve_the_renewal_equation() -> None:
    rng = random.Random(2)
    for _ in range(20):
        slots = fitted([rng.randrange(50, 3000)])
        survival = np.array([sorted([rng.random() for _ in range(POINTS)])[::-1] for _ in range(4)])
        survival[:, 0] = 1.0
        prompts = np.array([rng.randrange(1, 900) for _ in range(4)])
        slots.refill_with(prompts, survival)
        points, halves = np.arange(POINTS), np.arange(2 * POINTS - 1) / 2
        runs = survival.mean(axis=0)
        held = prompts @ survival / 4 + slots.width * points * runs
        # Half width by half width: what is held, and after each end what was held that long after a start.
        runs, held = np.interp(halves, points, runs), np.interp(halves, points, held)
        for half in range(1, len(held)):
            for begin in range(half):
                held[half] += (runs[begin] - runs[begin + 1]) * held[half - begin - 1]
        # One that is known to end just after a point leaves half way to the next.
        last = rng.randrange(POINTS - 1)
        ends = (points <= last).astype(np.float64)[None]
        loads = slots.loads(np.array([70]), np.array([3]), ends)[0]
        expected = [70 + 3 * slots.width * point for point in range(last + 1)]
        expected += [3 * held[2 * (point - last) - 1] for point in range(last + 1, POINTS)]
        assert loads == pytest.approx(expected)


def test_a_slot_that_empties_is_refilled() -> None:
    slots = fitted([1000])
    stay = np.ones((1, POINTS))
    slots.refill_with(np.array([40]), stay)
    ends = np.zeros((1, POINTS))
    ends[0, :2] = 1.0
    loads = slots.loads(np.array([500]), ONE, ends)[0]
    # It ends half way to point 2; the next one holds its 40 tokens from then on, and grows.
    expected = [500, 500 + slots.width] + [
        40 + slots.width * (point - 1.5) for point in range(2, POINTS)
    ]
    assert loads == pytest.approx(expected)


def test_refilled_slots_hold_in_the_long_run_what_requests_hold_on_average() -> None:
    slots = fitted([200, 2000])
    outputs = np.arange(1, 12) * slots.width
    survival = np.where(np.arange(POINTS) * slots.width < outputs[:, None], 1.0, 0.0)
    prompts = np.full(len(outputs), 30)
    slots.refill_with(prompts, survival)
    mean = (30 * outputs + outputs**2 / 2).sum() / outputs.sum()
    loads = slots.loads(prompts, np.ones(len(outputs), np.int64), survival).mean(axis=0)
    assert loads[-5:] == pytest.approx([mean] * 5, rel=0.1)
