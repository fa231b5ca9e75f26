"""What is told of streams, and when."""

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from balanceroute.proxy.live.processes.from_relay import FromRelay, Gaps, Progress
from balanceroute.proxy.live.processes.stream_counts import PROGRESS_S, StreamCounts
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.session import Session


def test_one_who_reads_slowly_is_told_of_the_latest_alone() -> None:
    async def main(loop: VirtualLoop) -> None:
        told: list[FromRelay] = []
        behind = True
        counts = StreamCounts(told.append, lambda: behind)
        stream = SimpleNamespace(emitted=SimpleNamespace(tokens=0), emitted_tokens=0)
        counts.started(7, cast("Session", stream))
        for _ in range(40):
            stream.emitted_tokens += 1
            counts.observe_gap(0.03)
            await asyncio.sleep(PROGRESS_S)
        assert told == []
        behind = False
        await asyncio.sleep(20 * PROGRESS_S)
        assert [one for one in told if isinstance(one, Progress)] == [
            Progress(b"\7\0\0\0", b"\x28\0\0\0")
        ]
        (gaps,) = (one for one in told if isinstance(one, Gaps))
        assert sum(gaps.counts) == 40
        counts.left(7)
        await asyncio.sleep(PROGRESS_S)
        assert loop.pending_timers == 0

    run(main, seed=0)
