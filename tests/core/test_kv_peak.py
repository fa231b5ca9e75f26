"""The room of a rank under the expected peak of its KV tokens: against simulation, and by hand."""

import random
from dataclasses import dataclass
from itertools import product
from math import log1p

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from balanceroute.predictors import NoPrediction, Oracle, Predictor, Survival
from balanceroute.proxy.core.events import RankId, RequestId, Ticket
from balanceroute.proxy.core.policies import PolicyInputs, PolicySettings, make_policy
from balanceroute.proxy.core.policies.within_peak import PeakRoom, Residents, WithinPeak
from balanceroute.proxy.core.queueing import Fcfs
from balanceroute.proxy.core.ranks import Ledger
from balanceroute.proxy.core.waiting import Pool, PoolEntry
from balanceroute.proxy.lab.sim.driver import SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import PrefillModel
from balanceroute.proxy.lab.sim.experiment import FORECASTS, make_simulation
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

ALL = np.ones(1, np.bool_)


def entry(number: int, prompt_tokens: int, *, slots: int = 1) -> PoolEntry:
    ticket = Ticket(prompt_tokens, slots=slots)
    return PoolEntry(RequestId(number), ticket, prompt_tokens, 0, None, None, None)


@dataclass
class Rank:
    """One rank of 10,000 KV tokens, and the pool before it."""

    predictor: Predictor
    quantile: float = 0.5  # The mean: an end between two points of the grid is in doubt.

    def __post_init__(self) -> None:
        self.residents = Residents(1, None)
        self.ledger = Ledger(1, self.residents)
        self.pool = Pool(Fcfs())
        self.peak = PeakRoom(
            self.residents, self.predictor, capacity=10_000, quantile=self.quantile
        )

    def run(self, number: int, kv_tokens: int, *, age: int = 0) -> None:
        """Let a request run that holds `kv_tokens`."""
        self.ledger.bind(RequestId(number), RankId(0), kv_tokens, age=age)
        self.ledger.start(RequestId(number))

    def room(self, *numbers: int) -> int:
        entries = [entry(number, 1) for number in numbers]
        return int(self.peak.of_ranks(ALL, entries, self.pool)[0])


def oracle(*outputs: int) -> Oracle:
    return Oracle({RequestId(number): tokens for number, tokens in enumerate(outputs)})


def test_an_empty_rank_has_room_for_what_grows_within_its_memory() -> None:
    # The newcomer holds w + h until it ends, somewhere between two points of the grid.
    assert Rank(oracle(1000)).room(0) == pytest.approx(9_000, abs=130)


def test_a_request_that_ends_soon_leaves_its_room_to_one_that_grows_later() -> None:
    """Held now 6,000, and in 100 steps 1,000 more: the newcomer then grows into what was freed."""
    rank = Rank(oracle(100, 1000))
    rank.room(0)
    rank.run(0, 6_000)
    # What both grow until the end, a hundred tokens each, may fall between two points of the grid.
    assert rank.room(1) == pytest.approx(3_900, abs=101)
    stays = Rank(oracle(1000, 1000))
    stays.room(0)
    stays.run(0, 6_000)
    assert stays.room(1) == pytest.approx(2_100, abs=101)


def test_a_known_end_needs_no_margin_and_a_doubtful_one_does() -> None:
    rooms = {}
    for quantile in (0.5, 0.99):
        for name, predictor in (
            ("known", oracle(*[400] * 12)),
            ("doubtful", Survival(range(10, 800, 10))),
        ):
            rank = Rank(predictor, quantile)
            rank.room(*range(11))
            for number in range(10):
                rank.run(number, 500)
            rooms[name, quantile] = rank.room(11)
    assert rooms["known", 0.99] == pytest.approx(rooms["known", 0.5], abs=50)
    assert rooms["doubtful", 0.99] < rooms["doubtful", 0.5] - 500


def test_time_that_passes_makes_room_only_by_departures() -> None:
    rank = Rank(oracle(400, 400, 400))
    rank.room(0, 1)
    rank.run(0, 3_000)
    rank.run(1, 3_000)
    before = rank.room(2)
    for _ in range(200):
        rank.ledger.step()
    # Both hold 200 more, and will grow by 200 less.
    assert rank.room(2) == pytest.approx(before + 200, abs=120)
    rank.ledger.unbind(RequestId(0))
    assert rank.room(2) > before + 3_000


def test_an_admission_leaves_the_room_that_the_next_one_has() -> None:
    """Admitted within a round, and seen by the ledger after it: the same."""
    survival = Survival(range(20, 900, 7))
    rank = Rank(survival)
    rank.room(0, 1, 2)
    rank.run(0, 2_000)
    rank.room(1, 2)
    within = rank.peak.admit(0, entry(1, 1_500))
    rank.ledger.bind(RequestId(1), RankId(0), 1_500)
    assert rank.room(2) == pytest.approx(within, abs=40)


