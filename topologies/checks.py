"""Checks of a topology's engines that its schema cannot make: ports, devices, sizes, connectors."""

import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from ipaddress import ip_address
from pathlib import Path

from balanceroute.topologies.connector_facts import CONNECTORS, KvFlow
from balanceroute.topologies.engines import Engines, RoleEngines
from balanceroute.topologies.placement import EngineProcess, place
from balanceroute.topologies.tables import MAX_PORT, Finding, Level, did_you_mean

# Checks of what each KV connector, and a store beside it, asks of the engines.
#
# vllm-ascend v0.23.0, vllm_ascend/distributed/kv_transfer: kv_p2p/mooncake_hybrid_connector.py
# asserts its sizes, kv_pool/ascend_store/pool_scheduler.py (get_zmq_rpc_path_lookup) names the
# sockets of a store.

# They find a prefix by hashes that every engine must make alike.
_SHARED_STORES = ("AscendStoreConnector", "MooncakeStoreConnector")


def check_connector(engines: Engines, processes: Iterable[EngineProcess]) -> Iterator[Finding]:
    """Yield the engines' flags that the connector and the store do not work with."""
    yield from _basics(engines)
    if engines.connector == "mooncake-hybrid":
        yield from _hybrid_stages(engines)
        for role in engines.roles:
            yield from _hybrid(role)
    for role in engines.roles:
        yield from _store(engines, role)
    yield from _store_sockets(processes)


def _basics(engines: Engines) -> Iterator[Finding]:
    prefill, facts = engines.prefill, CONNECTORS[engines.connector]
    if facts.flow is KvFlow.NAMED and prefill.data_parallel > 1:
        reason = (
            f"is {prefill.data_parallel}: the proxy asks a Mooncake prefiller's bootstrap server for "
            "its rank 0 alone; use several instances"
        )
        yield Finding("error", "engines.prefill.data_parallel", reason)
    pulls = facts.flow is KvFlow.PULL
    if facts.recomputes and pulls and not engines.decode.recompute_scheduler:
        reason = (
            "is off: under KV pressure a rank preempts and computes the prompt itself, in the step "
            "of all others"
        )
        yield Finding("note", "engines.decode.recompute_scheduler", reason)


def _hybrid(role: RoleEngines) -> Iterator[Finding]:
    place = f"engines.{role.role}.flags"
    if role.flags.get("disable_hybrid_kv_cache_manager") is not False:
        reason = (
            "is not false: vLLM then gives all layers KV caches of one kind, which mooncake-ascend "
            "transfers too, and a model that needs the others runs out of memory"
        )
        yield Finding("note", f"{place}.disable_hybrid_kv_cache_manager", reason)
    for flag in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if role.flags.get(flag, 1) != 1:
            reason = f"is {role.flags[flag]}: mooncake-hybrid has no context parallelism"
            yield Finding("error", f"{place}.{flag}", reason)


def _hybrid_stages(engines: Engines) -> Iterator[Finding]:
    stages = engines.prefill.pipeline_parallel
    if stages > 1:
        reason = (
            f'is {stages}: MooncakeHybridConnector of vllm-ascend 0.23.0 ends at its start ("received '
            'pp_rank > 0 handshake metadata but does not support PP-disaggregated KV transfer")'
        )
        level: Level = "error" if engines.version == "0.23.0" else "note"
        yield Finding(level, "engines.prefill.pipeline_parallel", reason)


def _store(engines: Engines, role: RoleEngines) -> Iterator[Finding]:
    name = role.kv_store.get("kv_connector")
    if name in _SHARED_STORES and "PYTHONHASHSEED" not in role.environment:
        reason = (
            f"lacks PYTHONHASHSEED: without it no engine finds what another has put into {name}"
        )
        yield Finding("error", f"engines.{role.role}.environment", reason)
    stages, extra = engines.prefill.pipeline_parallel, _extra(role)
    if extra.get("consumer_is_to_put") and extra.get("prefill_pp_size", 1) != stages:
        reason = f"needs prefill_pp_size = {stages} with consumer_is_to_put: that of prefill"
        yield Finding("error", f"engines.{role.role}.kv_store", reason)


def _store_sockets(processes: Iterable[EngineProcess]) -> Iterator[Finding]:
    owners: dict[tuple[str, str, int], EngineProcess] = {}
    for process in processes:
        role = process.role
        if role.kv_store.get("kv_connector") != "AscendStoreConnector" or process.node:
            continue
        port = str(_extra(role).get("lookup_rpc_port", 0))
        other = owners.setdefault((process.host, port, process.ranks.start), process)
        if other is not process:
            reason = (
                f"gives {process.name} the lookup_rpc_port {port} of {other.name} on {process.host}: "
                "write another one for each role, and one instance of a role a host"
            )
            yield Finding("error", f"engines.{role.role}.kv_store", reason)
            return


