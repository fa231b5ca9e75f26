"""What the proxy has to do for a KV connector.

A connector says what each leg's `kv_transfer_params` are. What a prefiller returns is passed on to the
decode rank as it is, after a check that it can be used at all: a decoder given incomplete parameters
hangs silently (seen with vLLM 0.32, NIXL without `remote_host`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from balanceroute.proxy.core.errors import BalanceRouteError
from balanceroute.topologies import ConnectorFacts

MissingKv = Literal["complete", "absent", "unusable", "no_bootstrap"]
"""Why: the answer has ended, has no parameters, or such as none can pull with, or the bootstrap server
has not answered. The first is no fault."""


class MissingKvError(BalanceRouteError):
    """A prefill answer without usable KV-transfer parameters.

    Attributes:
        kind: The reason in a word, for metrics.
    """

    def __init__(self, kind: MissingKv, reason: str) -> None:
        super().__init__(reason)
        self.kind: MissingKv = kind


@dataclass(frozen=True, slots=True)
class BootstrapIdentity:
    """What a prefiller's bootstrap server tells.

    Attributes:
        engine_id: The engine's id, new with each start.
        bootstrap_address: Where decoders ask for the engine.
    """

    engine_id: str
    bootstrap_address: str


@dataclass(frozen=True)
class Connector(ABC):
    """One KV connector's side of the PD protocol.

    Attributes:
        callback: URL under which the decode engines reach this proxy; "" if they need not.
    """

    facts: ConnectorFacts
    callback: str = ""

    @abstractmethod
    def prefill_params(self, transfer: str) -> bytes:
        """Return the prefill leg's parameters as JSON. `transfer` is unique per leg."""

    def computes_part(self, returned: object, prompt_tokens: int) -> bool:
        """Return whether a prefiller told that it left the end of the prompt to the rank."""
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