def test_several_sequences_grow_by_as_many_tokens() -> None:
    one, four = Rank(oracle(500, 500)), Rank(oracle(500, 500))
    rooms = []
    for rank, slots in ((one, 1), (four, 4)):
        rank.room(0, 1)
        rooms.append(rank.peak.admit(0, entry(0, 4_000 // slots, slots=slots)))
    assert rooms[0] - rooms[1] == pytest.approx(3 * 500, abs=200)


@given(
    outputs=st.lists(st.integers(1, 2_000), min_size=8, max_size=40),
    holds=st.lists(st.integers(1, 6_000), min_size=1, max_size=8),
    quantile=st.sampled_from([0.5, 0.9, 0.999]),
)
def test_the_largest_newcomer_just_fits(
    outputs: list[int], holds: list[int], quantile: float
) -> None:
    """The closed form against the bound by its definition, and the bound against all outcomes."""
    rank = Rank(Survival(outputs), quantile)
    rank.room(*range(len(holds) + 1))
    for number, kv_tokens in enumerate(holds):
        rank.run(number, kv_tokens)
    room, peak = rank.room(len(holds)), rank.peak
    steps = peak._width * np.arange(len(peak._newcomer))
    # None of them has emitted anything, so that all survive alike.
    runs = np.clip(peak._newcomer, 0.0, 1.0)

    def risks(held: list[int]) -> NDArray[np.float64]:
        """Return the least bound of log Pr[L > C] at each point, -inf where all may stay."""
        grown = np.array(held)[:, None] + steps
        growth = np.expm1(peak._tilts[:, None, None] * grown)
        bounds = np.log1p(runs * growth).sum(axis=1) - 10_000 * peak._tilts[:, None]
        least: NDArray[np.float64] = bounds.min(axis=0)
        return np.where(grown.sum(axis=0) <= 10_000, -np.inf, least)

    assert room >= 0
    if room:
        assert (risks([*holds, room]) <= log1p(-quantile) + 1e-9).all()
        assert likeliest_overflow([*holds, room], steps, runs) <= 1.0 - quantile + 1e-9
    assert (risks([*holds, room + 1]) > log1p(-quantile) - 1e-9).any()


def likeliest_overflow(
    held: list[int], steps: NDArray[np.int64], runs: NDArray[np.float64]
) -> float:
    """Return the largest probability at any point that those that run hold more than 10,000."""
    grown = np.array(held)[:, None] + steps
    overflow = np.zeros(len(steps))
    for stay in product((False, True), repeat=len(held)):
        chosen = np.array(stay)[:, None]
        probability = np.where(chosen, runs, 1.0 - runs).prod(axis=0)
        overflow += probability * ((grown * chosen).sum(axis=0) > 10_000)
    return float(overflow.max())


def test_no_memory_is_asked_of_a_predictor_that_expects_no_end() -> None:
    rank = Rank(NoPrediction())
    for _ in range(5):
        assert rank.room(0) >= 0
    assert rank.peak._width * 93 <= 1 << 15


def test_without_a_capacity_or_a_slot_limit_the_policy_is_as_it_was() -> None:
    settings = PolicySettings(kv_peak_quantile=0.99)
    parts = PolicyInputs(2, 4, settings, random.Random(0), NoPrediction())
    assert not isinstance(make_policy("fifo", parts), WithinPeak)
    parts = PolicyInputs(2, 4, settings, random.Random(0), NoPrediction(), rank_kv_tokens=99)
    assert isinstance(make_policy("fifo", parts), WithinPeak)
    assert not isinstance(make_policy("jsq", parts), WithinPeak)


class Stretched:
    """Says that every output is so many times as long as another predictor does."""

    def __init__(self, inner: Predictor, factor: float) -> None:
        self._inner = inner
        self._factor = factor
        self.begin, self.observe, self.forget = inner.begin, inner.observe, inner.forget

    def survival(self, requests, ages, steps):  # type: ignore[no-untyped-def]
        most = int(steps / self._factor) + 1
        known = self._inner.survival(requests, (ages / self._factor).astype(np.int64), most)
        return known[:, (np.arange(steps + 1) / self._factor).astype(np.int64)]


def workload(size: int = 500) -> Workload:
    """Requests whose outputs are long beside their prompts."""
    rng = random.Random(3)
    requests = [
        TraceRequest(0, rng.randint(5, 60), min(900, 1 + round(rng.expovariate(1 / 120))))
        for _ in range(2 * size)
    ]
    return Workload(requests[size:], requests[:size], backlog=24)


DEPLOYMENT = SimulatedDeployment(
    2,
    24,
    step_base_ns=1_000_000,
    rank_kv_tokens=2_400,
    recompute_ns_per_token=50_000.0,
    prefill=PrefillModel(2, 100_000, 0.0),
)


def figures(policy: str, quantile: float | None, factor: float = 1.0) -> tuple[float, float]:
    """Return the preemptions per request, and the tokens per second."""
    load = workload()
    settings = PolicySettings(kv_peak_quantile=quantile)
    simulation = make_simulation(
        DEPLOYMENT,
        load,
        policy,
        settings,
        lambda one, two: Stretched(FORECASTS["survival"](one, two), factor),
        seed="0",
    )
    recorder = simulation.run()
    simulation.scheduler.check()
    metrics = recorder.metrics()
    assert recorder.ended == len(load.requests)
    return metrics.recomputes / metrics.requests, metrics.output_tokens_per_s


@pytest.mark.parametrize("policy", ["fifo", "br-0", "br-h"])
def test_ranks_that_would_preempt_do_so_hardly_ever_and_answer_more(policy: str) -> None:
    preempted, output = figures(policy, None)
    hardly, more = figures(policy, 0.99)
    assert preempted > 1.0
    assert hardly < 0.03 * preempted
    assert more > 1.1 * output


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_wrong_predictor_costs_output_and_blocks_nothing(factor: float) -> None:
    preempted, output = figures("br-0", None)
    wrong, less = figures("br-0", 0.99, factor)
    assert wrong <= preempted
    # At 4 the longest answer alone would fill a rank.
    assert less > 0.1 * output
