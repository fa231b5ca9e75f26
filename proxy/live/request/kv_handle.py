"""What a prefill leaves behind for the rank."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from balanceroute.proxy.live.engines.instances import Prefiller


class KvHandle:
    """A KV cache on a prefiller.

    Attributes:
        prefiller: Who computed it.
        params: How a rank pulls it, as JSON; None if none can, so that the rank computes the prompt itself.
        expires_s: The machine's uptime from which on no rank may be asked to pull it; None for never.
        offers: How many ranks it was offered to.
    """

    __slots__ = ("_losses", "expires_s", "offers", "params", "prefiller")

    def __init__(
        self,
        prefiller: "Prefiller",
        params: bytes | None,
        expires_s: float | None = None,
    ) -> None:
        self.prefiller = prefiller
        self.params = params
        self.expires_s = expires_s
        self.offers = 0
        self._losses = prefiller.lost_kv

    @property
    def is_lost(self) -> bool:
        """Whether it went with its engine's process."""
        return self.params is not None and self.prefiller.lost_kv != self._losses
