"""How busy prefillers are, for the rules that choose by it."""

from collections.abc import Callable

from balanceroute.proxy.core.events import EngineLoad, Event, PrefillerScraped
from balanceroute.proxy.live.engines.engine_gauges import EngineGauges
from balanceroute.proxy.live.engines.instances import Instances, Prefiller, Target


def feed_loads(
    instances: Instances, feed: Callable[[Event], None], target: Target, gauges: EngineGauges
) -> None:
    """Tell the scheduler how busy a prefiller is; nothing of a decode engine."""
    load = EngineLoad(gauges.waiting, gauges.running, gauges.kv_cache_usage)
    for instance in instances.of(target):
        if isinstance(instance, Prefiller):
            feed(PrefillerScraped(instance.id, load))
