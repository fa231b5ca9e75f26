"""A generation request with the engine's own data on it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from balanceroute.proxy.lab.emulate.exchange import Exchange


@dataclass(slots=True)
class EngineCall:
    """One request in an engine.

    Attributes:
        request_id: The id of the answer, which carries the client's `X-Request-Id`.
        suffix: Makes the id unique inside the engine.
        rank: Which of the engine's ranks serves it.
        arrived_s: When the request had arrived, on the event loop's clock.
        length_name: The id by which the length of its answer may be known.
        drop_kv: Leave `kv_transfer_params` out of the answer.
        alien_kv: Answer with those of another request.
        session: What KV cache events call it; empty for nothing.
    """

    exchange: Exchange
    request_id: str
    suffix: str
    rank: int
    length_name: str
    arrived_s: float
    drop_kv: bool = False
    alien_kv: bool = False
    session: str = ""

    @property
    def kv(self) -> Mapping[str, Any]:
        """`kv_transfer_params`, empty if there are none."""
        return self.exchange.request.kv or {}

    @property
    def name(self) -> str:
        """The client's `X-Request-Id`."""
        return self.request_id.partition("-")[2]

    @property
    def remote_decode(self) -> bool:
        """Whether a decoder will pull the KV cache."""
        return self.kv.get("do_remote_decode") is True

    @property
    def remote_prefill(self) -> bool:
        """Whether the KV cache comes from a prefiller."""
        return self.kv.get("do_remote_prefill") is True

    def external_id(self, prompt: int) -> str:
        """Return the id of one of the prompts, as a proxy can derive it."""
        chat = self.exchange.request.chat
        return self.request_id if chat else f"{self.request_id}-{prompt}"

    def internal_id(self, prompt: int) -> str:
        """Return the id of one of the prompts inside the engine."""
        return f"{self.external_id(prompt)}-{self.suffix}"
