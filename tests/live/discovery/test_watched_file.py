"""Engines in a file that somebody else writes."""

import asyncio
from pathlib import Path

import pytest
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.discovery.reconciler import Found, View
from balanceroute.proxy.live.discovery.sources import WatchedFile, read_view
from balanceroute.proxy.live.engines.instances import Role, Target
from balanceroute.topologies import TopologyError

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


@pytest.mark.parametrize("hears", [True, False])
def test_events_that_nobody_follows_are_said_once(
    hears: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.toml"
    path.write_text('[[prefill]]\nurl = "http://p:8000"\nkv_events = "tcp://p:5557"')
    told: list[View] = []

    async def main(_: VirtualLoop) -> None:
        file = WatchedFile(path, interval_s=2.0, hears=hears)
        task = asyncio.create_task(file.run(told.append))
        await asyncio.sleep(5.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(main, seed=1, limit_s=1_000.0)
    assert [list(view) for view in told] == [[P]] * 3
    said = ["kv_events of the file of engines is not followed"]
    assert caplog.messages == ([] if hears else said)
