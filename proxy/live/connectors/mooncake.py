"""vLLM's MooncakeConnector: the proxy names the transfer, the decoder asks a bootstrap server.

The prefill answer carries no parameters. Keys as in real requests to vLLM 0.32; the engine id comes
from `GET <bootstrap>/query`, keyed by data-parallel rank.
"""

import json
from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.live.connectors.base import BootstrapIdentity, Connector, MissingKvError


class MooncakeConnector(Connector):
    """MooncakeConnector of vLLM."""

    def prefill_params(self, transfer: str) -> bytes:
        """Return the parameters that name the transfer."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        return json.dumps(params).encode()

    def decode_params(
        self, transfer: str, returned: object, identity: BootstrapIdentity | None
    ) -> Mapping[str, Any]:
        """Return the parameters with which a decoder finds the transfer.

        Raises:
            MissingKvError: The prefiller's bootstrap server has not named its engine id.
        """
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
