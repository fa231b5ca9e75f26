"""Decode ranks that stand still under streams while others step, and fleets that stand still as a whole."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.site import Exchanged, Site, play, served
from tests.support.virtual.addresses import Link

from balanceroute.proxy.core.steps import FLOOR_S
from balanceroute.proxy.lab.emulate.settings import DpMode
from balanceroute.proxy.live.engines.instances import Rank, Status
from balanceroute.proxy.live.scheduling import progress_veto

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.live.scheduling.progress_veto import ProgressVeto


CHAT = "/v1/chat/completions"
FLEET: dict[str, Any] = {"ranks": 3, "batch_limit": 8, "step_base_ns": 50_000_000}
WARM_S = 6.0
EXACT = {"resume": "exact", "batch": 8}
OFF = {"batch": 8}


def talk(number: int, tokens: int = 400, **more: object) -> dict[str, Any]:
    text = f"question {number} of many"
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        **more,
    }


@dataclass
class Streams:
    """Streams of a site, and how long each was silent."""

    site: Site
    open: "list[Exchanged]" = field(default_factory=list)  # What was sent.
    gaps_s: list[float] = field(default_factory=list)  # The longest silence of each so far.
    _seen: list[tuple[int, float]] = field(default_factory=list)

    def send(self, count: int, tokens: int = 400, path: str = CHAT, **more: object) -> None:
        for _ in range(count):
            body = talk(len(self.open), tokens, **more)
            if path != CHAT:
                del body["ignore_eos"]
            self.open.append(self.site.send(path, body))
            self.gaps_s.append(0.0)
            self._seen.append((0, self.site.loop.time()))

    async def go_on(self, seconds: float) -> None:
        """Watch for so long."""
        end_s = self.site.loop.time() + seconds
        while self.site.loop.time() < end_s:
            await asyncio.sleep(0.05)
            self.look()

    def look(self) -> None:
        now_s = self.site.loop.time()
        for place, stream in enumerate(self.open):
            count, since_s = self._seen[place]
            if len(stream.events) != count or stream.over:
                self._seen[place] = len(stream.events), now_s
            else:
                self.gaps_s[place] = max(self.gaps_s[place], now_s - since_s)

    async def end(self) -> None:
        """Wait for the ends, each of which has to be a whole answer."""
        for stream in self.open:
            await stream.end()
            assert stream.done, (stream.status, stream.error, stream.events[-2:])


def ranks(site: Site) -> list[Rank]:
    return site.world.plane.deployment.instances.ranks


def sessions(site: Site) -> "list[Session]":
    """Return the live ones."""
    driver = site.world.plane.deployment.driver
    return list(driver.sessions.values())


def bound(site: Site) -> list[int]:
    return [int(one) for one in site.world.scheduler.ledger.bound]


def veto(site: Site) -> "ProgressVeto":
    return site.world.plane.deployment.driver.veto


async def until_out(site: Site, streams: Streams, number: int, limit_s: float) -> float:
    """Return after how long a rank is out."""
    begin_s = site.loop.time()
    while not ranks(site)[number].still:
        await streams.go_on(0.05)
        assert site.loop.time() - begin_s < limit_s, "it is not left out"
    return site.loop.time() - begin_s


def freeze(site: Site, number: int, how: str) -> None:
    engine = site.fleet.engine(f"decode/{number}")
    if how == "process":
        site.loop.network.silence(engine.host, engine.port)
    else:
        site.fleet.faults.set(engine.name, frozen=how)


def thaw(site: Site, number: int) -> None:
    engine = site.fleet.engine(f"decode/{number}")
    site.loop.network.restore(engine.host, engine.port)
    site.fleet.faults.set(engine.name, frozen=None)


@pytest.mark.parametrize("how", ["alone", "process"])
@served(flags=EXACT, **FLEET)
async def test_a_frozen_rank_is_out_within_three_seconds_and_its_streams_go_on(
    site: Site, how: str
) -> None:
    right = [await site.ask("decode/0", CHAT, talk(number)) for number in range(9)]
    streams = Streams(site)
    streams.send(9)
    await streams.go_on(WARM_S)
    started = int(site.world.scheduler.ledger.started[1])
    assert started
    freeze(site, 1, how)
    assert await until_out(site, streams, 1, 3.0) <= 3.0
    assert ranks(site)[1].state == "still"
    assert not ranks(site)[1].open
    streams.send(3, 40)
    await streams.end()
    assert max(streams.gaps_s) <= 5.0
    assert [one.text for one in streams.open[:9]] == [one.text for one in right]
    ended = await site.ended(12)
    assert sum(record.resumes for record in ended) == started
    # Those that came since were not sent there, but for one that tried it.
    assert sum(record.retries for record in ended) <= 1
    thaw(site, 1)


@served(flags=OFF, **FLEET)
async def test_a_stream_that_cannot_go_on_elsewhere_stays_until_its_rank_comes_back(
    site: Site,
) -> None:
    streams = Streams(site)
    streams.send(9)
    await streams.go_on(WARM_S)
    freeze(site, 1, "alone")
    # Sent while nobody knows; these begin elsewhere, without the retry budget.
    await streams.go_on(1.0)
    streams.send(6, 20)
    await until_out(site, streams, 1, 3.0)
    await streams.go_on(8.0)
    assert [one.over for one in streams.open] == [False] * 9 + [True] * 6
    thaw(site, 1)
    await streams.go_on(4.0)
    assert ranks(site)[1].open
    streams.send(20, 20)
    await streams.go_on(2.0)
    assert not ranks(site)[1].on_trial
    await streams.end()
    ended = await site.ended(len(streams.open))
    assert not any(record.resumes for record in ended)
    assert sum(record.retries for record in ended) >= 2


@pytest.mark.parametrize("flags", [EXACT, OFF], ids=["exact", "off"])
def test_a_fleet_that_waits_for_one_rank_is_told_apart(
    flags: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(site: Site) -> None:
        streams = Streams(site)
        streams.send(9)
        await streams.go_on(WARM_S)
        freeze(site, 1, "barrier")
        await streams.go_on(4.0)
        state = await site.state()
        assert (state["still_ranks"], state["standstills"]) == (3, 1)
        assert {one["status"] for one in state["ranks"]} == {"up"}
        assert "balanceroute_decode_still_ranks 3\n" in (await site.get("/metrics")).body.decode()
        thaw(site, 1)
        await streams.go_on(2.0)
        assert veto(site).still_ranks == 0
        await streams.end()
        assert not veto(site).vetoes
        page = (await site.get("/metrics")).body.decode()
        assert "balanceroute_decode_standstills_total 1\n" in page
        assert "balanceroute_decode_still_ranks 0\n" in page

    play(scenario, flags=flags, **FLEET)
    messages = [one.message for one in caplog.records]
    assert messages.count("decode stands still: no rank that has streams makes tokens") == 1
    assert messages.count("decode goes on") == 1


@served(flags=EXACT, **FLEET)
async def test_a_rank_whose_server_answers_is_tried_with_one_request_at_a_time(site: Site) -> None:
    streams = Streams(site)
    streams.send(9)
    await streams.go_on(WARM_S)
    freeze(site, 1, "alone")
    await until_out(site, streams, 1, 3.0)
    before = len(site.received("decode", CHAT))
    for _ in range(60):  # More than its window each second.
        streams.send(1, 10)
        await streams.go_on(0.5)
    sent = [s for s in site.received("decode", CHAT)[before:] if s.engine == "decode/1"]
    # Half a minute has trials after 1, 2, 4, 8 s and so on, and the time that each takes.
    assert 2 <= len(sent) <= 5
    assert max(streams.gaps_s[9:]) <= 5.0
    thaw(site, 1)
    for _ in range(40):
        streams.send(1, 10)
        await streams.go_on(1.0)
        if ranks(site)[1].open and not ranks(site)[1].on_trial:
            break
    assert ranks(site)[1].open
    await streams.end()
    (count,) = veto(site).vetoes.values()
    assert 3 <= count <= 6


@served(flags=OFF, **{**FLEET, "ranks": 4})
async def test_no_more_than_half_of_the_ranks_are_left_out(site: Site) -> None:
    streams = Streams(site)
    streams.send(12, 200)
    await streams.go_on(WARM_S)
    for number in (0, 1, 2):
        freeze(site, number, "alone")
    for _ in range(60):
        await streams.go_on(0.1)
        assert sum(rank.still for rank in ranks(site)) <= 2
    assert len(veto(site).vetoes) == 2
    for number in (0, 1, 2):
        thaw(site, number)
    await streams.end()


def test_a_review_looks_at_all_requests_once_however_many_ranks_are_suspect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reviews, looks = 0, 0
    review, here = progress_veto.ProgressVeto._review_all, progress_veto._Here

    def reviewed(veto: "ProgressVeto") -> None:
        nonlocal reviews
        reviews += 1
        review(veto)

    def looked(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return here(*args)

    async def scenario(site: Site) -> None:
        nonlocal reviews, looks
        streams = Streams(site)
        streams.send(16, 200)
        await streams.go_on(WARM_S)
        assert not looks  # No rank is suspect.
        for number in range(1, 8):
            freeze(site, number, "alone")
        await streams.go_on(6.0)
        # They stand still for most of this time, and the first look after a rank left is another one.
        assert 0 < looks <= reviews + sum(veto(site).vetoes.values())
        assert len(veto(site).vetoes) == 4
        for number in range(1, 8):
            thaw(site, number)
        await streams.end()

    monkeypatch.setattr(progress_veto.ProgressVeto, "_review_all", reviewed)
    monkeypatch.setattr(progress_veto, "_Here", looked)
    play(scenario, flags=OFF, **{**FLEET, "ranks": 8})


@served(flags=OFF, **{**FLEET, "ranks": 2})
async def test_a_rank_that_stands_still_is_used_again_if_no_other_is_left(site: Site) -> None:
    streams = Streams(site)
    streams.send(4, 300)
    await streams.go_on(WARM_S)
    freeze(site, 1, "alone")
    await until_out(site, streams, 1, 3.0)
    await site.admin(
        "/admin/instances/drain", {"role": "decode", "url": site.fleet.engine("decode/0").url}
    )
    assert ranks(site)[0].status is Status.DRAINING
    assert ranks(site)[1].open
    thaw(site, 1)
    streams.send(2, 10)
    await streams.end()


@served(flags=OFF, **{**FLEET, "ranks": 1})
async def test_the_last_streams_of_what_is_drained_are_no_fleet_that_stands_still(
    site: Site,
) -> None:
    streams = Streams(site)
    streams.send(2, 300)
    await streams.go_on(WARM_S)
    url = site.fleet.engine("decode/0").url
    await site.admin("/admin/instances/drain", {"role": "decode", "url": url})
    freeze(site, 0, "alone")
    await streams.go_on(4.0)
    assert not veto(site).standstills
    thaw(site, 0)
    await streams.end()


@served(flags=OFF, **FLEET)
async def test_a_rank_that_froze_while_it_was_idle_does_not_get_all_that_comes(site: Site) -> None:
    streams = Streams(site)
    streams.send(2, 600)
    await streams.go_on(WARM_S)
    idle = [number for number, rank in enumerate(ranks(site)) if not bound(site)[rank.id]]
    freeze(site, idle[0], "alone")
    for _ in range(40):
        streams.send(1, 10)
        await streams.go_on(0.3)
    assert veto(site).vetoes.keys() == {idle[0]}
    assert max(streams.gaps_s) < 6.0
    await streams.end()
    thaw(site, idle[0])


@pytest.mark.parametrize(
    "connector", ["mooncake", "mooncake-ascend", "mooncake-hybrid", "mooncake-layerwise"]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
@served("connector", flags=EXACT, mean_output_tokens=5e3, **FLEET)
async def test_each_connector_has_the_same(site: Site, connector: str, path: str) -> None:
    streams = Streams(site)
    streams.send(6, 200, path)
    await streams.go_on(WARM_S)
    freeze(site, 1, "alone")
    assert await until_out(site, streams, 1, 3.0) <= 3.0
    for one in streams.open:
        await one.end()
        assert (one.status, one.error) == (200, None)
    assert any(record.resumes for record in await site.ended(6))
    thaw(site, 1)


@served(flags=EXACT, dp_mode=DpMode.HEADER, **FLEET)
async def test_of_several_ranks_behind_one_server_one_is_left_out(site: Site) -> None:
    streams = Streams(site)
    streams.send(9, 200)
    await streams.go_on(WARM_S)
    site.fleet._hub.barrier.freeze([1], holds=False)
    assert await until_out(site, streams, 1, 3.0) <= 3.0
    assert [rank.state for rank in ranks(site)] == ["up", "still", "up"]
    (row,) = [
        one
        for one in (await site.admin("/admin/instances")).json["instances"]
        if one["role"] == "decode"
    ]
    assert (row["status"], row["still"]) == ("up", [ranks(site)[1].name])
    await streams.end()
    assert max(streams.gaps_s) <= 5.0
    site.fleet._hub.barrier.thaw([1])


# What must not look like a rank that stands still.


def quiet(site: Site) -> None:
    assert not veto(site).vetoes
    assert not veto(site).standstills


@served(flags=OFF, **FLEET)
async def test_a_rank_whose_first_tokens_come_in_bursts_is_no_silent_rank(site: Site) -> None:
    for engine in (site.fleet.engine(f"decode/{number}") for number in (1, 2)):
        site.loop.network.rule(engine.host, engine.port, Link(coalesce_s=3.0))
    streams = Streams(site)
    streams.send(1, 600)  # To the first rank, whose pace is known then.
    await streams.go_on(WARM_S)
    streams.send(6, 200)
    await streams.go_on(20.0)
    assert all(stream.events for stream in streams.open)
    await streams.end()
    quiet(site)


@served(flags=OFF, **{**FLEET, "step_base_ns": 10_000_000})
async def test_a_client_that_reads_nothing_is_no_silent_rank(site: Site) -> None:
    streams = Streams(site)
    streams.send(3, 3000)  # One for each rank.
    await streams.go_on(WARM_S)
    slow = streams.open[1]
    slow.call.pause()
    await site.until(lambda: any(one.answer.is_paused for one in sessions(site)))
    await streams.go_on(8.0)
    assert any(one.answer.is_paused for one in sessions(site))
    quiet(site)
    slow.call.resume()
    await streams.go_on(1.0)
    await streams.end()
    quiet(site)


@pytest.mark.parametrize(("more", "vetoes"), [({}, 1), ({"tools": True}, 0)], ids=["text", "tools"])
@served(flags={"batch": 8}, at_rest=False, **FLEET)
async def test_a_parser_that_holds_text_back_is_no_silent_rank(
    site: Site, more: dict[str, bool], vetoes: int
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    members: dict[str, Any] = {"tools": [tool], "tool_choice": "none"} if more else {}
    streams = Streams(site)
    site.fleet.faults.set("decode/1", stall_after_tokens=140)
    streams.send(3, 300, **members)
    await streams.go_on(WARM_S + 6.0)
    assert len(veto(site).vetoes) == vetoes
    for one in streams.open:
        if not one.over:
            one.call.abort()


@served(flags=OFF, **FLEET)
async def test_a_proxy_that_stood_still_blames_nobody(site: Site) -> None:
    streams = Streams(site)
    streams.send(6)
    await streams.go_on(WARM_S)
    for seconds in (0.7, 3.0, 10.0):
        site.world.stand_still(seconds)
        await streams.go_on(1.5)
    await streams.end()
    quiet(site)


@served(flags=OFF, **FLEET)
async def test_engines_that_an_administrator_has_wait_are_not_blamed(site: Site) -> None:
    streams = Streams(site)
    streams.send(6)
    await streams.go_on(WARM_S)
    waits = site.loop.create_task(site.admin("/pause?mode=wait&engines=false", {}))
    await streams.go_on(0.5)
    freeze(site, 1, "alone")
    await streams.go_on(6.0)
    quiet(site)
    thaw(site, 1)
    await streams.end()
    assert (await waits).status == 200
    await site.admin("/resume?engines=false", {})
    quiet(site)


@pytest.mark.parametrize("step_s", [0.6, 1.5])
def test_a_slow_engine_with_one_request_is_left_alone(step_s: float) -> None:
    """Each rank has one stream, and a whole fleet is as slow as its slowest rank."""

    async def scenario(site: Site) -> None:
        streams = Streams(site)
        streams.send(3, 60)
        await streams.end()
        quiet(site)

    play(scenario, flags=OFF, **{**FLEET, "step_base_ns": round(step_s * 1e9)})


@served(flags=OFF | {"direct_decode_tokens": 100_000}, **FLEET)
async def test_a_rank_that_computes_a_long_prompt_has_the_time_for_it(site: Site) -> None:
    streams = Streams(site)
    streams.send(6)
    await streams.go_on(WARM_S)
    words = " ".join(f"w{number}" for number in range(3000))
    long = talk(99, 5, n=2, temperature=1) | {"messages": [{"role": "user", "content": words}]}
    exchanges = [site.send(CHAT, long) for _ in range(3)]
    await site.until(lambda: int(site.world.scheduler.ledger.bound.sum()) == 12)
    freeze(site, 1, "alone")
    freeze(site, 2, "alone")
    await streams.go_on(FLOOR_S + 0.6)
    assert bound(site)[1:] == [4, 4]
    quiet(site)
    thaw(site, 1)
    thaw(site, 2)
    await streams.end()
    for one in exchanges:
        await one.end()
