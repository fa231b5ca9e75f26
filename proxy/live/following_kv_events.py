"""Following the KV cache events of the prefillers that the settings name."""

from functools import partial
from typing import TYPE_CHECKING

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.engines.instances import Prefiller, Status
from balanceroute.proxy.live.engines.kv_feed import KvFeed, Source, Subscribe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from balanceroute.proxy.live.engines.instances import Instances
    from balanceroute.proxy.live.environment import Environment
    from balanceroute.proxy.live.settings.engines import PrefillServer


async def follow_kv_events(
    instances: "Instances",
    servers: "Sequence[PrefillServer]",
    *,
    subscribe: Subscribe,
    lost: "Callable[..., None]",
) -> None:
    """Follow them for ever.

    Args:
        instances: Its first prefillers are the next.
        servers: The prefillers of the settings, in their order.
        subscribe: Takes the events.
        lost: Called when events were lost.
    """
    blocks = instances.engine_blocks
    assert blocks is not None, "somebody listens"
    sources = []
    for prefiller, server in zip(instances.prefillers, servers, strict=False):
        if server.kv_events is not None:
            feed = KvFeed(blocks, prefiller.id, replays=server.kv_replay is not None)
            there = partial(_is_there, prefiller)
            sources.append(Source(feed, server.kv_events, server.kv_replay, there, lost))
    await subscribe(sources)


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
        reason = f"needs {error.name}: pip install 'balanceroute[kv-events]'"
        raise ConfigError(f"--kv-events: {reason}") from None
    return kv_subscriber.subscribe


def _is_there(prefiller: Prefiller) -> bool:
    return prefiller.status is not Status.REMOVED
