"""Fleet layouts as TOML files: read, checked, and turned into the commands that start them.

This folder is a leaf: it imports nothing else of the project.
"""

from balanceroute.topologies.checks import Finding, PortUse, check_engines, check_local_prefill
from balanceroute.topologies.commands import Command, engine_commands, proxy_command
from balanceroute.topologies.connector_facts import CONNECTORS, ConnectorFacts, KvFlow
from balanceroute.topologies.engines import MAX_RANKS, Engines, RoleEngines
from balanceroute.topologies.tables import TopologyError, did_you_mean
from balanceroute.topologies.topology import (
    DecodeEntry,
    PrefillEntry,
    Topology,
    read_topology,
    shipped_topologies,
)

__all__ = [
    "CONNECTORS",
    "MAX_RANKS",
    "Command",
    "ConnectorFacts",
    "DecodeEntry",
    "Engines",
    "Finding",
    "KvFlow",
    "PortUse",
    "PrefillEntry",
    "RoleEngines",
    "Topology",
    "TopologyError",
    "check_engines",
    "check_local_prefill",
    "did_you_mean",
    "engine_commands",
    "proxy_command",
    "read_topology",
    "shipped_topologies",
]