def _extra(role: RoleEngines) -> Mapping[str, object]:
    extra = role.kv_store.get("kv_connector_extra_config")
    return extra if isinstance(extra, dict) else {}


# Checks of the flags that prefill and decode engines must share, and of ranks on several hosts.
#
# The flags that must match, vLLM 0.32: vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py
# (compute_nixl_compatibility_hash). HCCL's ports, CANN 8.5:
# https://www.hiascend.com/document/detail/en/canncommercial/850/maintenref/envvar/envref_07_0143.html

# Flags that give the KV cache another content or layout.
_SAME = ("kv_cache_dtype", "dtype", "quantization", "hf_overrides", "revision")
# Of a speculative_config, likewise: how many tokens are drafted may differ.
_SAME_DRAFT = ("method", "model", "revision", "kv_cache_dtype")
HCCL_FIRST_PORT = 60_000
HCCL_PORTS = 16


def check_pair(engines: Engines) -> Iterator[Finding]:
    """Yield where the roles differ and must not, and missing flags of ranks on several hosts."""
    yield from _differences(engines)
    yield from _drafts(engines)
    for role in engines.roles:
        yield from _draft_tokens(role)
    yield from _interface(engines)
    yield from _npu_sockets(engines)


def drafted_tokens(role: RoleEngines) -> int:
    """Return the tokens that a step drafts for each request; 0 without speculative decoding."""
    number = _draft(role).get("num_speculative_tokens", 0)
    return number if isinstance(number, int) else 0


def hccl_ports(role: RoleEngines) -> range | None:
    """Return the ports of a host that HCCL takes; None if unknown."""
    if "HCCL_HOST_SOCKET_PORT_RANGE" in role.environment:
        return None
    first = role.environment.get("HCCL_IF_BASE_PORT", str(HCCL_FIRST_PORT))
    return range(int(first), int(first) + HCCL_PORTS) if first.isdecimal() else None


def _differences(engines: Engines) -> Iterator[Finding]:
    prefill, decode = engines.prefill.flags, engines.decode.flags
    for flag in _SAME:
        own, other = decode.get(flag, "auto"), prefill.get(flag, "auto")
        if own != other:
            reason = (
                f"is {own!r}, but prefill's is {other!r}: the KV caches differ. NIXL refuses the "
                'pair ("NIXL compatibility hash mismatch"), other connectors may transfer nonsense'
            )
            yield Finding("error", f"engines.decode.flags.{flag}", reason)


def _drafts(engines: Engines) -> Iterator[Finding]:
    prefill, decode = _draft(engines.prefill), _draft(engines.decode)
    for key in _SAME_DRAFT:
        if prefill.get(key) != decode.get(key):
            reason = (
                f"has {key} {decode.get(key)!r}, but prefill's {prefill.get(key)!r}: the KV caches of "
                "the draft model differ; give both roles the same in [engines.flags]"
            )
            yield Finding("error", "engines.decode.flags.speculative_config", reason)
            return


def _draft(role: RoleEngines) -> Mapping[str, object]:
    given = role.flags.get("speculative_config")
    return given if isinstance(given, dict) else {}


def _draft_tokens(role: RoleEngines) -> Iterator[Finding]:
    drafted, tokens = drafted_tokens(role), role.max_num_batched_tokens
    needed = role.max_num_seqs * (1 + drafted)
    if drafted and tokens is not None and tokens < needed:
        reason = (
            f"is {tokens}, less than {needed}: each of max_num_seqs ({role.max_num_seqs}) takes one "
            f"token and {drafted} drafted ones in a step"
        )
        yield Finding("error", f"engines.{role.role}.max_num_batched_tokens", reason)


def _interface(engines: Engines) -> Iterator[Finding]:
    spread = [role for role in engines.roles if len(role.hosts) > role.instances]
    if spread and engines.interface is None and engines.device != "cpu":
        reason = (
            f"is missing: the ranks of {spread[0].role} are on several hosts, and on hosts with "
            "InfiniBand their group may hang while it forms; name the Ethernet interface"
        )
        yield Finding("note", "engines.interface", reason)


