"""What is told of streams, and when."""

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np

from balanceroute.proxy.live.processes.from_relay import FromRelay, Gaps, Progress
from balanceroute.proxy.live.processes.stream_counts import PROGRESS_S, StreamCounts
from balanceroute.proxy.live.telemetry.registry import TOKEN_GAP_BOUNDS_S
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run

if TYPE_CHECKING:
    from balanceroute.proxy.live.request.session import Session
    from balanceroute.proxy.wire.http1.pump import Pump


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


class FakePump:
    """What the library tells of streams that it moves."""

    def __init__(self) -> None:
        self.tokens = np.zeros(8, np.uint32)
        self.gaps = [0] * (len(TOKEN_GAP_BOUNDS_S) + 1)

    def new_gaps(self) -> tuple[list[int], float]:
        new, self.gaps = self.gaps, [0] * len(self.gaps)
        return new, float(sum(new))


def test_streams_that_the_native_library_moves_are_told_of_like_others() -> None:
    async def main(loop: VirtualLoop) -> None:
        told: list[FromRelay] = []
        pump = FakePump()
        counts = StreamCounts(told.append, lambda: False, cast("Pump", pump))
        streams = [
            SimpleNamespace(emitted=SimpleNamespace(tokens=100 * row), emitted_tokens=100 * row)
            for row in range(4)
        ]
        for row, stream in enumerate(streams):
            counts.started(row, cast("Session", stream))
        counts.lent(2, 5)
        counts.lent(3, 1)
        counts.lent(7, 0)  # Of one that has no row.
        pump.tokens[5], pump.tokens[0] = 7, 9
        pump.gaps[3] = 6
        streams[1].emitted_tokens += 1
        await asyncio.sleep(20 * PROGRESS_S)
        assert [one for one in told if isinstance(one, Progress)] == [
            Progress(b"\1\0\0\0", b"\x65\0\0\0"),
            Progress(b"\2\0\0\0", b"\xcf\0\0\0"),
        ]
        (gaps,) = (one for one in told if isinstance(one, Gaps))
        assert (gaps.counts[3], sum(gaps.counts), gaps.total_s) == (6, 6, 6.0)
        told.clear()
        streams[2].emitted_tokens = 208
        counts.returned(5)
        counts.returned(0)
        pump.tokens[5] = 1_000
        await asyncio.sleep(2 * PROGRESS_S)
        assert told == [Progress(b"\2\0\0\0", b"\xd0\0\0\0")]
        idle = []
        for row in (0, 1, 2):
            counts.left(row)
            idle.append(counts.idle)
        counts.returned(1)
        counts.left(3)
        assert [*idle, counts.idle] == [False, False, False, True]
        counts.started(3, cast("Session", streams[3]))
        counts.lent(3, 1)
        counts.forget()
        counts.returned(1)
        await asyncio.sleep(2 * PROGRESS_S)
        assert loop.pending_timers == 0

    run(main, seed=0)
