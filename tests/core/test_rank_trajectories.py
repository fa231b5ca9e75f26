"""The kept sums of the ranks' trajectories, against a recount request by request."""

import random
from unittest.mock import Mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import Oracle, Survival
from balanceroute.proxy.core.curves import POINTS, Curves, Slots
from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.core.policies.own_trajectory import RankTrajectories
from balanceroute.proxy.core.prediction import OutputPredictor
from balanceroute.proxy.core.projection import Form, Projection

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