def _npu_sockets(engines: Engines) -> Iterator[Finding]:
    shared = sorted(set(engines.prefill.hosts) & set(engines.decode.hosts))
    variable = "HCCL_NPU_SOCKET_PORT_RANGE"
    if engines.device == "npu" and shared:
        missing = [role.role for role in engines.roles if variable not in role.environment]
        if missing:
            reason = (
                f"lacks {variable}: both roles are on {shared[0]}, and HCCL listens at port 16666 of "
                "an NPU's link unless it is told others (vllm-ascend#4725)"
            )
            yield Finding("note", f"engines.{missing[0]}.environment", reason)


# AscendDirectTransport takes random ports from here on, this many per device of a host:
# https://docs.vllm.ai/projects/ascend/en/latest/tutorials/features/pd_disaggregation_mooncake_multi_node.html
_ASCEND_DIRECT_FIRST = 20_000
_ASCEND_DIRECT_PER_DEVICE = 1_000
# vllm-ascend's MLAPO_MAX_SUPPORTED_TOKENS (attention/mla_v1.py).
_MLAPO_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class PortUse:
    """Ports that a process listens on."""

    host: str
    ports: range
    key: str  # The key that determines them.
    owner: str  # The process, as in `decode-3's API`.


def check_engines(engines: Engines, also: Iterable[PortUse] = ()) -> tuple[Finding, ...]:
    """Return the findings about the engines, in the order of their keys.

    Args:
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


# The options that an engine's version knows, and those of a topology that it does not.
#
# Lists of some versions are in `options/`. The installed engine's own parser knows more:
# `balanceroute topology check` asks it where there is one.

_FOLDER = Path(__file__).with_name("options")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options of one version of an engine, by name with underscores."""

    engine: str  # Its name and version, as in "vllm 0.32.0".
    flags: frozenset[str]  # Of `vllm serve`.
    compilation: frozenset[str]  # Keys of `--compilation-config`.
    kv_transfer: frozenset[str]  # Keys of `--kv-transfer-config`.
    variables: frozenset[str]  # Of the environment, those that begin with VLLM_.
    additional: frozenset[str]  # Keys of `--additional-config`; empty if it has none of its own.
    additional_later: frozenset[str]  # Those of later versions, which it ignores.


def known_options(engines: Engines) -> tuple[EngineOptions, bool]:
    """Return the list for the engines' version, or the latest of that engine, and whether it is theirs."""
    engine = "vllm-ascend" if engines.device == "npu" else "vllm"
    paths = {path.stem: path for path in _FOLDER.glob(f"{engine}-[0-9]*.toml")}
    named = f"{engine}-{engines.version}"
    chosen = named if named in paths else max(paths, key=_number)
    return _read(paths[chosen]), chosen == named


def check_options(engines: Engines) -> Iterator[Finding]:
    """Yield the options that the engines' version does not know.

    They are errors only where the list is that of the file's version.
    """
    options, theirs = known_options(engines)
    level: Level = "error" if theirs else "note"
    reported: set[str] = set()
    for role in engines.roles:
        for table, names, known in _used(role, options):
            for name in names:
                if name in known or f"{table}.{name}" in reported:
                    continue
                reported.add(f"{table}.{name}")
                reason = (
                    f"{options.engine} knows no such {_NOUNS[table]}{did_you_mean(name, known)}"
                )
                # An engine ends over the former, and passes over the latter.
                fatal = table in ("flags", "compilation", "kv_transfer")
                yield Finding(
                    level if fatal else "note", f"engines.{role.role}.{table}.{name}", reason
                )


_NOUNS = {
    "flags": "option",
    "compilation": "key of --compilation-config",
    "kv_transfer": "key of --kv-transfer-config",
    "environment": "variable",
    "additional": "key of --additional-config",
}


def _used(
    role: RoleEngines, options: EngineOptions
) -> Iterator[tuple[str, Mapping[str, object], frozenset[str]]]:
    yield "flags", role.flags, options.flags
    yield "compilation", role.compilation, options.compilation
    yield "kv_transfer", role.kv_transfer, options.kv_transfer
    own = {name: value for name, value in role.environment.items() if name.startswith("VLLM_")}
    yield "environment", own, options.variables
    if options.additional:
        yield "additional", role.additional, options.additional | options.additional_later


def _read(path: Path) -> EngineOptions:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    words = {
        field.name: frozenset(content.get(field.name, "").split())
        for field in fields(EngineOptions)
        if field.name != "engine"
    }
    name, _, version = path.stem.rpartition("-")
    return EngineOptions(engine=f"{name} {version}", **words)


def _number(stem: str) -> tuple[int, ...]:
    return tuple(map(int, stem.rpartition("-")[2].split(".")))
