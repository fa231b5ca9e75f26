"""Checks of a topology's engines that its schema cannot make: ports, devices, sizes, connectors."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address

from balanceroute.topologies.connector_checks import check_connector
from balanceroute.topologies.connector_facts import CONNECTORS
from balanceroute.topologies.engines import Engines, RoleEngines
from balanceroute.topologies.findings import Finding
from balanceroute.topologies.pair_checks import check_pair, hccl_ports
from balanceroute.topologies.placement import EngineProcess, place
from balanceroute.topologies.tables import MAX_PORT

# AscendDirectTransport takes random ports from here on, this many per device of a host:
# https://docs.vllm.ai/projects/ascend/en/latest/tutorials/features/pd_disaggregation_mooncake_multi_node.html
_ASCEND_DIRECT_FIRST = 20_000
_ASCEND_DIRECT_PER_DEVICE = 1_000
# vllm-ascend's MLAPO_MAX_SUPPORTED_TOKENS (attention/mla_v1.py).
_MLAPO_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class PortUse:
    """Ports that a process listens on.

    Attributes:
        key: The key that determines them.
        owner: The process, as in `decode-3's API`.
    """

    host: str
    ports: range
    key: str
    owner: str


def check_engines(engines: Engines, also: Iterable[PortUse] = ()) -> tuple[Finding, ...]:
    """Return the findings about the engines, in the order of their keys.

    Args:
        engines: The engines.
        also: Ports that other processes listen on: the proxy.
    """
    processes = place(engines)
    return (
        *_hosts(engines),
        *_devices(engines, processes),
        *_sizes(engines),
        *check_connector(engines, processes),
        *check_pair(engines),
        *_clashes([*_engine_ports(engines, processes), *also]),
        *_reserved(engines, processes),
        *_progress(engines.decode),
        *_barriers(engines.decode),
    )


def _hosts(engines: Engines) -> Iterator[Finding]:
    hosts = {engines.proxy_host, *(host for role in engines.roles for host in role.hosts)}
    near = sorted(host for host in hosts if _is_loopback(host))
    far = sorted(hosts.difference(near))
    if near and far:
        reason = f"{near[0]} is reached from no other host, and there are others ({far[0]})"
        yield Finding("error", "engines", reason)


def _devices(engines: Engines, processes: Iterable[EngineProcess]) -> Iterator[Finding]:
    most: dict[str, EngineProcess] = {}
    for process in processes:
        most[process.host] = process
    for host, last in most.items():
        if engines.devices_per_host is not None and last.devices.stop > engines.devices_per_host:
            reason = (
                f"is {engines.devices_per_host}, but the engines on {host} need "
                f"{last.devices.stop}: ranks times tensor_parallel, times pipeline_parallel, of both roles"
            )
            yield Finding("error", "engines.devices_per_host", reason)


def _sizes(engines: Engines) -> Iterator[Finding]:
    prefill, decode = engines.prefill, engines.decode
    of_prefill, of_decode = prefill.tensor_parallel, decode.tensor_parallel
    key = "engines.prefill.tensor_parallel"
    if engines.device == "npu" and of_prefill % of_decode:
        reason = f"is {of_prefill}: vllm-ascend needs a multiple of decode's ({of_decode})"
        yield Finding("error", key, reason)
    elif of_prefill % of_decode and of_decode % of_prefill:
        reason = f"is {of_prefill}, must be a multiple or a divisor of decode's ({of_decode})"
        yield Finding("error", key, reason)
    tokens = decode.max_num_batched_tokens
    if tokens is not None and tokens < decode.max_num_seqs:
        reason = (
            f"is {tokens}, less than one token for each of max_num_seqs ({decode.max_num_seqs})"
        )
        yield Finding("error", "engines.decode.max_num_batched_tokens", reason)


def check_local_prefill(engines: Engines) -> Iterator[Finding]:
    """Yield why decode ranks cannot compute prompts, if they have to (vllm-ascend#11882).

    With MLAPO, which is on by default, models with MLA in W8A8 drop the weights for it.
    """
    decode = engines.decode
    tokens, additional = decode.max_num_batched_tokens, decode.additional
    on = additional.get("enable_mlapo", decode.environment.get("VLLM_ASCEND_ENABLE_MLAPO") != "0")
    if engines.device != "npu" or not on or tokens is None or tokens > _MLAPO_TOKENS:
        return
    if additional.get("mlapo_keep_prefill_weights") is not True:
        reason = (
            "lacks mlapo_keep_prefill_weights = true: with MLAPO and max_num_batched_tokens of "
            f"{_MLAPO_TOKENS} or less a rank frees the weights that a prompt takes (MLA models in "
            "W8A8), and [proxy].direct sends it prompts: it dies of the first"
        )
        yield Finding("error", "engines.decode.additional", reason)


def _engine_ports(engines: Engines, processes: Iterable[EngineProcess]) -> Iterator[PortUse]:
    for process in processes:
        place_of = f"engines.{process.role.role}"
        name = process.name
        if process.ports:
            yield PortUse(process.host, process.ports, f"{place_of}.port", f"{name}'s API")
        if process.supervisor_port is not None:
            supervisor = range(process.supervisor_port, process.supervisor_port + 1)
            key = f"{place_of}.supervisor_port"
            yield PortUse(process.host, supervisor, key, f"{name}'s supervisor")
        if process.rpc_port is not None and process.ranks.start == 0:
            rpc = range(process.rpc_port, process.rpc_port + 1)
            yield PortUse(process.host, rpc, f"{place_of}.rpc_port", f"{name}'s RPC")
        if process.role.master_port is not None and process.node == 0:
            master = range(process.role.master_port, process.role.master_port + 1)
            yield PortUse(process.host, master, f"{place_of}.master_port", f"{name}'s group")
        facts = CONNECTORS[engines.connector]
        kv_ports = process.kv_ports(facts)
        if kv_ports:
            yield PortUse(
                process.host, kv_ports, f"{place_of}.{facts.port_key}", f"{name}'s connector"
            )


def _clashes(uses: Iterable[PortUse]) -> Iterator[Finding]:
    by_host: dict[str, list[PortUse]] = defaultdict(list)
    reported: set[tuple[str, str]] = set()
    for use in uses:
        if use.ports.stop - 1 > MAX_PORT:
            reason = f"comes to {_ports(use.ports)} for {use.owner}, beyond {MAX_PORT}"
            yield Finding("error", use.key, reason)
        for other in by_host[use.host]:
            first = max(use.ports.start, other.ports.start)
            pair = (use.key, other.key)
            if first < min(use.ports.stop, other.ports.stop) and pair not in reported:
                # Once for each pair of keys: one change of one of them resolves all their clashes.
                reported.add(pair)
                reason = (
                    f"{use.owner} would listen on {use.host}:{_ports(use.ports)}, where "
                    f"{other.owner} has {_ports(other.ports)} ({other.key})"
                )
                yield Finding("error", use.key, reason)
        by_host[use.host].append(use)


def _reserved(engines: Engines, processes: Iterable[EngineProcess]) -> Iterator[Finding]:
    if engines.device != "npu" or engines.devices_per_host is None:
        return
    end = _ASCEND_DIRECT_FIRST + engines.devices_per_host * _ASCEND_DIRECT_PER_DEVICE
    direct = "Mooncake's AscendDirectTransport takes ports at random,"
    hosts = {host for role in engines.roles for host in role.hosts}
    taken = [(direct, range(_ASCEND_DIRECT_FIRST, end), hosts)]
    for role in engines.roles:
        ports = hccl_ports(role)
        if ports is not None:
            taken.append((f"HCCL of {role.role} (HCCL_IF_BASE_PORT) takes", ports, {*role.hosts}))
    reported: set[tuple[str, str]] = set()
    for use in _engine_ports(engines, processes):
        for who, ports, where in taken:
            overlaps = use.ports.start < ports.stop and use.ports.stop > ports.start
            if overlaps and use.host in where and (use.key, who) not in reported:
                reported.add((use.key, who))
                reason = f"{use.owner} would listen on {_ports(use.ports)}: {who} {_ports(ports)}"
                yield Finding("error", use.key, reason)


def _progress(decode: RoleEngines) -> Iterator[Finding]:
    if "reasoning_parser" not in decode.flags:
        return  # The engine's own counts are right.
    for flag in ("speculative_config", "stream_interval"):
        if flag in decode.flags:
            reason = (
                "merges tokens into one event, which the proxy counts as one where there is a "
                "reasoning parser: it underestimates the loads until requests end"
            )
            yield Finding("note", f"engines.decode.flags.{flag}", reason)


def _barriers(decode: RoleEngines) -> Iterator[Finding]:
    if decode.instances > 1 and decode.data_parallel > 1:
        reason = (
            f"is {decode.instances}: each instance has a step barrier of its own, but the proxy "
            "balances all ranks as if they had one; run a proxy for each"
        )
        yield Finding("note", "engines.decode.instances", reason)


def _ports(ports: range) -> str:
    return str(ports.start) if len(ports) == 1 else f"{ports.start}-{ports.stop - 1}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
