"""Prefix caches of simulated prefillers, and the choices that use them."""

import random
from dataclasses import replace
from functools import cache

import pytest
from tests.extended import usually

from balanceroute.predictors import NoPrediction
from balanceroute.proxy.core.events import PrefillerId, RankId, RequestId
from balanceroute.proxy.core.policies import PolicySettings
from balanceroute.proxy.core.prefill import USING_LOADS, ScoreSettings
from balanceroute.proxy.lab.sim.driver import Handover, SimulatedDeployment
from balanceroute.proxy.lab.sim.engines import (
    DecodeFleet,
    EventLoop,
    PrefillFleet,
    PrefillJob,
    PrefillModel,
    PrefixCache,
)
from balanceroute.proxy.lab.sim.experiment import make_simulation
from balanceroute.proxy.lab.sim.recorder import RunMetrics
from balanceroute.proxy.lab.sim.workload import Workload
from balanceroute.traces import TraceRequest

SECOND = 10**9
BLOCK = 512
UNTIMED = {"dispatch_us_p50": 0.0, "dispatch_us_p99": 0.0}


def test_the_beginning_that_is_held_is_found() -> None:
    cache = PrefixCache(None, 10)
    assert cache.use((1, 2, 3), 35) == 0
    assert cache.use((1, 2, 3, 4), 45) == 30
    assert cache.use((1, 9, 3, 4), 45) == 10
    assert cache.use((8, 2, 3), 35) == 0


def test_only_full_blocks_are_held_and_the_last_token_is_computed() -> None:
    cache = PrefixCache(None, 10)
    cache.use((1, 2, 3), 29)
    assert cache.use((1, 2, 3), 31) == 20
    assert cache.use((1, 2, 3), 30) == 20
    assert cache.use((1, 2, 3), 31) == 30


def test_the_least_recently_used_go_first_of_a_prompt_its_end() -> None:
    cache = PrefixCache(4, 10)
    cache.use((1, 2, 3), 30)
    cache.use((7, 8), 20)
    assert cache.use((1, 2, 3), 31) == 20
    assert cache.use((7, 8), 21) == 10


def fleet(cache_tokens: int | None) -> list[tuple[int, int, int | None]]:
    """Return when each of four prompts was computed, in us, and what was cached of it."""
    loop = EventLoop()
    model = PrefillModel(2, 1_000, 1.0, cache_tokens, BLOCK)
    servers = PrefillFleet(model, loop)
    done: list[tuple[int, int, int | None]] = []
    for number, prefiller in enumerate((0, 0, 1, 0)):
        job = PrefillJob(
            RequestId(number),
            PrefillerId(prefiller),
            10 * BLOCK + 1,
            tuple(range(10)),
            lambda job: done.append((job.request, loop.now_ns, job.cached_tokens)),
        )
        servers.submit(job)
    loop.run(lambda: None)
    return done


def test_a_server_computes_in_turn_and_only_what_is_not_cached() -> None:
    assert fleet(None) == [
        (0, 6_121, None), (2, 6_121, None), (1, 12_242, None), (3, 18_363, None)
    ]  # fmt: skip
    # The second server has a cache of its own.
    assert fleet(10**6) == [(0, 6_121, 0), (2, 6_121, 0), (1, 7_122, 5_120), (3, 8_123, 5_120)]
    assert fleet(9 * BLOCK)[2:] == [(1, 7_634, 4_608), (3, 9_147, 4_608)]


def conversations(count: int, turns: int) -> list[TraceRequest]:
    """Return conversations whose turns come in any order of conversation."""
    rng = random.Random(3)
    requests = []
    for number in range(count):
        at = rng.uniform(0, 60)
        blocks = [0, *(1_000 * (number + 1) + place for place in range(60))]
        for turn in range(turns):
            length = 8 + 4 * turn
            requests.append(
                TraceRequest(
                    round(at * SECOND), length * BLOCK + 7, 20, tuple(blocks[: length + 1])
                )
            )
            at += rng.uniform(5, 15)
    return sorted(requests, key=lambda request: request.arrival_ns)


def played(
    choice: str,
    requests: list[TraceRequest],
    prefillers: int = 4,
    limits: ScoreSettings = ScoreSettings(),  # noqa: B008 - frozen.
) -> RunMetrics:
    deployment = SimulatedDeployment(
        8,
        64,
        step_base_ns=10_000_000,
        step_ns_per_token=20.0,
        prefill=PrefillModel(prefillers, 20_000_000, 50_000.0, 10**7, BLOCK),
        probe_limit=None,
        prefill_choice=choice,
        scores=limits,
    )
    workload = Workload(requests, [], rate=1.0)
    forecast = lambda *_: NoPrediction()  # noqa: E731
    return (
        make_simulation(deployment, workload, "br-0", PolicySettings(), forecast, seed="0")
        .run()
        .metrics()
    )


