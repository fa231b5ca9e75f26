"""Fleet layouts as TOML files: read, checked, and turned into the commands that start them.

This folder is a leaf: it imports nothing else of the project. What starts engines (`engines`, `placement`,
`commands`) and judges that (`checks`) is imported by name, so that a proxy without `[engines]` has none of it.
"""

from balanceroute.topologies.connector_facts import CONNECTORS, ConnectorFacts, KvFlow
from balanceroute.topologies.tables import MAX_RANKS, Finding, TopologyError, did_you_mean
from balanceroute.topologies.topology import (
    DecodeEntry,
    GroupEntry,
    PrefillEntry,
    Topology,
    added_group,
    read_engine_list,
    read_topology,
    shipped_topologies,
)

__all__ = [
    "CONNECTORS",
    "MAX_RANKS",
    "ConnectorFacts",
    "DecodeEntry",
    "Finding",
    "GroupEntry",
    "KvFlow",
    "PrefillEntry",
    "Topology",
    "TopologyError",
    "added_group",
    "did_you_mean",
    "read_engine_list",
    "read_topology",
    "shipped_topologies",
]
