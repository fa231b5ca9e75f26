"""Replays against the emulated engines, in virtual time: both sides must tell the same story."""

import asyncio
import random
from typing import Any

import pytest
from tests.support.virtual.addresses import Link
from tests.support.virtual.runner import run

from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.lab.replay.driver import ReplayResult, replay
from balanceroute.proxy.lab.replay.figures import STEADY_STATE
from balanceroute.proxy.lab.replay.requests import PlannedRequest, ReplayApi, ReplaySettings

MS = 1_000_000


def replayed(
    requests: list[PlannedRequest], *, time_scale: float = 1.0, **settings: Any
) -> ReplayResult:
    """Replay against one decode rank that does its own prefills, steps of 40 ms."""

    async def main(_: asyncio.AbstractEventLoop) -> ReplayResult:
        machines = EmulationSettings(
            prefillers=0,
            ranks=1,
            batch_limit=8,
            step_base_ns=40 * MS,
            step_ns_per_token=0.0,
            prefill_base_ns=10 * MS,
            prefill_ns_per_token=0.0,
            time_scale=time_scale,
        )
        fleet = EmulatedFleet(machines, rng=random.Random(0))
        await fleet.start()
        (url,) = fleet.decode_urls
        try:
            return await replay(
                ReplaySettings(target=url, emulation=url, time_scale=time_scale, **settings),
                requests,
            )
        finally:
            await fleet.close()

    return run(main, seed=0, link=Link(latency_s=0.0))


def requests(count: int, *, prompt: int = 700, output: int = 20) -> list[PlannedRequest]:
    return [PlannedRequest(number, 100 * MS * number, prompt, output) for number in range(count)]


@pytest.mark.parametrize(
    ("api", "added"),
    [
        (ReplayApi.COMPLETIONS, 0),
        *((api, 4) for api in (ReplayApi.CHAT, ReplayApi.MESSAGES, ReplayApi.RESPONSES)),
    ],
)
def test_the_engine_counts_the_tokens_that_were_asked(api: ReplayApi, added: int) -> None:
    planned = [PlannedRequest(i, 0, 1 + 511 * i, 1 + i, (3, 1, 4)[: i - 1]) for i in range(5)]
    figures = replayed(planned, api=api).figures
    assert (figures.finished, figures.wrong_lengths, figures.uneven_events) == (5, 0, 0)
    assert figures.prompt_tokens_asked == sum(1 + 511 * i for i in range(5))
    assert figures.prompt_tokens == figures.prompt_tokens_asked + 5 * added
    assert figures.output_tokens == 1 + 2 + 3 + 4 + 5


@pytest.mark.parametrize("time_scale", [1.0, 50.0])
def test_the_client_sees_the_engines_steps_in_the_engines_time(time_scale: float) -> None:
    result = replayed(requests(60), time_scale=time_scale)
    figures = result.figures
    assert figures.window == STEADY_STATE
    assert figures.errors == 0
    assert figures.itl_ms_p99 == pytest.approx(40.0)
    assert figures.tpot_ms_p95 == pytest.approx(40.0)
    assert figures.request_rate == pytest.approx(10.0, rel=0.02)
    assert figures.output_tokens_per_s == pytest.approx(200.0, rel=0.02)
    assert result.fleet is not None
    assert result.fleet.idle_fraction == 0.0
    # Steps fill the window.
    assert result.fleet.steps == pytest.approx(figures.duration_s / 0.040, abs=1.0)


def test_closed_loop_saturates_the_engine() -> None:
    figures = replayed(requests(80), concurrency=8).figures
    assert figures.errors == 0
    # The rank computes a prompt in a step that has not begun when it comes: 21 steps for 20 tokens.
    assert figures.output_tokens_per_s == pytest.approx(8 / 0.040 * 20 / 21, rel=0.02)
