"""The proxy's side of the KV connectors: a class for each `KvFlow`."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from balanceroute.proxy.core.errors import BalanceRouteError, ConfigError
from balanceroute.topologies import CONNECTORS, ConnectorFacts, KvFlow

# What the proxy has to do for a KV connector.
#
# A connector says what each leg's `kv_transfer_params` are. What a prefiller returns is passed on
# to the decode rank as it is, after a check that it can be used at all: a decoder given
# incomplete parameters hangs silently (seen with vLLM 0.32, NIXL without `remote_host`).

MissingKv = Literal["complete", "absent", "unusable", "no_bootstrap"]
"""Why: the answer has ended, has no parameters, or such as none can pull with, or the bootstrap server
has not answered. The first is no fault."""


class MissingKvError(BalanceRouteError):
    """A prefill answer without usable KV-transfer parameters."""

    def __init__(self, kind: MissingKv, reason: str) -> None:
        super().__init__(reason)
        self.kind: MissingKv = kind  # The reason in a word, for metrics.


@dataclass(frozen=True, slots=True)
class BootstrapIdentity:
    """The identity that a prefiller's bootstrap server returns."""

    engine_id: str  # The engine's id, new with each start.
    bootstrap_address: str  # Where decoders ask for the engine.


@dataclass(frozen=True)
class Connector(ABC):
    """One KV connector's side of the PD protocol."""

    facts: ConnectorFacts
    callback: str = ""  # URL under which the decode engines reach this proxy; "" if they need not.
    decode_first: ClassVar[bool] = (
        False  # Whether the decode leg starts first and asks for its prefill.
    )

    @abstractmethod
    def prefill_params(self, transfer: str) -> bytes:
        """Return the prefill leg's parameters as JSON. `transfer` is unique per leg."""

    def computes_part(self, returned: object, prompt_tokens: int) -> bool:
        """Return whether a prefiller reported that it left the end of the prompt to the rank."""
        del returned, prompt_tokens
        return False

    @abstractmethod
    def decode_params(
        self, transfer: str, returned: object, identity: BootstrapIdentity | None
    ) -> Mapping[str, Any]:
        """Return the decode leg's parameters.

        Args:
            transfer: That of the prefill leg.
            returned: `kv_transfer_params` of the prefill answer.
            identity: What the prefiller's bootstrap server answered, for connectors that need it.

        Raises:
            MissingKvError: No decoder could use the prefill.
        """


# vllm-ascend's layerwise Mooncake connector: the decode rank goes first and calls back.
#
# Keys as in vllm-ascend's layerwise example proxy and `mooncake_layerwise_connector.py`: the rank
# posts what the prefiller needs, verbatim, to the `metaserver` URL of its parameters.

METASERVER_PATH = b"/v1/metaserver/"


class LayerwiseConnector(Connector):
    """MooncakeLayerwiseConnector of vllm-ascend."""

    decode_first = True

    def prefill_params(self, transfer: str) -> bytes:
        """Refuse: the decode rank makes the prefill leg's parameters."""
        raise AssertionError(f"{transfer}: the prefill leg is started by a hand-off")

    def decode_params(
        self, transfer: str, returned: object, identity: BootstrapIdentity | None
    ) -> Mapping[str, Any]:
        """Return the parameters that make the rank call back for its prefill.

        Raises:
            ConfigError: It is not given where the engines reach this proxy.
        """
        del returned, identity
        if not self.callback:
            raise ConfigError("the engines need an address of this proxy to call back")
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "metaserver": f"{self.callback}{METASERVER_PATH.decode()}{transfer}",
        }


# vLLM's MooncakeConnector: the proxy names the transfer, the decoder asks a bootstrap server.
#
# The prefill answer carries no parameters. Keys as in real requests to vLLM 0.32; the engine id
# comes from `GET <bootstrap>/query`, keyed by data-parallel rank.


class MooncakeConnector(Connector):
    """MooncakeConnector of vLLM."""

    def prefill_params(self, transfer: str) -> bytes:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        return json.dumps(params).encode()

    def decode_params(
        self, transfer: str, returned: object, identity: BootstrapIdentity | None
    ) -> Mapping[str, Any]:
        del returned
        if identity is None:
            raise MissingKvError(
                "no_bootstrap", "the prefiller's bootstrap server has not answered"
            )
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": identity.bootstrap_address,
            "remote_engine_id": identity.engine_id,
            "transfer_id": transfer,
        }


# Connectors whose prefill answer carries all that the decoder needs to pull the KV cache.
#
# NIXL (vLLM): https://docs.vllm.ai/en/latest/features/nixl_connector_usage.html.
# MooncakeConnectorV1 (vllm-ascend) returns further keys, which pass through with the rest; its
# decode ranks run the recompute scheduler, which hands requests back under KV pressure.

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
        del transfer
        return _PREFILL_PARAMS

    def computes_part(self, returned: object, prompt_tokens: int) -> bool:
        computed = returned.get("remote_num_tokens") if isinstance(returned, dict) else None
        return type(computed) is int and 0 < computed < prompt_tokens

    def decode_params(
        self, transfer: str, returned: object, identity: BootstrapIdentity | None
    ) -> Mapping[str, Any]:
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


__all__ = ["BootstrapIdentity", "Connector", "MissingKv", "MissingKvError", "make_connector"]

_BY_FLOW: dict[KvFlow, type[Connector]] = {
    KvFlow.PULL: PullConnector,
    KvFlow.NAMED: MooncakeConnector,
    KvFlow.DECODE_FIRST: LayerwiseConnector,
}


def make_connector(name: str, *, callback: str = "") -> Connector:
    facts = CONNECTORS[name]
    return _BY_FLOW[facts.flow](facts, callback)
