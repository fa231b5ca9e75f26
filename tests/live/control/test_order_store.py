"""What administrators ordered, as it is kept for the process that is started next."""

import asyncio
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.site import Site, play, served
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.live.control.order_store import (
    OrderedState,
    OrderStore,
    basis_of,
    keep_trying,
    ordered_state,
)
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.proxy.live.settings.engines import DecodeServer, PrefillServer
from balanceroute.proxy.live.telemetry.process_log import LOGGER, set_log_level

P, D = EngineUrl("http", "p", 1), EngineUrl("https", "::1", 2)
SETTINGS = OrderedState("br-0", (PrefillServer(P),), (DecodeServer(D),))
ORDERED = OrderedState(
    "jsq",
    (PrefillServer(P, EngineUrl("http", "p", 8998)),),
    (DecodeServer(D, (0, 3)), DecodeServer(P, discover=True)),
    (Target(Role.DECODE, D.base),),
    paused=True,
    deadlines=((Target(Role.DECODE, D.base), 1_700_000_000.5),),
)


def load(store: OrderStore | None, settings: OrderedState) -> OrderedState:
    return ordered_state(store, "", settings)


def save(store: OrderStore, state: OrderedState) -> None:
    store.changed("", lambda: state)


def test_what_was_kept_goes_before_the_settings(tmp_path: Path) -> None:
    store = OrderStore(tmp_path / "orders")
    assert load(None, SETTINGS) == SETTINGS
    assert load(store, SETTINGS) == SETTINGS
    for state in (ORDERED, SETTINGS, ORDERED):
        save(store, state)
        assert load(store, SETTINGS) == state
    assert [path.name for path in tmp_path.iterdir()] == ["orders"]


@pytest.mark.parametrize("group", ["", "small"])
def test_without_a_file_nothing_is_encoded_before_a_successor_is_told(group: str) -> None:
    store, asked = OrderStore(), 0

    def state() -> OrderedState:
        nonlocal asked
        asked += 1
        return ORDERED

    assert ordered_state(store, group, SETTINGS) == SETTINGS
    for _ in range(1_000):
        store.changed(group, state)
    assert asked == 0
    assert not store.retry()
    successor = OrderStore(handed_over=store.content())
    assert asked == 1
    assert ordered_state(successor, group, SETTINGS) == ORDERED
    assert ordered_state(successor, "other" if group else "", SETTINGS) == (
        SETTINGS if group else ORDERED
    )
    # Which tells its own successor, with nothing ordered since.
    assert successor.content() == store.content()


def test_with_a_file_only_the_part_that_has_changed_is_encoded(tmp_path: Path) -> None:
    store = OrderStore(tmp_path / "orders")
    asked: list[str] = []

    def state(group: str) -> Callable[[], OrderedState]:
        def asked_for() -> OrderedState:
            asked.append(group)
            return ORDERED

        return asked_for

    for group in ("a", "b", "a"):
        store.changed(group, state(group))
    assert asked == ["a", "b", "a"]
    store.changed("b", state("b"), forgotten="a")
    again = OrderStore(tmp_path / "orders")
    assert ordered_state(again, "b", SETTINGS) == ORDERED
    assert ordered_state(again, "a", SETTINGS) == SETTINGS


def test_while_another_process_begins_the_file_stays_as_it_is(tmp_path: Path) -> None:
    store = OrderStore(tmp_path / "orders")
    save(store, SETTINGS)
    store.suspend()
    save(store, ORDERED)
    assert not store.retry()
    assert load(OrderStore(tmp_path / "orders"), ORDERED) == SETTINGS
    store.resume()
    assert load(OrderStore(tmp_path / "orders"), SETTINGS) == ORDERED
    store.hand_over()
    save(store, SETTINGS)
    assert load(OrderStore(tmp_path / "orders"), SETTINGS) == ORDERED


