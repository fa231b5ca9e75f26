"""Very many engines in one reading of a file: the proxy changes once, and serves on. In virtual time."""

import asyncio
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.support.site import Site, play
from tests.support.virtual.addresses import Connect, Link

from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.engines.instances import Target
from balanceroute.proxy.live.engines.pairing import Pairing

COMPLETIONS = "/v1/completions"
BODY = {"model": "tiny", "prompt": "a b c", "max_tokens": 4, "ignore_eos": True}
ENGINES = 40


def tell(path: Path, prefill: Iterable[str], decode: Iterable[str], more: str = "") -> None:
    lines = [f'[[prefill]]\nurl = "{url}"\n' for url in prefill]
    lines += [f'[[decode]]\nurl = "{url}"\n' for url in decode]
    path.write_text("".join(lines) + more)


class Counted:
    """How often the scheduler is configured, and all pairs are judged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.configured = self.judged = 0
        reconfigure, update = Scheduler.reconfigure, Pairing.update

        def configured(scheduler: Scheduler, *arguments: Any) -> None:
            self.configured += 1
            reconfigure(scheduler, *arguments)

        def judged(pairing: Pairing) -> None:
            self.judged += 1
            update(pairing)

        monkeypatch.setattr(Scheduler, "reconfigure", configured)
        monkeypatch.setattr(Pairing, "update", judged)

    def begin(self) -> None:
        """Count from zero."""
        self.configured = self.judged = 0


def flags(path: Path) -> dict[str, object]:
    return {"discover": [f"file:{path}"], "discover_interval_s": 0.5, "discover_hold_s": 1.0}


def found(site: Site) -> int:
    """Return how many ranks take requests."""
    return int(site.world.scheduler.ranks.open)


def engines(site: Site) -> list[Target]:
    return site.world.plane.deployment.roster.targets()


def test_a_reading_configures_the_scheduler_once_and_numbers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, counted = tmp_path / "engines.toml", Counted(monkeypatch)
    path.write_text("")

    async def scenario(site: Site) -> None:
        settings = EmulationSettings(prefillers=ENGINES, ranks=ENGINES, model="tiny")
        crowd = EmulatedFleet(settings, rng=random.Random(7))
        await crowd.start()
        for _ in range(3):
            counted.begin()
            tell(path, crowd.prefill_urls, crowd.decode_urls)
            await site.until(lambda: found(site) == ENGINES + 2)
            assert counted.configured == 1
            # Not once for each engine.
            assert counted.judged <= ENGINES / 2
            state = await site.state()
            assert len(state["ranks"]) == ENGINES + 2
            assert len(state["prefillers"]) == ENGINES + 1
            counted.begin()
            path.write_text("")
            await site.until(lambda: len(engines(site)) == 3)
            assert (counted.configured, found(site)) == (0, 2)
            assert counted.judged <= 4
            assert (await site.post(COMPLETIONS, BODY)).status == 200
        await crowd.close()

    play(scenario, prefillers=1, ranks=2, flags=flags(path))


def test_what_does_not_answer_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, counted = tmp_path / "engines.toml", Counted(monkeypatch)
    path.write_text("")

    async def scenario(site: Site) -> None:
        urls = [f"http://127.9.0.{number % 2 + 1}:{20_000 + number}" for number in range(200)]
        for number in range(200):
            site.loop.network.rule("127.9.0.1", 20_000 + number, Link(connect=Connect.HANG))
        await asyncio.sleep(1.0)  # The first probes of the others end.
        counted.begin()
        tell(path, urls[:100], urls[100:])
        for _ in range(20):
            await asyncio.sleep(1.0)
            assert (await site.post(COMPLETIONS, BODY)).status == 200
        state = await site.state()
        assert (len(state["ranks"]), len(state["prefillers"])) == (2, 1)
        assert (counted.configured, counted.judged) == (0, 0)
        path.write_text("")
        await asyncio.sleep(5.0)
        fetcher = site.world.plane.deployment.fetcher
        assert len(fetcher._endpoints) == 3

    play(scenario, prefillers=1, ranks=2, flags=flags(path))


@pytest.mark.parametrize("ranks", [1025, 9_000])
def test_a_server_of_too_many_ranks_is_left_out(tmp_path: Path, ranks: int) -> None:
    path = tmp_path / "engines.toml"

    async def scenario(site: Site) -> None:
        fleet = EmulatedFleet(EmulationSettings(ranks=2, model="tiny"), rng=random.Random(7))
        await fleet.start()
        large, other = fleet.decode_urls
        tell(path, [], [other], f'[[decode]]\nurl = "{large}"\nranks = {ranks}\n')
        await site.until(lambda: found(site) == 3)
        await asyncio.sleep(5.0)
        assert (await site.post(COMPLETIONS, BODY)).status == 200
        assert len((await site.state())["ranks"]) == 3
        await fleet.close()

    path.write_text("")
    play(scenario, prefillers=1, ranks=2, flags=flags(path))
