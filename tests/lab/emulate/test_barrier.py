"""Steps in the event loop's time: as long, as loaded and as full as the simulator's."""

import asyncio
import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.emulate.lab import COMPLETIONS, Lab, emulated
from tests.support.played import in_virtual_time
from tests.support.virtual.loop import VirtualLoop

from balanceroute.proxy.core.events import RankId, RequestId
from balanceroute.proxy.lab.emulate.barrier import PICTURE_STEPS, Barrier
from balanceroute.proxy.lab.emulate.settings import EmulationSettings, Preemption
from balanceroute.proxy.lab.sim.engines import DecodeFleet, SimulatedEngineOptions

STEP_S = 0.03


@dataclass(eq=False)
class Tokens:
    """A sequence that notes when it spoke."""

    kv_tokens: int
    tokens_left: int
    loop: VirtualLoop
    times_s: list[float] = field(default_factory=list)
    drops: int = 0

    def advance(self, *, more: bool = False) -> bool:
        self.times_s.append(self.loop.time())
        self.kv_tokens += 1
        self.tokens_left -= 1
        return self.tokens_left == 0

    def dropped(self) -> None:
        self.drops += 1


UNEVEN = SimulatedEngineOptions((1.0, 0.5), (3, 2), tokens_per_step=2.5, pause_above=0.2)


def simulated(
    settings: EmulationSettings, jobs: list[tuple[int, int, int]]
) -> tuple[list[list[int]], list[bool]]:
    """Return the end of each token in ns, by job, and who was dropped, of the simulator's fleet."""
    fleet = DecodeFleet(
        ranks=settings.ranks,
        batch_limit=settings.batch_limit,
        step_base_ns=settings.step_base_ns,
        step_ns_per_token=settings.step_ns_per_token,
        rank_kv_tokens=settings.rank_kv_tokens,
        options=settings.engines,
    )
    for number, (rank, kv_tokens, output_tokens) in enumerate(jobs):
        fleet.submit(
            RequestId(number), RankId(rank), kv_tokens=kv_tokens, output_tokens=output_tokens
        )
    times: list[list[int]] = [[] for _ in jobs]
    lost = [False] * len(jobs)
    running: set[int] = set()
    now_ns = 0
    while True:
        running |= set(fleet.join())
        if not running:
            return times, lost
        now_ns += fleet.begin_step()
        for number in running:
            times[number] += [now_ns] * fleet.emissions.get(RequestId(number), 1)
        finished, dropped = fleet.end_step()
        running -= {*finished, *dropped}
        for number in dropped:
            lost[number] = True


@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 5_000), st.integers(1, 8)), max_size=12
    ),
    kv=st.one_of(st.none(), st.integers(2_000, 9_000)),
    engines=st.sampled_from([SimulatedEngineOptions(), UNEVEN]),
)
@in_virtual_time(seed=0)
async def test_the_barrier_steps_as_the_simulated_fleet_does(
    loop: VirtualLoop,
    jobs: list[tuple[int, int, int]],
    kv: int | None,
    engines: SimulatedEngineOptions,
) -> None:
    settings = EmulationSettings(ranks=3, batch_limit=3, rank_kv_tokens=kv, engines=engines)
    barrier = Barrier(settings, ranks=3, rank_kv_tokens=kv)
    begin_s = loop.time()
    sequences = [Tokens(kv_tokens, output, loop) for _, kv_tokens, output in jobs]
    for sequence, (rank, _, _) in zip(sequences, jobs, strict=True):
        barrier.submit(sequence, rank)
    await asyncio.sleep(10.0)
    times, lost = simulated(settings, jobs)
    for sequence, times_ns in zip(sequences, times, strict=True):
        assert sequence.times_s == pytest.approx([begin_s + one / 1e9 for one in times_ns])
    assert [bool(sequence.drops) for sequence in sequences] == lost
    assert barrier.idle
    assert barrier.loads == [0, 0, 0]
    assert barrier.counters.output_tokens == sum(map(len, times))


