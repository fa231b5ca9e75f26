"""Checks of what prefill and decode engines must have in common, and of ranks on several hosts.

What must match, vLLM 0.32: vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py
(compute_nixl_compatibility_hash). HCCL's ports, CANN 8.5:
https://www.hiascend.com/document/detail/en/canncommercial/850/maintenref/envvar/envref_07_0143.html
"""

from collections.abc import Iterator, Mapping

from balanceroute.topologies.engines import Engines, RoleEngines
from balanceroute.topologies.findings import Finding

# Flags that give the KV cache another content or layout.
_SAME = ("kv_cache_dtype", "dtype", "quantization", "hf_overrides", "revision")
# Of a speculative_config, likewise: how many tokens are drafted may differ.
_SAME_DRAFT = ("method", "model", "revision", "kv_cache_dtype")
HCCL_FIRST_PORT = 60_000
HCCL_PORTS = 16


def check_pair(engines: Engines) -> Iterator[Finding]:
    """Yield where the roles differ and must not, and what ranks on several hosts lack."""
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
    """Return the ports of a host that HCCL takes; None if they cannot be told."""
    if "HCCL_HOST_SOCKET_PORT_RANGE" in role.environment:
        return None
    first = role.environment.get("HCCL_IF_BASE_PORT", str(HCCL_FIRST_PORT))
    return range(int(first), int(first) + HCCL_PORTS) if first.isdecimal() else None


def _differences(engines: Engines) -> Iterator[Finding]:
    prefill, decode = engines.prefill.flags, engines.decode.flags
    for flag in _SAME:
        mine, others = decode.get(flag, "auto"), prefill.get(flag, "auto")
        if mine != others:
            reason = (
                f"is {mine!r}, but prefill's is {others!r}: the KV caches differ. NIXL refuses the "
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
