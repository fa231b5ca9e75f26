"""Checks of what each KV connector, and a store beside it, asks of the engines.

vllm-ascend v0.23.0, vllm_ascend/distributed/kv_transfer: kv_p2p/mooncake_hybrid_connector.py asserts its
sizes, kv_pool/ascend_store/pool_scheduler.py (get_zmq_rpc_path_lookup) names the sockets of a store.
"""

from collections.abc import Iterable, Iterator, Mapping

from balanceroute.topologies.connector_facts import CONNECTORS, KvFlow
from balanceroute.topologies.engines import Engines, RoleEngines
from balanceroute.topologies.findings import Finding, Level
from balanceroute.topologies.placement import EngineProcess

# They find a prefix by hashes that every engine must make alike.
_SHARED_STORES = ("AscendStoreConnector", "MooncakeStoreConnector")


def check_connector(engines: Engines, processes: Iterable[EngineProcess]) -> Iterator[Finding]:
    """Yield what the connector and the store do not work with."""
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
    if facts.has_bootstrap and prefill.data_parallel > 1:
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
