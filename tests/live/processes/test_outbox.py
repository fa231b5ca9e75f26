"""What is sent at the end of a turn, and what may wait for it."""

import asyncio
from collections.abc import Sequence

from balanceroute.proxy.live.processes import from_relay
from balanceroute.proxy.live.processes.outbox import LINGER_S, Outbox
from balanceroute.proxy.live.processes.uplink import Uplink
from balanceroute.proxy.live.telemetry.record import RequestRecord
from balanceroute.proxy.testing.virtual.loop import VirtualLoop
from balanceroute.proxy.testing.virtual.runner import run

ENDED = from_relay.SessionEnded(1, RequestRecord("r", "/v1/completions", 0, 0.0), "finished")


def test_what_may_wait_goes_in_its_order_with_what_may_not() -> None:
    async def main(loop: VirtualLoop) -> None:
        frames: list[list[str]] = []
        out = Outbox[str](loop.call_soon, loop.call_later, lambda one: frames.append(list(one)))
        out.send_late("begun")
        await asyncio.sleep(LINGER_S / 2)
        assert frames == []
        out.send_late("over")
        out.send("new")
        out.send_late("begun too")
        await asyncio.sleep(0)
        assert frames == [["begun", "over", "new", "begun too"]]
        await asyncio.sleep(2 * LINGER_S)
        assert len(frames) == 1
        assert loop.pending_timers == 0

    run(main, seed=0)


def test_it_waits_no_longer_than_a_moment() -> None:
    async def main(loop: VirtualLoop) -> None:
        frames: list[list[str]] = []
        out = Outbox[str](loop.call_soon, loop.call_later, lambda one: frames.append(list(one)))
        out.send_late("over")
        await asyncio.sleep(LINGER_S * 1.01)
        assert frames == [["over"]]
        out.send_late("over too")
        await asyncio.sleep(LINGER_S * 1.01)
        assert frames == [["over"], ["over too"]]

    run(main, seed=0)


def test_an_end_that_waited_when_the_scheduler_process_went_is_told_to_the_next() -> None:
    async def main(loop: VirtualLoop) -> None:
        heard: list[from_relay.FromRelay] = []

        def write(messages: Sequence[from_relay.FromRelay]) -> None:
            heard.extend(messages)

        uplink = Uplink(loop.call_soon, loop.call_later)
        hello = from_relay.Hello(1, 0, "")
        uplink.connect(write, hello)
        uplink.open([])
        uplink.send_late(
            from_relay.DecodeStarted(1, 2, 0)
        )  # Told anew by its `Live`, if it is not over.
        uplink.send_late(ENDED)
        uplink.close()
        await asyncio.sleep(2 * LINGER_S)
        assert heard == [hello]
        uplink.connect(write, hello)
        uplink.open([from_relay.Resumed()])
        await asyncio.sleep(0)
        assert heard[2:] == [from_relay.Resumed(), ENDED]

    run(main, seed=0)


def test_what_waits_can_be_sent_at_once() -> None:
    async def main(loop: VirtualLoop) -> None:
        frames: list[list[from_relay.FromRelay]] = []
        uplink = Uplink(loop.call_soon, loop.call_later)
        uplink.flush()
        uplink.connect(lambda messages: frames.append(list(messages)), from_relay.Hello(1, 0, ""))
        uplink.open([])
        await asyncio.sleep(0)
        uplink.send_late(ENDED)
        uplink.flush()
        assert frames[1:] == [[ENDED]]

    run(main, seed=0)
