"""The `[engines]` table of a topology: how to start every real engine.

```toml
[engines]
weights = "/weights/DeepSeek-V3-W8A8"  # Model of `vllm serve`: a folder or a hub name.
device = "npu"                         # One of DEVICES.
version = "0.23.0"                     # Of vLLM, or of vllm-ascend with "npu"; optional.
devices_per_host = 16                  # Assigned in order, prefill first; not for "cpu".
proxy_host = "10.0.0.1"                # Host of the proxy.
interface = "eth0"                     # The hosts' network interface; optional.
lease_s = 480                          # Lease that the prefillers get; optional. Not with layerwise.
max_model_len = 65536                  # Of both roles, as is block_size; both optional.
[engines.kv_transfer]                  # More keys of --kv-transfer-config; optional.
[engines.kv_store]                     # A second connector, which keeps prefixes: its part of
kv_connector = "AscendStoreConnector"  # --kv-transfer-config; optional. See `commands.py`.
[engines.flags]                        # More flags of `vllm serve`, with underscores; optional.
trust_remote_code = true               # false is --no-trust-remote-code; a table is JSON.
[engines.environment]                  # More of the environment, literally; optional.
[engines.prefill]                      # And [engines.decode] likewise.
hosts = ["10.0.0.1", "10.0.0.2"]
instances = 2                          # Engines on all of them; default: one a host.
port = 7100                            # The first API server's on a host; the next ones follow.
tensor_parallel = 16                   # Devices of a stage of a rank; default 1.
pipeline_parallel = 2                  # Stages of a rank; prefill only, default 1.
data_parallel = 1                      # Ranks of an instance; default 1.
dp_mode = "external"                   # One of DP_MODES; needed if it has several ranks.
rpc_port = 12321                       # Of an instance's first rank; needed likewise.
master_port = 29501                    # Of the first host of a rank that is on several; needed then.
supervisor_port = 9256                 # Of a host's supervisor; needed if dp_mode is "supervised".
max_num_seqs = 8
kv_port = 36000                        # The connector's: see `connector_facts.py`.
[engines.prefill.flags]                # Goes before [engines.flags], key by key; as do
[engines.prefill.kv_transfer]          # these three
[engines.prefill.kv_store]
[engines.prefill.environment]
```

A role also knows `max_num_batched_tokens`, `gpu_memory_utilization`, and the JSON tables `compilation`
and `additional`; decode knows `recompute_scheduler`. The flags are those of vLLM
(https://docs.vllm.ai/en/latest/cli/serve/) and vllm-ascend
(https://docs.vllm.ai/projects/ascend/en/latest/user_guide/configuration/additional_config.html).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from balanceroute.topologies.connector_facts import CONNECTORS
from balanceroute.topologies.tables import MAX_RANKS, Table

Role = Literal["prefill", "decode"]

ROLES: tuple[Role, ...] = ("prefill", "decode")
DEVICES = ("cuda", "npu", "cpu")
# external: one API server a rank. internal: one API server an instance, and X-data-parallel-rank.
# supervised: one API server a rank; one process a host starts them and ends them together
# (vLLM 0.32, entrypoints/launchers/dp_supervisor.py).
DP_MODES = ("external", "internal", "supervised")
# The keys of the ports that one connector or another needs.
_KV_PORT_KEYS = tuple(dict.fromkeys(facts.port_key for facts in CONNECTORS.values()))

_FLAG = re.compile(r"[a-z][a-z0-9_]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Flags that other keys set, and these keys.
_OWN_FLAGS = {
    "additional_config": "write the table additional of a role",
    "api_key": "secrets do not belong in this file: set VLLM_API_KEY where the engine runs",
    "block_size": "write [engines].block_size",
    "compilation_config": "write the table compilation of a role",
    "data_parallel_address": "it follows from hosts",
    "data_parallel_external_lb": "write dp_mode",
    "data_parallel_hybrid_lb": "write dp_mode",
    "data_parallel_multi_port_external_lb": "write dp_mode",
    "data_parallel_rank": "it follows from data_parallel and hosts",
    "data_parallel_rpc_port": "write rpc_port",
    "data_parallel_size": "write data_parallel",
    "data_parallel_size_local": "it follows from data_parallel and hosts",
    "data_parallel_start_rank": "it follows from data_parallel and hosts",
    "data_parallel_supervisor_port": "write supervisor_port",
    "gpu_memory_utilization": "write the role's gpu_memory_utilization",
    "headless": "it follows from dp_mode and hosts",
    "host": "it is each host's own address",
    "kv_transfer_config": "write [engines.kv_transfer]",
    "max_model_len": "write [engines].max_model_len",
    "max_num_batched_tokens": "write the role's max_num_batched_tokens",
    "max_num_seqs": "write the role's max_num_seqs",
    "model": "write [engines].weights",
    "master_addr": "it follows from hosts",
    "master_port": "write the role's master_port",
    "nnodes": "it follows from hosts",
    "node_rank": "it follows from hosts",
    "pipeline_parallel_size": "write pipeline_parallel",
    "port": "write the role's port",
    "served_model_name": "write model at the top of the file",
    "tensor_parallel_size": "write tensor_parallel",
}
_OWN_VARIABLES = {
    "ASCEND_RT_VISIBLE_DEVICES": "it follows from hosts and tensor_parallel",
    "CUDA_VISIBLE_DEVICES": "it follows from hosts and tensor_parallel",
    "GLOO_SOCKET_IFNAME": "write [engines].interface",
    "HCCL_IF_IP": "it is each host's own address",
    "HCCL_SOCKET_IFNAME": "write [engines].interface",
    "NCCL_SOCKET_IFNAME": "write [engines].interface",
    "TP_SOCKET_IFNAME": "write [engines].interface",
    "VLLM_API_KEY": "secrets do not belong in this file: set it where the engine runs",
    "VLLM_HOST_IP": "it is each host's own address",
    **{
        variable: reason
        for facts in CONNECTORS.values()
        for variable, reason in (
            (facts.lease_variable, "write [engines].lease_s"),
            (facts.port_variable, f"write {facts.port_key}"),
            (facts.host_variable, "it is each host's own address"),
        )
        if variable
    },
}
_OWN_KV_KEYS = {
    "engine_id": "each engine makes its own, which no two may share",
    "kv_connector": "write connector at the top of the file",
    "kv_port": "write the role's kv_port",
    "kv_role": "it follows from the role",
}
_OWN_STORE_KEYS = {key: reason for key, reason in _OWN_KV_KEYS.items() if key != "kv_connector"}
_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RoleEngines:
    role: Role  # "prefill" or "decode".
    hosts: tuple[str, ...]
    instances: int  # Number of engines on all hosts.
    port: int  # The first API server's on each host.
    tensor_parallel: int  # Devices of a stage of a rank.
    pipeline_parallel: int  # Stages of a rank.
    data_parallel: int  # Ranks of an instance.
    dp_mode: str | None  # One of `DP_MODES`; None if an instance is one rank.
    # An instance's first rank listens on it for the other ranks; None if there are none.
    rpc_port: int | None
    # The first host of a rank listens on it for the rank's other hosts; None if it has none.
    master_port: int | None
    # Of the first supervisor on a host, which reports whether all its ranks are healthy; None if
    # there is none.
    supervisor_port: int | None
    max_num_seqs: int  # Batch limit of a rank.
    max_num_batched_tokens: int | None  # Token limit of a step; None for vLLM's default.
    # Share of a device's memory, 0 to 1; None for vLLM's default.
    gpu_memory_utilization: float | None
    kv_port: int | None  # The first port of the connector on a host; None if the role needs none.
    # Whether a rank returns requests when its KV cache is full (vllm-ascend).
    recompute_scheduler: bool
    compilation: Mapping[str, object]  # `--compilation-config`.
    additional: Mapping[str, object]  # `--additional-config`.
    kv_transfer: Mapping[str, object]  # More keys of `--kv-transfer-config`.
    kv_store: Mapping[str, object]  # The part of a second connector in it; empty without.
    flags: Mapping[str, object]  # More flags, by name with underscores.
    environment: Mapping[str, str]  # More variables of the environment.

    @property
    def devices_per_rank(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def hosts_per_rank(self) -> int:
        return max(1, len(self.hosts) // self.instances) if self.data_parallel == 1 else 1


@dataclass(frozen=True, slots=True)
class Engines:
    weights: str  # The model argument of `vllm serve`.
    connector: str
    device: str
    # The version of vLLM, or of vllm-ascend with device "npu", whose options these are; None if the
    # file does not say.
    version: str | None
    devices_per_host: int | None  # Devices of a host; None for CPUs.
    proxy_host: str  # The host of the proxy.
    interface: str | None  # The hosts' network interface; None to leave it to the libraries.
    # How long a prefiller keeps a KV cache that no decoder has claimed; None for the connector's
    # default.
    lease_s: int | None
    max_model_len: int | None  # Context length in both roles; None for the model's default.
    block_size: int | None  # KV tokens of a block, in both roles; None for vLLM's default.
    prefill: RoleEngines
    decode: RoleEngines

    @property
    def roles(self) -> tuple[RoleEngines, RoleEngines]:
        """Both roles, prefill first."""
        return self.prefill, self.decode


# They are no keys of a role, or only of one role.
_NOT_KEYS = ("role", "kv_port", "recompute_scheduler")
ENGINES_KEYS = (
    *(one.name for one in fields(Engines) if one.name not in ("connector", *ROLES)),
    *("kv_transfer", "kv_store", "flags", "environment"),
    *ROLES,
)
ROLE_KEYS = (
    *(one.name for one in fields(RoleEngines) if one.name not in _NOT_KEYS),
    *_KV_PORT_KEYS,
)


def read_engines(table: Table, connector: str | None) -> Engines:
    """Read the `[engines]` table of a file.

    Raises:
        TopologyError: A key is unknown, missing, or has an invalid value.
    """
    if connector is None:
        raise table.error("connector", "is missing: [engines] needs it")
    engines = table.table("engines", ENGINES_KEYS)
    device = engines.word("device", DEVICES)
    if device is None:
        raise engines.error("device", f"is missing: one of {', '.join(DEVICES)}")
    _check_device(engines, device, connector)
    lease_s = engines.integer("lease_s", 6, 1_000_000)
    if lease_s is not None and CONNECTORS[connector].lease_s is None:
        raise engines.error("lease_s", f"means nothing with {connector}, which pushes KV caches")
    proxy_host = engines.required_text("proxy_host")
    prefill, decode = (_role(engines, role, connector) for role in ROLES)
    return Engines(
        weights=engines.required_text("weights"),
        connector=connector,
        device=device,
        version=engines.text("version"),
        devices_per_host=engines.integer("devices_per_host", 1, 1024),
        proxy_host=proxy_host,
        interface=engines.text("interface"),
        lease_s=lease_s,
        max_model_len=engines.integer("max_model_len", 1, 10**9),
        block_size=engines.integer("block_size", 1, 4096),
        prefill=prefill,
        decode=decode,
    )


def _check_device(engines: Table, device: str, connector: str) -> None:
    fitting = CONNECTORS[connector].devices
    if device not in fitting:
        reason = f"is {device!r}: connector {connector} needs {' or '.join(fitting)}"
        raise engines.error("device", reason)
    if device == "cpu" and "devices_per_host" in engines:
        raise engines.error("devices_per_host", "means nothing with device 'cpu'")
    if device != "cpu" and "devices_per_host" not in engines:
        raise engines.error("devices_per_host", f"is missing: device {device!r} needs it")


def _role(engines: Table, role: Role, connector: str) -> RoleEngines:
    own = ("recompute_scheduler",) if role == "decode" else ()
    table = engines.table(role, (*ROLE_KEYS, *own))
    hosts = table.hosts("hosts")
    data_parallel = table.integer("data_parallel", 1, MAX_RANKS) or 1
    dp_mode = table.word("dp_mode", DP_MODES)
    rpc_port = table.port("rpc_port")
    for key, value in (("dp_mode", dp_mode), ("rpc_port", rpc_port)):
        if data_parallel == 1 and value is not None:
            raise table.error(key, "means nothing with data_parallel = 1")
        if data_parallel > 1 and value is None:
            raise table.error(key, f"is missing: data_parallel = {data_parallel} needs it")
    supervisor_port = table.port("supervisor_port")
    if (supervisor_port is None) == (dp_mode == "supervised"):
        reason = "is missing: it needs one" if supervisor_port is None else "means nothing"
        raise table.error("supervisor_port", f"{reason} with dp_mode = {dp_mode!r}")
    port = table.port("port")
    if port is None:
        raise table.error("port", "is missing")
    tensor_parallel = table.integer("tensor_parallel", 1, 1024) or 1
    pipeline_parallel = _stages(table, role, connector)
    instances = _instances(table, len(hosts), data_parallel, tensor_parallel * pipeline_parallel)
    master_port = table.port("master_port")
    over_hosts = data_parallel == 1 and instances < len(hosts)
    if (master_port is not None) != over_hosts:
        reason = "is missing: a rank is on several hosts"
        raise table.error(
            "master_port", reason if over_hosts else "means nothing: a rank is on one host"
        )
    if dp_mode == "supervised" and data_parallel * instances < 2 * len(hosts):
        raise table.error("data_parallel", "a supervisor takes two ranks or more on each host")
    recomputes = table.switch("recompute_scheduler")
    if recomputes and not CONNECTORS[connector].recomputes:
        raise table.error("recompute_scheduler", "is vllm-ascend's: it needs its connectors")
    return RoleEngines(
        role=role,
        hosts=hosts,
        instances=instances,
        port=port,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        data_parallel=data_parallel,
        dp_mode=dp_mode,
        rpc_port=rpc_port,
        master_port=master_port,
        supervisor_port=supervisor_port,
        max_num_seqs=table.required_integer("max_num_seqs", 1, 1_000_000),
        max_num_batched_tokens=table.integer("max_num_batched_tokens", 1, 10**9),
        gpu_memory_utilization=table.number("gpu_memory_utilization", 0.01, 1),
        kv_port=_kv_port(table, role, connector),
        recompute_scheduler=recomputes,
        compilation=table.mapping("compilation") or _NOTHING,
        additional=_additional(table),
        kv_transfer=_kv_transfer(engines) | _kv_transfer(table),
        kv_store=_kv_store(engines, table),
        flags=_flags(engines) | _flags(table),
        environment=_environment(engines) | _environment(table),
    )


def _stages(table: Table, role: Role, connector: str) -> int:
    stages = table.integer("pipeline_parallel", 1, 1024) or 1
    if stages > 1 and role == "decode":
        raise table.error("pipeline_parallel", f"is {stages}: a decode rank has one stage")
    if stages > 1 and not CONNECTORS[connector].stages:
        able = ", ".join(name for name, facts in CONNECTORS.items() if facts.stages)
        reason = f"is {stages}: {connector} transfers no KV caches of several stages, {able} do"
        raise table.error("pipeline_parallel", reason)
    return stages


def _instances(table: Table, hosts: int, data_parallel: int, devices: int) -> int:
    """Return the number of instances: a multiple of the hosts, or a divisor of their number."""
    instances = table.integer("instances", 1, MAX_RANKS) or hosts
    if instances % hosts and hosts % instances:
        reason = f"is {instances}, must be a multiple or a divisor of the number of hosts ({hosts})"
        raise table.error("instances", reason)
    span = max(1, hosts // instances)
    if data_parallel > 1 and data_parallel % span:
        reason = f"is {data_parallel}, must share out evenly over an instance's {span} hosts"
        raise table.error("data_parallel", reason)
    if data_parallel == 1 and devices % span:
        reason = f"comes to {devices} devices, must share out evenly over a rank's {span} hosts"
        raise table.error("tensor_parallel", reason)
    return instances


def _kv_port(table: Table, role: Role, connector: str) -> int | None:
    facts, found = CONNECTORS[connector], None
    for key in _KV_PORT_KEYS:
        port = table.port(key)
        if key == facts.port_key and role in facts.port_roles:
            if port is None:
                raise table.error(key, f"is missing: connector {connector} needs it")
            found = port
        elif port is not None:
            raise table.error(key, f"means nothing here with connector {connector}")
    return found


def _additional(table: Table) -> Mapping[str, object]:
    additional = table.mapping("additional") or _NOTHING
    scheduler = additional.get("scheduler_config")
    for at in (additional, scheduler if isinstance(scheduler, dict) else {}):
        if "recompute_scheduler_enable" in at:
            raise table.error("additional", "write the role's recompute_scheduler")
    return additional


def _kv_transfer(table: Table) -> dict[str, object]:
    return _more(table, "kv_transfer", _FLAG, _OWN_KV_KEYS)


def _kv_store(engines: Table, role: Table) -> dict[str, object]:
    own = _more(role, "kv_store", _FLAG, _OWN_STORE_KEYS)
    found = _more(engines, "kv_store", _FLAG, _OWN_STORE_KEYS) | own
    name, place = found.get("kv_connector"), role if "kv_connector" in own else engines
    if found and not isinstance(name, str):
        raise place.error("kv_store.kv_connector", "is missing: it names the connector")
    if name in {"MultiConnector", *(facts.vllm_class for facts in CONNECTORS.values())}:
        reason = f"is {name!r}: connector transfers the KV caches, this one keeps prefixes"
        raise place.error("kv_store.kv_connector", reason)
    return found


def _flags(table: Table) -> dict[str, object]:
    flags = _more(table, "flags", _FLAG, _OWN_FLAGS)
    for key, value in flags.items():
        items = value if isinstance(value, list) else [value]
        if not items or not all(
            isinstance(item, bool | int | float | str | dict) for item in items
        ):
            raise table.error(f"flags.{key}", f"must be a plain value or a table, is {value!r}")
        if isinstance(value, list) and any(isinstance(item, bool | dict) for item in value):
            raise table.error(f"flags.{key}", f"must be a list of texts or numbers, is {value!r}")
    return flags


def _environment(table: Table) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in _more(table, "environment", _VARIABLE, _OWN_VARIABLES).items():
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise table.error(f"environment.{key}", f"must be a text or an integer, is {value!r}")
        found[key] = str(value)
    return found


def _more(
    table: Table, key: str, pattern: re.Pattern[str], own: Mapping[str, str]
) -> dict[str, object]:
    """Return a table whose keys the schema does not define."""
    found = dict(table.mapping(key) or _NOTHING)
    for name in found:
        if name in own:
            raise table.error(f"{key}.{name}", own[name])
        if not pattern.fullmatch(name):
            raise table.error(f"{key}.{name}", f"is no name: it does not match {pattern.pattern}")
    return found
