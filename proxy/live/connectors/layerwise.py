"""vllm-ascend's layerwise Mooncake connector: the decode rank goes first and calls back.

Keys as in vllm-ascend's layerwise example proxy and `mooncake_layerwise_connector.py`: the rank
posts what the prefiller needs, verbatim, to the `metaserver` URL of its parameters.
"""

from collections.abc import Mapping
from typing import Any

from balanceroute.proxy.core.errors import ConfigError
from balanceroute.proxy.live.connectors.base import BootstrapIdentity, Connector

METASERVER_PATH = b"/v1/metaserver/"


class LayerwiseConnector(Connector):
    """MooncakeLayerwiseConnector of vllm-ascend."""

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
