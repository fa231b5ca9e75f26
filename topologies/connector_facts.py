"""The facts of each KV connector, for topologies, the proxy and the emulator.

NIXL: https://docs.vllm.ai/en/latest/features/nixl_connector_usage.html. vLLM's Mooncake:
https://docs.vllm.ai/en/latest/features/mooncake_connector_usage.html. Those of vllm-ascend:
https://docs.vllm.ai/projects/ascend/en/latest/tutorials/features/pd_disaggregation_mooncake_multi_node.html.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class KvFlow(Enum):
    """How a decode rank learns where its KV cache is."""

    PULL = "pull"  # The prefill answer has the parameters of a pull.
    NAMED = "named"  # The proxy names the transfer; the prefiller's bootstrap server has the rest.
    DECODE_FIRST = "decode first"  # The rank requests its prefill, which pushes the KV cache.


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorFacts:
    vllm_class: str  # Its name in `--kv-transfer-config`.
    flow: KvFlow  # The order of its legs.
    devices: tuple[str, ...]
    # How long a prefiller keeps blocks that no decoder has claimed, by default; None if it pushes
    # them.
    lease_s: float | None
    lease_key: str = ""  # Sets another lease, as a key of `kv_connector_extra_config`.
    lease_variable: str = ""  # Sets another lease, as a variable of the environment.
    port_key: str  # The key of a topology that has its first port on a host.
    port_roles: tuple[str, ...] = ("prefill", "decode")  # The roles that need it.
    port_variable: str = ""  # Sets the port; "" if `--kv-transfer-config` does.
    host_variable: str = ""  # Sets its host's address.
    port_per: Literal["rank", "process", "device"]  # The unit that has a port of its own.
    stages: bool = False  # Whether prefill may be a pipeline of several stages. Decode never is.
    # Whether a decode rank may return a request (`stop_reason` "recomputed").
    recomputes: bool = False
    ranks_prefill: bool = True  # Whether its decode ranks can compute a prompt reliably.
    # Whether a prefill answer says that the prefiller left the end of the prompt to the rank.
    tells_part: bool = False
    # vllm 0.32, nixl/pull_scheduler.py, mooncake/mooncake_connector.py; vllm-ascend at 182b75ea.
    # Whether a decode rank gets only those blocks of a KV cache that its prefix cache lacks.
    pulls_missing: bool = True
    # Whether the token of a prefill answer is the first of the answer. It is not where the
    # prefiller leaves the prompt's last token to the rank and does not say so.
    says_first: bool = True


CONNECTORS = {
    "nixl": ConnectorFacts(
        vllm_class="NixlConnector",
        flow=KvFlow.PULL,
        devices=("cuda", "cpu"),
        lease_s=30.0,
        lease_key="kv_lease_duration",
        port_key="side_channel_port",
        port_variable="VLLM_NIXL_SIDE_CHANNEL_PORT",
        host_variable="VLLM_NIXL_SIDE_CHANNEL_HOST",
        port_per="rank",  # vllm, nixl/base_scheduler.py.
        tells_part=True,  # `remote_num_tokens`.
    ),
    "mooncake": ConnectorFacts(
        vllm_class="MooncakeConnector",
        flow=KvFlow.NAMED,
        devices=("cuda", "cpu"),
        lease_s=480.0,
        lease_variable="VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
        port_key="bootstrap_port",
        port_roles=("prefill",),
        port_variable="VLLM_MOONCAKE_BOOTSTRAP_PORT",
        port_per="process",
        stages=True,  # vllm 0.32, mooncake/mooncake_connector.py; nixl/pull_worker.py has none.
    ),
    "mooncake-ascend": ConnectorFacts(
        vllm_class="MooncakeConnectorV1",
        flow=KvFlow.PULL,
        devices=("npu",),
        lease_s=480.0,
        lease_variable="VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
        port_key="kv_port",
        port_per="device",  # vllm-ascend, kv_p2p/mooncake_connector.py.
        stages=True,
        recomputes=True,
        ranks_prefill=False,
    ),
    # For models with KV caches of several kinds: kv_p2p/mooncake_hybrid_connector.py.
    "mooncake-hybrid": ConnectorFacts(
        vllm_class="MooncakeHybridConnector",
        flow=KvFlow.PULL,
        devices=("npu",),
        lease_s=480.0,
        lease_variable="VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
        port_key="kv_port",
        port_per="device",
        stages=True,
        recomputes=True,
        ranks_prefill=False,
        says_first=False,  # Its `_truncate_request_for_prefill`.
    ),
    "mooncake-layerwise": ConnectorFacts(
        vllm_class="MooncakeLayerwiseConnector",
        flow=KvFlow.DECODE_FIRST,
        devices=("npu",),
        lease_s=None,
        port_key="kv_port",
        port_per="device",
        recomputes=True,
        ranks_prefill=False,
        pulls_missing=False,  # `remote_cached_tokens` is read before it is known.
    ),
}
"""By the name on the command line and in a topology."""
