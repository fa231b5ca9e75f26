"""The channel between a relay and the scheduler process: real sockets, one loop."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

from balanceroute.proxy.live.processes.channel import Channel
from balanceroute.proxy.live.processes.frames import FrameError, encode, for_relay, for_scheduler
from balanceroute.proxy.live.processes.from_relay import Failure, FromRelay, Hello
from balanceroute.proxy.live.processes.to_relay import Readiness, ToRelay

HELLO = Hello(1, 0, "digest")
PATIENCE_S = 20.0  # Only ever waited for by a test that fails.


class End:
    """The scheduler's end of a channel.

    Attributes:
        heard: Every message.
        ended: The reason, once closed.
    """

    def __init__(self, *, max_unread_bytes: int = 1 << 20) -> None:
        self.heard: list[FromRelay] = []
        self.came = asyncio.Event()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.channel = Channel(
            for_scheduler(),
            on_messages=self._messages,
            on_close=self.ended.set_result,
            max_unread_bytes=max_unread_bytes,
        )

    def _messages(self, messages: list[FromRelay]) -> None:
        self.heard += messages
        self.came.set()

    async def until(self, count: int) -> list[FromRelay]:
        while len(self.heard) < count:
            self.came.clear()
            await self.came.wait()
        return self.heard


async def connect(end: "Channel[Any]", at: socket.socket) -> None:
    await asyncio.get_running_loop().create_unix_connection(lambda: end, sock=at)


def is_behind(end: End) -> bool:
    return end.channel.behind


def play(main: Coroutine[Any, Any, None]) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await main

    asyncio.run(guarded())


def test_messages_go_both_ways_in_order() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        end = End()
        heard: list[ToRelay] = []
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_messages(messages: list[ToRelay]) -> None:
            heard.extend(messages)
            relay.close("enough")

        relay = Channel(for_relay(), on_messages=on_messages, on_close=ended.set_result)
        assert relay.closed
        relay.write([HELLO])  # Nothing is sent yet.
        await connect(end.channel, near)
        await connect(relay, far)
        told: list[FromRelay] = [HELLO, *(Failure(str(n)) for n in range(100))]
        relay.write(told[:50])
        relay.write(told[50:])
        assert await end.until(101) == told
        end.channel.write([Readiness(ready=True)])
        assert await ended == "enough"
        assert await end.ended == "the peer is gone"
        assert heard == [Readiness(ready=True)]
        assert relay.closed
        relay.write([HELLO])  # Nor any more.

    play(main())


def test_what_is_sent_before_a_close_arrives() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        far.setblocking(False)
        end = End()
        await connect(end.channel, near)
        both = [Readiness(ready=True), Readiness(ready=False)]
        end.channel.write(both)
        end.channel.close("the end")
        loop = asyncio.get_running_loop()
        assert await loop.sock_recv(far, 1000) == encode(both)
        assert await loop.sock_recv(far, 1000) == b""
        assert await end.ended == "the end"
        far.close()

    play(main())


def test_what_is_no_frame_closes_the_channel_with_the_reason() -> None:
    async def main() -> None:
        for data, reason in (
            (b"GET / HTTP/1.1\r\n", "a frame of 1,195,725,856 bytes"),
            (b"\0\0\0\1\xc1", "a frame of 1 bytes is none of the protocol"),
            (encode([Readiness(ready=True)]), "is none of the protocol"),
        ):
            near, far = socket.socketpair()
            far.setblocking(False)
            end = End()
            await connect(end.channel, near)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(far, encode([HELLO]))
            assert await end.until(1) == [HELLO]
            await loop.sock_sendall(far, data)
            assert reason in await end.ended
            far.close()

    play(main())


def test_a_peer_that_does_not_read_holds_nobody_up_and_is_given_up_in_the_end() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        end = End(max_unread_bytes=2 << 20)
        await connect(end.channel, near)
        page = Failure("y" * 100_000)
        sent = 0
        behind_at = None
        while not end.channel.closed:
            end.channel.write([page])
            sent += 1
            await asyncio.sleep(0)
            if end.channel.behind and behind_at is None:
                behind_at = sent
        assert "bytes were not read" in await end.ended
        assert behind_at is not None
        assert behind_at < sent
        # What the socket holds, and no more than one message over the limit.
        assert 20 <= sent <= 40
        far.close()

    play(main())


def test_a_peer_that_catches_up_is_behind_no_more() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        far.setblocking(False)
        loop = asyncio.get_running_loop()
        end = End(max_unread_bytes=8 << 20)
        await connect(end.channel, near)
        while not is_behind(end):
            end.channel.write([Failure("y" * 100_000)])
            await asyncio.sleep(0)
        while is_behind(end):
            await loop.sock_recv(far, 1 << 20)
        assert not end.channel.closed
        end.channel.close("done")
        while await loop.sock_recv(far, 1 << 20):
            pass
        assert await end.ended == "done"
        far.close()

    play(main())


def test_messages_that_cannot_stand_there_close_it() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def refuse(messages: list[FromRelay]) -> None:
            raise FrameError(f"{len(messages)} too many")

        channel = Channel(for_scheduler(), on_messages=refuse, on_close=ended.set_result)
        await connect(channel, near)
        far.send(encode([HELLO]))
        assert await ended == "1 too many"
        assert channel.closed
        far.close()

    play(main())
