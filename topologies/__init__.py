"""Fleet layouts (how many prefillers, how many decode ranks) as TOML files, and their reader.

This folder is a leaf: it imports nothing else of the project.
"""

from balanceroute.topologies.topology import (
    CONNECTORS,
    MAX_RANKS,
    DecodeEntry,
    PrefillEntry,
    Topology,
    TopologyError,
    did_you_mean,
    read_topology,
    shipped_topologies,
)

__all__ = [
    "CONNECTORS",
    "MAX_RANKS",
    "DecodeEntry",
    "PrefillEntry",
    "Topology",
    "TopologyError",
    "did_you_mean",
    "read_topology",
    "shipped_topologies",
]
