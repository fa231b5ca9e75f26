"""The exact command of every process of a topology, with its environment, as data and as shell.

Flags are those of `vllm serve`; the environment's names are those of the pages that
`balanceroute.topologies.engines` cites. The shell expands nothing: every word is quoted.

With `kv_store` the KV connector is vLLM's MultiConnector: the file's connector first, which transfers,
then the store. What fails is decided above both (vllm-ascend v0.23.0, user_guide/feature_guide/kv_pool.md).
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any

from balanceroute.topologies.connector_facts import CONNECTORS
from balanceroute.topologies.engines import Engines, RoleEngines
from balanceroute.topologies.placement import EngineProcess, place

PROXY = "proxy"
# Keys of --kv-transfer-config that are read above a MultiConnector, and not in its parts.
_ABOVE = ("kv_load_failure_policy",)
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_INTERFACES = {
    "cuda": ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    "npu": ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"),
    "cpu": ("GLOO_SOCKET_IFNAME",),
}


@dataclass(frozen=True, slots=True)
class Command:
    name: str  # As in `decode-3`, or `proxy`.
    role: str  # "prefill", "decode" or "proxy".
    host: str
    about: str  # Its description, one line.
    environment: Mapping[str, str]
    words: tuple[tuple[str, ...], ...]  # The command line. A flag and its values are one item.

    def one_line(self) -> str:
        words = [word for item in self.words for word in item]
        return shlex.join([*(["env"] if self.environment else []), *self._assignments(), *words])

    def shell(self) -> str:
        """Return readable shell: a comment, then one variable or flag per line."""
        lines = ["env", *(f"    {shlex.quote(word)}" for word in self._assignments())]
        if not self.environment:
            lines = []
        command, *flags = (shlex.join(item) for item in self.words)
        lines += [command, *(f"    {flag}" for flag in flags)]
        return f"# {self.name} on {self.host}: {self.about}\n" + " \\\n".join(lines)

    def _assignments(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.environment.items()]


def engine_commands(engines: Engines, models: tuple[str, ...]) -> tuple[Command, ...]:
    """Return the commands of all engine processes, prefill first.

    Args:
        models: The served names; empty for the name of the weights.
    """
    return tuple(
        Command(
            name=process.name,
            role=process.role.role,
            host=process.host,
            about=_about(process),
            environment=_environment(engines, process),
            words=tuple(_words(engines, process, models)),
        )
        for process in place(engines)
    )


def proxy_command(engines: Engines, topology: str) -> Command:
    """Return the proxy's command.

    Args:
        topology: The topology on the proxy's host: a file, or the name of a shipped one.
    """
    return Command(
        name=PROXY,
        role=PROXY,
        host=engines.proxy_host,
        about="the proxy",
        environment=MappingProxyType({}),
        words=(("balanceroute", "serve"), ("--topology", topology)),
    )


def _about(process: EngineProcess) -> str:
    role = process.role
    parts = [f"headless, served by {process.head}"]
    if process.ports:
        last = process.ports.stop - 1
        parts = [process.urls[0] + (f" to {last}" if len(process.ports) > 1 else "")]
    if role.data_parallel > 1:
        ranks = process.ranks
        first, last = ranks.start, ranks.stop - 1
        which = f"rank {first}" if first == last else f"ranks {first} to {last}"
        parts.append(f"{which} of {role.data_parallel}")
    if role.hosts_per_rank > 1:
        parts.append(f"host {process.node + 1} of the {role.hosts_per_rank} of its rank")
    return ", ".join(parts)


def _environment(engines: Engines, process: EngineProcess) -> Mapping[str, str]:
    found: dict[str, str] = {}
    if process.devices:
        found[_VISIBLE_DEVICES[engines.device]] = ",".join(map(str, process.devices))
    if _is_address(process.host):
        # Else vLLM asks the routing table, which may name another interface.
        found["VLLM_HOST_IP"] = process.host
        if engines.device == "npu":
            found["HCCL_IF_IP"] = process.host
    if engines.interface is not None:
        found |= dict.fromkeys(_INTERFACES[engines.device], engines.interface)
    facts = CONNECTORS[engines.connector]
    for variable, value in (
        (facts.host_variable, process.host),
        (facts.port_variable, process.kv_port),
        (facts.lease_variable, engines.lease_s),
    ):
        if variable and value is not None:
            found[variable] = str(value)
    return MappingProxyType({**found, **process.role.environment})


def _words(
    engines: Engines, process: EngineProcess, models: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    role = process.role
    yield "vllm", "serve", engines.weights
    if not process.ports:
        yield ("--headless",)
    else:
        yield from _flag("host", process.host)
        yield from _flag("port", process.ports.start)
        if models:
            yield from _flag("served_model_name", list(models))
    yield from _flag("tensor_parallel_size", role.tensor_parallel)
    if role.pipeline_parallel > 1:
        yield from _flag("pipeline_parallel_size", role.pipeline_parallel)
    yield from _several_hosts(process)
    yield from _data_parallel(process)
    for name, value in (
        ("max_num_seqs", role.max_num_seqs),
        ("max_model_len", engines.max_model_len),
        ("max_num_batched_tokens", role.max_num_batched_tokens),
        ("block_size", engines.block_size),
        ("gpu_memory_utilization", role.gpu_memory_utilization),
        ("compilation_config", dict(role.compilation) or None),
        ("additional_config", _additional(process) or None),
        *role.flags.items(),
        ("kv_transfer_config", _kv_transfer(engines, process)),
    ):
        if value is not None:
            yield from _flag(name, value)


def _data_parallel(process: EngineProcess) -> Iterator[tuple[str, ...]]:
    role = process.role
    if role.data_parallel == 1:
        return
    yield from _flag("data_parallel_size", role.data_parallel)
    if role.dp_mode == "external":
        yield from _flag("data_parallel_rank", process.ranks.start)
    elif role.dp_mode == "supervised" or len(process.ranks) < role.data_parallel:
        yield from _flag("data_parallel_size_local", len(process.ranks))
        if process.ranks.start:
            yield from _flag("data_parallel_start_rank", process.ranks.start)
    if process.supervisor_port is not None:
        yield ("--data-parallel-multi-port-external-lb",)
        yield from _flag("data_parallel_supervisor_port", process.supervisor_port)
    yield from _flag("data_parallel_address", process.head)
    yield from _flag("data_parallel_rpc_port", process.rpc_port)


def _several_hosts(process: EngineProcess) -> Iterator[tuple[str, ...]]:
    role = process.role
    if role.master_port is not None:
        yield from _flag("nnodes", role.hosts_per_rank)
        yield from _flag("node_rank", process.node)
        yield from _flag("master_addr", process.head)
        yield from _flag("master_port", role.master_port)


def _additional(process: EngineProcess) -> dict[str, object]:
    role = process.role
    found = dict(role.additional)
    if role.recompute_scheduler:
        # All versions know it here; only those from v0.25 on also within scheduler_config.
        found["recompute_scheduler_enable"] = True
    return found


def _kv_transfer(engines: Engines, process: EngineProcess) -> dict[str, object]:
    role, facts = process.role, CONNECTORS[engines.connector]
    found: dict[str, object] = {
        "kv_connector": facts.vllm_class,
        "kv_role": _KV_ROLES[role.role],
    }
    more = dict(role.kv_transfer)
    given = more.pop("kv_connector_extra_config", {})
    extra: dict[str, Any] = {}
    if engines.device == "npu":
        found["kv_port"] = process.kv_port
        extra = {side.role: _parallel_sizes(side) for side in engines.roles}
    elif facts.lease_key and engines.lease_s is not None:
        extra = {facts.lease_key: engines.lease_s}
    for key, value in (given if isinstance(given, dict) else {}).items():
        both = isinstance(value, dict) and isinstance(extra.get(key), dict)
        extra[key] = {**extra[key], **value} if both else value
    found |= {**more, **({"kv_connector_extra_config": extra} if extra else {})}
    return _beside_store(found, role.kv_store) if role.kv_store else found


def _parallel_sizes(role: RoleEngines) -> dict[str, int]:
    found = {"dp_size": role.data_parallel, "tp_size": role.tensor_parallel}
    return found | ({"pp_size": role.pipeline_parallel} if role.pipeline_parallel > 1 else {})


def _beside_store(transfer: dict[str, object], store: Mapping[str, object]) -> dict[str, object]:
    above = {key: transfer[key] for key in _ABOVE if key in transfer}
    below = {key: value for key, value in transfer.items() if key not in _ABOVE}
    role = {"kv_role": transfer["kv_role"]}
    store_part = {"kv_connector": store["kv_connector"], **role, **store}
    return {
        "kv_connector": "MultiConnector",
        **role,
        **above,
        "kv_connector_extra_config": {"connectors": [below, store_part]},
    }


def _flag(name: str, value: object) -> Iterator[tuple[str, ...]]:
    """Yield a flag with its value: on or off, JSON, several words, or one."""
    flag = f"--{name.replace('_', '-')}"
    match value:
        case True:
            yield (flag,)
        case False:
            yield (f"--no-{flag.removeprefix('--')}",)
        case dict():
            yield flag, json.dumps(value, separators=(", ", ": "))
        case list():
            yield flag, *map(str, value)
        case _:
            word = str(value)
            # As one word: a value that begins with a dash is no flag.
            yield (f"{flag}={word}",) if word.startswith("-") else (flag, word)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
