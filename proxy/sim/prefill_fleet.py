"""The prefill engines: a prefill takes c + d x prompt tokens, one at a time on each server.

The scheduler sends a server one prefill at a time, so a server needs no queue. Without prefill
servers every prompt is prefilled at once.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Service time of P prefill servers.

    Attributes:
        servers: P.
        base_ns: c.
        ns_per_token: d.
    """

    servers: int
    base_ns: int
    ns_per_token: float

    def service_ns(self, prompt_tokens: int) -> int:
        """Return the duration of a prefill of `prompt_tokens`."""
        return self.base_ns + round(self.ns_per_token * prompt_tokens)
