"""Fleet layouts as TOML files: read, checked, and turned into the commands that start them.

This folder is a leaf: it imports nothing else of the project. What reads files (`topology`), starts engines
(`engines`, `placement`, `commands`) and judges that (`checks`) is imported by name, so that a proxy that is given
its engines by flags has none of it.
"""

from balanceroute.topologies.connector_facts import CONNECTORS, ConnectorFacts, KvFlow
from balanceroute.topologies.tables import MAX_RANKS, Finding, TopologyError, did_you_mean

__all__ = [
    "CONNECTORS",
    "MAX_RANKS",
    "ConnectorFacts",
    "Finding",
    "KvFlow",
    "TopologyError",
    "did_you_mean",
]
