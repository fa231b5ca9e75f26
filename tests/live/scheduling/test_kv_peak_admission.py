"""`--kv-peak-quantile` in a proxy before emulated ranks that preempt, with predictors that are wrong."""

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from tests.support.site import Site, play

from balanceroute.predictors import Survival
from balanceroute.proxy.live import deployment

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RequestId

MEAN = 60
REQUESTS = 60


class Wrong(Survival):
    """Says that every output is so many times as long as it is, whatever it has seen."""

    def __init__(self, factor: float) -> None:
        rng = random.Random(1)
        super().__init__(round(factor * rng.expovariate(1 / MEAN)) + 1 for _ in range(500))

    def observe(self, request: "RequestId", output_tokens: int) -> None:
        del request, output_tokens


@dataclass
class Seen:
    """What came of the requests."""

    preemptions: int = 0
    ok: int = 0
    last_s: float = 0.0


def seen_of(monkeypatch: pytest.MonkeyPatch, factor: float, quantile: float | None) -> Seen:
    """Send all at once, under a predictor that is wrong by a factor."""
    monkeypatch.setattr(deployment, "make_predictor", lambda _: Wrong(factor))
    seen = Seen()

    async def scenario(site: Site) -> None:
        rng = random.Random(2)
        begin_s = site.loop.time()
        exchanges = [
            site.send(
                "/v1/completions",
                {"model": "tiny", "prompt": [number + 1] * rng.randint(4, 30)}
                | {"stream": True, "max_tokens": 600},
            )
            for number in range(REQUESTS)
        ]
        await asyncio.gather(*(one.end() for one in exchanges))
        seen.last_s = site.loop.time() - begin_s
        seen.ok = sum(one.status == 200 and one.done for one in exchanges)
        seen.preemptions = site.fleet.stats()["preemptions"]

    flags = {"policy": "br-0", "batch": 16, "kv_peak_quantile": quantile, "pool_limit": 32}
    play(
        scenario,
        flags=flags | {"rank_kv_tokens": 640},
        rank_kv_tokens=640,
        batch_limit=16,
        block_tokens=16,
        mean_output_tokens=float(MEAN),
    )
    return seen


def test_a_wrong_predictor_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = seen_of(monkeypatch, 1.0, None)
    short, right, long = (seen_of(monkeypatch, factor, 0.99) for factor in (0.25, 1.0, 4.0))
    assert {one.ok for one in (plain, short, right, long)} == {REQUESTS}
    assert plain.preemptions > REQUESTS
    # Expected to be short, they preempt nearly as before; expected to be long, they wait.
    assert right.preemptions == long.preemptions == 0
    assert 0 < short.preemptions <= plain.preemptions
    assert right.last_s < 1.6 * plain.last_s
    assert right.last_s < long.last_s < 8 * plain.last_s
