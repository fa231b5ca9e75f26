"""A whole proxy whose engines come and go at an API server, while clients ask. In virtual time."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.extended import usually
from tests.live.discovery.api_server import ApiServer, endpoint, slice_of
from tests.support.played import played_by
from tests.support.site import Site, play
from tests.support.virtual.addresses import Connect, Link

from balanceroute.proxy.core.scheduler import Scheduler
from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.settings import EmulationSettings
from balanceroute.proxy.live.control.order_store import OrderStore
from balanceroute.proxy.live.engines.instances import Target
from balanceroute.proxy.live.engines.pairing import Pairing
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.proxy import Proxy
from balanceroute.proxy.live.settings.configure import make_config

COMPLETIONS = "/v1/completions"
Body = Callable[["Scene"], Awaitable[None]]


class Scene:
    """An API server, and a proxy that finds the engines of a site there.

    All engines have one address and differ in their ports, so each has a slice of its own.
    """

    def __init__(self, site: Site, folder: Path, keeper: OrderStore | None = None) -> None:
        self.site, self.folder, self.keeper = site, folder, keeper
        self.api = ApiServer()
        self.listed: dict[str, bool] = {}  # Whether each terminates.
        self.proxy: Proxy

    async def start_proxy(self, **flags: Any) -> None:
        settings = {
            "host": "127.0.0.1",
            "port": 0,
            "admin": False,
            "log": "none",
            "discover": ["kubernetes:app=x@serving"],
            "kubernetes_api": self.api.url,
            "kubernetes_account": str(self.folder),
            "queue_ttl_s": 60.0,
        }
        environment = Environment(
            log=self.site.world,
            rng=random.Random(3),
            unix_s=self.site.loop.time,
            stopwatch=self.site.loop.time,
            uptime_s=self.site.loop.time,
            orders=self.keeper,
        )
        self.proxy = Proxy(make_config(None, settings | flags), environment)
        await self.proxy.start()

    async def stop_proxy(self) -> None:
        await self.proxy.drain()
        await self.proxy.close()

    def show(self, engine: str, *, terminating: bool = False) -> None:
        """List an engine."""
        role, _, number = engine.partition("/")
        host, port = "127.0.0.1", self.site.fleet.engine(engine).port
        entry = endpoint(host, ready=not terminating, terminating=terminating)
        self.api.put(slice_of(f"{role}-{number}", role, [entry], port=port))
        self.listed[engine] = terminating

    def hide(self, engine: str) -> None:
        """List it no more."""
        self.api.delete(engine.replace("/", "-"))
        del self.listed[engine]

    def registered(self) -> set[str]:
        """Return the URLs of the engines that get requests."""
        instances = self.proxy.deployment.instances
        urls = {one.target.url for one in instances.prefillers if one.open}
        return urls | {one.target.url for one in instances.ranks if one.open}

    async def all_registered(self) -> None:
        """Wait until the engines that are listed are those that get requests."""
        wanted = {
            self.site.fleet.engine(one).url for one, leaves in self.listed.items() if not leaves
        }
        await self.site.until(lambda: self.registered() == wanted)

    async def ask(self, number: int, *, max_tokens: int = 20) -> None:
        """Ask once; the answer must be right."""
        body = {
            "model": "tiny",
            "prompt": f"t{number} u",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": number % 2 == 0,
        }
        answer = await self.site.send(COMPLETIONS, body, port=self.proxy.server.port).end()
        assert answer.status == 200, answer.body
        assert answer.error is None
        alone = await self.site.ask("decode/0", COMPLETIONS, body)
        assert answer.text == alone.text


def stage(scenario: Body, *, keeper: OrderStore | None = None, **engines: Any) -> None:
    """Play a scenario with such a proxy, which is at rest in the end."""

    async def run(site: Site) -> None:
        with TemporaryDirectory() as folder:
            scene = Scene(site, Path(folder), keeper)
            await scene.api.start()
            await scene.start_proxy()
            await scenario(scene)
            driver = scene.proxy.deployment.driver
            await site.until(lambda: not driver.sessions)
            driver.scheduler.check()
            assert not any(driver.scheduler.prefillers.held_tokens)
            await scene.stop_proxy()
            await scene.api.close()

    play(run, **{"prefillers": 3, "ranks": 4} | engines)


staged = played_by(stage)


@staged()
async def test_engines_register_by_themselves_and_requests_wait_for_them(scene: Scene) -> None:
    port = scene.proxy.server.port
    assert (await scene.site.send("/ready", method="GET", port=port).end()).status == 503
    page = scene.proxy.metrics.render().decode()
    assert "balanceroute_rank_open{" not in page
    assert "balanceroute_prefiller_open{" not in page
    for engine in ("prefill/0", "decode/0", "decode/1"):
        scene.show(engine)
    await scene.all_registered()
    await scene.ask(1)
    assert (await scene.site.send("/ready", method="GET", port=port).end()).status == 200


@staged()
async def test_an_engine_that_ends_finishes_its_streams_and_gets_nothing_new(scene: Scene) -> None:
    for engine in ("prefill/0", "decode/0", "decode/1"):
        scene.show(engine)
    await scene.all_registered()
    asked = [asyncio.create_task(scene.ask(number, max_tokens=400)) for number in range(6)]
    await scene.site.until(lambda: len(scene.site.received("decode")) >= 6)
    scene.show("decode/1", terminating=True)
    await scene.all_registered()
    before = len(scene.site.received("decode/1"))
    later = [asyncio.create_task(scene.ask(number)) for number in range(6, 12)]
    await asyncio.gather(*asked, *later)
    assert len(scene.site.received("decode/1")) == before > 0
    # Then it is forgotten.
    url = scene.site.fleet.engine("decode/1").url
    roster = scene.proxy.deployment.roster
    await scene.site.until(lambda: all(one.url != url for one in roster.targets()))
    # Alerts on ranks that are closed would never end.
    page = scene.proxy.metrics.render().decode().splitlines()
    assert not [one for one in page if one.startswith("balanceroute_rank_open{") and url in one]


@staged(keeper=OrderStore())
async def test_the_roster_is_kept_over_a_restart_while_the_api_server_is_down(scene: Scene) -> None:
    for engine in ("prefill/0", "prefill/1", "decode/0", "decode/1"):
        scene.show(engine)
    await scene.all_registered()
    before = scene.registered()
    scene.api.failure = 503
    await scene.stop_proxy()
    await scene.start_proxy()
    assert scene.registered() == before
    await asyncio.sleep(60.0)
    await scene.ask(2)
    # What went meanwhile is drained once the server says so.
    scene.hide("decode/1")
    scene.api.failure = 0
    await scene.all_registered()
    await scene.ask(3)
    # An administrator changes other settings: what was found stays.
    await scene.stop_proxy()
    await scene.start_proxy(policy="jsq")
    assert scene.proxy.deployment.policy == "jsq"
    await scene.all_registered()


@staged()
async def test_without_what_was_kept_nothing_is_registered_while_the_api_server_is_down(
    scene: Scene,
) -> None:
    scene.show("decode/0")
    await scene.site.until(lambda: len(scene.registered()) == 1)
    scene.api.failure = 503
    await scene.stop_proxy()
    await scene.start_proxy()
    await asyncio.sleep(10.0)
    assert scene.registered() == set()


async def history(scene: Scene, seed: int) -> None:
    """Play a random history of engines and of the API server, while clients ask."""
    rng = random.Random(seed)
    engines = [f"prefill/{number}" for number in range(3)]
    engines += [f"decode/{number}" for number in range(4)]
    kept = {"prefill/0", "decode/0"}  # So that there always is one of each.
    for engine in sorted(kept | set(rng.sample(engines, 3))):
        scene.show(engine)
    await scene.all_registered()
    asked = []

    def change() -> None:
        engine = rng.choice([one for one in engines if one not in kept])
        if engine not in scene.listed:
            scene.show(engine)
        elif rng.random() < 0.4:
            scene.show(engine, terminating=True)
        else:
            scene.hide(engine)

    steps: list[Callable[[], None]] = [
        *[change] * 6,
        scene.api.bookmark,
        scene.api.expire,
        scene.api.forget,
        scene.api.end_watches,
        lambda: scene.api.end_watches(broken=True),
        lambda: setattr(scene.api, "failure", rng.choice([0, 0, 410, 429, 500, 503])),
        lambda: setattr(scene.api, "page_items", rng.choice([1, 2, 500])),
    ]
    for number in range(24):
        rng.choice(steps)()
        max_tokens = rng.choice([1, 10, 100])
        asked.append(asyncio.create_task(scene.ask(number, max_tokens=max_tokens)))
        await asyncio.sleep(rng.choice([0.0, 0.05, 1.0, 6.0]))
    scene.api.failure = 0
    await asyncio.gather(*asked)
    await scene.all_registered()


@pytest.mark.parametrize("seed", usually(range(5), range(20)))
@staged()
async def test_no_request_is_lost_whatever_comes_and_goes(scene: Scene, seed: int) -> None:
    await history(scene, seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20, 520, 20))
def test_no_request_is_lost_in_500_histories(block: int) -> None:
    for seed in range(block, block + 20):

        async def scenario(scene: Scene, seed: int = seed) -> None:
            await history(scene, seed)

        stage(scenario)


@staged(keeper=OrderStore())
async def test_what_is_found_while_a_new_version_starts_is_found_by_it_too(scene: Scene) -> None:
    for engine in ("prefill/0", "prefill/1", "decode/0"):
        scene.show(engine)
    await scene.all_registered()
    assert scene.keeper is not None
    told = scene.keeper.content()  # What it begins with.
    scene.show("decode/1")
    scene.hide("prefill/1")
    await scene.all_registered()
    scene.keeper = OrderStore(handed_over=told)
    await scene.stop_proxy()
    await scene.start_proxy()
    await scene.all_registered()
    await scene.ask(2)


# Very many engines in one reading of a file: the proxy changes once, and serves on. In virtual time.


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
