"""Following the KV cache events of the prefillers, as they come and go."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.engines.instances import Prefiller, Status
from balanceroute.proxy.live.engines.kv_feed import KvFeed, Source, Subscribe
from balanceroute.proxy.live.settings.engines import PrefillServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from balanceroute.proxy.live.control.roster import Roster
    from balanceroute.proxy.live.environment import Environment
    from balanceroute.proxy.live.settings.declared import EngineSettings

# Between two looks for prefillers that were added.
_LOOK_S = 0.5


async def follow_kv_events(
    roster: "Roster",
    ports: "EngineSettings",
    *,
    subscribe: Subscribe,
    lost: "Callable[..., None]",
) -> None:
    """Follow them for ever.

    Args:
        roster: Has the prefillers, and what was said of each.
        ports: Where those publish that name no address.
        subscribe: Takes the events.
        lost: Called when events were lost.
    """
    sources = asyncio.Queue[Source]()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(subscribe(sources))
        looked_at = 0
        while True:
            # Those that are removed stay on the list, and numbers are never used again.
            new = roster.instances.prefillers[looked_at:]
            looked_at += len(new)
            for prefiller in new:
                source = _source_of(prefiller, roster, ports, lost)
                if source is not None:
                    sources.put_nowait(source)
            await asyncio.sleep(_LOOK_S)


def _source_of(
    prefiller: Prefiller, roster: "Roster", ports: "EngineSettings", lost: "Callable[..., None]"
) -> Source | None:
    """Return where a prefiller's events come from; None if it tells none, or is gone already."""
    server, blocks = roster.servers.get(prefiller.target), roster.instances.engine_blocks
    assert blocks is not None, "somebody listens"
    if not isinstance(server, PrefillServer) or not _is_there(prefiller):
        return None
    events, replay = server.event_addresses(ports)
    if events is None:
        return None
    feed = KvFeed(blocks, prefiller.id, replays=replay is not None)
    return Source(feed, events, replay, partial(_is_there, prefiller), lost)


def subscribed(environment: "Environment") -> Subscribe:
    """Return what takes KV cache events.

    Raises:
        ConfigError: Its extra is not installed.
    """
    if environment.subscribe is not None:
        return environment.subscribe
    try:
        from balanceroute.proxy.live.engines import kv_subscriber  # noqa: PLC0415  # An extra.
    except ModuleNotFoundError as error:
        raise ConfigError("--kv-events: needs pyzmq: pip install pyzmq") from error
    return kv_subscriber.subscribe


def _is_there(prefiller: Prefiller) -> bool:
    return prefiller.status is not Status.REMOVED
