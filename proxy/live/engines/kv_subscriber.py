"""Subscribes to the KV cache events of prefillers over ZeroMQ. Needs the extra `kv-events`.

Limits here bound the memory: of the size of messages, and of their number in queues. `KvFeed` notices a lost
message by its number.
"""

import asyncio
import logging
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from balanceroute.proxy.live.engines.kv_feed import KvEventSource

_log = logging.getLogger(__name__)
_MESSAGE_BYTES = 4 << 20
# Messages that wait in a socket.
_QUEUE = 128
# Batches of one replay. vLLM keeps 10,000.
_REPLAY_BATCHES = 100_000
# Until an answer of a replay counts as missing; vLLM looks for requests ten times a second.
_REPLAY_S = 10.0
# Between two replays: the first ones, and if one is needed again and again.
_PAUSE_S, _LONG_PAUSE_S = 0.5, 60.0
_RECONNECT_MS, _LONG_RECONNECT_MS = 100, 5_000
_HEARTBEAT_MS, _SILENCE_MS = 5_000, 15_000
_END = b"\xff" * 8
_NUMBER_BYTES = 8
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


async def subscribe(sources: asyncio.Queue[KvEventSource]) -> None:
    """Take the events of all prefillers that come, until cancelled."""
    context = zmq.asyncio.Context()
    try:
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(_Subscriber(context, await sources.get()).run())
    finally:
        context.destroy(linger=0)


class _Subscriber:
    """Follows one source."""

    def __init__(self, context: zmq.asyncio.Context, source: KvEventSource) -> None:
        self._context = context
        self._source = source
        self._feed = source.feed
        self._clock = asyncio.get_running_loop().time
        self._pause_s = _PAUSE_S
        self._replayed_s = -_LONG_PAUSE_S
        self._other_size: int | None = None

    async def run(self) -> None:
        subscriber = self._socket(zmq.SUB)
        monitor: Any = subscriber.get_monitor_socket(_EVENTS)
        poller = zmq.asyncio.Poller()
        poller.register(subscriber, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        subscriber.subscribe(b"")
        subscriber.connect(self._source.events)
        try:
            while self._source.is_wanted():
                # The monitor first: messages after a reconnection may come from another engine.
                ready = dict(await poller.poll(1_000))
                if monitor in ready:
                    await self._changed(await recv_monitor_message(monitor))
                elif subscriber in ready:
                    await self._received(await subscriber.recv_multipart())
                self._report()
                await asyncio.sleep(0)  # A receive that need not wait lets no other task run.
        finally:
            subscriber.disable_monitor()
            monitor.close(0)
            subscriber.close(0)
        self._feed.end()

    async def _changed(self, change: Any) -> None:
        if change["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            await self._catch_up()
        else:
            self._feed.interrupted()

    async def _received(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            return  # A gap, if it was a batch.
        if self._feed.take(int.from_bytes(frames[1]), frames[2]):
            await self._catch_up()

    async def _catch_up(self) -> None:
        """Have missing batches sent again; meanwhile new ones wait."""
        if self._source.replay is None:
            return
        now_s = self._clock()
        seldom = now_s - self._replayed_s > _LONG_PAUSE_S
        self._pause_s = _PAUSE_S if seldom else min(2 * self._pause_s, _LONG_PAUSE_S)
        if not seldom:
            await asyncio.sleep(max(0.0, self._replayed_s + self._pause_s - now_s))
        # An engine that has begun anew is asked for all it has.
        if not await self._replay(self._source.replay):
            await self._replay(self._source.replay)
        self._replayed_s = self._clock()

    async def _replay(self, address: str) -> bool:
        """Return whether the replay will do, or failed for good."""
        feed = self._feed
        dealer = self._socket(zmq.DEALER)
        dealer.connect(address)
        try:
            start = feed.begin_replay()
            await dealer.send_multipart([b"", start.to_bytes(_NUMBER_BYTES)])
            for _ in range(_REPLAY_BATCHES):
                async with asyncio.timeout(_REPLAY_S):
                    frames = await dealer.recv_multipart()
                # A delimiter, in later versions the topic, and these two.
                number, payload = frames[-2:] if len(frames) in (3, 4) else (b"", b"")
                if len(number) != _NUMBER_BYTES:
                    break
                if number == _END:
                    return feed.end_replay(complete=True)
                if not feed.replayed(int.from_bytes(number), payload):
                    return False
                await asyncio.sleep(0)
        except TimeoutError:
            pass
        finally:
            dealer.close(0)
        return feed.end_replay(complete=False)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        for option, value in (
            (zmq.MAXMSGSIZE, _MESSAGE_BYTES),
            (zmq.RCVHWM, _QUEUE),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _LONG_RECONNECT_MS),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS),
            (zmq.IPV6, 1),
        ):
            socket.setsockopt(option, value)
        return socket

    def _report(self) -> None:
        """Report when the index was emptied, and blocks that do not go into it."""
        feed, url = self._feed, self._source.events
        for reason in feed.losses:
            self._source.lost(reason)
            _log.warning("KV cache events lost", extra={"fields": {"url": url, "reason": reason}})
        feed.losses.clear()
        if feed.other_size != self._other_size:
            self._other_size = feed.other_size
            fields = {"url": url, "tokens": feed.other_size}
            _log.warning("KV blocks are not of --kv-block-tokens", extra={"fields": fields})
