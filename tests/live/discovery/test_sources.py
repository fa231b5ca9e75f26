"""Engines behind one name."""

import asyncio
import json
import random
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.live.served import ENGINES, Client, Served, command, plain_environment, play
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.lab.emulate import EmulatedFleet
from balanceroute.proxy.live.discovery.reconciler import Found, View
from balanceroute.proxy.live.discovery.sources import DnsName, WatchedFile, read_view
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.topologies import TopologyError


def test_every_address_is_an_engine_and_a_name_without_addresses_tells_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    zone: list[str] = []
    told: list[View] = []

    async def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("d.serving", 8000)
        if not zone:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return zone

    async def main(_: VirtualLoop) -> None:
        source = DnsName(Role.DECODE, "d.serving", 8000, interval_s=2.0, resolve=resolve)
        task = asyncio.create_task(source.run(told.append))
        for addresses, urls in (
            ([], None),
            (["10.0.0.2", "10.0.0.1"], ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]),
            ([], ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]),
            # Of both families one: an engine must not count twice.
            (["fd00::1", "10.0.0.1"], ["http://10.0.0.1:8000"]),
            (["fd00::1"], ["http://[fd00::1]:8000"]),
        ):
            zone[:] = addresses
            await asyncio.sleep(5.0)
            if urls is None:
                assert told == []
            else:
                assert list(told[-1]) == [Target(Role.DECODE, url) for url in urls]
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main, seed=1, limit_s=1_000.0)
    # Once for each outage.
    assert caplog.messages == ["the name of engines does not resolve"] * 2


def test_the_resolver_of_the_system_is_asked() -> None:
    told: list[View] = []

    async def main() -> None:
        done = asyncio.Event()

        def tell(view: View) -> None:
            told.append(view)
            done.set()

        task = asyncio.create_task(
            DnsName(Role.PREFILL, "localhost", 8100, interval_s=60.0).run(tell)
        )
        async with asyncio.timeout(30):
            await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    assert list(told[0]) in (
        [Target(Role.PREFILL, "http://127.0.0.1:8100")],
        [Target(Role.PREFILL, "http://[::1]:8100")],
    )


# Engines in a file that somebody else writes.


P, D, E, F = (
    Target(Role.PREFILL, "http://p:8000"),
    Target(Role.DECODE, "http://d:8000"),
    Target(Role.DECODE, "http://e:8000"),
    Target(Role.DECODE, "http://[fd00::1]:80"),
)
TEXT = """
[[prefill]]
url = "http://p:8000"
bootstrap = "http://p:8998"
[[decode]]
url = "http://d:8000/"
[[decode]]
url = "http://e:8000"
ranks = 8
[[decode]]
url = "http://[fd00::1]"
ranks = "discover"
"""


def test_the_entries_are_those_of_a_topology(tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    path.write_text(TEXT)
    assert read_view(path) == {
        P: Found(P, bootstrap="http://p:8998"),
        D: Found(D, ranks=1),
        E: Found(E, ranks=8),
        F: Found(F),
    }
    path.write_text("")
    assert read_view(path) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[decode]", "is not TOML"),
        ("[proxy]\nbatch = 3", "proxy: unknown key"),
        ('[[decode]]\nurl = "d"', "decode url is 'd': it must begin with http://"),
        ('[[decode]]\nurl = "http://d@3"', "decode url is 'http://d:80@3': write ranks = N"),
        ('[[decode]]\nurl = "http://d"\nrank_ids = [4, 5]', "write ranks = N, not rank_ids"),
        ("[[decode]]\nranks = 3", "url: is missing"),
        (
            '[[prefill]]\nurl = "http://p"\nkv_replay = "tcp://p:1"',
            "prefill url http://p: kv_replay needs kv_events too",
        ),
    ],
)
def test_what_is_no_list_of_engines_is_an_error(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "engines.toml"
    path.write_text(text)
    with pytest.raises((TopologyError, ConfigError), match=reason) as caught:
        read_view(path)
    assert str(path) in str(caught.value)


def test_changes_are_told_and_what_cannot_be_read_tells_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.toml"
    told: list[View] = []

    async def main(_: VirtualLoop) -> None:
        task = asyncio.create_task(WatchedFile(path, interval_s=2.0).run(told.append))
        await asyncio.sleep(5.0)
        assert told == []
        path.write_text(TEXT)
        await asyncio.sleep(2.0)
        assert len(told[-1]) == 4
        before = len(told)
        for text in ("[[decode]", "x"):
            path.write_text(text)
            await asyncio.sleep(10.0)
        assert len(told) == before
        path.write_text('[[decode]]\nurl = "http://d:8000"')
        await asyncio.sleep(2.0)
        assert list(told[-1]) == [D]
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main, seed=1, limit_s=1_000.0)
    # Once for each reason.
    assert caplog.messages == ["the file of engines cannot be read"] * 3


@pytest.mark.parametrize("follows", [True, False])
def test_events_that_nobody_follows_are_said_once(
    follows: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.toml"
    path.write_text('[[prefill]]\nurl = "http://p:8000"\nkv_events = "tcp://p:5557"')
    told: list[View] = []

    async def main(_: VirtualLoop) -> None:
        file = WatchedFile(path, interval_s=2.0, follows=follows)
        task = asyncio.create_task(file.run(told.append))
        await asyncio.sleep(5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main, seed=1, limit_s=1_000.0)
    assert [list(view) for view in told] == [[P]] * 3
    said = ["kv_events of the file of engines is not followed"]
    assert caplog.messages == ([] if follows else said)


# A proxy that is started before any engine is found.


def test_it_says_that_there_are_none_and_that_it_waits(tmp_path: Path) -> None:
    listed, log = tmp_path / "engines.toml", tmp_path / "log"
    listed.write_text("")
    discovery = ["--discover", f"file:{listed}", "--discover-interval-s", "0.1"]

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            *command("--port", "0", "--admin-port", "0", "--log", str(log), *discovery),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=plain_environment(),
        )
        assert process.stdout is not None
        served = Served(process, (await process.stdout.readline()).decode())
        client = Client(served.ports()[0])
        assert (await client.get("/ready")).status == 503
        fleet = EmulatedFleet(ENGINES, rng=random.Random(5))
        await fleet.start()
        urls = [("prefill", *fleet.prefill_urls), ("decode", *fleet.decode_urls)]
        told = [f'[[{role}]]\nurl = "{url}"\n' for role, *each in urls for url in each]
        listed.write_text("".join(told))
        while "the fleet is ready" not in log.read_text():  # noqa: ASYNC110 - of a process.
            await asyncio.sleep(0.01)
        assert (await client.get("/ready")).status == 200
        client.close()
        process.send_signal(signal.SIGTERM)
        assert await served.exit() == (0, "")
        await fleet.close()

    play(main())
    lines: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    (serving,) = [line for line in lines if line.get("message") == "serving"]
    assert (serving["prefillers"], serving["ranks"]) == (0, 0)
    waits = [
        line["role"] for line in lines if line.get("message") == "waiting for engines of a role"
    ]
    assert waits == ["decode", "prefill"]
