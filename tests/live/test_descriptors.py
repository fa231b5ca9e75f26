"""File descriptors: the limit that is raised, what it is enough for, and the watch over both."""

import asyncio
import errno
import logging
import os
import socket
import subprocess
import sys

import pytest

from balanceroute.proxy.live.descriptors import DescriptorWatch, connections_for
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run


@pytest.mark.parametrize(
    ("limits", "expected"),
    [("(64, 100)", 100), ("(64, 64)", 64), ("(64, 1 << 20)", 65_536)],
)
def test_the_soft_limit_is_raised_as_far_as_is_useful(limits: str, expected: int) -> None:
    """Finding H5: the soft limit that the shell left was the ceiling."""
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
        watch = DescriptorWatch(list, probe=probe)
        task = loop.create_task(watch.run())
        await asyncio.sleep(61.5)
        assert watch.shortages == 61
        lacking = False
        await asyncio.sleep(60.0)
        assert watch.shortages == 61
        task.cancel()

    with caplog.at_level(logging.ERROR):
        run(main, seed=1)
    assert [record.__dict__["fields"] for record in caplog.records] == [
        {"reason": "Too many open files", "count": 1},
        {"reason": "Too many open files", "count": 60},
    ]


def test_a_listener_that_somebody_closed_ends_the_watch() -> None:
    async def main(loop: VirtualLoop) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        number = listener.fileno()
        watch = DescriptorWatch(lambda: [number])
        task = loop.create_task(watch.run())
        await asyncio.sleep(5.0)
        assert not task.done()
        listener.close()
        # Its number may belong to something else by then.
        assert taken() == number
        with pytest.raises(RuntimeError, match="was closed"):
            await task
        os.close(number)

    run(main, seed=1)


def test_a_listener_that_is_meant_to_be_closed_does_not_end_it() -> None:
    async def main(loop: VirtualLoop) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listening = [listener.fileno()]
            watch = DescriptorWatch(lambda: listening)
            task = loop.create_task(watch.run())
            await asyncio.sleep(5.0)
            listening.clear()
        await asyncio.sleep(5.0)
        assert not task.done()
        task.cancel()

    run(main, seed=1)