def test_prefix_aware_hits_as_often_as_one_prefiller_would_and_waits_less() -> None:
    requests = conversations(200, 5)
    alone = played("random", requests, prefillers=1).prefix_hit_fraction
    ours, blind, sticky = (
        played(choice, requests) for choice in ("prefix-aware", "fewest-tokens", "sticky")
    )
    assert alone > 0.6
    assert ours.prefix_hit_fraction > 0.95 * alone > 1.5 * blind.prefix_hit_fraction
    assert ours.ttft_s_p99 < 0.8 * min(blind.ttft_s_p99, sticky.ttft_s_p99)


def test_a_hot_prefix_overloads_no_prefiller_and_may_change() -> None:
    """Half of the traffic shares a prefix of 20k tokens; in the middle it is another one."""
    rng = random.Random(5)
    requests = []
    for number in range(2_400):
        hot = 1 if number < 1_200 else 2
        own = tuple(10**6 * (number + 1) + place for place in range(40))
        shared = tuple(10**5 * hot + place for place in range(40))
        blocks = (*shared, *own[:4]) if rng.random() < 0.5 else own[: rng.randint(4, 16)]
        requests.append(TraceRequest(number * SECOND // 16, BLOCK * len(blocks) + 9, 20, blocks))
    for part in (requests[:1_200], requests):
        metrics = played("prefix-aware", part)
        assert metrics.prefiller_peak < 1.1
        assert metrics.ttft_s_p99 < 3.0
        # Half of the prompts have 40 of their 44 blocks in common: most tokens of the trace.
        assert metrics.prefix_hit_fraction > 0.6


@pytest.mark.parametrize("choice", ["prefix-aware", "cache-aware", "lmetric", "sticky"])
def test_without_blocks_the_choices_still_work(choice: str) -> None:
    requests = [replace(request, hash_ids=()) for request in conversations(20, 3)]
    metrics = played(choice, requests)
    assert metrics.prefix_hit_fraction == 0.0
    assert metrics.prefill_tokens > 0


@pytest.mark.parametrize("choice", sorted(USING_LOADS))
def test_choices_by_score_are_told_of_the_load_by_scrapes(choice: str) -> None:
    requests = conversations(60, 4)
    scored, drawn = played(choice, requests), played("random", requests)
    assert scored.prefiller_peak < 1.3
    assert scored.ttft_s_p99 < drawn.ttft_s_p99


def test_the_weights_of_a_score_reach_the_simulated_choice() -> None:
    requests = conversations(60, 4)
    by_queue, by_cache = (
        played("s1-enhanced", requests, limits=ScoreSettings(s1_weights=weights))
        for weights in ((1.0, 0.0), (0.0, 1.0))
    )
    assert by_queue.ttft_s_p99 != by_cache.ttft_s_p99


def test_a_limit_to_the_share_evens_out_what_the_scores_draw() -> None:
    requests = conversations(60, 4)
    free, limited = (
        played("s2-enhanced", requests, limits=ScoreSettings(prefill_share_limit=share))
        for share in (None, 0.3)
    )
    assert limited.prefiller_peak < free.prefiller_peak


def test_a_rank_pulls_only_what_it_lacks() -> None:
    loop, model = EventLoop(), PrefillModel(1, 0, 0.0, None, BLOCK)
    fleet = DecodeFleet(ranks=2, batch_limit=4, step_base_ns=1, step_ns_per_token=0.0)
    way = Handover(
        fleet, loop, transfer_ns=(1_000, 2.0), prefill=model, cache_tokens=[5 * BLOCK, None]
    )
    short, long = (TraceRequest(0, n * BLOCK + 9, 8, tuple(range(n + 1))) for n in (3, 7))
    sent = [(short, 0, 0), (long, 0, 0), (long, 0, 7), (short, 1, 0), (long, 1, 0)]
    pulled = [
        way.send(RequestId(number), RankId(rank), traced, emitted=emitted, local=False)
        for number, (traced, rank, emitted) in enumerate(sent)
    ]
    # The first rank keeps five blocks, the second one none.
    lacked = [3 * BLOCK + 9, 4 * BLOCK + 9, 2 * BLOCK + 16, 3 * BLOCK + 9, 7 * BLOCK + 9]
    assert pulled == lacked
    assert way.send(RequestId(9), RankId(0), long, emitted=0, local=True) == 0
    joined: list[tuple[int, int]] = []
    loop.run(lambda: joined.extend((loop.now_ns, int(one)) for one in fleet.join()))
    by_time = sorted((1_000 + 2 * tokens, number) for number, tokens in enumerate(lacked))
    assert [one for one in joined if one[1] != 9] == by_time


@pytest.mark.parametrize("policy", usually({"br-h"}, ["br-0", "br-h"]))
@pytest.mark.parametrize(("rate", "more_idle"), [(1.2, 0.05), (6.0, 0.02)])
def test_the_price_returns_turns_and_keeps_the_balance(
    policy: str, rate: float, more_idle: float
) -> None:
    requests = conversations(120, 5)

    def run(price: float, cache: int | None) -> RunMetrics:
        deployment = SimulatedDeployment(
            4,
            8,
            prefill=PrefillModel(4, 20_000_000, 5_000.0, 10**7, BLOCK),
            probe_limit=None,
            transfer_base_ns=2_000_000,
            transfer_ns_per_token=1_000.0,
            rank_cache_tokens=cache,
        )
        settings = PolicySettings(prefix_affinity=price)
        forecast = lambda *_: NoPrediction()  # noqa: E731
        workload = Workload(requests, [], rate=rate)
        simulation = make_simulation(deployment, workload, policy, settings, forecast, seed="0")
        metrics = simulation.run().metrics()
        simulation.scheduler.check()
        return metrics

    alone, priced = run(0.0, 10**6), run(1.0, 10**6)
    assert 0.0 < priced.pulled_fraction < 0.8 * alone.pulled_fraction < 0.8
    assert priced.output_tokens_per_s > 0.99 * alone.output_tokens_per_s
    assert priced.idle_fraction < alone.idle_fraction + more_idle
    assert priced.hottest_rank < alone.hottest_rank + 0.05
    # Where ranks keep nothing there is nothing to choose by.
    assert replace(run(1.0, None), **UNTIMED) == replace(run(0.0, None), **UNTIMED)


@pytest.mark.parametrize(
    ("session", "home", "size", "lacked"),
    # The turn before had 3 blocks and 9 tokens, and emitted 2 blocks: 5 full ones.
    [("one", 0, 9, 2), ("", 0, 9, 4), ("one", 1, 9, 7), ("one", 0, 2, 7 - 2)],
)
def test_a_rank_has_the_answer_that_the_next_turn_repeats(
    session: str, home: int, size: int, lacked: int
) -> None:
    loop, model = EventLoop(), PrefillModel(1, 0, 0.0, None, BLOCK)
    fleet = DecodeFleet(ranks=2, batch_limit=4, step_base_ns=1, step_ns_per_token=0.0)
    way = Handover(
        fleet, loop, transfer_ns=(0, 0.0), prefill=model, cache_tokens=[size * BLOCK] * 2
    )
    pulled = 0
    for number, (blocks, rank) in enumerate(((3, home), (7, 0))):
        traced = TraceRequest(
            0, blocks * BLOCK + 9, 2 * BLOCK, tuple(range(blocks + 1)), session=session
        )
        pulled = way.send(RequestId(number), RankId(rank), traced, emitted=0, local=False)
    assert pulled == lacked * BLOCK + 9


# Ranks that compute short prompts: neither none nor all of them is better than where it pays.


LIMIT = 2_048
PREFILL = PrefillModel(4, 20_000_000, 50_000.0)


def mixed(short: float, load: float, requests: int) -> Workload:
    """Return requests of which a share has short prompts; the prefillers' utilisation is `load`."""
    rng = random.Random(f"{short} of {requests}")
    prompts = [
        rng.randint(50, 1_000) if rng.random() < short else rng.randint(3_000, 13_000)
        for _ in range(requests)
    ]
    gap_ns = sum(map(PREFILL.service_ns, prompts)) / requests / PREFILL.servers / load
    traced, now_ns = [], 0.0
    for prompt in prompts:
        now_ns += rng.expovariate(1.0 / gap_ns)
        output = 1 + min(2_000, int(rng.expovariate(1 / 200)))
        traced.append(TraceRequest(int(now_ns), prompt, output))
    return Workload(traced, [], rate=1.0)


@cache
def locally_played(short: float, limit: int | None, *, always: bool = False) -> RunMetrics:
    deployment = SimulatedDeployment(
        8,
        64,
        step_base_ns=10_000_000,
        step_ns_per_token=20.0,
        prefill=PREFILL,
        probe_limit=None,
        transfer_base_ns=2_000_000,
        transfer_ns_per_token=1_000.0,
        local_prefill_tokens=limit,
        local_prefill_always=always,
    )
    forecast = lambda *_: NoPrediction()  # noqa: E731
    simulation = make_simulation(
        deployment, mixed(short, 1.0, 1_500), "br-0", PolicySettings(), forecast, seed="0"
    )
    metrics = simulation.run().metrics()
    simulation.scheduler.check()
    return metrics


@pytest.mark.parametrize("short", usually({0.5}, [0.25, 0.5, 0.75]))
def test_the_rule_beats_none_and_all(short: float) -> None:
    never, rule = locally_played(short, None), locally_played(short, LIMIT)
    always = locally_played(short, LIMIT, always=True)
    assert rule.latency_s_mean < 1.01 * min(never.latency_s_mean, always.latency_s_mean)
    assert rule.ttft_s_p95 < 0.9 * never.ttft_s_p95
    assert rule.tpot_ms_p50 < 1.06 * never.tpot_ms_p50
    assert 0 < rule.local_prefills < always.local_prefills


@pytest.mark.parametrize("short", [0.0, 1.0])
def test_where_nothing_is_to_gain_nothing_is_lost(short: float) -> None:
    never, rule = locally_played(short, None), locally_played(short, LIMIT)
    assert rule.latency_s_mean < 1.01 * never.latency_s_mean
