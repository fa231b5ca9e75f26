"""The placement of engine processes: ranks, ports and devices that follow from `[engines]`."""

from collections import Counter
from dataclasses import dataclass

from balanceroute.topologies.connector_facts import CONNECTORS, ConnectorFacts
from balanceroute.topologies.engines import Engines, RoleEngines


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One `vllm serve`."""

    name: str  # Its name, as in `decode-3`; unique in the topology.
    role: RoleEngines  # The engines of its role.
    instance: int  # The index of its instance, from 0.
    slot: int  # The index of its instance among those that begin on the same host.
    host: str
    head: str  # The host of its instance's first rank.
    ranks: range  # The data-parallel ranks of its instance that it hosts.
    node: int  # The index of its host among those of one rank, from 0; 0 if the rank is on one.
    ports: range  # The ports of its API servers; empty if another process serves it.
    devices: range  # The host's devices that it uses; empty for a CPU.
    # The connector's first port, as configured; None if it needs none. The ports that it derives
    # from it differ by connector: see `kv_ports`.
    kv_port: int | None

    @property
    def urls(self) -> tuple[str, ...]:
        """The URLs of its API servers; empty if it has none."""
        return tuple(f"http://{bracketed(self.host)}:{port}" for port in self.ports)

    @property
    def rpc_port(self) -> int | None:
        """The port on which its instance's first rank listens for the other ranks; None if there are none."""
        return None if self.role.rpc_port is None else self.role.rpc_port + self.slot

    @property
    def supervisor_port(self) -> int | None:
        first = self.role.supervisor_port
        return None if first is None else first + self.slot

    def kv_ports(self, connector: ConnectorFacts) -> range:
        """Return the ports on its host that its connector listens on."""
        if self.kv_port is None or (self.node and connector.port_per != "device"):
            return range(0)
        if connector.port_per == "process":
            return range(self.kv_port, self.kv_port + 1)
        width = _ports_of_rank(connector, self.role)
        count = len(self.ranks) * width // self._hosts_per(connector)
        first = self.kv_port + self.ranks.start * width + self.node * count
        return range(first, first + count)

    def _hosts_per(self, connector: ConnectorFacts) -> int:
        """Return the hosts that share the ports of a rank."""
        return self.role.hosts_per_rank if connector.port_per == "device" else 1


def place(engines: Engines) -> tuple[EngineProcess, ...]:
    """Return the processes of all engines, prefill first.

    Devices of a host are assigned in this order; `checks` checks that a host has enough.
    """
    devices = Counter[str]()
    return tuple(
        process for role in engines.roles for process in _place_role(engines, role, devices)
    )


def _place_role(engines: Engines, role: RoleEngines, devices: Counter[str]) -> list[EngineProcess]:
    hosts, found = role.hosts, list[EngineProcess]()
    connector = CONNECTORS[engines.connector]
    served = Counter[str]()
    span = max(1, len(hosts) // role.instances)
    per_host = max(1, role.instances // len(hosts))
    nodes = role.hosts_per_rank
    local = max(1, role.data_parallel // span)
    # An external rank is a process of its own; those of another instance share one a host.
    width = 1 if role.dp_mode == "external" else local
    # A rank on several hosts is one process on each of them.
    starts = [(start, 0) for start in range(0, role.data_parallel, width)]
    if nodes > 1:
        starts = [(0, node) for node in range(nodes)]
    for instance in range(role.instances):
        slot = instance % per_host
        first_host = instance // per_host * span
        head = hosts[first_host]
        for start, node in starts:
            host = hosts[first_host + start // local + node]
            servers = width if role.dp_mode == "supervised" else 1
            if node or (role.dp_mode == "internal" and start > 0):
                servers = 0
            port = role.port + served[host]
            used = 0 if engines.device == "cpu" else role.devices_per_rank * width // nodes
            found.append(
                EngineProcess(
                    name=f"{role.role}-{len(found)}",
                    role=role,
                    instance=instance,
                    slot=slot,
                    host=host,
                    head=head,
                    ranks=range(start, start + width),
                    node=node,
                    ports=range(port, port + servers),
                    devices=range(devices[host], devices[host] + used),
                    kv_port=_kv_port(connector, role, slot, served[host]),
                )
            )
            devices[host] += used
            served[host] += servers
    return found


def _kv_port(connector: ConnectorFacts, role: RoleEngines, slot: int, before: int) -> int | None:
    """Return the configured KV port of a process.

    Args:
        slot: Its instance's place among those that begin on the same host.
        before: The processes of the role on its host before it.
    """
    if role.kv_port is None:
        return None
    if connector.port_per == "process":
        return role.kv_port + before
    return role.kv_port + slot * role.data_parallel * _ports_of_rank(connector, role)


def _ports_of_rank(connector: ConnectorFacts, role: RoleEngines) -> int:
    return role.devices_per_rank if connector.port_per == "device" else 1


def bracketed(host: str) -> str:
    """Return a host as URLs write it."""
    return f"[{host}]" if ":" in host else host
