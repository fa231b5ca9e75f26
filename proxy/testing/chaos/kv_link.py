"""KV cache events of emulated engines in virtual time, where ZeroMQ cannot be."""

import asyncio

from balanceroute.proxy.lab.emulate.fleet import EmulatedFleet
from balanceroute.proxy.lab.emulate.prefix_caches import KvLog
from balanceroute.proxy.live.engines.kv_feed import KvFeed, Source

# How often what was published arrives.
_TURN_S = 0.05
RANK_PORT = 10_000
"""Above it are the ports of ranks, by their number; below it those of prefillers, from 1 on."""


class KvLink:
    """Between the logs of a fleet's engines and the proxy that listens.

    Args:
        fleet: Its engines, by their numbers, are at the ports of the sources.
    """

    def __init__(self, fleet: EmulatedFleet) -> None:
        self._fleet = fleet

    async def subscribe(self, sources: asyncio.Queue[Source]) -> None:
        """Take the events of all sources that come, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._follow(await sources.get()))

    async def _follow(self, source: Source) -> None:
        port = int(source.events.rpartition(":")[2])
        waiting: list[tuple[int, bytes]] = []
        heard: KvLog | None = None

        def listen(number: int, payload: bytes) -> None:
            waiting.append((number, payload))

        try:
            while source.is_wanted():
                log = self._log(port)
                if log is not heard:
                    if heard is not None:
                        heard.listeners.remove(listen)
                        waiting.clear()
                        source.feed.interrupted()
                    heard = log
                    log.listeners.append(listen)
                    _catch_up(source, log)
                batches, waiting[:] = [*waiting], []
                for number, payload in batches:
                    if source.feed.take(number, payload):
                        _catch_up(source, log)
                await asyncio.sleep(_TURN_S)
        finally:
            if heard is not None:
                heard.listeners.remove(listen)
        source.feed.end()

    def _log(self, port: int) -> KvLog:
        """Return the log that is published at a port at present."""
        if port >= RANK_PORT:
            return self._fleet.rank_kv_logs[port - RANK_PORT]
        return self._fleet.kv_logs[self._fleet.engines[port - 1]]


def _catch_up(source: Source, log: KvLog) -> None:
    """Have batches sent again, as the subscriber does."""
    if source.replay is not None and not _replayed(source.feed, log):
        _replayed(source.feed, log)


def _replayed(feed: KvFeed, log: KvLog) -> bool:
    start = feed.begin_replay()
    for number, payload in log.batches:
        if number >= start and not feed.replayed(number, payload):
            return False
    return feed.end_replay(complete=True)
