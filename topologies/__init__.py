"""Fleet layouts as TOML files: read, checked, and turned into the commands that start them.

This folder is a leaf: it imports nothing else of the project.
"""

from balanceroute.topologies.checks import (
    EngineOptions,
    PortUse,
    check_engines,
    check_local_prefill,
    check_options,
    known_options,
)
from balanceroute.topologies.commands import Command, engine_commands, proxy_command
from balanceroute.topologies.connector_facts import CONNECTORS, ConnectorFacts, KvFlow
from balanceroute.topologies.engines import MAX_RANKS, Engines, RoleEngines
from balanceroute.topologies.tables import Finding, TopologyError, did_you_mean
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
    "Command",
    "ConnectorFacts",
    "DecodeEntry",
    "EngineOptions",
    "Engines",
    "Finding",
    "GroupEntry",
    "KvFlow",
    "PortUse",
    "PrefillEntry",
    "RoleEngines",
    "Topology",
    "TopologyError",
    "added_group",
    "check_engines",
    "check_local_prefill",
    "check_options",
    "did_you_mean",
    "engine_commands",
    "known_options",
    "proxy_command",
    "read_engine_list",
    "read_topology",
    "shipped_topologies",
]
