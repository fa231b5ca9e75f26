"""What the proxy has to know about a KV connector.

A connector adapter says what each leg's `kv_transfer_params` are. What a prefiller returns is passed
on to the decode rank as it is, after a check that it can be used at all: a decoder given incomplete
parameters hangs silently (seen with vLLM 0.32, NIXL without `remote_host`).
"""

from collections.abc import Mapping
from typing import Any, Protocol

from balanceroute.proxy.core.errors import BalanceRouteError


class MissingKvError(BalanceRouteError):
    """A prefill answer without usable KV-transfer parameters."""


class Connector(Protocol):
    """One KV connector's side of the PD protocol."""

    @property
    def name(self) -> str:
        """The name on the command line."""
        ...

    @property
    def lease_s(self) -> float | None:
        """How long a prefiller keeps blocks that no decoder has asked for; None for ever."""
        ...

    @property
    def recomputes(self) -> bool:
        """Whether a decode rank may hand a request back (`stop_reason` "recomputed")."""
        ...

    @property
    def decode_first(self) -> bool:
        """Whether the decode leg goes first and calls back for its prefill."""
        ...

    @property
    def ranks_prefill(self) -> bool:
        """Whether its decode ranks can be relied on to compute a prompt."""
        ...

    def prefill_params(self, transfer: str) -> Mapping[str, object]:
        """Return the prefill leg's parameters. `transfer` is unique per leg."""
        ...

    def decode_params(
        self, transfer: str, returned: object, identity: "PrefillerIdentity | None"
    ) -> Mapping[str, Any]:
        """Return the decode leg's parameters.

        Args:
            transfer: That of the prefill leg.
            returned: `kv_transfer_params` of the prefill answer.
            identity: What the prefiller told of itself, for connectors that need it.

        Raises:
            MissingKvError: No decoder could use the prefill.
        """
        ...


class PrefillerIdentity(Protocol):
    """What a prefiller's bootstrap server tells."""

    @property
    def engine_id(self) -> str:
        """The engine's id, new with each start."""
        ...

    @property
    def bootstrap_address(self) -> str:
        """Where decoders ask for the engine."""
        ...
