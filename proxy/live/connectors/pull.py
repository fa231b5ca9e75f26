"""Connectors whose prefill answer carries all that the decoder needs to pull the KV cache.

NIXL (vLLM): https://docs.vllm.ai/en/latest/features/nixl_connector_usage.html. MooncakeConnectorV1
(vllm-ascend) returns further keys, which pass through with the rest; its decode ranks run the
recompute scheduler, which hands requests back under KV pressure.
"""

import json
from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.live.connectors.base import BootstrapIdentity, Connector, MissingKvError

_PREFILL_PARAMS = json.dumps(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
).encode()
# What every pull needs.
_PULLED: tuple[tuple[str, type], ...] = (
    ("remote_block_ids", list),
    ("remote_engine_id", str),
    ("remote_host", str),
    ("remote_port", int),
)


class PullConnector(Connector):
    """NIXL in pull mode, and MooncakeConnectorV1 of vllm-ascend."""

    def prefill_params(self, transfer: str) -> bytes:
        """Return the parameters that make the prefiller keep the KV cache for a decoder."""
        del transfer
        return _PREFILL_PARAMS

    def computes_part(self, returned: object, prompt_tokens: int) -> bool:
        """Return whether a prefiller told that it left the end of the prompt to the rank: NIXL does."""
        computed = returned.get("remote_num_tokens") if isinstance(returned, dict) else None
        return type(computed) is int and 0 < computed < prompt_tokens

    def decode_params(
        self, transfer: str, returned: object, identity: BootstrapIdentity | None
    ) -> Mapping[str, Any]:
        """Return what the prefiller returned, if a decoder can pull with it.

        Raises:
            MissingKvError: It is no object, or lacks what every pull needs.
        """
        del transfer, identity
        if not isinstance(returned, dict):
            raise MissingKvError("absent", "the prefill answer has no kv_transfer_params")
        if returned.get("do_remote_prefill") is not True:
            reason = "kv_transfer_params of the prefill answer do not ask for a pull"
            raise MissingKvError("unusable", reason)
        for key, kind in _PULLED:
            value = returned.get(key)
            # Not isinstance: true is no port.
            if type(value) is not kind or not (value or kind is list):
                reason = f"kv_transfer_params of the prefill answer lack {key}"
                raise MissingKvError("unusable", reason)
        return returned