@emulated(time_scale=10.0, max_model_len=4096)
async def test_a_step_takes_a_plus_b_times_the_largest_load_over_the_time_scale(lab: Lab) -> None:
    values = {"prompt": "t " * 1000, "max_tokens": 5, "ignore_eos": True, "stream": True}
    heavy = lab.send("decode/0", COMPLETIONS, values)
    await heavy.tokens(1)
    light = await lab.post("decode/1", COMPLETIONS, values | {"prompt": "a"})
    await heavy.end()
    times_s = heavy.times_s[:5]
    gaps_s = [after - before for before, after in pairwise(times_s)]
    # The rank with one word pays for the thousand of the other.
    expected = [(0.03 + 200e-9 * (1000 + age)) / 10 for age in range(1, 5)]
    assert gaps_s == pytest.approx(expected, rel=1e-6)
    assert light.times_s[:3] == pytest.approx(times_s[2:], abs=1e-4)


@emulated(batch_limit=2)
async def test_a_request_joins_between_steps_and_never_past_the_batch_limit(lab: Lab) -> None:
    values = {"prompt": "a b", "max_tokens": 4, "ignore_eos": True, "stream": True}
    all_of_them = [lab.send("decode/0", COMPLETIONS, values) for _ in range(5)]
    await all_of_them[0].tokens(2)
    stats = lab.fleet.stats()
    assert stats["running"] == [2, 0]
    assert stats["waiting"] == [3, 0]
    assert stats["loads"] == [2 * (2 + 2), 0]
    for exchanged in all_of_them:
        await exchanged.end()
    firsts = sorted({round(one.times_s[0], 3) for one in all_of_them})
    assert len(firsts) == 3


@emulated()
async def test_n_choices_take_n_slots(lab: Lab) -> None:
    values = {"prompt": "a b", "max_tokens": 4, "n": 3, "stream": True, "ignore_eos": True}
    exchanged = lab.send("decode/0", COMPLETIONS, values)
    await exchanged.tokens(1)
    assert lab.fleet.stats()["running"] == [3, 0]
    await exchanged.end()
    assert [len(exchanged.texts(index)) for index in range(3)] == [4, 4, 4]


@emulated()
async def test_the_counters_are_those_of_the_steps(lab: Lab) -> None:
    values = {"prompt": "t " * 100, "max_tokens": 3, "ignore_eos": True}
    await lab.post("decode/0", COMPLETIONS, values)
    stats = lab.fleet.stats()
    loads = [100, 101, 102]
    assert stats["steps"] == 3
    assert stats["idle_tokens"] == sum(loads)
    assert stats["capacity_tokens"] == 2 * sum(loads)
    assert stats["idle_fraction"] == 0.5
    assert stats["mean_imbalance_tokens"] == sum(loads) / 3
    assert stats["output_tokens"] == 3
    # The rank computes the prompt in the first step.
    assert stats["busy_s"] == pytest.approx(3 * STEP_S + 200e-9 * sum(loads) + 50e-6 * 100)
    assert stats["tokens_per_s"] == pytest.approx(3 / stats["busy_s"])
    assert stats["late_s"] == pytest.approx(0.0, abs=1e-9)
    picture = (await lab.get("prefill/0", "/emulation/stats/picture")).json
    assert picture == [[load, 0] for load in loads]
    lab.fleet.reset_stats()
    assert lab.fleet.stats()["steps"] == 0
    assert lab.fleet.picture() == []


@emulated()
async def test_the_picture_has_the_first_steps(lab: Lab) -> None:
    values = {"prompt": "t", "max_tokens": PICTURE_STEPS + 9, "ignore_eos": True}
    await lab.post("decode/0", COMPLETIONS, values)
    assert lab.fleet.picture() == [[1 + step, 0] for step in range(PICTURE_STEPS)]


def overflowing() -> dict[str, object]:
    return {"prompt": "t " * 40, "max_tokens": 30, "ignore_eos": True, "stream": True}


@emulated(rank_kv_tokens=100, preemption=Preemption.STOP)
async def test_an_overflow_ends_the_youngest_answer_with_recomputed(lab: Lab) -> None:
    first = lab.send("decode/0", COMPLETIONS, overflowing())
    second = lab.send("decode/0", COMPLETIONS, overflowing())
    await first.end()
    await second.end()
    assert first.reasons() == ("length", None)
    assert second.reasons() == ("stop", "recomputed")
    # 2 x (40 + 10) tokens fit, and the token of the step that overflows still comes.
    assert len([text for text in second.texts() if text]) == 11
    assert lab.fleet.stats()["preemptions"] == 1
    assert lab.fleet.idle


