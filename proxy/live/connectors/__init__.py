"""The proxy's side of the KV connectors: a file for each `KvFlow`."""

from balanceroute.proxy.live.connectors.base import (
    BootstrapIdentity,
    Connector,
    MissingKv,
    MissingKvError,
)
from balanceroute.proxy.live.connectors.layerwise import LayerwiseConnector
from balanceroute.proxy.live.connectors.mooncake import MooncakeConnector
from balanceroute.proxy.live.connectors.pull import PullConnector
from balanceroute.topologies import CONNECTORS, KvFlow

__all__ = ["BootstrapIdentity", "Connector", "MissingKv", "MissingKvError", "make_connector"]

_BY_FLOW: dict[KvFlow, type[Connector]] = {
    KvFlow.PULL: PullConnector,
    KvFlow.NAMED: MooncakeConnector,
    KvFlow.DECODE_FIRST: LayerwiseConnector,
}


def make_connector(name: str, *, callback: str = "") -> Connector:
    """Return a connector."""
    facts = CONNECTORS[name]
    return _BY_FLOW[facts.flow](facts, callback)
