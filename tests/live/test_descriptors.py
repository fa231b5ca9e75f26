"""File descriptors: the limit that is raised, what it is enough for, and the watch over both."""

import asyncio
import errno
import fcntl
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from tests.live.served import COMPLETIONS, STREAM, Client, engines, play, serving
from tests.support.played import in_virtual_time
from tests.support.virtual.loop import VirtualLoop
from tests.support.virtual.runner import run

from balanceroute.proxy.live.descriptors import DescriptorWatch, connections_for

if TYPE_CHECKING:
    from balanceroute.proxy.wire.http1.server import Server


@pytest.mark.parametrize(
    ("limits", "expected"),
    [("(64, 100)", 100), ("(64, 64)", 64), ("(64, 1 << 20)", 65_536)],
)
def test_the_soft_limit_is_raised_as_far_as_is_useful(limits: str, expected: int) -> None:
    """The soft limit that the shell left was the ceiling."""
    script = (
        "import resource\n"
        "from balanceroute.proxy.live.descriptors import raise_limit\n"
        f"soft, hard = {limits}\n"
        "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "hard = hard if most == resource.RLIM_INFINITY else min(hard, most)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    returned, now = map(int, told.split())
    assert returned == now
    assert min(100, expected) <= now <= expected  # The machine may allow less.


@pytest.mark.parametrize(
    ("descriptors", "engines", "expected"),
    [(64, 3, 10), (100, 3, 16), (1024, 10, 306), (65_536, 64, 21_738), (2, 1, 1)],
)
def test_each_client_has_room_for_its_engines(
    descriptors: int, engines: int, expected: int
) -> None:
    assert connections_for(descriptors, engines) == expected
    assert expected == 1 or 3 * expected < descriptors


def taken() -> int:
    return os.open(os.devnull, os.O_RDONLY)


class Listening:
    """Stands for a server: notes what the watch wants of it."""

    def __init__(self, *listening: int) -> None:
        self.listening = list(listening)
        self.said: list[str] = []
        self.resumes = True

    @property
    def server(self) -> "Server":
        return cast("Server", self)

    def keep_spares(self) -> None:
        self.said.append("spares")

    def pause(self) -> None:
        self.said.append("pause")

    async def resume(self) -> None:
        if not self.resumes:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.said.append("resume")


def test_a_lack_of_descriptors_is_counted_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lacking = True

    def probe() -> int:
        if lacking:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return taken()

    async def main(loop: VirtualLoop) -> None:
        nonlocal lacking
        server = Listening()
        watch = DescriptorWatch(lambda: [server.server], probe=probe)
        task = loop.create_task(watch.run())
        await asyncio.sleep(61.5)
        assert watch.shortages == 61
        assert server.said == ["spares", "pause"]
        # There is one, but not for the listeners.
        lacking, server.resumes = False, False
        await asyncio.sleep(1.0)
        assert watch.shortages == 62
        server.resumes = True
        await asyncio.sleep(60.0)
        assert watch.shortages == 62
        assert server.said == ["spares", "pause", "pause", "resume", "spares"]
        task.cancel()

    with caplog.at_level(logging.INFO):
        run(main, seed=1)
    assert [record.__dict__["fields"] for record in caplog.records] == [
        {"reason": "Too many open files", "count": 1},
        {"reason": "Too many open files", "count": 60},
        {"seconds": 62.0},
    ]


@pytest.mark.parametrize(("limit", "is_short"), [(1_017, False), (1_016, True), (1_000, True)])
@in_virtual_time()
async def test_nothing_is_accepted_when_only_a_few_descriptors_are_left(
    loop: VirtualLoop, limit: int, *, is_short: bool
) -> None:
    def probe() -> int:
        """Take the lowest that is free where all up to 999 are in use."""
        number = taken()
        high = fcntl.fcntl(number, fcntl.F_DUPFD, 1_000)
        os.close(number)
        return high

    server = Listening()
    watch = DescriptorWatch(lambda: [server.server], probe=probe, limit=lambda: limit)
    task = loop.create_task(watch.run())
    await asyncio.sleep(1.5)
    assert watch.shortages == is_short
    assert server.said == ["spares", "pause"][: 1 + is_short]
    task.cancel()


@in_virtual_time()
async def test_a_listener_that_somebody_closed_ends_the_watch(loop: VirtualLoop) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    number = listener.fileno()
    watch = DescriptorWatch(lambda: [Listening(number).server])
    task = loop.create_task(watch.run())
    await asyncio.sleep(5.0)
    assert not task.done()
    listener.close()
    # Its number may belong to something else by then.
    assert taken() == number
    with pytest.raises(RuntimeError, match="was closed"):
        await task
    os.close(number)


@in_virtual_time()
async def test_a_listener_that_is_meant_to_be_closed_does_not_end_it(loop: VirtualLoop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Listening(listener.fileno())
        watch = DescriptorWatch(lambda: [server.server])
        task = loop.create_task(watch.run())
        await asyncio.sleep(5.0)
        server.listening.clear()
    await asyncio.sleep(5.0)
    assert not task.done()
    task.cancel()


def test_who_connects_while_no_descriptor_is_left_waits_and_is_served(tmp_path: Path) -> None:
    """It was accepted and closed, or else the loop turned without a pause."""
    log = tmp_path / "log"

    async def main() -> None:
        async with (
            engines() as fleet,
            serving(fleet.prefill_urls, fleet.decode_urls, "--log", str(log)) as served,
        ):
            process = served.process.pid
            public, _ = served.ports()
            limits = resource.prlimit(process, resource.RLIMIT_NOFILE)
            running = served.client.send(b"POST", COMPLETIONS, STREAM | {"max_tokens": 600})
            await running.until_events(1)

            async def until_told(words: bytes) -> None:
                while words not in log.read_bytes():  # noqa: ASYNC110 (no event tells)
                    await asyncio.sleep(0)

            # Below all that it has: nothing of it closes, and nothing more can be opened.
            resource.prlimit(process, resource.RLIMIT_NOFILE, (4, limits[1]))
            await until_told(b"no file descriptor is left")
            begun_s = cpu_s(process)
            client = Client(public)
            exchange = client.send(b"POST", COMPLETIONS, STREAM)
            await asyncio.sleep(1.0)
            assert not exchange.over
            assert cpu_s(process) - begun_s < 0.2
            resource.prlimit(process, resource.RLIMIT_NOFILE, limits)
            await exchange.end()
            assert exchange.done
            await running.end()
            assert running.done
            # And again: it has what it needs to pause once more.
            resource.prlimit(process, resource.RLIMIT_NOFILE, (4, limits[1]))
            await asyncio.sleep(2.5)
            client.close()
            exchange = client.send(b"POST", COMPLETIONS, STREAM)
            resource.prlimit(process, resource.RLIMIT_NOFILE, limits)
            assert (await exchange.end()).done
            client.close()
            served.process.send_signal(signal.SIGTERM)
            assert await served.exit() == (0, "")

    play(main())
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["outcome"] for one in lines if "outcome" in one] == ["ok"] * 3
    assert [one["retries"] for one in lines if "outcome" in one] == [0] * 3
    told = [one for one in lines if "descriptor" in one.get("message", "")]
    assert [one["level"] for one in told] == ["error", "info", "info"]


def cpu_s(process: int) -> float:
    """Return the CPU time that a process has used."""
    times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, times[11:13])) / os.sysconf("SC_CLK_TCK")
