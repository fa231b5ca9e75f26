"""Following the KV cache events of the engines, as they come and go.

A proxy that listens to none never imports this.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from balanceroute.proxy.live.control.roster import Roster
from balanceroute.proxy.live.engines.engine_url import EngineUrl
from balanceroute.proxy.live.engines.instances import Prefiller, Rank, Status
from balanceroute.proxy.live.engines.kv_feed import KvEventSource, KvFeed
from balanceroute.proxy.live.environment import Environment
from balanceroute.proxy.live.settings.declared import EngineSettings
from balanceroute.proxy.live.settings.engines import PrefillServer
from balanceroute.proxy.wire.messages import bracketed

if TYPE_CHECKING:
    from balanceroute.proxy.core.events import RankId
    from balanceroute.proxy.core.prefill.engine_blocks import EngineBlocks
    from balanceroute.proxy.live.engines.kv_feed import Subscribe

# Between two looks for engines that were added.
_LOOK_S = 0.5


async def follow(
    roster: Roster,
    ports: EngineSettings,
    *,
    subscribe: "Subscribe",
    lost: Callable[..., None],
) -> None:
    """Follow the engines' events for ever."""
    sources, instances = asyncio.Queue[KvEventSource](), roster.instances
    followed: dict[RankId, KvEventSource] = {}
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(subscribe(sources))
        looked_at = 0
        while True:
            # Those that are removed stay on the list, and numbers are never used again.
            new = instances.prefillers[looked_at:]
            looked_at += len(new)
            for prefiller in new:
                source = _source_of(prefiller, roster, ports, lost)
                if source is not None:
                    sources.put_nowait(source)
            blocks = instances.rank_blocks
            for rank in instances.ranks:
                # One that comes back has its number again.
                last = followed.get(rank.id)
                if blocks is None or not _is_there(rank):
                    continue
                if last is None or last.feed.ended:
                    followed[rank.id] = _source_of_rank(rank, blocks, ports, lost)
                    sources.put_nowait(followed[rank.id])
            await asyncio.sleep(_LOOK_S)


def _source_of(
    prefiller: Prefiller, roster: Roster, ports: EngineSettings, lost: Callable[..., None]
) -> KvEventSource | None:
    """Return where a prefiller's events come from; None if it sends none, or is gone already."""
    server, blocks = roster.servers.get(prefiller.target), roster.instances.engine_blocks
    if blocks is None or not isinstance(server, PrefillServer) or not _is_there(prefiller):
        return None
    events, replay = server.event_addresses(ports)
    if events is None:
        return None
    feed = KvFeed(blocks, prefiller.id, replays=replay is not None)
    return KvEventSource(feed, events, replay, partial(_is_there, prefiller), lost)


def _source_of_rank(
    rank: Rank, blocks: "EngineBlocks", ports: EngineSettings, lost: Callable[..., None]
) -> KvEventSource:
    """Return where a rank's events come from: at its server's host, by its number there."""
    url = EngineUrl.parse(rank.name)
    events, replay = (
        None if port is None else f"tcp://{bracketed(url.host)}:{port + (url.rank or 0)}"
        for port in (ports.rank_kv_events_port, ports.rank_kv_replay_port)
    )
    assert events is not None, "the settings name a port of rank events"
    feed = KvFeed(blocks, rank.id, replays=replay is not None)
    return KvEventSource(feed, events, replay, partial(_is_there, rank), lost)


def subscribed(environment: Environment) -> "Subscribe":
    """Return what takes KV cache events."""
    if environment.subscribe is not None:
        return environment.subscribe
    from balanceroute.proxy.live.engines import kv_subscriber  # noqa: PLC0415  # An extra.

    return kv_subscriber.subscribe


def _is_there(engine: Prefiller | Rank) -> bool:
    return engine.status is not Status.REMOVED