@emulated(rank_kv_tokens=100, preemption=Preemption.INTERNAL)
async def test_an_overflow_inside_an_engine_only_delays_the_answer(lab: Lab) -> None:
    alone = await lab.post("decode/1", COMPLETIONS, overflowing())
    first = lab.send("decode/0", COMPLETIONS, overflowing())
    second = lab.send("decode/0", COMPLETIONS, overflowing())
    await first.end()
    await second.end()
    assert first.text == second.text == alone.text
    assert second.reasons() == ("length", None)
    times_s = second.times_s
    pause_s = max(b - a for a, b in pairwise(times_s))
    assert pause_s > 10 * STEP_S
    page = (await lab.get("decode/0", "/metrics")).body
    assert b'vllm:num_preemptions_total{engine="0",model_name="tiny"} 1.0' in page


@in_virtual_time(seed=0)
async def test_a_process_that_slept_makes_up_for_a_second_and_no_more(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EmulationSettings(ranks=1, step_ns_per_token=0.0)
    barrier = Barrier(settings, ranks=1, rank_kv_tokens=None)
    sequence = Tokens(1, 400, loop)
    barrier.submit(sequence, 0)
    await asyncio.sleep(0.5 * STEP_S)
    call_at = loop.call_at
    begin_s = loop.time()

    def sleep_through(when: float, callback: Any, *arguments: Any, **more: Any) -> Any:
        if getattr(callback, "__self__", None) is barrier:
            monkeypatch.undo()
            when += 5.0
        return call_at(when, callback, *arguments, **more)

    monkeypatch.setattr(loop, "call_at", sleep_through)
    await asyncio.sleep(6.0)
    assert barrier.counters.late_s == pytest.approx(5.0)
    assert barrier.counters.total_late_s >= 5.0  # The steps behind it are late too.
    # Of six seconds it slept five, and four of them are lost.
    assert len(sequence.times_s) == pytest.approx((loop.time() - begin_s - 4.0) / STEP_S, abs=1)
    barrier.close()


@in_virtual_time(seed=0)
async def test_a_sequence_that_another_one_withdraws_speaks_no_more(loop: VirtualLoop) -> None:
    settings = EmulationSettings(ranks=1)
    barrier = Barrier(settings, ranks=1, rank_kv_tokens=None)
    victim = Tokens(1, 9, loop)

    class Killer(Tokens):
        def advance(self, *, more: bool = False) -> bool:
            barrier.withdraw(victim)
            return super().advance()

    barrier.submit(Killer(1, 3, loop), 0)
    barrier.submit(victim, 0)
    await asyncio.sleep(1.0)
    assert not victim.times_s
    assert barrier.counters.output_tokens == 3
    assert barrier.idle


@in_virtual_time(seed=0)
async def test_random_withdrawals_leave_nothing_behind(loop: VirtualLoop) -> None:
    settings = EmulationSettings(ranks=2, batch_limit=2, rank_kv_tokens=300)
    rng = random.Random(3)
    barrier = Barrier(settings, ranks=2, rank_kv_tokens=300)
    alive: list[Tokens] = []
    for _ in range(300):
        await asyncio.sleep(rng.random() * 0.02)
        if rng.random() < 0.5:
            alive.append(Tokens(rng.randrange(1, 150), rng.randrange(1, 20), loop))
            barrier.submit(alive[-1], rng.randrange(2))
        elif alive:
            sequence = alive.pop(rng.randrange(len(alive)))
            barrier.withdraw(sequence)
            spoken = len(sequence.times_s)
            await asyncio.sleep(0.05)
            assert len(sequence.times_s) == spoken
    await asyncio.sleep(100.0)
    assert barrier.idle
    assert barrier.loads == [0, 0]
    assert [barrier.waiting(0), barrier.running(1)] == [0, 0]