def test_what_was_handed_over_goes_before_the_file(tmp_path: Path) -> None:
    """The file may lack what was ordered while the disk was full."""
    save(OrderStore(tmp_path / "orders"), SETTINGS)
    told = OrderStore()
    save(told, ORDERED)
    store = OrderStore(tmp_path / "orders", told.content())
    assert load(store, SETTINGS) == ORDERED
    save(store, replace(ORDERED, policy="br-h"))
    assert load(OrderStore(tmp_path / "orders"), SETTINGS).policy == "br-h"


@pytest.mark.parametrize(("servers", "ranks"), [(1, 1025), (11, 1000)])
def test_a_fleet_of_too_many_ranks_is_not_taken_from_a_file(
    servers: int, ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = OrderStore(tmp_path / "orders")
    decoders = [
        DecodeServer(EngineUrl("http", f"d{n}", 1), (*range(ranks),)) for n in range(servers)
    ]
    save(store, replace(SETTINGS, decoders=tuple(decoders)))
    assert load(store, SETTINGS) == SETTINGS
    assert caplog.messages == ["orders are lost"]


@pytest.mark.parametrize("content", [b"{", b'{"policy": 3}', b"\xff", b'{"basis": "\xff"}'])
def test_what_cannot_be_read_is_logged_and_the_settings_hold(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "orders"
    path.write_bytes(content)
    assert load(OrderStore(path), SETTINGS) == SETTINGS
    assert caplog.messages == ["orders are lost"]


def test_an_order_holds_though_it_cannot_be_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(OrderStore(tmp_path / "absent" / "orders"), ORDERED)
    assert caplog.messages == ["orders are not kept"]


def test_an_order_that_found_a_full_disk_is_kept_as_soon_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was kept with the next order only."""
    path = tmp_path / "orders"
    usual, room = Path.write_bytes, 100_000

    def write_bytes(self: Path, data: bytes) -> int:
        usual(self, data[:room])
        if len(data) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)

    async def main(loop: VirtualLoop) -> None:
        nonlocal room
        store = OrderStore(path)
        save(store, SETTINGS)
        before = path.read_bytes()
        room = 10
        trying = loop.create_task(keep_trying(store))
        save(store, ORDERED)
        await asyncio.sleep(60.0)
        assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["orders"])
        assert load(store, SETTINGS) == ORDERED
        assert load(OrderStore(path), SETTINGS) == SETTINGS
        room = 100_000
        await asyncio.sleep(6.0)
        assert load(OrderStore(path), SETTINGS) == ORDERED
        trying.cancel()

    with caplog.at_level(logging.INFO):
        run(main, seed=1)
    assert caplog.messages == ["orders are not kept", "orders are kept again"]


def test_of_other_settings_what_was_found_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = OrderStore(tmp_path / "roster")
    x, y = EngineUrl("http", "x", 1), EngineUrl("http", "y", 1)
    found = (Target(Role.DECODE, x.base), Target(Role.PREFILL, y.base))
    kept = OrderedState(
        "jsq",
        (PrefillServer(P), PrefillServer(y)),
        (DecodeServer(x, (0, 1)),),
        draining=(found[0], Target(Role.PREFILL, P.base)),
        discovered=found,
        leaving=found[:1],
        basis=basis_of("br-0"),
        paused=True,
        deadlines=((found[0], 5.0),),
    )
    save(store, kept)
    assert load(store, OrderedState("br-0", (), (), basis=kept.basis)) == kept
    assert caplog.messages == []
    settings = OrderedState("br-h", (PrefillServer(P),), (DecodeServer(D),), basis=basis_of("br-h"))
    assert load(store, settings) == OrderedState(
        "br-h",
        (PrefillServer(P), PrefillServer(y)),
        (DecodeServer(D), DecodeServer(x, (0, 1))),
        draining=found[:1],
        discovered=found,
        leaving=found[:1],
        basis=settings.basis,
        paused=True,
    )
    # One that the settings name now is there once.
    named = OrderedState("br-h", (PrefillServer(y),), (DecodeServer(x),), basis="other")
    assert load(store, named) == replace(named, paused=True)


COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "tiny", "prompt": "t1 t2 t3", "max_tokens": 40, "ignore_eos": True}
STREAM = BODY | {"stream": True}


async def order(site: Site, what: str, engine: str, **more: object) -> None:
    role = engine.partition("/")[0]
    path = f"/admin/instances/{what}".removesuffix("/")
    answer = await site.admin(path, {"role": role, "url": site.fleet.engine(engine).url, **more})
    assert answer.status == 200, answer.body


async def instances(site: Site) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await site.admin("/admin/instances")).json["instances"]
    return sorted(rows, key=lambda row: row["url"])


@served()
async def test_orders_about_engines_and_the_policy_outlive_the_process(site: Site) -> None:
    await order(site, "drain", "decode/1", deadline_s=1_000.0)
    await order(site, "drain", "prefill/0")
    await order(site, "remove", "prefill/0")
    assert (await site.admin("/admin/policy", {"policy": "jsq"})).status == 200
    before = [(row["url"], row["status"]) for row in await instances(site)]
    assert "draining" in dict(before).values()
    deadlines = site.world.plane.deployment.roster.deadlines.times()
    assert len(deadlines) == 1
    await site.world.restart()
    await asyncio.sleep(2.0)
    assert [(row["url"], row["status"]) for row in await instances(site)] == before
    assert site.world.plane.deployment.roster.deadlines.times() == deadlines
    assert (await site.state())["policy"] == "jsq"
    site.seen.clear()
    exchanges = [site.send(COMPLETIONS, STREAM) for _ in range(4)]
    for one in exchanges:
        assert (await one.end()).done
    assert {seen.engine for seen in site.seen} == {"prefill/1", "decode/0"}
    # The other way round.
    await order(site, "", "decode/1")
    await order(site, "", "prefill/0")
    await site.world.restart()
    await asyncio.sleep(2.0)
    assert [row["status"] for row in await instances(site)] == ["up"] * 4


def test_the_log_level_that_was_ordered_outlives_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(site: Site) -> None:
        log = logging.getLogger(LOGGER)
        assert (await site.admin("/admin/log-level", {"level": "loud"})).status == 400
        assert (await site.admin("/admin/log-level", {"level": "error"})).status == 200
        assert log.level == logging.ERROR
        set_log_level("info")  # As the new process begins.
        await site.world.restart()
        assert log.level == logging.ERROR

    caplog.set_level(logging.INFO, LOGGER)  # And back at the end.
    play(scenario)


@served()
async def test_a_role_whose_engines_were_all_removed_has_none_in_the_next_process(
    site: Site,
) -> None:
    for engine in ("prefill/0", "prefill/1", "decode/0", "decode/1"):
        await order(site, "remove", engine)
    await site.world.restart()
    assert await instances(site) == []
    assert (await site.get("/ready")).status == 503
    for engine in ("prefill/1", "decode/1"):
        await order(site, "", engine)
    await site.until(lambda: site.world.plane.ready)
    assert (await site.post(COMPLETIONS, BODY)).status == 200


def test_the_limit_that_was_found_outlives_the_process() -> None:
    async def scenario(site: Site) -> None:
        async def limit() -> int:
            return int((await site.state())["budget"]["limit_per_rank"])

        assert await limit() == 64
        # First tokens that come in time let it grow.
        exchanges = [site.send(COMPLETIONS, STREAM | {"max_tokens": 400}) for _ in range(12)]
        await asyncio.gather(*(one.end() for one in exchanges))
        grown = await limit()
        assert 64 < grown <= 70
        await site.world.restart()
        assert await limit() == grown

    flags = {"aimd": "post5", "aimd_min": 4, "aimd_max": 70, "aimd_ttft_s": 5.0}
    play(scenario, flags=flags, step_base_ns=20_000_000.0)
