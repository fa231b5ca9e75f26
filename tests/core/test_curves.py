"""Survival curves that are asked for once."""

import random
from collections.abc import Sequence
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import Oracle, Survival
from balanceroute.proxy.core.curves import POINTS, Curves, Slots
from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.policies.own_trajectory import RankTrajectories
from balanceroute.proxy.core.prediction import OutputPredictor
from balanceroute.proxy.core.projection import Form, Projection

WIDTH = 10


def ids(*numbers: int) -> list[RequestId]:
    return [RequestId(number) for number in numbers]


class Counting(Oracle):
    """Counts the requests that it is asked about."""

    asked = 0

    def survival(
        self, requests: Sequence[RequestId], ages: NDArray[np.int64], steps: int
    ) -> NDArray[np.float64]:
        self.asked += len(requests)
        return super().survival(requests, ages, steps)


def knowing(outputs: dict[int, int]) -> Counting:
    return Counting({RequestId(number): tokens for number, tokens in outputs.items()})


def at(curves: Curves, request: int, age: int, width: int) -> NDArray[np.float64]:
    """Return the survival of one request at an age."""
    row = curves.row_of(RequestId(request))
    return curves.survival(np.array([row]), np.array([age]), width)


def test_each_request_is_asked_about_once() -> None:
    predictor = knowing({1: 50, 2: 90})
    curves = Curves(predictor)
    curves.ask(ids(1), WIDTH)
    curves.ask(ids(1, 2), WIDTH)
    assert predictor.asked == 2


@pytest.mark.parametrize(("age", "ends_at"), [(0, 5), (20, 3), (40, 1)])
def test_a_curve_is_read_from_the_requests_age_on(age: int, ends_at: int) -> None:
    curves = Curves(knowing({1: 45}))
    curves.ask(ids(1), WIDTH)
    survival = at(curves, 1, age, WIDTH)
    assert survival[0].tolist() == [1.0] * ends_at + [0.0] * (POINTS - ends_at)


@pytest.mark.parametrize(
    ("output", "width", "survival"), [(52, 10, 0.7), (45, 10, 0.0), (54, 9, 1.0), (6, 1, 1.0)]
)
def test_it_is_kept_where_between_two_points_a_request_ends(
    output: int, width: int, survival: float
) -> None:
    curves = Curves(knowing({1: output}))
    curves.ask(ids(1), width)
    ahead = at(curves, 1, 0, width)[0]
    assert ahead[5] == pytest.approx(survival)
    assert ahead[:5].tolist() == [1.0] * 5


def test_what_outlives_its_curve_is_taken_to_stay() -> None:
    curves = Curves(knowing({1: 50}))
    curves.ask(ids(1), WIDTH)
    assert at(curves, 1, 70, WIDTH).tolist() == [[1.0] * POINTS]
    assert at(curves, 1, 10**6, WIDTH).tolist() == [[1.0] * POINTS]


def test_a_request_never_asked_about_has_the_mean_of_the_latest() -> None:
    curves = Curves(knowing({1: 15, 2: 35}))
    curves.ask(ids(1, 2), WIDTH)
    survival = at(curves, 9, 0, WIDTH)[0]
    assert survival[:5].tolist() == [1.0, 1.0, 0.5, 0.5, 0.0]


def test_curves_follow_the_grid() -> None:
    curves = Curves(knowing({1: 95, 2: 45}))
    curves.ask(ids(1), WIDTH)
    curves.stretch(2.5)
    survival = at(curves, 1, 0, 25)[0]
    assert survival[:6].tolist() == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    curves.ask(ids(2), 25)
    assert at(curves, 2, 0, 25)[0, :4].tolist() == [1.0, 1.0, 0.28, 0.0]


def test_requests_that_are_gone_make_room() -> None:
    predictor = knowing(dict.fromkeys(range(2_000), 30))
    curves = Curves(predictor)
    for number in range(0, 2_000, 50):
        batch = ids(*range(number, number + 50))
        curves.make_room(len(batch), set(batch).__contains__)
        curves.ask(batch, WIDTH)
    assert len(curves) <= 512
    curves.ask(ids(1_999), WIDTH)
    assert predictor.asked == 2_000


def test_the_lasting_output_weighs_a_request_by_how_long_it_stays() -> None:
    curves = Curves(knowing({1: 200, 2: 600}))
    curves.ask(ids(1, 2), WIDTH)
    assert curves.lasting_output(WIDTH) == pytest.approx((200**2 + 600**2) / 800, rel=0.05)


# What a slot is expected to hold over a whole output.


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


# The kept sums of the ranks' trajectories, against a recount request by request.


RANKS = 4
OUTPUTS = random.Random(5).choices([1, 2, 5, 30, 90, 400], k=400)


