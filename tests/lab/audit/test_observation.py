"""What pages of metrics say, and what an audit makes of too little."""

import math
import socket

import numpy as np
import pytest

from balanceroute.proxy.__main__ import main
from balanceroute.proxy.capacity import Bound, judge
from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.audit.observation import (
    LengthSums,
    Look,
    PageError,
    RankPage,
    fit_looks,
    observe,
    read_page,
)
from balanceroute.proxy.lab.audit.replica import AuditRecovery, Prediction, requests_like
from balanceroute.proxy.lab.audit.report import Audit, lines, lost_shares

VLLM = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="4000",num_gpu_blocks="9"} 1.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 70.0
vllm:generation_tokens_total{engine="1",model_name="m"} 80.0
# TYPE vllm:request_generation_tokens histogram
vllm:request_generation_tokens_bucket{engine="0",le="1.0",model_name="m"} 2.0
vllm:request_generation_tokens_bucket{engine="0",le="+Inf",model_name="m"} 5.0
vllm:request_generation_tokens_count{engine="0",model_name="m"} 5.0
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 44.0
"""
SGLANG = b"""sglang:num_running_reqs{model_name="m",dp_rank="1"} 2.0
sglang:num_queue_reqs{model_name="m",dp_rank="1"} 1.0
sglang:num_used_tokens{model_name="m",dp_rank="1"} 1234.0
sglang:generation_tokens_total{model_name="m",dp_rank="1"} 9.0
"""


def test_a_page_of_vllm_tells_each_rank() -> None:
    ranks = read_page(VLLM)
    assert {name: (one.running, one.kv_tokens, one.generated) for name, one in ranks.items()} == {
        "0": (3.0, 800.0, 70.0),
        "1": (4.0, 1000.0, 80.0),
    }
    assert ranks["0"].outputs == LengthSums({1.0: 2.0, float("inf"): 5.0}, 44.0)


def test_a_page_of_sglang_tells_its_tokens() -> None:
    (rank,) = read_page(SGLANG).items()
    assert rank[0] == "1"
    assert (rank[1].running, rank[1].waiting, rank[1].kv_tokens) == (2.0, 1.0, 1234.0)


@pytest.mark.parametrize(
    "page",
    [
        *(b"", b"<html>", b"other_metric 1\n", b"vllm:num_requests_running x\n"),
        *(VLLM.replace(b"} 4.0", word) for word in (b"} NaN", b"} +Inf", b"} -1", b"} 1e300")),
    ],
)
def test_other_pages_are_refused(page: bytes) -> None:
    with pytest.raises(PageError):
        read_page(page)


def looks(count: int, *, kv_tokens: float | None = 10.0) -> list[Look]:
    return [
        Look(float(i), {"a": RankPage(1.0, 0.0, kv_tokens, 30.0 * i)}, {}) for i in range(count)
    ]


def test_too_little_is_not_judged() -> None:
    with pytest.raises(ConfigError, match=r"19 looks .*, 20 the least: more --minutes"):
        observe(looks(19))
    with pytest.raises(ConfigError, match=r"a tells neither its KV tokens .*cache_config_info"):
        observe(looks(30, kv_tokens=None))
    with pytest.raises(ConfigError, match="nothing was decoded"):
        observe(looks(30, kv_tokens=0.0))
    with pytest.raises(ConfigError, match="fewer than 100 requests"):
        requests_like(LengthSums(), LengthSums({1.0: 99.0}, 99.0), 10, seed=0)


@pytest.mark.parametrize(("batch", "said"), [(1, False), (2, True)])
def test_who_gains_in_a_fleet_with_free_slots_is_said(batch: int, said: bool) -> None:
    seen = observe(looks(30), batch=batch)
    recovery = AuditRecovery(1, "jsq", (Prediction("br-h", 0.1, 30.0, 0.2, 0.01),))
    told = list(lines(Audit(seen, seen.verdict, recovery)))
    assert any("where arrivals do not depend on answers" in line for line in told) == said


def test_one_rank_waits_for_nobody() -> None:
    seen = observe(looks(30))
    assert (seen.idle, seen.imbalance_tokens, seen.output_tokens_per_s) == (0.0, 0.0, 30.0)
    assert seen.fit is None  # The loads are all the same.


def test_drawn_lengths_have_the_buckets_and_the_mean() -> None:
    prompts = LengthSums({10.0: 0.0, 100.0: 500.0, 1000.0: 1000.0}, 1000 * 180.0)
    outputs = LengthSums({50.0: 1000.0, float("inf"): 1000.0}, 1000 * 20.0)
    drawn = requests_like(prompts, outputs, 4000, seed=1)
    mean = sum(one.prompt_tokens for one in drawn) / 4000
    assert mean == pytest.approx(180, rel=0.01)
    assert sum(one.output_tokens for one in drawn) / 4000 == pytest.approx(20, rel=0.02)
    assert drawn == requests_like(prompts, outputs, 4000, seed=1)


def test_no_prompt_is_drawn_that_is_much_longer_than_any_was() -> None:
    """A few beyond the longest made BR-H idle 5 points more in a simulation than it does."""
    counts = {1000.0: 0.0, 5000.0: 994.0, 10_000.0: 994.0, 20_000.0: 1000.0, math.inf: 1000.0}
    lengths = LengthSums(counts, 2.54e6)
    drawn = requests_like(lengths, lengths, 4000, seed=1, longest_prompt=12_000.0)
    assert 11_000 < max(one.prompt_tokens for one in drawn) < 12_500  # All are scaled to the mean.
    assert max(one.output_tokens for one in drawn) > 18_000
    shorter = requests_like(lengths, lengths, 4000, seed=1, longest_prompt=9000.0)
    assert len({one.prompt_tokens for one in shorter if one.prompt_tokens > 6000}) == 1


@pytest.mark.parametrize(("every", "longest"), [(1, 8000.0 + 900.0), (10, math.inf)])
def test_the_longest_prompt_follows_from_looks_at_every_request(every: int, longest: float) -> None:
    """One of 9,000 tokens joins in the place of one of 1,000, and leaves 20 looks later."""
    found = []
    for number in range(400):
        kv_tokens = 8000.0 if number % 100 < 80 else 16_000.0
        ended = LengthSums({float("inf"): 0.4 * number}, 100.0 * number)
        page = RankPage(8.0, 0.0, kv_tokens, 30.0 * number, prompts=ended, outputs=ended)
        found.append(Look(float(number), {"a": page}, {}))
    mean = sum(look.decode["a"].kv_tokens or 0.0 for look in found[::every]) / len(found[::every])
    seen = observe(found[::every])
    if every == 1:
        assert seen.longest_prompt == pytest.approx(8000.0 + mean / 8.0)
    assert seen.longest_prompt == pytest.approx(longest, rel=0.05)


@pytest.mark.parametrize(("tells", "tokens"), [(True, 1000.0), (False, 900.0)])
def test_prefillers_take_as_long_as_for_what_they_ended(tells: bool, tokens: float) -> None:
    """Where prefill bounds the fleet, the ranks end other requests than the prefillers meanwhile."""
    found = []
    for number in range(100):
        prefilled = LengthSums(total=1000.0 * number if tells else 0.0)
        prefiller = RankPage(float(number % 2), 0.0, 5.0, prompts=prefilled)
        ended = LengthSums({math.inf: float(number)}, 900.0 * number)
        rank = RankPage(8.0, 0.0, 8000.0, 30.0 * number, prompts=ended, outputs=ended)
        found.append(Look(0.5 * number, {"d": rank}, {"p": prefiller, "q": RankPage(0.0, 0.0)}))
    # Half of the time one of the two is busy, for a look of 0.5 s.
    assert observe(found).prefill_ns_per_token == pytest.approx(0.5 * 0.5e9 / tokens)


@pytest.mark.parametrize(
    ("prefill_busy", "slots_share", "idle", "bound"),
    [
        (0.5, 0.99, 0.3, Bound.BARRIER),
        (0.5, 0.99, 0.03, Bound.DECODE),
        (0.95, 0.5, 0.3, Bound.PREFILL),
        (0.5, 0.5, 0.3, Bound.NOTHING),
        (None, 0.5, 0.3, Bound.NOTHING),
    ],
)
def test_what_bounds_a_fleet(
    prefill_busy: float | None, slots_share: float, idle: float, bound: Bound
) -> None:
    verdict = judge(
        prefillers=2, ranks=8, prefill_busy=prefill_busy, slots_share=slots_share, idle=idle
    )
    assert verdict.bound is bound
    if prefill_busy is not None:
        expected = 2 * prefill_busy / (8 * slots_share)
        assert verdict.prefillers_per_rank == pytest.approx(expected)


def test_energy_is_lost_while_ranks_wait() -> None:
    low, high = lost_shares(0.3, base_ms=10.0, step_ms=40.0)
    assert high == pytest.approx(0.3 * 0.75)  # A rank that polls draws all of its power.
    assert 0.0 < low < high
    assert lost_shares(0.0, base_ms=10.0, step_ms=40.0) == (0.0, 0.0)


# The line of the step time from looks that see two or three steps each.


BASE_MS, US_PER_TOKEN, RUNNING = 30.0, 5.0, 32.0
SECONDS, INTERVAL_S = 180.0, 0.25


def steps(rng: np.random.Generator) -> tuple[list[float], list[float]]:
    """Return when each step of a fleet ends, and the load of its fullest rank, which wanders."""
    ends, peaks, now_s, away = [], [], 0.0, 0.0
    while now_s < SECONDS:
        away = 0.99 * away + 0.141 * float(rng.normal())
        peaks.append(16_000 + 3_500 * away)
        now_s += BASE_MS / 1e3 + US_PER_TOKEN / 1e6 * peaks[-1]
        ends.append(now_s)
    return ends, peaks


@pytest.mark.parametrize("seed", range(5))
def test_looks_that_see_few_steps_do_not_bias_the_line(seed: int) -> None:
    """A quotient for each look made b 5 to 20 % too large, and so every gain that was predicted."""
    ends, peaks = steps(np.random.default_rng(seed))
    looks = np.arange(0.3, SECONDS - 1.0, INTERVAL_S)
    done = np.searchsorted(ends, looks)
    generated = (RUNNING * done).astype(np.float64)
    generated[200] = np.nan  # An engine did not tell it, and later one counts anew.
    generated[400:] -= generated[400]
    fit = fit_looks(looks, np.array(peaks)[done], np.full(len(looks), RUNNING), generated)
    assert fit is not None
    assert fit.us_per_token == pytest.approx(US_PER_TOKEN, rel=0.02)
    assert fit.base_ms == pytest.approx(BASE_MS, rel=0.05)
    assert fit.r2 > 0.95


def test_a_fleet_without_work_has_no_line() -> None:
    times = np.arange(100.0)
    nothing = np.zeros(100)
    assert fit_looks(times, nothing, nothing, nothing) is None
    assert fit_looks(times, np.full(100, 9.0), np.full(100, 4.0), 4.0 * times) is None


def test_engines_that_do_not_tell_their_tokens_have_no_line() -> None:
    times, loads = np.arange(100.0), np.full(100, 9.0)
    assert fit_looks(times, loads, loads, np.full(100, np.nan)) is None


# The command: faults of the user's input are one line.


def test_an_engine_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:  # Bound, and nobody listens.
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert main(["audit", "--decode", f"http://127.0.0.1:{port}", "--minutes", "0.1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(port) in line


def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--decode", "10.0.0.1"]) == 2
    assert "--decode is '10.0.0.1', must be http://host:port" in capsys.readouterr().err
