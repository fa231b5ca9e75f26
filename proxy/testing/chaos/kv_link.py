"""KV cache events of emulated prefillers in virtual time, where ZeroMQ cannot be."""

import asyncio

from balanceroute.proxy.emulate.fleet import EmulatedFleet
from balanceroute.proxy.emulate.kv_log import KvLog
from balanceroute.proxy.live.engines.kv_feed import KvFeed, Source

# How often what was published arrives.
_TURN_S = 0.05


class KvLink:
    """Between the logs of a fleet's prefillers and the proxy that listens.

    Args:
        fleet: Its prefillers, by their numbers, are at the ports of the sources.
    """

    def __init__(self, fleet: EmulatedFleet) -> None:
        self._fleet = fleet

    async def subscribe(self, sources: asyncio.Queue[Source]) -> None:
        """Take the events of all sources that come, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self._follow(await sources.get()))

    async def _follow(self, source: Source) -> None:
        engine = self._fleet.engines[int(source.events.rpartition(":")[2]) - 1]
        waiting: list[tuple[int, bytes]] = []
        heard: KvLog | None = None

        def listen(number: int, payload: bytes) -> None:
            waiting.append((number, payload))

        try:
            while source.is_wanted():
                log = self._fleet.kv_logs[engine]
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