class Fleet:
    """Some ranks, and what is known of their requests without any sums."""

    def __init__(self, predictor: OutputPredictor) -> None:
        self.projection = Projection(
            ranks=RANKS,
            horizon_steps=5,
            refresh_tokens=3,
            predictor=predictor,
            form=Form.EXPECTED,
        )
        self.curves = Curves(predictor)
        self.slots = Slots()
        for output in [20, 60, 150] * 64:
            self.slots.leave(10, output)
        self.slots.fit()
        self.ranks = RankTrajectories(self.projection, self.curves, self.slots)
        # By request: rank, KV tokens, age, sequences, whether it has started.
        self.running: dict[RequestId, list[int]] = {}
        self.look([RequestId(399)], 7)

    def look(self, candidates: list[RequestId], prompt: int) -> None:
        """Ask about candidates, of which slots are refilled."""
        rows = self.curves.ask(candidates, self.slots.width)
        survival = self.curves.survival(rows, np.zeros(len(rows), np.int64), self.slots.width)
        self.slots.refill_with(np.full(len(rows), prompt), survival)

    def step(self) -> None:
        self.projection.step()
        for request in self.running.values():
            request[1] += request[3] * request[4]
            request[2] += request[4]

    def stretch(self, output: int) -> None:
        """See longer outputs, until the grid is another."""
        for _ in range(512):
            self.slots.leave(10, output)
        factor = self.slots.fit()
        if factor != 1.0:
            self.ranks.forget()
            self.curves.stretch(factor)

    def recount(self) -> NDArray[np.float64]:
        """Sum the trajectories of the requests one by one."""
        rows = np.zeros((RANKS, POINTS))
        for request, (rank, tokens, age, sequences, _) in self.running.items():
            row = np.array([self.curves.row_of(request)])
            survival = self.curves.survival(row, np.array([age]), self.slots.width)
            rows[rank] += self.slots.loads(np.array([tokens]), np.array([sequences]), survival)[0]
        return rows


OPERATIONS = ["bind", "bind", "ask", "start", "step", "steps", "emit", "unbind", "clear", "stretch"]


@given(
    knows=st.booleans(),
    operations=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 40), st.integers(1, 60)),
        min_size=4,
        max_size=40,
    ),
    fulls=st.lists(st.integers(0, 2**RANKS - 1), min_size=40, max_size=40),
)
def test_kept_sums_equal_a_recount_in_every_order_of_events(
    knows: bool, operations: list[tuple[str, int, int]], fulls: list[int]
) -> None:
    oracle = Oracle({RequestId(number): output for number, output in enumerate(OUTPUTS)})
    fleet = Fleet(oracle if knows else Survival(OUTPUTS[:200]))
    before = fleet.recount()
    for number, ((operation, pick, amount), full) in enumerate(
        zip(operations, fulls, strict=False)
    ):
        change(fleet, RequestId(number), operation, pick, amount)
        free = np.array([not full >> rank & 1 for rank in range(RANKS)])
        made_at = fleet.ranks._made_at.copy()
        rows = fleet.ranks.rows(free)
        age = fleet.projection.now - made_at
        due = free | (made_at < 0) | (age < 0) | (age >= fleet.slots.width)
        recount = fleet.recount()
        np.testing.assert_allclose(rows[due], recount[due], rtol=1e-9, atol=1e-6)
        # The others are as they were when they had a free slot.
        np.testing.assert_array_equal(rows[~due], before[~due])
        before = rows.copy()


def change(fleet: Fleet, new: RequestId, operation: str, pick: int, amount: int) -> None:
    """Let one thing happen, as far as it can."""
    present = sorted(fleet.running)
    request = present[pick % len(present)] if present else None
    match operation:
        case "bind":
            rank, sequences, age = pick % RANKS, 1 + amount % 3, pick // 8
            tokens = sequences * (amount + age)
            if pick % 3:  # Else it was never a candidate.
                fleet.look([new], amount)
            fleet.projection.bind(new, RankId(rank), tokens, age, sequences)
            fleet.running[new] = [rank, tokens, age, sequences, 0]
            if amount % 4:
                fleet.projection.start(new)
                fleet.running[new][4] = 1
        case "ask" if request is not None:
            # As one that was lost and waits again: it is bound elsewhere, or where it was.
            rank, tokens, age, sequences, _ = fleet.running.pop(request)
            fleet.projection.unbind(request)
            fleet.look([request], amount)
            rank = pick % RANKS if pick % 2 else rank
            fleet.projection.bind(request, RankId(rank), tokens, age, sequences)
            fleet.running[request] = [rank, tokens, age, sequences, 0]
        case "start" if request is not None and not fleet.running[request][4]:
            fleet.projection.start(request)
            fleet.running[request][4] = 1
        case "step":
            fleet.step()
        case "steps":
            for _ in range(amount):
                fleet.step()
        case "emit" if request is not None and fleet.running[request][4]:
            sequences = fleet.running[request][3]
            fleet.projection.emit(request, sequences * amount)
            fleet.running[request][1] += sequences * amount
            fleet.running[request][2] += amount
        case "unbind" if request is not None:
            fleet.projection.unbind(request)
            del fleet.running[request]
        case "clear":
            fleet.projection.clear()
            fleet.running.clear()
        case "stretch":
            fleet.stretch(10 * amount)
        case _:
            pass


def test_within_a_step_only_changed_ranks_are_summed_anew() -> None:
    fleet = Fleet(Survival(OUTPUTS[:200]))
    all_ranks = np.ones(RANKS, np.bool_)
    numbers = range(2 * RANKS)
    fleet.look([RequestId(number) for number in numbers], 9)
    for number in numbers:
        fleet.projection.bind(RequestId(number), RankId(number % RANKS), 50, 0)
    fleet.ranks.rows(all_ranks)
    running_on = Mock(wraps=fleet.projection.running_on)
    fleet.projection.running_on = running_on  # type: ignore[method-assign]
    fleet.ranks.rows(all_ranks)
    fleet.projection.unbind(RequestId(2))
    fleet.ranks.rows(all_ranks)
    fleet.projection.step()
    fleet.ranks.rows(all_ranks)
    # One that was never a candidate follows the candidates.
    fleet.projection.bind(RequestId(99), RankId(1), 50, 0)
    fleet.ranks.rows(all_ranks)
    fleet.ranks.rows(all_ranks)
    assert [call.args[0].tolist() for call in running_on.call_args_list] == [
        [False, False, True, False],
        [True, True, True, True],
        [False, True, False, False],
        [False, True, False, False],
    ]
