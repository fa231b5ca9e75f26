"""KV connectors by the name on the command line.

Leases: vLLM's NIXL keeps unclaimed blocks 30 s (`kv_lease_duration`); vLLM's Mooncake and
vllm-ascend's keep them for their abort timeout, 480 s unless the environment says otherwise.
"""

from balanceroute.proxy.live.connectors.base import Connector, MissingKvError, PrefillerIdentity
from balanceroute.proxy.live.connectors.layerwise import LayerwiseConnector
from balanceroute.proxy.live.connectors.mooncake import MooncakeConnector
from balanceroute.proxy.live.connectors.pull import PullConnector

__all__ = ["CONNECTORS", "Connector", "MissingKvError", "PrefillerIdentity", "make_connector"]

CONNECTORS: dict[str, Connector] = {
    connector.name: connector
    for connector in (
        PullConnector("nixl", lease_s=30.0, recomputes=False),
        MooncakeConnector("mooncake", lease_s=480.0),
        PullConnector("mooncake-ascend", lease_s=480.0, recomputes=True, ranks_prefill=False),
        LayerwiseConnector(),
    )
}


def make_connector(name: str, *, callback: str = "") -> Connector:
    """Return a connector.

    Args:
        name: One of `CONNECTORS`.
        callback: URL under which the decode engines reach this proxy, if the connector needs one.
    """
    connector = CONNECTORS[name]
    return LayerwiseConnector(callback) if connector.decode_first else connector
