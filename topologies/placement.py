"""The placement of engine processes: ranks, ports and devices that follow from `[engines]`."""

from collections import Counter
from dataclasses import dataclass

from balanceroute.topologies.connector_facts import CONNECTORS, ConnectorFacts
from balanceroute.topologies.engines import Engines, RoleEngines


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One `vllm serve`.

    Attributes:
        name: Its name, as in `decode-3`; unique in the topology.
        role: The engines of its role.
        instance: The index of its instance, from 0.
        slot: The index of its instance among those that begin on the same host.
        head: The host of its instance's first rank.
        ranks: The data-parallel ranks of its instance that it hosts.
        port: The port of its API; None if another process serves it.
        devices: The host's devices that it uses; empty for a CPU.
        kv_port: The connector's first port, as configured; None if it needs none. The ports that it
            derives from it differ by connector: see `kv_ports`.
    """

    name: str
    role: RoleEngines
    instance: int
    slot: int
    host: str
    head: str
    ranks: range
    port: int | None
    devices: range
    kv_port: int | None

    @property
    def url(self) -> str | None:
        """The URL of its API; None if it serves none."""
        return None if self.port is None else f"http://{bracketed(self.host)}:{self.port}"

    @property
    def rpc_port(self) -> int | None:
        """The port on which its instance's first rank listens for the others; None if there are none."""
        return None if self.role.rpc_port is None else self.role.rpc_port + self.slot

    def kv_ports(self, connector: ConnectorFacts) -> range:
        """Return the ports on its host that its connector listens on."""
        if self.kv_port is None:
            return range(0)
        if connector.port_per == "process":
            return range(self.kv_port, self.kv_port + 1)
        width = _ports_of_rank(connector, self.role)
        first = self.kv_port + self.ranks.start * width
        return range(first, first + len(self.ranks) * width)


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
    local = role.data_parallel // span
    # An external rank is a process of its own; the ranks of an internal instance share one a host.
    width = local if role.dp_mode == "internal" else 1
    for instance in range(role.instances):
        slot = instance % per_host
        first_host = instance // per_host * span
        head = hosts[first_host]
        for start in range(0, role.data_parallel, width):
            host = hosts[first_host + start // local]
            headless = role.dp_mode == "internal" and start > 0
            used = 0 if engines.device == "cpu" else role.tensor_parallel * width
            found.append(
                EngineProcess(
                    name=f"{role.role}-{len(found)}",
                    role=role,
                    instance=instance,
                    slot=slot,
                    host=host,
                    head=head,
                    ranks=range(start, start + width),
                    port=None if headless else role.port + served[host],
                    devices=range(devices[host], devices[host] + used),
                    kv_port=_kv_port(connector, role, slot, served[host]),
                )
            )
            devices[host] += used
            served[host] += not headless
    return found


def _kv_port(connector: ConnectorFacts, role: RoleEngines, slot: int, before: int) -> int | None:
    """Return the configured KV port of a process.

    Args:
        connector: The topology's connector.
        role: Its role.
        slot: Its instance's place among those that begin on the same host.
        before: The processes of the role on its host before it.
    """
    if role.kv_port is None:
        return None
    if connector.port_per == "process":
        return role.kv_port + before
    return role.kv_port + slot * role.data_parallel * _ports_of_rank(connector, role)


def _ports_of_rank(connector: ConnectorFacts, role: RoleEngines) -> int:
    return role.tensor_parallel if connector.port_per == "device" else 1


def bracketed(host: str) -> str:
    """Return a host as URLs write it."""
    return f"[{host}]" if ":" in host else host
